"""Checkpoints: what is written is whole, what is read is what was written, what goes on is the same run.

Real kills and full disks are in test_faults.py; here an exception that nothing catches ends a save at each of its stages.
"""
import io
import itertools
import json
import os
import pickle
import signal
import threading
import zipfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import minigpt.checkpoint as checkpoint
import minigpt.pretrainer_single as single
from checkpoint_job import SAVED, TOTAL, WALK, restless_scaler, stop_before
from minigpt.checkpoint import Checkpointer, damage, snapshot
from minigpt.collectives import run_ranks
from minigpt.pretrainer_single import Trainer, unpatch
from test_ddp import ONE_THREAD, free_ports, largest_difference
from trainer_job import adamw, losses, make_model, make_trainer, trained, weights

JOB = str(Path(__file__).with_name("checkpoint_job.py"))
pytestmark = pytest.mark.usefixtures("one_plain_process")


def saved(folder, *steps, keep_last=3, **more):
    "A keeper that has written small states of these steps"
    keeper = Checkpointer(folder, keep_last)
    for step in steps:
        keeper.save({"step": step, "eval_loss": None, "x": torch.full((1000,), float(step))} | more)
        keeper.saved(wait=True)
    return keeper


def names(folder, pattern="*.pth"):
    return sorted(path.name for path in Path(folder).glob(pattern))


def notes(trainer):
    return [event["text"] for event in trainer.events if event["event"] == "note"]


def flip(path):
    "One bit in the middle of a file"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- what is in the file


def test_the_state_has_the_fields_that_loading_asks_for(tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4)
    trainer.setup()
    assert trainer.checkpoint().keys() == checkpoint.CHECKPOINT_FIELDS.keys()


def leaves(value):
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_c06_c07_files_hold_tensors_and_plain_python_only(tmp_path):
    "C06, C07: all of a run's files load by torch's own default, which refuses anything else; NumPy's random state included"
    trained(tmp_path, train_batch_size=4, max_steps=4, save_steps=2)
    assert len(names(tmp_path)) == 2
    for path in tmp_path.glob("*.pth"):
        state = torch.load(path)
        assert {type(leaf) for leaf in leaves(state)} <= {torch.Tensor, int, float, str, bool, type(None)}
        assert {"python", "numpy", "torch"} <= set(state["rng_states"][0])
    for module in Path(checkpoint.__file__).parent.glob("*.py"):
        assert "weights_only=False" not in module.read_text(encoding="utf-8")


def test_c28_the_saved_optimizer_is_the_one_that_trained(tmp_path):
    "C28: moments for every parameter after three steps"
    trainer = trained(tmp_path, optimizer=adamw, train_batch_size=4, max_steps=3)
    moments = torch.load(tmp_path / "checkpoint-3.pth")["optimizer_state"]["state"]
    assert len(moments) == len(list(trainer.model.parameters()))
    assert all(entry["step"] == 3 and entry["exp_avg"].abs().sum() > 0 for entry in moments.values())


def test_c29_a_short_run_ends_with_a_checkpoint(tmp_path):
    "C29: save_steps is far beyond the end"
    trained(tmp_path, train_batch_size=4, max_steps=2, save_steps=10_000)
    assert names(tmp_path) == ["checkpoint-2.pth"]


def test_x06_all_that_differs_between_runs_is_stored(tmp_path):
    "X06: scaler, random state, world size, config, place in the data"
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=4)
    trainer.about = dict(model_config=dict(emb_dim=32), data_fingerprint="f", tokenizer_hash="t")
    restless_scaler(trainer)
    trainer.train()
    state = torch.load(tmp_path / "checkpoint-4.pth")
    assert state["scaler_state"]["scale"] > 4 and state["world_size"] == 1 and state["config"] == dict(emb_dim=32)
    assert (state["step"], state["position"], state["samples_seen"], state["tokens_seen"]) == (4, 16, 16, 128)
    assert (state["data_fingerprint"], state["tokenizer_hash"], state["total_steps"]) == ("f", "t", 4)
    assert state["choices"]["dtype"] == "float32" and state["train_args"]["max_steps"] == 4


# ---- the same run to the bit


@pytest.mark.parametrize("at, accumulate, drop_rate, scaler", [*itertools.product(["mid-epoch", "end"], [1, 2], [0.0, 0.3], [False, True])])
def test_c13_k_steps_and_the_rest_equal_all_steps(at, accumulate, drop_rate, scaler, tmp_path):
    "C13, C28: weights, moments, losses, scale and random state; another seed's model is overwritten"
    per_epoch = 10 // accumulate
    k = per_epoch if at == "end" else per_epoch - 2
    options = dict(optimizer=adamw, train_batch_size=4, accumulate=accumulate, max_steps=k + 4, save_steps=k, keep_last=0)
    whole = make_trainer(tmp_path, model=make_model(drop_rate), **options)
    half = make_trainer(tmp_path, model=make_model(drop_rate, seed=8), **options | dict(resume=str(tmp_path / f"checkpoint-{k}.pth")))
    states = []
    for trainer in (whole, half):
        if scaler:
            restless_scaler(trainer)
        trainer.train()
        states.append(torch.load(tmp_path / f"checkpoint-{k + 4}.pth"))
        states[-1]["train_args"].pop("resume")
    one, other = (list(leaves(state)) for state in states)
    assert len(one) == len(other) and len(half.train_set.seen) == 16 * accumulate
    for a, b in zip(one, other):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert losses(half.events) == losses(whole.events)[k:]
    assert not scaler or states[0]["scaler_state"]["scale"] > 4


def test_c14_order_after_a_resume_in_the_second_epoch(tmp_path):
    "C14: in this and the next epoch; 10 steps an epoch"
    options = dict(train_batch_size=4, num_train_epochs=3, save_steps=14)
    whole = trained(tmp_path, **options)
    rest = trained(tmp_path / "rest", **options | dict(resume=str(tmp_path / "checkpoint-14.pth")))
    assert rest.train_set.seen == whole.train_set.seen[14 * 4 :] and len(rest.train_set.seen) == 16 * 4
    epochs = [whole.train_set.seen[40 * epoch : 40 * (epoch + 1)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert (rest.epoch, rest.step) == (whole.epoch, whole.step)


def test_stop_ends_at_a_step_with_its_checkpoint_and_the_rest_is_the_same(tmp_path):
    options = dict(optimizer=adamw, train_batch_size=4, max_steps=9, save_steps=0)
    whole = trained(tmp_path / "whole", model=make_model(0.3), **options)
    half = make_trainer(tmp_path / "half", model=make_model(0.3), **options)
    stop_before(half, 5)
    half.train()
    assert names(tmp_path / "half") == ["checkpoint-5.pth"] and half.step == 5 and half.stopping
    rest = trained(tmp_path / "half", model=make_model(0.3, seed=8), **options | dict(resume="auto"))
    assert largest_difference(weights(whole), weights(rest)) == 0 and not rest.stopping
    assert losses(half.events) + losses(rest.events) == losses(whole.events)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "One launch of three processes: the walk through world sizes, and exactness on two"
    folder = tmp_path_factory.mktemp("ranks")
    ports = free_ports(len(WALK) + len(SAVED))
    run_ranks(JOB, 3, args=[folder, *ports], env=ONE_THREAD, stream=False, timeout=100)
    return folder


@pytest.mark.parametrize("name", SAVED)
def test_c13_two_ranks_go_on_to_the_bit(name, ranks):
    "C13: dropout, AdamW, two micro-batches and a scaler that moves"
    for rank in range(2):
        told = torch.load(ranks / f"exact-rank-{rank}.pt")[name]
        assert largest_difference(told["whole"], told["half"]) == 0
        assert told["scaler"][0] == told["scaler"][1] and told["scaler"][0]["scale"] > 4


def test_c03_one_rank_writes(ranks):
    "C03: every save of two ranks has one writer, and its file is whole"
    for name, at in SAVED.items():
        written = [torch.load(ranks / f"exact-rank-{rank}.pt")[name]["written"] for rank in range(2)]
        assert written[1] == [] and written[0].count(at) == 1 and len(written[0]) >= 3
        assert not any(damage(path) for path in (ranks / name).glob("*.pth"))


@pytest.fixture(scope="module")
def legs(ranks):
    return [[torch.load(ranks / f"leg-{leg}-rank-{rank}.pt") for rank in range(world)] for leg, (world, _) in enumerate(WALK)]


def test_c17_two_one_three_one_two_ranks_see_the_same_windows_and_losses(legs, tmp_path):
    "C17: 2x3, 1x6, 3x2 and back, across an epoch's end: order by samples seen, losses to rounding"
    whole = trained(tmp_path, train_batch_size=6, max_steps=TOTAL, save_steps=0)
    order, told = [], []
    for told_by, (world, last) in zip(legs, WALK):
        assert {(rank["step"], rank["samples"]) for rank in told_by} == {(last, 6 * last)}
        share = 6 // world
        for step in range(len(told_by[0]["seen"]) // share):
            order += [row for rank in told_by for row in rank["seen"][step * share : (step + 1) * share]]
        told += told_by[0]["events"]
    assert order == whole.train_set.seen
    assert losses(told) == pytest.approx(losses(whole.events), abs=1e-4)
    assert losses(told, "lr") == losses(whole.events, "lr")


def test_c17_c18_another_world_size_is_told(legs):
    "C17, C18: both numbers; new ranks have fresh seeds, in words"
    for (before, _), (now, _), told_by in zip(WALK, WALK[1:], legs[1:]):
        said = " ".join(event["text"] for event in told_by[0]["events"] if event["event"] == "note")
        assert f"processes {before} before, {now} now" in said and "dropout from fresh seeds" in said
        assert not any(rank["events"] for rank in told_by[1:])


def test_c10_c11_files_of_several_ranks_load_in_one_process(ranks):
    "C10, C11: periodic, final and stopped ones"
    files = sorted(ranks.rglob("*.pth"))
    assert len(files) >= len(WALK) + 2 * len(SAVED)
    for path in files:
        make_model().load_state_dict(Checkpointer(path.parent).load(path)["model_state"], strict=True)


# ---- another device


def test_c12_a_file_from_the_second_gpu_loads_without_one(tmp_path):
    "C12: every tensor in the file says cuda:1"
    trained(tmp_path / "cpu", train_batch_size=4, max_steps=2)
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "checkpoint-2.pth"
    with zipfile.ZipFile(tmp_path / "cpu" / "checkpoint-2.pth") as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            place = lambda name: b"X" + len(name).to_bytes(4, "little") + name
            new.writestr(item, old.read(item).replace(place(b"cpu"), place(b"cuda:1")) if item.filename.endswith("data.pkl") else old.read(item))
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path)
    state = Checkpointer(path.parent).load(path)
    assert {leaf.device.type for leaf in leaves(state) if isinstance(leaf, torch.Tensor)} == {"cpu"}
    state["choices"]["device"] = "cuda:1"
    torch.save(state, path)
    rest = trained(tmp_path / "rest", train_batch_size=4, max_steps=4, resume=str(path))
    assert rest.step == 4 and rest.choices.device == "cpu"


def test_what_auto_chose_is_chosen_again(tmp_path):
    "a run in bfloat16 goes on in it; not where the device lacks it, and not against a flag"
    trained(tmp_path, train_batch_size=4, max_steps=2, dtype="bfloat16")
    options = dict(train_batch_size=4, max_steps=2, resume="auto")
    reused = make_trainer(tmp_path, **options)
    assert reused.choices.dtype == "float32"
    reused.setup()
    assert reused.choices.dtype == "bfloat16"
    asked = make_trainer(tmp_path, **options, dtype="float32")
    asked.setup()
    assert asked.choices.dtype == "float32" and "dtype bfloat16 before, float32 now" in notes(asked)[0]
    lacking = make_trainer(tmp_path, **options)
    with mock.patch.object(single, "choose_dtype", side_effect=ValueError):
        lacking.setup()
    assert lacking.choices.dtype == "float32" and "this cpu device has no bfloat16" in " ".join(notes(lacking))


# ---- another run's checkpoint, other settings

ABOUT = dict(model_config=dict(vocab_size=64, emb_dim=32), data_fingerprint="data-1", tokenizer_hash="tok-1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "Four steps of a run whose model, data and tokenizer are known"
    unpatch(Trainer)
    return trained(tmp_path_factory.mktemp("run"), about=ABOUT, optimizer=adamw, train_batch_size=4, max_steps=4, save_steps=2).checkpointer.folder


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(model_config=dict(vocab_size=64, emb_dim=48)), "emb_dim 32 before, 48 now"),
        (dict(model_config=dict(vocab_size=74, emb_dim=32), tokenizer_hash="tok-2"), "vocab_size 64 before, 74 now; tokenizer_hash tok-1 before, tok-2 now"),
        (dict(data_fingerprint="data-2"), "data_fingerprint data-1 before, data-2 now"),
        (dict(tokenizer_hash="tok-2"), "tokenizer_hash tok-1 before, tok-2 now"),
    ],
)
def test_c26_another_model_or_other_data_are_refused_by_name(changed, said, run, tmp_path):
    "C26: field, old and new value, and the flag that starts a new run; the folder stays as it was"
    trainer = make_trainer(run, train_batch_size=4, max_steps=8, resume="auto")
    trainer.about = ABOUT | changed
    with pytest.raises(ValueError) as error:
        trainer.train()
    line = str(error.value)
    assert said in line and "another --output_dir" in line and "\n" not in line
    assert "--init_from" in line or "tokenizer_hash" in changed  # weights mean nothing to another tokenizer
    assert names(run) == ["checkpoint-2.pth", "checkpoint-4.pth"] and not trainer.events


def test_c19_changed_rate_batch_length_and_decay_count_are_told_and_recorded(run, tmp_path):
    "C19: the flag wins over what the optimizer's state brought"
    changed = dict(learning_rate=0.03, train_batch_size=2, max_steps=6, weight_decay=0.5)
    trainer = make_trainer(tmp_path, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5), **changed, resume=str(run / "checkpoint-2.pth"))
    trainer.about, used, plain = ABOUT, [], trainer.optimizer_step

    def optimizer_step():
        used.append([(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups])
        plain()

    trainer.optimizer_step = optimizer_step
    trainer.train()
    assert used[0] == [(losses(trainer.events, "lr")[0], 0.5)] and max(losses(trainer.events, "lr")) <= 0.03
    for said in ("learning_rate 0.3 before, 0.03 now", "train_batch_size 4 before, 2 now", "steps in all 4 before, 6 now", "weight_decay 0.1 before, 0.5 now"):
        assert said in notes(trainer)[0]
    recorded = torch.load(tmp_path / "checkpoint-6.pth")["train_args"]
    assert {name: recorded[name] for name in changed} == changed
    assert trainer.samples_seen == 2 * 4 + 4 * 2


def test_c24_weights_start_a_new_run(run, tmp_path):
    "C24: from a whole checkpoint or a bare state dict: the weights alone, everything else anew"
    state = torch.load(run / "checkpoint-4.pth")
    torch.save(state["model_state"], tmp_path / "bare.pth")
    fresh = make_model()
    fresh.load_state_dict(state["model_state"])
    options = dict(optimizer=adamw, train_batch_size=4, max_steps=3)
    wanted = trained(tmp_path / "wanted", about=ABOUT, model=fresh, **options)
    for number, path in enumerate((run / "checkpoint-4.pth", tmp_path / "bare.pth")):
        started = trained(tmp_path / f"{number}", about=ABOUT | dict(data_fingerprint="other"), model=make_model(seed=5), **options, init_from=str(path))
        assert largest_difference(weights(wanted), weights(started)) == 0 and started.samples_seen == 12
        assert "optimizer, schedule and data begin anew" in notes(started)[0]


@pytest.mark.parametrize("path, said", [("checkpoint-4.pth", "another tokenizer's tokens: tok-1 there, tok-2 here"), ("none.pth", "none.pth: no such")])
def test_weights_that_can_not_be_used_are_refused(path, said, run, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        trained(tmp_path, about=ABOUT | dict(tokenizer_hash="tok-2"), train_batch_size=4, init_from=str(run / path))
    assert "does not fit" not in str(error.value)


def test_weights_of_another_shape_are_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="other.pth: does not fit this run") as error:
        trained(tmp_path / "run", train_batch_size=4, init_from=str(tmp_path / "other.pth"))
    assert "\n" not in str(error.value)


def test_a_resumed_run_does_not_take_its_first_weights_again(run, tmp_path):
    "the same command after a kill: init_from counts for the start only"
    options = dict(optimizer=adamw, train_batch_size=4, init_from=str(run / "checkpoint-4.pth"), resume="auto", save_steps=2)
    whole = trained(tmp_path / "whole", max_steps=4, **options)
    checkpoints = tmp_path / "whole"
    for name in ("checkpoint-4.pth", "checkpoint-4.json"):
        (checkpoints / name).unlink()
    rest = trained(checkpoints, max_steps=4, **options)
    assert largest_difference(weights(whole), weights(rest)) == 0 and len(losses(rest.events)) == 2


# ---- which one is the newest, which ones are kept


def test_an_altered_or_incomplete_checkpoint_is_refused_in_one_line(tmp_path):
    trained(tmp_path, train_batch_size=4, max_steps=2)
    path = tmp_path / "checkpoint-2.pth"
    load, whole = Checkpointer(tmp_path).load, path.read_bytes()
    flip(path)
    with pytest.raises(ValueError, match="altered since it was written"):
        load(path)
    for junk in (b"", b"hello", whole[: len(whole) // 2]):
        (tmp_path / "junk.pth").write_bytes(junk)
        with pytest.raises(ValueError, match="damaged, no checkpoint"):
            load(tmp_path / "junk.pth")
    for state in ({"model_state": {}}, [1, 2], torch.zeros(3)):  # C24: weights alone
        torch.save(state, tmp_path / "part.pth")
        with pytest.raises(ValueError, match="lacks .*optimizer_state"):
            load(tmp_path / "part.pth")


def harm_bit(path):
    flip(path)


def harm_length(path):
    path.write_bytes(path.read_bytes()[:-1])


def harm_sidecar(path):
    path.with_suffix(".json").unlink()


def harm_sidecar_text(path):
    path.with_suffix(".json").write_text('{"step": 3, "serial": ')


@pytest.mark.parametrize("harm", [harm_bit, harm_length, harm_sidecar, harm_sidecar_text])
def test_c27_torn_and_altered_ones_are_named_passed_over_and_kept(harm, tmp_path):
    "C27: also by the rotation of later saves"
    keeper = saved(tmp_path, 1, 2, 3)
    bad = tmp_path / "checkpoint-3.pth"
    harm(bad)
    before = bad.read_bytes()
    path, told = keeper.newest()
    assert path.name == "checkpoint-2.pth" and len(told) == 1 and str(bad) in told[0] and "passed over" in told[0]
    saved(tmp_path, 4, 5, 6, 7, keep_last=1)
    assert bad.read_bytes() == before and names(tmp_path) == ["checkpoint-3.pth", "checkpoint-7.pth"]


@pytest.mark.parametrize("harm", [harm_bit, harm_length, harm_sidecar, harm_sidecar_text])
def test_a_damaged_file_is_set_aside_when_its_step_is_written_again(harm, tmp_path):
    "a file without a sidecar may be another keeper's only copy; a whole one is replaced"
    saved(tmp_path, 2, 3)
    bad = tmp_path / "checkpoint-3.pth"
    harm(bad)
    before = bad.read_bytes()
    keeper = saved(tmp_path, 2, 3, 4, keep_last=1)
    assert names(tmp_path, "*.damaged") == ["checkpoint-3.pth.damaged"]
    assert bad.with_name("checkpoint-3.pth.damaged").read_bytes() == before
    assert keeper.newest() == (tmp_path / "checkpoint-4.pth", [])


def test_c27_a_resumed_run_names_what_it_passed_over_and_writes_it_anew(tmp_path):
    options = dict(optimizer=adamw, train_batch_size=4, max_steps=6, save_steps=2, keep_last=0)
    whole = trained(tmp_path, **options)
    harm_sidecar(tmp_path / "checkpoint-6.pth")
    flip(tmp_path / "checkpoint-4.pth")
    rest = trained(tmp_path, **options | dict(resume="auto"))
    assert [("checkpoint-6" in note, "checkpoint-4" in note) for note in notes(rest)[:2]] == [(True, False), (False, True)]
    assert next(event for event in rest.events if event["event"] == "resume")["from_path"].endswith("checkpoint-2.pth")
    assert largest_difference(weights(whole), weights(rest)) == 0
    assert not any(damage(path) for path in tmp_path.glob("*.pth"))


def test_where_all_are_altered_the_run_is_refused(tmp_path):
    "whether to start afresh is not ours to decide"
    saved(tmp_path, 2)
    flip(tmp_path / "checkpoint-2.pth")
    with pytest.raises(ValueError, match="checkpoint-2.pth: altered .*another --output_dir starts afresh"):
        trained(tmp_path, train_batch_size=4, max_steps=1, resume="auto")


def test_a_write_that_never_ended_is_no_past(tmp_path):
    "killed in its first save, a run starts again and says so"
    saved(tmp_path, 2)
    harm_sidecar(tmp_path / "checkpoint-2.pth")
    trainer = trained(tmp_path, train_batch_size=4, max_steps=1, resume="auto")
    assert "checkpoint-2.pth" in notes(trainer)[0] and trainer.samples_seen == 4


def test_the_newest_is_the_one_written_last(tmp_path):
    "a run that went back to an older checkpoint in the same folder goes on from its own"
    options = dict(train_batch_size=4, max_steps=6, save_steps=2, keep_last=0)
    trained(tmp_path, **options)
    back = make_trainer(tmp_path, **options | dict(resume=str(tmp_path / "checkpoint-2.pth")))
    stop_before(back, 5)
    back.train()
    assert back.checkpointer.newest()[0].name == "checkpoint-5.pth"
    assert [path.name for path in back.checkpointer.complete()] == [f"checkpoint-{n}.pth" for n in (2, 6, 4, 5)]


def test_c22_keep_last_counts_numbers(tmp_path):
    "C22: 1000 is newer than 950"
    saved(tmp_path, *range(900, 1101, 50))
    assert names(tmp_path) == ["checkpoint-1000.pth", "checkpoint-1050.pth", "checkpoint-1100.pth"]
    assert len(names(tmp_path, "*.json")) == 3


def test_keep_last_keeps_the_newest(tmp_path):
    trained(tmp_path, train_batch_size=4, max_steps=8, save_steps=2, keep_last=2, evaluation=0)
    assert names(tmp_path) == ["checkpoint-6.pth", "checkpoint-8.pth"]


def test_the_best_is_kept_besides_the_newest(tmp_path):
    "a loss that is no number is never the best"
    for step, loss in enumerate((float("nan"), 1.5, 3.0, 2.0, None, float("inf"), 2.5)):
        keeper = saved(tmp_path, step, keep_last=2, eval_loss=loss)
    assert names(tmp_path) == ["checkpoint-1.pth", "checkpoint-5.pth", "checkpoint-6.pth"] and keeper.best().name == "checkpoint-1.pth"


# ---- writing


class Killed(BaseException):
    "As a kill: nothing that runs now catches it"


def killed_in(stage):
    "Patches that end a save at one of its stages"
    plain_write, plain_fsync, plain_replace = checkpoint.HashedFile.write, os.fsync, os.replace
    weights_or_sidecar = lambda name: "sidecar" if ".json" in str(name) else "weights"

    def write(self, data):
        if stage == f"half {weights_or_sidecar(self.file.name)}":
            plain_write(self, bytes(data)[: len(data) // 2])
            raise Killed
        return plain_write(self, data)

    def fsync(handle):
        if stage == f"sync {'folder' if os.path.isdir(f'/proc/self/fd/{handle}') else 'file'}":
            raise Killed
        plain_fsync(handle)

    def replace(source, target):
        if stage == f"rename {weights_or_sidecar(target)}":
            raise Killed
        plain_replace(source, target)

    return (mock.patch.object(checkpoint.HashedFile, "write", write), mock.patch.object(os, "fsync", fsync), mock.patch.object(os, "replace", replace))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", ["half weights", "sync file", "rename weights", "sync folder", "half sidecar", "rename sidecar"])
@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
def test_c01_a_save_that_is_cut_off_leaves_what_was_there(stage, step, tmp_path):
    "C01: the old or the new one, whole; what is left of the cut one goes with the next save; 200 real kills are in bench/kill_sweep.py"
    keeper = saved(tmp_path, 1)
    patches = killed_in(stage)
    with patches[0], patches[1], patches[2], pytest.raises(Killed):
        keeper.write({"step": step, "eval_loss": None, "x": torch.full((1000,), 9.0)})
    path = Checkpointer(tmp_path).newest()[0]
    assert path.name == "checkpoint-1.pth" and damage(path) is None
    assert torch.load(path)["x"].unique().tolist() in ([1.0], [9.0])
    saved(tmp_path, 3)
    assert names(tmp_path, "*.tmp") == [] and Checkpointer(tmp_path).newest()[0].name == "checkpoint-3.pth"


@contextmanager
def killed_at(n):
    "A save that ends before its call number `n` that touches the disk"
    calls = itertools.count()

    def counted(plain):
        def call(*args):
            if next(calls) == n:
                raise Killed
            return plain(*args)

        return call

    def in_halves(state, file, plain=torch.save):
        "PyTorch's writer would turn our exception into its own"
        plain(state, buffer := io.BytesIO())
        half = buffer.tell() // 2
        file.write(buffer.getvalue()[:half])
        file.write(buffer.getvalue()[half:])
        file.flush()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "save", in_halves))
        for place, name in ((checkpoint.HashedFile, "write"), (os, "fsync"), (os, "replace"), (Path, "unlink")):
            patches.enter_context(mock.patch.object(place, name, counted(getattr(place, name))))
        yield


@pytest.mark.parametrize("keep_last", [0, 1])
def test_c01_a_step_that_is_written_again_is_there_at_every_moment(keep_last, tmp_path):
    "C01: killed before any call, and killed again in the next attempt: one of those that were begun, with its own evaluation loss"
    told = set()

    def write_again(folder, value, n):
        try:
            with killed_at(n):
                Checkpointer(folder, keep_last).write({"step": 20, "eval_loss": value, "x": torch.full((1000,), value)})
        except Killed:
            return False
        return True

    def value_of(folder):
        path, notes = Checkpointer(folder).newest()
        assert path and not notes and damage(path) is None
        value = torch.load(path)["x"].unique().item()
        assert checkpoint.read_sidecar(path)["eval_loss"] == value == checkpoint.read_sidecar(Checkpointer(folder).best())["eval_loss"]
        return value

    def attempt(n, m):
        folder = tmp_path / f"{n}-{m}"
        keeper = Checkpointer(folder, keep_last)
        keeper.write({"step": 20, "eval_loss": 1.0, "x": torch.full((1000,), 1.0)})
        ended = write_again(folder, 2.0, n)
        told.add(before := value_of(folder))
        assert before in ((2.0,) if ended else (1.0, 2.0))
        again = write_again(folder, 3.0, m)
        told.add(value := value_of(folder))
        assert value in ((3.0,) if again else (before, 3.0))
        keeper.write({"step": 20, "eval_loss": 4.0, "x": torch.full((1000,), 4.0)})
        assert value_of(folder) == 4.0 and sorted(path.name for path in folder.iterdir()) == ["checkpoint-20.json", "checkpoint-20.pth"]
        assert "coming" not in (folder / "checkpoint-20.json").read_text()
        return ended, again

    calls = next(n for n in itertools.count() if attempt(n, 0)[0])
    assert calls > 12
    for n, m in itertools.product(range(calls + 1), range(1, calls + 1)):
        attempt(n, m)
    assert told == {1.0, 2.0, 3.0}


@pytest.mark.parametrize("coming", ["x", 5, [1], {}, {"sha256": 1}, {"step": 3}])
def test_c27_an_odd_sidecar_is_no_traceback(coming, tmp_path):
    saved(tmp_path, 2, 3)
    sidecar = tmp_path / "checkpoint-3.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | dict(coming=coming)))
    assert Checkpointer(tmp_path).newest()[0].name in ("checkpoint-2.pth", "checkpoint-3.pth")
    sidecar.write_text(json.dumps([coming]))
    assert Checkpointer(tmp_path).newest()[0].name == "checkpoint-2.pth"


def test_a_failed_save_leaves_no_temporary_file_and_the_old_one_whole(tmp_path):
    trainer = trained(tmp_path, train_batch_size=4, max_steps=2)
    with mock.patch.object(torch, "save", side_effect=OSError(28, "No space left on device")):
        trainer.checkpointer.save({"step": 9, "eval_loss": None})
        with pytest.raises(OSError, match="checkpoint-9.pth"):
            trainer.checkpointer.saved(wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2.json", "checkpoint-2.pth"]
    assert trainer.checkpointer.newest() == (tmp_path / "checkpoint-2.pth", [])


def test_what_is_whole_is_told_before_what_failed(tmp_path):
    keeper = Checkpointer(tmp_path)
    keeper.save({"step": 1, "eval_loss": None})
    keeper.writer.submit(int).result()  # the first write has ended, nobody has asked yet
    (tmp_path / "checkpoint-2.pth").mkdir()
    keeper.save({"step": 2, "eval_loss": None})
    assert keeper.saved(wait=True) == [(1, tmp_path / "checkpoint-1.pth")]
    with pytest.raises(OSError, match="checkpoint-2.pth"):
        keeper.saved(wait=True)
    assert keeper.saved(wait=True) == []


def test_a_snapshot_keeps_ties_and_uses_its_memory_again():
    weight = torch.arange(6.0).view(2, 3)
    state = dict(a=weight, b=[weight, weight.t()], empty=torch.zeros(0), n=1, words=("x", None))
    memory = {}
    first = snapshot(state, memory)
    assert first["a"] is first["b"][0] and first["a"].data_ptr() != weight.data_ptr() and first["n"] == 1 and first["words"] == ("x", None)
    assert torch.equal(first["b"][1], weight.t())
    places = {at: kept.data_ptr() for at, kept in memory.items()}
    weight += 1
    assert first["a"][0, 0] == 0
    second = snapshot(state, memory)
    assert second["a"][0, 0] == 1 and {at: kept.data_ptr() for at, kept in memory.items()} == places
    assert snapshot(dict(a=torch.zeros(4)), memory)["a"].shape == (4,)  # another shape takes new memory


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    big = torch.randn(100_000)
    saved(tmp_path, 1, x=big, y=big)
    state = torch.load(tmp_path / "checkpoint-1.pth")
    assert state["x"].data_ptr() == state["y"].data_ptr() and (tmp_path / "checkpoint-1.pth").stat().st_size < 2 * big.nbytes


def test_weights_that_change_while_they_are_written_stay_as_they_were_in_the_file(tmp_path):
    keeper, go, plain = Checkpointer(tmp_path), threading.Event(), torch.save

    def late(state, file):
        assert go.wait(30)
        plain(state, file)

    weight = torch.zeros(1000)
    with mock.patch.object(torch, "save", late):
        keeper.save({"step": 1, "eval_loss": None, "x": weight})
        weight += 1  # training goes on
        assert keeper.saved() == []
        go.set()
        assert keeper.saved(wait=True) == [(1, tmp_path / "checkpoint-1.pth")]
    assert torch.load(tmp_path / "checkpoint-1.pth")["x"].sum() == 0


def test_never_two_writes_at_once(tmp_path):
    "a save waits for the one before, whose memory it uses"
    keeper, running, most, plain = Checkpointer(tmp_path, 0), [], [], torch.save

    def slow(state, file):
        running.append(state["step"])
        most.append(len(running))
        plain(state, file)
        running.pop()

    weight = torch.zeros(200_000)
    with mock.patch.object(torch, "save", slow):
        for step in range(1, 6):
            weight.fill_(step)
            keeper.save({"step": step, "eval_loss": None, "x": weight})
        assert [step for step, _ in keeper.saved(wait=True)] == [1, 2, 3, 4, 5]
    assert most == [1] * 5
    assert all(torch.load(tmp_path / f"checkpoint-{step}.pth")["x"].unique().tolist() == [step] for step in range(1, 6))


def test_a_second_signal_ends_the_wait_for_a_write(tmp_path):
    "Also one that the wait itself does not see, here because another thread takes it: to end at once must not take as long as the disk"
    begun, gate, keeper = threading.Event(), threading.Event(), Checkpointer(tmp_path)

    def held_save(state, file):
        begun.wait(20)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        gate.wait(20)

    try:
        with mock.patch.object(torch, "save", held_save), pytest.raises(KeyboardInterrupt):
            keeper.save({"step": 1, "eval_loss": None})
            begun.set()
            keeper.saved(wait=True)
        assert not keeper.pending[0].done()
    finally:
        gate.set()


# ---- hostile files


class Payload:
    "Runs a command when it is unpickled"

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("sidecar", [False, True], ids=["bare", "with a sidecar that fits"])
@pytest.mark.parametrize("option", ["resume", "init_from"])
def test_a_hostile_pickle_is_refused_and_nothing_runs(option, sidecar, tmp_path):
    path, trace = tmp_path / "run" / "checkpoint-5.pth", tmp_path / "executed"
    path.parent.mkdir()
    torch.save({"model_state": Payload(trace)}, path)
    if sidecar:
        facts = checkpoint.write_whole(path, lambda file: file.write(path.read_bytes())) | dict(step=5, serial=1, eval_loss=None)
        path.with_suffix(".json").write_text(json.dumps(facts))
    raw = path.with_name("raw.pth")
    raw.write_bytes(pickle.dumps(Payload(trace)))
    for hostile in (path, raw):
        with pytest.raises(ValueError, match="holds more than tensors") as error:
            trained(tmp_path / "new", train_batch_size=4, **{option: str(hostile)})
        assert "\n" not in str(error.value)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # it would have


def test_a_renamed_pair_is_still_verified(tmp_path):
    "under a name of the user's own; under that of another step it is not that step's"
    keeper = saved(tmp_path, 2)
    for name in ("best", "checkpoint-9"):
        for kind in ("pth", "json"):
            (tmp_path / f"{name}.{kind}").write_bytes((tmp_path / f"checkpoint-2.{kind}").read_bytes())
    assert damage(tmp_path / "best.pth") is None and "another step's" in damage(tmp_path / "checkpoint-9.pth")
    flip(tmp_path / "best.pth")
    assert "altered" in damage(tmp_path / "best.pth") and keeper.newest()[0] == tmp_path / "checkpoint-2.pth"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="POSIX signals")
@pytest.mark.parametrize("ignored, steps", [(False, 4), (True, 10)])
def test_a_closed_terminal_ends_a_run_unless_nohup_is_there(ignored, steps, tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4)  # 10 steps
    plain = trainer.backward
    trainer.backward = lambda loss: (plain(loss), signal.raise_signal(signal.SIGHUP) if trainer.step == 2 else None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with checkpoint.stop_on_signals(trainer):
            trainer.train()
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trainer.step == steps and trainer.stopping != ignored and (tmp_path / f"checkpoint-{steps}.pth").exists()
