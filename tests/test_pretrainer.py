"The command line, its launches and the run folder; real launches cost seconds of imports, so they are few and shared"
import errno
import gc
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

import minigpt.pretrainer as pretrainer
from minigpt.collectives import launch_env
from minigpt.pretrain_dataset import PretrainBinaryDataset, data_dir, prepare_files
from minigpt.pretrainer_single import TrainArgs, Trainer, unpatch
from minigpt.runlog import read_run
from minigpt.tokenizer import Tokenizer, train_tokenizer
from minigpt.transformer import GPTConfig

ROOT = Path(__file__).resolve().parent.parent
CACHE = data_dir()  # of the checkout: the bundled corpus is prepared once
ENTRY = ROOT / "minigpt" / "pretrainer.py"
COMMAND_1 = "torchrun --standalone --nproc_per_node 2 minigpt/pretrainer.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = "--n_layers 1 --emb_dim 32 --n_heads 2 --context_length 16 --vocab_size 300".split()
SMALL += "--warmup_steps 2 --sample_tokens 4 --log_every 1".split()


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    "One process, one thread, data of its own"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as m:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            m.delenv(name, raising=False)
        m.setenv("OMP_NUM_THREADS", "1")
        m.setenv("MINIGPT_DATA", str(tmp_path_factory.mktemp("data")))
        yield
    unpatch(Trainer)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    "A few small files with sentences that can be learnt, in several scripts"
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    names, verbs = ["Anna", "Pierre", "Sonya", "曹操", "Holmes"], ["sees", "hears", "答", "loves 🎻"]
    for number in range(3):
        lines = [f"{draw.choice(names)} {draw.choice(verbs)} {draw.choice(names)}." for _ in range(400)]
        (folder / f"part{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def cli(*args):
    "Exit code of the command in this process"
    try:
        return pretrainer.main([str(a) for a in args])
    except SystemExit as stop:
        return stop.code


def start(command, cwd=None, **env):
    "A launch that writes into one pipe"
    return subprocess.Popen(
        [str(c) for c in command], cwd=cwd or ROOT, env=launch_env(2, env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace", start_new_session=sys.platform != "win32",
    )  # fmt: skip


def ended(process, timeout=100):
    "Output and exit code"
    try:
        out = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
    return out, process.returncode


def events(folder, kind):
    return [event for event in read_run(folder) if event["event"] == kind]


def losses(folder):
    return [event["train_loss"] for event in read_run(folder) if "train_loss" in event]


def weights(folder, step):
    return torch.load(Path(folder) / f"checkpoint-{step}.pth", weights_only=True)["model_state"]


# ---- launches: three at once, each of another form


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    "One process, 6 steps of 6 windows in float32 (so that other world sizes differ by rounding alone), a checkpoint at 3 and at 6; and what a run killed after step 3 leaves"
    folder = tmp_path_factory.mktemp("base")
    six = ("--train_batch_size", 6, "--max_steps", 6, "--save_steps", 3, "--dtype", "float32")
    assert cli("--dataset_path", texts, *SMALL, *six, "--output_dir", folder / "whole") == 0
    for name in ("killed", "killed-3"):
        (folder / name).mkdir()
        for file in (folder / "whole").glob("checkpoint-3.*"):
            shutil.copy(file, folder / name)
    return folder


@pytest.fixture(scope="module")
def launches(texts, base, tmp_path_factory):
    "name -> (folder, output, exit code)"
    folder = tmp_path_factory.mktemp("launches")
    config = dict(dataset_path=[str(texts / "part0.txt"), str(texts / "part[12].txt")], train_batch_size=2, max_steps=6, save_steps=3)
    config |= {key: yaml.safe_load(value) for key, value in zip((flag[2:] for flag in SMALL[::2]), SMALL[1::2])}
    config["output_dir"] = str(base / "killed-3")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    torchrun = Path(sys.executable).with_name("torchrun")
    words = COMMAND_1.split()
    first = [torchrun, *words[1:]] if torchrun.exists() else [*TORCHRUN, *words[2:]]
    by_file = [*first, "--max_steps", 3, "--log_every", 1, "--output_dir", folder / "two"]
    by_module = [*TORCHRUN, "--nproc_per_node", 3, "-m", "minigpt.pretrainer", "--config", folder / "config.yaml"]
    alone = [sys.executable, ENTRY, "--dataset_path", texts, *SMALL, "--max_steps", 2, "--prompt", "曹操 🎻"]
    (folder / "elsewhere").mkdir()
    running = dict(
        two=start(by_file, MINIGPT_DATA=str(CACHE)),
        three=start(by_module, folder / "elsewhere", MINIGPT_DATA=str(folder / "empty")),
        one=start(alone, folder / "elsewhere", PYTHONIOENCODING="latin-1"),
    )
    places = dict(two=folder / "two", three=base / "killed-3", one=None)
    results = {name: (places[name], *ended(process)) for name, process in running.items()}
    results["one"] = (next((folder / "elsewhere" / "runs").iterdir()), *results["one"][1:])
    return results


@pytest.mark.parametrize("name", ["two", "three", "one"])
def test_b01_p12_all_forms_run_and_three_at_once(launches, name):
    "torchrun by file and by -m, python by file; from the checkout and from elsewhere; side by side on one machine"
    folder, out, code = launches[name]
    assert code == 0, out[-3000:]
    assert "Traceback" not in out and "destroy_process_group" not in out  # P26
    assert "\r" not in out  # no progress bars in a pipe
    assert (folder / "loss.png").stat().st_size > 10_000


def test_command_1_is_the_one_of_the_readme():
    assert f"./run {COMMAND_1}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_b01_main_job_on_two_processes_equals_one_process_with_the_joined_batch(launches, tmp_path):
    "The README's first command, loss by loss"
    with pytest.MonkeyPatch.context() as m:
        m.setenv("MINIGPT_DATA", str(CACHE))
        assert cli("--max_steps", 3, "--log_every", 1, "--train_batch_size", 32, "--sample_tokens", 0, "--output_dir", tmp_path) == 0
    two, one = losses(launches["two"][0]), losses(tmp_path)
    assert len(two) == len(one) == 3
    assert two == pytest.approx(one, abs=2e-4)
    assert events(launches["two"][0], "eval")[-1]["eval_loss"] == pytest.approx(events(tmp_path, "eval")[-1]["eval_loss"], abs=2e-3)


def test_what_is_printed_says_what_will_happen_and_what_came_out(launches):
    "T26, T27: the batch and the schedule in words, loss among its baselines"
    out = launches["two"][1]
    assert "2 processes x 16 windows of 128 tokens = 4,096 tokens (global batch 32)" in out
    assert "asked for: --max_steps 3 --log_every 1 --output_dir" in out
    assert "strategy ddp" in out and "3 updates = 12,288 tokens" in out
    assert "Evaluation loss" in out and "bigram" in out and "Next: " in out
    assert re.search(r"Health: step 3\b.* to ln V", out)


def test_n08_start_event_tells_the_strategy_that_the_ranks_really_run(launches):
    assert events(launches["two"][0], "start")[0]["strategy"] == "ddp"
    assert events(launches["one"][0], "start")[0]["strategy"] == "single"
    assert not hasattr(Trainer, "ddp")  # nothing of it reached this process


def test_p10_three_processes_prepare_an_empty_cache_once(launches):
    "And leave one set of files, nothing half-written"
    data = next(Path(e["data"]).parent for e in events(launches["three"][0], "start"))
    names = sorted(path.suffix for path in data.iterdir() if path.suffix != ".lock")
    assert names == [".bin", ".json", ".json"], names


def test_c24_three_processes_go_on_where_one_was_killed(launches, base):
    "Resume by output_dir alone, in another world size, by a YAML file: the same losses"
    folder, out, _ = launches["three"]
    assert "resume from" in out and events(folder, "resume")[0]["step"] == 3
    assert losses(folder) == pytest.approx(losses(base / "whole")[3:], abs=1e-4)


def test_resume_in_the_same_world_is_exact(texts, base, capsys):
    args = ("--dataset_path", texts, *SMALL, "--train_batch_size", 6, "--max_steps", 6, "--save_steps", 3, "--output_dir", base / "killed")
    assert cli(*args) == 0
    whole, resumed = weights(base / "whole", 6), weights(base / "killed", 6)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    before = (base / "killed" / "train.log").read_text(encoding="utf-8")
    assert cli(*args) == 0  # done already
    assert "nothing left to train" in capsys.readouterr().out
    assert (base / "killed" / "train.log").read_text(encoding="utf-8").startswith(before)  # L01: appended
    assert cli(*args, "--max_steps", 8) == 0 and (base / "killed" / "checkpoint-8.pth").exists()
    assert [event["step"] for event in events(base / "killed", "sample")] == [6, 8]  # one a session that trained


def test_d08_a_narrow_console_does_not_end_the_run(launches):
    folder, out, code = launches["one"]
    assert code == 0 and "?" in out
    assert "曹操 🎻" in (folder / "train.log").read_text(encoding="utf-8")
    assert folder.parent.name == "runs" and folder.parent.parent.name == "elsewhere"  # the working folder's


# ---- the run folder


def test_run_folder_contract(base):
    "C29: a final checkpoint always; keys of the contract; plain tensors and Python only"
    folder = base / "whole"
    names = {path.name for path in folder.iterdir()}
    assert {"train.log", "metrics.jsonl", "loss.png", "checkpoint-6.pth", "checkpoint-6.json", "tokenizer.json"} <= names
    state = torch.load(folder / "checkpoint-6.pth", weights_only=True)
    keys = "model_state optimizer_state scaler_state step epoch samples_seen loss_accumulator rng_states config train_args"
    assert set(f"{keys} choices data_fingerprint world_size versions".split()) <= set(state)
    assert state["step"] == 6 and state["samples_seen"] == 36 and state["train_args"]["max_steps"] == 6
    assert not any(name.startswith("module.") for name in state["model_state"])
    assert len(state["rng_states"]) == state["world_size"] == 1
    sidecar = json.loads((folder / "checkpoint-6.json").read_text(encoding="utf-8"))
    assert sidecar["bytes"] == (folder / "checkpoint-6.pth").stat().st_size and len(sidecar["sha256"]) == 64
    first = json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["event"] == "start" and {"model_config", "train_args", "run_args", "ln_vocab", "unigram", "bigram"} <= set(first)
    line = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d lr=\d\.\d{5}, train_loss: \d+\.\d{4}, "
    line += r"eval_loss: \d+\.\d{4}, grad_norm=\d+\.\d{5}, steps: 6/6, tokens: "
    assert re.search(line, (folder / "train.log").read_text(encoding="utf-8"), re.M)


def test_config_and_samples_lie_in_the_run_folder(base):
    config = json.loads((base / "whole" / "config.json").read_text(encoding="utf-8"))
    assert {"model_config", "train_args", "run_args"} <= set(config)
    assert GPTConfig(**config["model_config"]).context_length == 16
    assert len(events(base / "whole", "sample")) == 2
    text = (base / "whole" / "samples.txt").read_text(encoding="utf-8")
    assert all(event["text"] in text for event in events(base / "whole", "sample"))


def test_n07_load_run_gives_the_trained_model_and_its_tokenizer(base):
    model, words = pretrainer.load_run(base / "whole")
    state = weights(base / "whole", 6)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if name in state)
    ids = model.generate(torch.tensor([words.encode("Anna")]), 4, temperature=0)
    assert words.decode(ids[0].tolist()).startswith("Anna") and not model.training
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        pretrainer.load_run(base)


def test_d22_vocabulary_comes_from_the_data(base):
    config = torch.load(base / "whole" / "checkpoint-6.pth", weights_only=True)["config"]
    assert config["vocab_size"] == Tokenizer.load(base / "whole" / "tokenizer.json").vocab_size


# ---- options


ISSUE_FLAGS = """num_train_epochs train_batch_size eval_steps warmup_steps save_steps output_dir last_checkpoint_path learning_rate
weight_decay train_ratio use_mixed_precision dataset_path corpus seed max_steps strategy config resume
context_length vocab_size emb_dim n_layers n_heads n_kv_heads drop_rate flash_attn size
device dtype backend timeout accumulate clip min_lr keep_last log_every content_key""".split()


def test_every_argument_is_there_with_help_in_a_group(capsys):
    assert cli("--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pretrainer.py [options]\n")
    assert all(group in text for group in ("\ndata and run:", "\ntraining:", "\nmodel:"))
    for name in ISSUE_FLAGS:
        assert re.search(rf"--{name}\b", text), name
    for cls in pretrainer.GROUPS.values():
        comments = pretrainer.field_help(cls)
        assert set(comments) == {f.name for f in fields(cls)} and all(len(comment) > 5 for comment in comments.values())


def test_yaml_and_flags_set_the_same_fields(tmp_path):
    "Numbers as YAML writes them: 1e-3 without a dot, underscores, long integers, null"
    lines = "learning_rate: 1e-3\nmax_steps: 1_000\ntrain_batch_size: 4.0\nuse_mixed_precision: no\nmin_lr: null\nflash_attn: true\n"
    lines += "dataset_path: [a.txt, b.txt]\nlast_checkpoint_path: x.pth\nemb_dim: 64\nseed: 4000000000\nclip: 2\nprompt: 你好\n"
    (tmp_path / "c.yaml").write_text(lines, encoding="utf-8-sig")
    flags = "--learning_rate 1e-3 --max_steps 1e3 --train_batch_size 4 --use_mixed_precision false --min_lr none --flash_attn"
    flags += " --dataset_path a.txt b.txt --resume x.pth --emb_dim=64 --seed 4000000000 --clip 2 --prompt 你好"
    by_file, by_flags = pretrainer.parse_args(["--config", str(tmp_path / "c.yaml")]), pretrainer.parse_args(flags.split())
    assert by_file == by_flags
    run, train, model = by_flags
    assert (train.learning_rate, train.max_steps, train.seed, train.resume, train.clip) == (1e-3, 1000, 4_000_000_000, "x.pth", 2.0)
    assert model == dict(flash_attn=True, emb_dim=64) and run.dataset_path == ["a.txt", "b.txt"]
    assert pretrainer.parse_args(["--config", str(tmp_path / "c.yaml"), "--max_steps", "5"])[1].max_steps == 5  # flags win


def test_no_flags_are_the_defaults():
    run, train, model = pretrainer.parse_args([])
    assert asdict(run) == asdict(pretrainer.RunArgs()) and model == {}
    assert asdict(train) == asdict(TrainArgs()) | dict(output_dir="")


BAD = {  # arguments -> words of the one line
    "--max_stps 3": "--max_stps did you mean max_steps?",
    "--lr 1e-3": "--lr did you mean learning_rate?",
    "--last_checkpoint x": "did you mean last_checkpoint_path?",
    "train.txt": "train.txt: no such option",
    "max_steps=5": "max_steps=5: an option begins with two dashes: --max_steps",
    "-max_steps=5": "-max_steps=5: two dashes: --max_steps",
    "-flash_attn": "-flash_attn: two dashes: --flash_attn",
    "seed": "seed: two dashes: --seed",
    "-config=BAD_KEY": "two dashes: --config",
    "last_checkpoint_path=x": "two dashes: --resume",
    "--max_steps 3.5": "--max_steps 3.5 whole number",
    "--seed x": "--seed x whole number",
    "--seed": "--seed expected one argument",
    "--seed 99999999999999999999": "--seed 0 to 2**32",
    "--learning_rate nan": "--learning_rate nan number",
    "--learning_rate fast": "--learning_rate fast number",
    "--clip -1": "--clip -1.0 negative",
    "--timeout 0": "--timeout 0 seconds",
    "--timeout 1e300": "--timeout 1e+300 seconds",
    "--backend mpi": "--backend mpi gloo nccl",
    "--accumulate 99999999999999999999": "--accumulate whole number",
    "--dataset_path TEXTS --device cpu:x": "--device cpu:x cuda:N",
    "--dataset_path TEXTS --n_layers 99999999999": "n_layers=99999999999 below",
    "--dataset_path TEXTS --seed 5 --resume WHOLE": "WHOLE seed 123 5",
    "--flash_attn maybe": "--flash_attn maybe true or false",
    "--max_steps none": "--max_steps give a value",
    "--size XL": "--size XL S, M, L",
    "--strategy fast": "--strategy fast single, ddp",
    "--train_ratio 1.5": "--train_ratio 1.5",
    "--train_batch_size 0": "--train_batch_size 0",
    "--sample_tokens -1": "--sample_tokens -1",
    "--config nothere.yaml": "nothere.yaml no such file",
    "--config TEXTS": "TEXTS directory",
    "--config BAD_KEY": "BAD_KEY line 1 max_stps did you mean max_steps?",
    "--config BAD_YAML": "BAD_YAML line 2",
    "--config BAD_DATE": "BAD_DATE line 1 seed whole number",
    "--config DEEP": "DEEP YAML",
    "--config A_LIST": "A_LIST option: value list",
    "--config BINARY": "BINARY UTF-8",
    "--config A_NEST": "A_NEST line 1 seed one value",
    "--corpus nothere": "nothere holmes-war-peace python-docs",
    "--corpus sotu --dataset_path TEXTS": "--corpus sotu --dataset_path one of them",
    "--dataset_path nothere.txt": "nothere.txt",
    "--dataset_path nothere.bin": "nothere.bin no such token file",
    "--dataset_path a.bin b.txt": "--dataset_path a.bin b.txt both",
    "--dataset_path TEXTS --vocab_size 12": "vocab_size 12 260",
    "--dataset_path TEXTS --context_length 1000000": "1000000 tokens",  # D23, D24
    "--dataset_path TEXTS --train_ratio 0.99999": "0.99999 evaluation",  # D27
    "--dataset_path TEXTS --train_batch_size 100000": "100000 global batch",
    "--dataset_path TEXTS --n_heads 3": "n_heads=3 emb_dim=32",
    "--dataset_path TEXTS --dtype float17": "--dtype float17 float32",
    "--dataset_path TEXTS --resume nothere.pth": "nothere.pth no such checkpoint",
    "--dataset_path TEXTS --resume NOT_A_CHECKPOINT": "NOT_A_CHECKPOINT no checkpoint",
    "--dataset_path TEXTS --resume WEIGHTS": "WEIGHTS optimizer_state",  # C24
    "--dataset_path TEXTS --resume EMPTY": "--resume empty auto, never",
    "--dataset_path TEXTS --resume WHOLE --init_from WHOLE": "--init_from --resume one of them",
    "--dataset_path TEXTS --resume FOLDER": "FOLDER a folder",
    "--dataset_path TEXTS --init_from BIN": "BIN no checkpoint",
    "--dataset_path TEXTS --resume never --output_dir FOLDER": "--resume never FOLDER another run",
    "--dataset_path TEXTS --resume WHOLE --emb_dim 64": "WHOLE emb_dim 32 64",
    "--dataset_path BIN --vocab_size 301": "301 300 leave the flag out",
}


@pytest.fixture(scope="module")
def stand_ins(texts, base, tmp_path_factory):
    "What the words in capitals above stand for"
    folder = tmp_path_factory.mktemp("bad")
    contents = dict(BAD_KEY="max_stps: 3", BAD_DATE="seed: 2020-13-45", DEEP="[" * 5000, BAD_YAML="seed: 1\nx: [", A_LIST="- seed", A_NEST="seed: {a: 1}")
    contents |= dict(BINARY=b"\xff\xfe\x00x", NOT_A_CHECKPOINT="hello")
    for name, content in contents.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    torch.save(dict(model_state={}), folder / "WEIGHTS")
    places = {name: folder / name for name in [*contents, "WEIGHTS"]}
    places |= dict(EMPTY="", FOLDER=base / "whole")
    return {**places, "TEXTS": texts, "WHOLE": base / "whole" / "checkpoint-6.pth", "BIN": prepare_files([texts], 300, progress=False)}


@pytest.mark.parametrize("args", BAD)
def test_t26_a_mistake_is_one_line_and_exit_code_2(args, stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [str(stand_ins.get(word, word)) for word in args.split()]
    small = [] if "_size 12" in args or "--dataset_path BIN" in args else SMALL[:10]
    more = [] if "--max_steps" in args else ["--max_steps", 1]
    assert cli(*small, *words, *more) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("pretrainer.py: "), lines
    for word in BAD[args].split():
        assert str(stand_ins.get(word, word)) in lines[0]
    assert all(any(folder.iterdir()) for folder in tmp_path.glob("runs/*"))  # no empty run folder is left


@pytest.mark.parametrize(
    "env, missing",
    [
        (dict(RANK="0"), "WORLD_SIZE"),
        (dict(RANK="1", WORLD_SIZE="2"), "MASTER_ADDR"),
        (dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1"), "RANK"),
    ],
)
def test_p30_half_a_launcher_is_named_not_waited_for(env, missing, texts, tmp_path, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pretrainer.time, "sleep", lambda seconds: None)
    assert cli("--dataset_path", texts, *SMALL, "--output_dir", tmp_path) == 2
    assert missing in capsys.readouterr().err


def test_p23_p24_more_processes_than_visible_gpus(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    assert cli("--dataset_path", texts, *SMALL, "--output_dir", tmp_path) == 2
    assert "4 processes, 1 visible GPU" in capsys.readouterr().err


def test_t10_the_cpu_path_asks_nothing_of_cuda(texts, tmp_path, monkeypatch):
    def refuse(*args, **how):
        raise AssertionError("CUDA was asked")

    for name in ("_lazy_init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert cli("--dataset_path", texts, *SMALL, "--device", "cpu", "--max_steps", 1, "--output_dir", tmp_path / "run") == 0


def test_p16_p20_machine_quirks_are_settled_before_ranks_meet():
    local = dict(MASTER_ADDR="no-such-host.invalid", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    quirks = dict(linux=dict(GLOO_SOCKET_IFNAME="lo"), darwin=dict(GLOO_SOCKET_IFNAME="lo0"), win32=dict(USE_LIBUV="0"))
    for platform, expected in quirks.items():
        env = dict(local)
        pretrainer.settle_environment(env, platform)
        assert env == local | expected | dict(MASTER_ADDR="127.0.0.1")
    two_nodes = local | dict(LOCAL_WORLD_SIZE="1")
    env = dict(two_nodes)
    pretrainer.settle_environment(env, "linux")
    assert env == two_nodes
    one_of_two = two_nodes | dict(MASTER_ADDR="127.0.0.1")
    for name_leads_to, expected in (("127.0.1.1", "lo"), ("10.0.0.5", None)):  # Debian's own entry; a name that others can use
        env = dict(one_of_two)
        with mock.patch.object(pretrainer.socket, "gethostbyname", return_value=name_leads_to):
            pretrainer.settle_environment(env, "linux")
        assert env.get("GLOO_SOCKET_IFNAME") == (expected if sys.platform == "linux" else None)
    env = local | dict(GLOO_SOCKET_IFNAME="eth0")
    pretrainer.settle_environment(env, "linux")
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"  # what the user set stands


def test_p25_each_process_takes_its_share_of_the_cores(monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for given, processes in ((None, "1"), (None, "2"), ("1", "2"), ("3", "2"), ("1", "1"), (None, "99")):
        for name, value in dict(OMP_NUM_THREADS=given, LOCAL_WORLD_SIZE=processes).items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        pretrainer.share_cores()
    assert taken == [8, 4, 4, 1]


@pytest.mark.parametrize("words", ["", "--learning_rate 1e-3", "--learning_rate 1e-3 --min_lr 4e-4", "--min_lr 1e-5", "--seed 5 --prompt 你好"])
def test_the_printed_flags_start_the_same_job(words):
    "--min_lr 4e-4 is the default of another learning rate only"
    given = pretrainer.parse_args(words.split())
    asked = shlex.split(pretrainer.asked_for(*given).removeprefix("asked for: "))
    assert pretrainer.parse_args(asked) == given if words else asked[0] == "nothing,"
    assert len(asked) == len(words.split()) or not words  # and no flag more


def test_ranks_that_resume_from_different_steps_are_refused(monkeypatch):
    "Two machines without a common folder: the second one finds no checkpoint"

    class Two:
        rank, world_size, step, device = 1, 2, 0, torch.device("cpu")

        def reduce_sum(self, tensor):
            return tensor + torch.tensor([5, 25])

    with pytest.raises(ValueError, match="one folder that all machines see"):
        pretrainer.check_same_step(Two())


def test_prompt_is_a_sentence_of_the_text(texts):
    path = prepare_files([texts], 300, progress=False)
    words = Tokenizer.load(path.with_suffix(".tokenizer.json"))
    prompt = pretrainer.opening(words, PretrainBinaryDataset(path, 64)[0][0])
    assert prompt and len(words.encode(prompt)) <= 13


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrainer.time, "strftime", lambda form: "now")
    assert [pretrainer.fresh_folder(), pretrainer.fresh_folder()] == ["runs/now", "runs/now-2"]


def test_trouble_that_is_no_bug_is_one_line(texts, tmp_path, monkeypatch, capsys):
    "A loss that is no number, memory that is used up, a peer that died: exit code 1; all else keeps its traceback"

    def fail(error):
        def train(self):
            raise error

        monkeypatch.setattr(Trainer, "train", train)
        return cli("--dataset_path", texts, *SMALL, "--max_steps", 1, "--output_dir", tmp_path)

    peer, late = RuntimeError("[127.0.0.1]:1: Connection closed by peer"), RuntimeError("Timed out waiting 4000ms for recv operation")
    lost = RuntimeError("Read error [10.77.0.2]:28290: Connection timed out")  # TCP's own time-out came first
    mesh = RuntimeError("Gloo connectFullMesh failed with Connect timeout [none]")
    for error in (FloatingPointError("step 3: loss is nan"), torch.OutOfMemoryError("CUDA out of memory"), peer, late, lost, mesh):
        assert fail(error) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(RuntimeError, match="our bug"):
        fail(RuntimeError("our bug"))


# ---- mistakes and interruption of real jobs


def test_a_mistake_under_torchrun_is_told_once(texts):
    out, code = ended(start([*TORCHRUN, "--nproc_per_node", 2, ENTRY, "--dataset_path", texts, *SMALL, "--n_heads", 3]))
    assert code != 0
    assert len(re.findall(r"pretrainer\.py: .*n_heads=3", out)) == 1
    assert out.count("Traceback") <= 1  # torchrun's own


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_is_one_line_and_exit_code_130(texts, tmp_path):
    args = ["--dataset_path", texts, *SMALL, "--max_steps", 1_000_000, "--save_steps", 2, "--output_dir", tmp_path / "run"]
    process = start([sys.executable, "-m", "minigpt.pretrainer", *args], tmp_path)
    for line in process.stdout:
        if "checkpoint-4.pth" in line:
            break
    process.send_signal(signal.SIGINT)
    out, code = ended(process)
    assert code == 130 and "Traceback" not in out
    line = r"pretrainer\.py: stopped by SIGINT after step (\d+) of 1000000; the same command with --output_dir \S+ goes on from checkpoint-(\d+)\.pth$"
    found = re.search(line, out.strip())
    assert found and found[1] == found[2]


def test_without_evaluation_the_run_ends_well(texts, tmp_path):
    "D27: --train_ratio 1 is an explicit run without evaluation"
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--train_ratio", 1, "--output_dir", tmp_path) == 0
    assert all(event["eval_loss"] is None for event in events(tmp_path, "eval")) and (tmp_path / "loss.png").exists()


def test_a_folder_in_use_is_refused(texts, tmp_path, capsys):
    "two runs at once would write one log"
    lock = pretrainer.sole_use(tmp_path)
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--output_dir", tmp_path) == 2
    assert "another run is writing there" in capsys.readouterr().err
    lock.release()
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--output_dir", tmp_path) == 0


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, "No locks available")])
def test_a_file_system_without_locks_is_told_and_trained_on(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrainer.FileLock, "acquire", mock.Mock(side_effect=error))
    pretrainer.sole_use(tmp_path)
    assert "has no locks" in capsys.readouterr().out
    monkeypatch.setattr(pretrainer.FileLock, "acquire", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(PermissionError):
        pretrainer.sole_use(tmp_path)


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, "No locks available")])
def test_data_are_not_prepared_where_there_are_no_locks(error, texts, tmp_path, monkeypatch, capsys):
    "Two processes could write one file: the line names the lock and the cure"
    monkeypatch.setattr(pretrainer.FileLock, "acquire", mock.Mock(side_effect=error))
    assert cli("--dataset_path", texts, *SMALL, "--output_dir", tmp_path) == 2
    told = capsys.readouterr().err
    assert "prepare.lock: this file system has no locks; set MINIGPT_DATA" in told and len(told.splitlines()) == 1


def test_a_mistake_frees_the_folder(stand_ins, tmp_path):
    "mended and started again in the same process, the job is not refused by its own lock"
    gc.disable()
    try:
        assert cli("--dataset_path", stand_ins["TEXTS"], *SMALL, "--resume", stand_ins["WEIGHTS"], "--output_dir", tmp_path / "run") == 2
        pretrainer.sole_use(tmp_path / "run").release()
    finally:
        gc.enable()


def test_a_restarted_job_goes_on_however_it_was_begun(texts, base, tmp_path, monkeypatch):
    "torchrun repeats the command: `--resume never` or PATH must not throw away what the life before has saved"
    folder = tmp_path / "run"
    folder.mkdir()
    for file in (base / "whole").glob("checkpoint-3.*"):
        shutil.copy(file, folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    six = ("--train_batch_size", 6, "--max_steps", 6, "--save_steps", 3)
    assert cli("--dataset_path", texts, *SMALL, *six, "--resume", "never", "--output_dir", folder) == 0
    assert [event["step"] for event in events(folder, "resume")] == [3]


def test_another_runs_tokenizer_is_refused(base, tmp_path):
    "N07: a model's text is decoded by its own tokenizer"
    folder = shutil.copytree(base / "whole", tmp_path / "run")
    train_tokenizer(["another text " * 20], 262).save(folder / "tokenizer.json")
    with pytest.raises(ValueError, match="another tokenizer"):
        pretrainer.load_run(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_sigterm_before_the_first_step_is_one_line(texts, tmp_path, monkeypatch, capsys):
    "also while the data are prepared; and the handler is gone afterwards"
    monkeypatch.setattr(pretrainer, "prepare_data", lambda *args: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert cli("--dataset_path", texts, *SMALL, "--output_dir", tmp_path / "run") == 143
    assert capsys.readouterr().err.strip() == "pretrainer.py: interrupted; there is no checkpoint yet: --save_steps 100 writes one every 100 steps"
    assert signal.getsignal(signal.SIGTERM) == before


def test_closed_streams_are_no_mistake(texts, tmp_path, monkeypatch):
    "`2>&-` leaves no stderr"
    monkeypatch.setenv("MINIGPT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "stderr", None)
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 1, "--output_dir", tmp_path / "run") == 0


def test_another_tokenizer_beside_the_data_is_refused(texts, tmp_path, capsys):
    "D39: the sidecar knows which tokenizer made the ids"
    path = prepare_files([texts / "part0.txt"], 300, folder=tmp_path, progress=False)
    other = prepare_files([texts / "part1.txt"], 280, folder=tmp_path, progress=False)
    shutil.copy(other.with_suffix(".tokenizer.json"), path.with_suffix(".tokenizer.json"))
    assert cli("--dataset_path", path, *SMALL[:-2], "--max_steps", 2, "--output_dir", tmp_path / "run") == 2
    assert "not the tokenizer" in capsys.readouterr().err


def test_trouble_while_writing_is_one_line(texts, tmp_path, capsys):
    (tmp_path / "checkpoint-2.pth").mkdir()
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--output_dir", tmp_path) == 1
    error = capsys.readouterr().err
    assert "checkpoint-2.pth" in error and "Traceback" not in error and len(error.strip().splitlines()) == 1


def test_a_refused_run_leaves_the_folder_as_it_was(texts, base, tmp_path, capsys):
    "the record of the first run is all that tells its settings"
    folder = shutil.copytree(base / "whole", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert cli("--dataset_path", texts, *SMALL, "--emb_dim", 64, "--max_steps", 8, "--output_dir", folder) == 2
    assert "emb_dim 32 before, 64 now" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_p09_data_are_prepared_before_ranks_meet(texts, tmp_path, monkeypatch):
    "P09: a preparation of hours must not run into a collective's time-out"
    met = []

    def prepare(*args, **kwargs):
        met.append(torch.distributed.is_initialized())
        raise ValueError("enough")

    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(pretrainer, "prepare_data", prepare)
    assert cli("--dataset_path", texts, *SMALL, "--output_dir", tmp_path) == 2 and met == [False]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_a_reader_that_leaves_costs_one_line(texts, tmp_path):
    "`pretrainer.py | head`: no traceback when nobody reads on"
    command = [sys.executable, ENTRY, "--dataset_path", texts, *SMALL, "--max_steps", 400, "--eval_steps", 1, "--output_dir", tmp_path]
    with subprocess.Popen([str(c) for c in command], env=launch_env(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert any(" lr=" in line for line in process.stdout)  # it trains by now
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) == 1 and error.strip() == "pretrainer.py: Broken pipe", error
