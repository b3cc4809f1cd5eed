"Chapter 07's levers: picked rightly, equal to the plain run, stored and reused; compiled runs cost seconds, so they are few and shared"
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import minigpt.speed as speed
from minigpt.collectives import launch_env
from minigpt.pretrainer_single import TrainArgs, log_line, micro_loss, open_levers
from minigpt.runlog import read_run
from minigpt.speed import Speed, flops_per_token, lost_share, page_faults, pages_hint
from minigpt.transformer import GPTConfig, MiniGPT
from test_pretrainer import cli
from trainer_job import VOCAB, losses, make_model, make_trainer, trained, weights

pytestmark = pytest.mark.usefixtures("one_plain_process")
ROOT = Path(__file__).resolve().parent.parent
COMPILES = pytest.mark.skipif(not speed.can_compile("cpu"), reason="torch.compile finds no C++ compiler here")
FAST, SLOW = dict(float32=2e11, bfloat16=4e11), dict(float32=2e11, bfloat16=1e11)


class Says(Speed):
    "A Speed whose measurement is given"

    def __init__(self, measured):
        self.measured = measured

    def measure(self, device):
        return self.measured


def run_of(device="cpu", steps=100, vocab=2048, args=None, **more):
    "Facts of a run on a small model, 4096 tokens a step"
    options = TrainArgs(**args or {})
    config = dict(vocab_size=vocab, context_length=128)
    return dict(
        device=device, dtype="bfloat16" if device == "cuda" else "float32", total_steps=steps, tokens_per_step=4096, world_size=1, n_params=1_115_264,
        flops_per_token=7_478_016, model_config=config, train_args=vars(options), open_levers=open_levers(options),
    ) | more  # fmt: skip


def picked(measured=FAST, **facts):
    return Speed().pick(run_of(**facts), measured)


# ---- what is picked


@pytest.fixture
def compilers(monkeypatch):
    "Compilers on all devices, whatever this machine has"
    monkeypatch.setattr(speed, "can_compile", lambda kind: kind in ("cpu", "cuda"))


def test_bfloat16_only_where_it_is_faster(compilers):
    assert picked(FAST)[0]["dtype"] == "bfloat16" and picked(SLOW)[0]["dtype"] == "float32"
    assert "2.0 times" in picked(FAST)[1][0] and "0.5 times" in picked(SLOW)[1][0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_short_run_is_never_compiled_and_a_long_one_is(device, compilers):
    assert picked(device=device)[0]["compile"] is False
    levers, notes = picked(device=device, steps=10_000_000)
    assert levers["compile"] is True and "; compiled, as that would save about" in notes[0]


def test_more_processes_have_less_to_gain(compilers):
    "Of the same global batch each takes its share"
    steps = next(n for n in range(1000, 10**6, 1000) if picked(steps=n)[0]["compile"])
    assert not picked(steps=steps, world_size=8)[0]["compile"]


def test_units_for_bfloat16_products_do_not_put_compiling_off(compilers):
    "They make a CPU's products several times faster, and a step far less: the same run is compiled with them as without"
    units = FAST | dict(bfloat16=8 * FAST["float32"])
    steps = next(n for n in range(100, 10**6, 100) if picked(steps=n)[0]["compile"])
    assert picked(units, steps=steps)[0]["compile"] and not picked(units, steps=steps - 100)[0]["compile"]


def test_no_compiler_is_told(monkeypatch):
    monkeypatch.setattr(speed, "can_compile", lambda kind: False)
    levers, notes = picked(steps=10_000_000)
    assert levers["compile"] is False and "no compiler was found" in notes[0]


def test_compilers_are_looked_for_by_device(monkeypatch):
    monkeypatch.setattr(speed.shutil, "which", lambda name: name if name == "clang++" else None)
    monkeypatch.delenv("CXX", raising=False)
    assert speed.can_compile("cpu") == (sys.platform != "win32") and not speed.can_compile("mps")
    monkeypatch.setattr(speed.shutil, "which", lambda name: None)
    assert not speed.can_compile("cpu")


def test_cards_get_tf32_and_keep_their_number_type(compilers):
    levers, _ = picked(device="cuda")
    assert levers == dict(tf32=True, compile=False)


def test_an_apple_gpu_gets_nothing_it_cannot_do(compilers):
    assert picked(dict(float32=2e12, float16=4e12), device="mps") == ({}, [])


def test_only_logits_too_large_are_sliced(compilers):
    "Below and above a gibibyte"
    assert "loss_rows" not in picked(vocab=128_000)[0]
    levers, notes = picked(vocab=128_000, args=dict(train_batch_size=32))
    assert levers["loss_rows"] == 1024 and "loss in slices" in notes[0]
    assert "loss_rows" not in picked(model_config=None)[0]


def test_what_the_user_set_is_left_alone(compilers):
    asked = dict(dtype="float32", compile=False, loss_rows=0, tf32=False)
    assert Speed().pick(run_of(args=asked), FAST) == ({}, [])
    assert "dtype" not in picked(args=dict(use_mixed_precision=False))[0]


def test_peak_is_the_data_sheets_in_16_bits_and_measured_in_32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    card = torch.device("cuda")
    assert Speed().peak_flops(card, "bfloat16", FAST) == 989e12 and Speed().peak_flops(card, "float32", FAST) == 2e11
    assert Speed().peak_flops(torch.device("cpu"), "bfloat16", FAST) == 4e11


@pytest.mark.parametrize(
    "name, peak",
    [("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Tesla V100-SXM2-16GB", 125e12)]
    + [(name, FAST["bfloat16"]) for name in ("NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA RTX A1000")],
)
def test_a_card_is_known_by_whole_words_or_measured(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert Speed().peak_flops(torch.device("cuda"), "bfloat16", FAST) == peak


def test_measuring_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    measured = Speed().measure(torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state()) and set(measured) == {"float32", "bfloat16"} and min(measured.values()) > 1e8


@pytest.mark.parametrize(
    "env, platform, hints",
    [
        ({}, "linux", True),
        (dict(GLIBC_TUNABLES="glibc.malloc.hugetlb=1"), "linux", False),
        (dict(GLIBC_TUNABLES="glibc.malloc.perturb=1"), "linux", True),
        (dict(LD_PRELOAD="/usr/lib/libjemalloc.so.2"), "linux", False),
        (dict(LD_PRELOAD="/usr/lib/libfoo.so"), "linux", True),
        ({}, "darwin", False),
        ({}, "win32", False),
    ],
)
def test_pages_hint_only_where_it_helps(env, platform, hints):
    hint = pages_hint(env, platform)
    assert (hint is not None) == hints and (not hints or "GLIBC_TUNABLES" in hint)


def test_fused_attention_pays_on_cards_and_at_long_contexts():
    assert speed.fused_attention("cuda:1", 128) and speed.fused_attention("mps", 128) and speed.fused_attention("cpu", 2048)
    assert not speed.fused_attention("cpu", 1024)


# ---- counts


@pytest.mark.parametrize("shape", [{}, dict(n_layers=3, emb_dim=96), dict(context_length=48, vocab_size=500)])
def test_flops_per_token_is_what_a_counter_counts(shape):
    config = GPTConfig(**dict(vocab_size=300, context_length=32, emb_dim=64, n_layers=2, n_heads=2) | shape)
    ids = torch.zeros(2, config.context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        micro_loss(MiniGPT(config), ids, ids)[0].backward()
    assert flops_per_token(config) * ids.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_lost_share_counts_what_rounds_to_zero():
    gradients = torch.tensor([0.0, 1.0, 2.0**-24, 2.0**-26, 2.0**-40])
    assert lost_share(gradients, torch.float16) == 0.5
    assert lost_share(gradients, torch.float16, 2.0**16) == 0 == lost_share(gradients, torch.bfloat16)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows tells no page faults")
def test_page_faults_count_fresh_memory():
    fresh, before = mmap.mmap(-1, 4 << 20), page_faults()  # straight from the system: the allocator may have kept what it had
    for place in range(0, len(fresh), mmap.PAGESIZE):
        fresh[place] = 1
    assert page_faults() - before >= 2  # pages may be as large as 2 MiB


def test_bandwidth_is_above_zero():
    assert speed.memory_bandwidth(torch.device("cpu"), mib=8) > 1e7


# ---- each lever alone, through the trainer

LEVERS = {  # options -> how far the losses of an epoch may be from the plain run's
    "dtype": (dict(dtype="bfloat16"), 0.05),
    "loss_rows": (dict(loss_rows=5), 1e-5),
    "recompute": (dict(recompute=True), 0),
    "workers": (dict(workers=1), 0),
    "threads": (dict(threads=2), 1e-5),
    "tf32": (dict(tf32=True), 0),  # cards alone have it
    "accumulate": (dict(train_batch_size=2, accumulate=2), 1e-5),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_each_lever_alone_equals_the_plain_run(lever, tmp_path):
    options, tolerance = LEVERS[lever]
    drop_rate = 0.3 if lever in ("recompute", "workers", "tf32") else 0.0
    plain, other = (
        trained(tmp_path / name, model=make_model(drop_rate), **dict(train_batch_size=4, max_steps=8, save_steps=0) | how)
        for name, how in (("plain", {}), ("lever", options))
    )
    assert len(losses(plain.events)) == 8
    assert losses(other.events) == pytest.approx(losses(plain.events), abs=tolerance, rel=0)


def test_recompute_needs_blocks(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
    with pytest.raises(ValueError, match="ModuleList"):
        make_trainer(tmp_path, model=model, recompute=True, train_batch_size=4).train()


def test_mfu_is_in_the_log_where_the_peak_is_known(tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=2, about=dict(flops_per_token=flops_per_token(make_model().config)))
    trainer.speed = Says(FAST)
    trainer.train()
    told = [event for event in trainer.events if "train_loss" in event]
    assert all(0 < event["mfu"] < 1 and "mfu: " in log_line(event) for event in told)
    event = told[0]
    assert event["mfu"] == pytest.approx(event["tokens_per_s"] * flops_per_token(make_model().config) / trainer.peak_flops)
    silent = trained(tmp_path / "silent", train_batch_size=4, max_steps=1)
    assert not any("mfu: " in log_line(event) for event in silent.events if "train_loss" in event)


@pytest.mark.parametrize("now", [FAST, SLOW])
def test_a_resumed_trainer_keeps_what_was_picked(now, tmp_path):
    first = make_trainer(tmp_path, train_batch_size=4, max_steps=4, save_steps=2)
    first.speed = Says(FAST)
    first.train()
    assert first.choices.dtype == "bfloat16" and torch.load(tmp_path / "checkpoint-2.pth")["choices"]["dtype"] == "bfloat16"
    rest = make_trainer(tmp_path, train_batch_size=4, max_steps=4, resume=str(tmp_path / "checkpoint-2.pth"))
    rest.speed = Says(now)
    rest.train()
    assert rest.choices == first.choices and losses(rest.events) == losses(first.events)[2:]


# ---- compiled

SMALL = "--n_layers 1 --emb_dim 32 --n_heads 2 --context_length 16 --vocab_size 300 --warmup_steps 2 --sample_tokens 0 --log_every 1".split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m", "minigpt.pretrainer"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    "A text that can be learnt, and data of its own"
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("\n".join(f"Anna sees {n} birds over the river." for n in range(900)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("MINIGPT_DATA", str(tmp_path_factory.mktemp("data")))
        m.setenv("OMP_NUM_THREADS", "1")
        yield folder


def start(command, **env):
    "A launch that writes into one pipe"
    return subprocess.Popen(
        [str(c) for c in command], cwd=ROOT, env=launch_env(2, env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace", start_new_session=sys.platform != "win32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def launches(texts, tmp_path_factory):
    "Two compiled processes, and one whose compiler fails; they work while the tests below compile in this process"
    folder = tmp_path_factory.mktemp("launches")
    two = [*TORCHRUN, "--dataset_path", texts, *SMALL, "--max_steps", 3, "--speed", "off", "--compile", "true", "--train_batch_size", 4]
    broken = [sys.executable, "-m", "minigpt.pretrainer", "--dataset_path", texts, *SMALL, "--max_steps", 1, "--compile", "true"]
    started = dict(
        two=start([*two, "--output_dir", folder / "two"]),
        broken=start([*broken, "--output_dir", folder / "broken"], CXX="/bin/false", TORCHINDUCTOR_CACHE_DIR=str(folder / "cold")),
    )
    yield {name: (folder / name, process) for name, process in started.items()}
    for process in started.values():
        process.kill()
        process.communicate()


def ended(process):
    "Output and exit code"
    return process.communicate(timeout=150)[0], process.returncode


SHARED = dict(train_batch_size=2, accumulate=3, max_steps=6, save_steps=2)  # an epoch is 7 updates, the last of 3 micro-batches


@pytest.fixture(scope="module")
def compiled(launches, tmp_path_factory):
    "A compiled run with dropout and accumulation, and a plain one"
    runs = {}
    for name, on in (("compiled", True), ("plain", False)):
        folder = tmp_path_factory.mktemp(name)
        runs[name] = trained(folder, model=make_model(0.3), compile=on, **SHARED)
        runs[name].folder = folder
    return runs


@COMPILES
def test_compiled_run_resumes_to_the_bit(compiled):
    "In the middle of an epoch, with dropout and accumulation"
    whole = compiled["compiled"]
    rest = trained(whole.folder / "rest", model=make_model(0.3, seed=9), compile=True, **SHARED | dict(resume=str(whole.folder / "checkpoint-4.pth")))
    assert rest.epoch == 0 and losses(rest.events) == losses(whole.events)[4:]
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(rest).items())


@COMPILES
def test_a_compiled_step_of_wide_heads_has_finite_gradients(tmp_path):
    "Heads of 64 and 256 tokens in bfloat16: where g++ 12 compiled for a new processor with AMX, the first gradient was no number"
    torch.manual_seed(0)
    model = MiniGPT(GPTConfig(vocab_size=256, context_length=256, emb_dim=384, n_layers=1, n_heads=6))
    x, y = torch.randint(256, (2, 8, 256))
    trainer = make_trainer(tmp_path, model=model, train_batch_size=8, max_steps=1, compile=True, dtype="bfloat16", learning_rate=0.01)
    trainer.set_dataset(list(zip(x, y)), None)
    trainer.train()
    assert trainer.step == 1 and trainer.grad_norm.isfinite()


@COMPILES
def test_compiled_learns_as_plain(compiled):
    "Dropout is drawn by the compiled code itself, so the same noise is not to be had"
    first, last = (run for run in compiled.values())
    assert losses(first.events)[0] == pytest.approx(losses(last.events)[0], abs=0.1)
    assert not torch.equal(weights(first)["embed.weight"], make_model(0.3).state_dict()["embed.weight"])


@COMPILES
@pytest.mark.parametrize("saved", ["compiled", "plain"])
@pytest.mark.parametrize("loading", [True, False])
def test_c08_compiled_and_plain_load_each_other(saved, loading, compiled, tmp_path):
    "All four ways, with strict keys"
    path = compiled[saved].folder / "checkpoint-6.pth"
    state = torch.load(path)["model_state"]
    make_model().load_state_dict(state, strict=True)
    trainer = make_trainer(tmp_path, model=make_model(0.3, seed=9), compile=loading, **SHARED | dict(resume=str(path)))
    trainer.setup()
    assert trainer.step == 6 and trainer.choices.compile == loading
    assert all(torch.equal(value, state[name]) for name, value in weights(trainer).items())


def test_c08_a_model_that_was_compiled_before_keeps_its_names(tmp_path):
    "torch.compile's wrapper is taken off; the option --compile does what it did"
    model = make_model()
    trainer = make_trainer(tmp_path, model=torch.compile(model), train_batch_size=4, max_steps=1)
    assert trainer.model is model
    trainer.train()
    assert set(torch.load(tmp_path / "checkpoint-1.pth")["model_state"]) == set(make_model().state_dict())
    assert trainer.predict(torch.tensor([[3]]), 2, temperature=0).shape == (1, 3)  # P40


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_c08_weights_of_a_foreign_file(prefix, tmp_path):
    model = make_model(seed=5)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "foreign.pth")
    trainer = make_trainer(tmp_path / "run", train_batch_size=4, max_steps=1, init_from=str(tmp_path / "foreign.pth"))
    trainer.setup()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights(trainer).items())


# ---- the command line

def choices_of(folder, step):
    return torch.load(Path(folder) / f"checkpoint-{step}.pth")["choices"]


def told_losses(folder):
    return [event["train_loss"] for event in read_run(folder) if "train_loss" in event]


@COMPILES
def test_what_auto_picked_is_reused_on_resume(texts, tmp_path, monkeypatch):
    "Same number type, still compiled, though the machine now measures otherwise; losses as if never interrupted"
    args = ("--dataset_path", texts, *SMALL, "--max_steps", 4, "--save_steps", 2)
    endless = dict(float32=1.0, bfloat16=2.0)  # so slow that compiling pays
    monkeypatch.setattr(Speed, "measure", lambda self, device: endless)
    assert cli(*args, "--output_dir", tmp_path / "whole") == 0
    assert (choices_of(tmp_path / "whole", 4)["dtype"], choices_of(tmp_path / "whole", 4)["compile"]) == ("bfloat16", True)
    assert "note: speed: bfloat16" in (tmp_path / "whole" / "train.log").read_text(encoding="utf-8")
    (tmp_path / "rest").mkdir()
    for name in ("checkpoint-2.pth", "checkpoint-2.json"):
        (tmp_path / "rest" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    monkeypatch.setattr(Speed, "measure", lambda self, device: SLOW)
    assert cli(*args, "--output_dir", tmp_path / "rest") == 0
    assert choices_of(tmp_path / "rest", 4) == choices_of(tmp_path / "whole", 4)
    assert told_losses(tmp_path / "rest") == told_losses(tmp_path / "whole")[2:]


def test_speed_off_is_float32_and_measures_nothing(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(Speed, "measure", lambda self, device: pytest.fail("measured"))
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 1, "--speed", "off", "--output_dir", tmp_path) == 0
    choices = choices_of(tmp_path, 1)
    assert choices["dtype"] == "float32" and not choices["compile"] and not choices["loss_rows"]


@COMPILES
def test_two_compiled_processes_equal_one_that_is_not(texts, launches, tmp_path):
    "The same global batch"
    folder, process = launches["two"]
    out, code = ended(process)
    assert code == 0 and "Traceback" not in out, out[-3000:]
    assert choices_of(folder, 3)["compile"]
    same = ("--dataset_path", texts, *SMALL, "--max_steps", 3, "--speed", "off")
    assert cli(*same, "--train_batch_size", 8, "--output_dir", tmp_path) == 0
    assert len(told_losses(folder)) == 3
    assert told_losses(folder) == pytest.approx(told_losses(tmp_path), abs=2e-4)


@COMPILES
def test_a_broken_compiler_is_one_line(launches):
    "It is found, but fails, and nothing was compiled before"
    out, code = ended(launches["broken"][1])
    assert code != 0 and "Traceback" not in out, out[-3000:]
    lines = [line for line in out.splitlines() if line.startswith("pretrainer.py:")]
    assert len(lines) == 1 and "torch.compile failed" in lines[0] and "--compile false" in lines[0]
