"Logs as they come: appended, cut, resumed, doubled, in narrow consoles; and the trainer that writes them"
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import minigpt.runlog as runlog
from minigpt.pretrainer_single import Trainer, TrainArgs, build_optimizer
from minigpt.runlog import Events, RunLog, curve, health_line, main, parse_log, plot_runs, read_run, run_baselines, run_labels, stitch, watch_run

torch.set_num_threads(1)

SOURCE = """set trainset: 98000, evalset: 2000
init train_loader steps: 2041, eval_loader: 125
2024-12-28 07:33:12 start epoch:0 from step:0
2024-12-28 07:35:16 lr=0.00099, train_loss: 7.3078, eval_loss: 6.4596, grad_norm=0.37541, steps: 199/2041
2024-12-28 07:37:20 lr=0.00097, train_loss: 6.2862, eval_loss: 6.1645, grad_norm=0.24622, steps: 399/2041
2024-12-28 07:39:23 lr=0.00090, train_loss: 6.1241, eval_loss: 6.0611, grad_norm=0.23912, steps: 599/2041
2024-12-28 07:41:27 lr=0.00079, train_loss: 6.0449, eval_loss: 6.0008, grad_norm=0.21517, steps: 799/2041
2024-12-28 07:43:30 lr=0.00064, train_loss: 5.9862, eval_loss: 5.9592, grad_norm=0.20768, steps: 999/2041
2024-12-28 07:45:37 lr=0.00049, train_loss: 5.9465, eval_loss: 5.9235, grad_norm=0.20683, steps: 1199/2041
2024-12-28 07:47:40 lr=0.00034, train_loss: 5.9102, eval_loss: 5.8910, grad_norm=0.19565, steps: 1399/2041
2024-12-28 07:49:44 lr=0.00022, train_loss: 5.8823, eval_loss: 5.8677, grad_norm=0.19772, steps: 1599/2041
2024-12-28 07:51:48 lr=0.00014, train_loss: 5.8657, eval_loss: 5.8471, grad_norm=0.20222, steps: 1799/2041
2024-12-28 07:53:51 lr=0.00010, train_loss: 5.8473, eval_loss: 5.8367, grad_norm=0.19727, steps: 1999/2041
2024-12-28 07:53:54 device:cuda:0-save checkpoint: checkpoint-2000.pth
2024-12-28 07:53:54 barrier wait over of device:cuda:0 at step: 2000.
2024-12-28 07:53:54 barrier wait over of device:cuda:2 at step: 2000.
clean multi process.
train over, steps: 2041
train use time: 21.10min
"""


def record(step, loss=None, kind="train", **more):
    "One measured event"
    loss = 4 - step / 100 if loss is None else loss
    extra = dict(eval_loss=loss + 0.1) if kind == "eval" else {}
    when = f"2026-01-05 09:{step // 60:02}:{step % 60:02}"
    return dict(event=kind, time=when, step=step, total_steps=150, lr=1e-3, train_loss=loss, grad_norm=0.5, tokens=step * 64, tokens_per_s=1.0, **extra, **more)


def session(start, stop, shift=0.0, resume=None, every=1):
    "What the trainer writes when it starts, and resumes"
    head = [dict(event="start", time="2026-01-05 09:00:00", step=0)]
    if resume is not None:
        head.append(dict(event="resume", time="2026-01-05 09:00:00", step=resume, from_path="checkpoint-80.pth"))
    return head + [record(s, 4 - s / 100 + shift) for s in range(start, stop + 1, every)]


def steps(events):
    return [e["step"] for e in events if e["event"] == "train"]


class Toy(nn.Module):
    "The smallest language model: logits of the next token from this one"

    def __init__(self, vocab=8):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, x):
        return self.table(x)


def toy_trainer(folder, log, train_set=None, **args):
    "A trainer over random tokens"
    torch.manual_seed(0)
    ids = torch.randint(0, 8, (64, 9))
    rows = [(row[:-1], row[1:]) for row in ids]
    settings = dict(train_batch_size=4, eval_steps=0, log_every=0, save_steps=0, warmup_steps=0, learning_rate=0.05, output_dir=str(folder))
    args = TrainArgs(**{**settings, **args})
    model = Toy()
    trainer = Trainer(model, build_optimizer(model, args.learning_rate, 0.0), args, device="cpu", log=log)
    trainer.set_dataset(rows[:48], rows[48:])
    return trainer


def test_source_log_ten_points_last_5_8367(tmp_path):
    (tmp_path / "log.txt").write_text(SOURCE, encoding="utf-8")
    events = read_run(tmp_path / "log.txt")
    evals = [e for e in events if e["event"] == "eval"]
    assert len(evals) == 10 and evals[-1]["eval_loss"] == 5.8367 and evals[-1]["step"] == 1999 and evals[0]["lr"] == 0.00099
    assert {e["event"] for e in events} == {"start", "eval", "save", "note", "end"}
    assert [e["minutes"] for e in events if e["event"] == "end"] == [21.1]
    pasted = "\n".join(line for line in SOURCE.splitlines() if "eval_loss:" in line)  # no newline at the end
    assert len(parse_log(pasted)) == 10


def test_own_lines_and_records_say_the_same(tmp_path):
    log = RunLog(tmp_path, echo=lambda line: None)
    for e in [dict(event="start", step=0, n_params=5, world_size=2, device="cpu", dtype="float32", total_steps=9, tokens_per_step=64),
              record(5), record(10, kind="eval", memory_mb=512.0), dict(event="save", step=10, path="a b/checkpoint-10.pth"),
              dict(event="resume", step=10, from_path="checkpoint-10.pth"), dict(event="sample", step=10, prompt="a\nb", text="c\nd"),
              dict(event="note", step=10, text="waiting"), dict(event="end", step=10, minutes=2.9)]:  # fmt: skip
        log(e)
    exact, human = read_run(tmp_path), read_run(tmp_path / "train.log")
    assert [e["event"] for e in exact] == [e["event"] for e in human] and exact.ignored == human.ignored == 0
    for name in ("step", "total_steps", "train_loss", "eval_loss", "lr", "grad_norm", "memory_mb"):
        assert human[2][name] == pytest.approx(exact[2][name], abs=5e-5)
    assert human[3]["path"] == "a b/checkpoint-10.pth" and human[4]["step"] == 10


def test_strict_json_of_numbers_that_are_none():
    line = runlog.to_json(dict(event="train", step=1, train_loss=math.nan, grad_norm=torch.tensor(math.inf), args=dict(limit=math.inf, ids=[1])))
    assert json.loads(line, parse_constant=pytest.fail)["nonfinite"] == ["train_loss", "grad_norm"]
    assert math.isnan(runlog.from_json(line)["train_loss"])
    assert runlog.from_json('{"event": "train", "train_loss": 1}') is None and runlog.from_json("[1]") is None


def test_l01_restart_appends_with_a_marker(tmp_path):
    for _ in range(2):
        log = RunLog(tmp_path, echo=lambda line: None)
        for e in session(1, 3):
            log({**e, "n_params": 1, "world_size": 1, "device": "cpu", "dtype": "f", "total_steps": 3, "tokens_per_step": 1})
    assert [e["event"] for e in read_run(tmp_path)].count("start") == 2
    assert len((tmp_path / "train.log").read_text(encoding="utf-8").splitlines()) == 8


def test_l01_a_half_line_does_not_swallow_the_next_session(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "st', encoding="utf-8")
    RunLog(tmp_path, echo=lambda line: None)(record(5))
    events = read_run(tmp_path)
    assert steps(events) == [5] and events.ignored == 1


def test_l02_resumed_run_is_one_curve_later_record_wins():
    events = session(1, 100) + session(81, 150, shift=0.5, resume=80)
    kept = stitch(events)
    assert steps(kept) == list(range(1, 151))
    assert [round(e["train_loss"] - (4 - e["step"] / 100), 6) for e in kept if e["event"] == "train"] == [0.0] * 80 + [0.5] * 70
    lost = [e for e in stitch(events, both=True) if "dropped" in e]
    assert steps(lost) == list(range(81, 101)) and all(round(e["train_loss"] - (4 - e["step"] / 100), 6) == 0 for e in lost)


def test_l02_without_markers_and_twice_and_short():
    bare = [record(s) for s in range(10, 101, 10)] + [record(s, 9.0) for s in range(90, 151, 10)]
    assert steps(stitch(bare)) == list(range(10, 151, 10))
    # a third session resumes at 80 again and dies at 85: what stood beyond 80 is no longer any weights' past
    events = session(1, 100) + session(81, 150, resume=80) + session(81, 85, shift=1.0, resume=80)
    assert steps(stitch(events)) == list(range(1, 86))


def test_l02_minutes_leave_the_pause_out():
    events = session(10, 100, every=10) + [{**e, "time": e["time"].replace("01-05", "01-06")} for e in session(90, 150, resume=80, every=10)]
    at, _ = curve(stitch(events), "train_loss", "minutes")
    assert at == sorted(at) and at[-1] < 5


def test_l04_kinds_stay_apart():
    events = [e for s in range(1, 11) for e in (record(s), record(s, kind="eval"))]
    at, values = curve(stitch(events), "eval_loss")
    assert at == list(range(1, 11)) and values == pytest.approx([4.1 - s / 100 for s in range(1, 11)])


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_l05_junk_is_counted_not_raised(tmp_path, name):
    head = "2026-01-05 09:30:0"
    text = (f"{head}1 lr=1e-3, train_loss: -nan, grad_norm=inf, steps: 1/9\n{head}2 lr=1e-3, train_loss: 3.5, eval_loss: -inf, grad_norm=1, steps: 2/9\n"
            f"\r 10%|#   | 1/9 [00:01]\r 20%|##  | 2/9\r{head}3 lr=1e-3, train_loss: 3.25, grad_norm=0.5, steps: 3/9\r\n\x00\x7fjunk\n"
            '{"event": "train", "step": 4, "train_loss": NaN, "lr": 0.1}\n{"event": "tr\n{}\n[]\n'
            f"{head}4 lr=1e-3, train_loss: 3.0, grad_norm=0.5, steps: 5/")
    (tmp_path / name).write_bytes(text.encode())
    events = read_run(tmp_path)
    assert [e["step"] for e in events] == [1, 2, 3, 4] and events.ignored == 7
    assert math.isnan(events[0]["train_loss"]) and math.isnan(events[1]["eval_loss"]) and events[2]["train_loss"] == 3.25
    plot_runs([tmp_path], out=tmp_path / "f.png")
    assert "3 of 4 records not finite" in health_line(events)  # two training losses and an evaluation


@pytest.mark.parametrize("junk", [
    '{"event": "note", "nonfinite": null}', '{"event": "note", "nonfinite": [[1]]}', '{"event": "train", "step": 1, "train_loss": "low"}',
    '{"event": "train", "step": 1, "train_loss": 1, "nonfinite": ["step"]}', '{"event": "start", "step": 0, "baselines": [1]}', '{"a":' * 100_000, "5",
    "train use time: 1.2.3min", f"2026-01-05 09:30:01 lr=1, train_loss: 1, steps: {'9' * 5000}/9", "x" * 1_000_000, "a " * 300_000,
    '{"event": "note", "rank": "a"}', f"[rank {'9' * 5000}] ", '{"event": "train", "step": 1, "train_loss": 1, "tokens": "many"}',
], ids=lambda junk: junk[:40])  # fmt: skip
def test_l05_what_other_programs_write_is_ignored_quickly(junk):
    begin = time.monotonic()
    events = parse_log(junk + "\n")
    assert events == [] and events.ignored == 1 and time.monotonic() - begin < 10
    assert run_baselines([dict(event="start", baselines=dict(bigram="low"))]) == {}


@pytest.mark.parametrize("said, kind", [
    ("sample: 'Let us start: now' -> 'the end: 5 min'", "sample"), ("note: 'end: 5 min'", "note"), ("note: resume from: a at step 3", "note"),
    ("note: train_loss: 3.0, steps: 5/9", "note"), ("sample: 'start epoch:0 from step:0'", "sample"), ("note: save checkpoint: x", "note"),
    ("start: 5 parameters", "start"), ("resume from: a at step 3/x.pth at step 12", "resume"), ("end: 2.9 min, step 10", "end"),
    ("so the end: 5 min", "note"), ("device:cuda:0-save checkpoint: x.pth", "save"),
])  # fmt: skip
def test_l05_an_event_is_known_by_the_word_behind_its_time(said, kind):
    "L05: what a text quotes starts, ends and measures nothing"
    for head in ("", "[rank 1] ", "half a li"):
        told = parse_log(f"{head}2026-01-05 09:30:01 {said}\n")
        assert [e["event"] for e in told] == [kind] or head == "half a li" and "so the" in said
    assert kind != "resume" or (told[0]["step"], told[0]["from_path"]) == (12, "a at step 3/x.pth")


@pytest.mark.parametrize("said, name, value", [
    ("tokens: 1.31B", "tokens", 1.31e9), ("tokens: 1.31M", "tokens", 1.31e6), ("tokens: 7", "tokens", 7), ("tokens: 2T", "tokens", 2e12),
    ("memory: 512MB", "memory_mb", 512), ("memory: 2GB", "memory_mb", 2000), ("memory: 5000000B", "memory_mb", 5), ("params: 7B", "params", 7e9),
])  # fmt: skip
def test_l05_units_of_other_programs(said, name, value):
    "L05: B is bytes for memory alone, elsewhere a billion"
    (event,) = parse_log(f"2026-01-05 09:30:01 train_loss: 3.5, {said}, steps: 2/9\n")
    assert event[name] == pytest.approx(value)


def test_the_schema_names_every_field_of_a_run(tmp_path, monkeypatch):
    "the table of chapter 05 against what two sessions of the command line write"
    from test_pretrainer import SMALL, cli

    monkeypatch.setenv("MINIGPT_DATA", str(tmp_path / "data"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(f"Anna sees Pierre {i % 7} times, and Sonya hears {i % 5}." for i in range(600)), encoding="utf-8")
    options = ["--dataset_path", tmp_path / "texts", "--output_dir", tmp_path / "run", "--device", "cpu", "--eval_steps", 2, "--save_steps", 2, *SMALL]
    assert [cli(*options, "--max_steps", steps) for steps in (3, 4)] == [0, 0]
    cells = json.loads((Path(__file__).parent.parent / "nbs" / "05_runlog.ipynb").read_text(encoding="utf-8"))["cells"]
    table = set(re.findall(r"`(\w+)`", "".join(next(cell for cell in cells if cell["id"] == "schema")["source"])))
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kinds = {e["event"] for e in events}
    assert kinds == {"start", "train", "eval", "resume", "save", "sample", "note", "end"}
    assert {name for e in events for name in e} | kinds <= table


def test_l05_empty_files_and_every_cut_of_a_log(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert read_run(tmp_path) == [] and health_line(read_run(tmp_path)) == "nothing measured yet"
    plot_runs([tmp_path], out=tmp_path / "f.png")
    whole = [e["train_loss"] for e in parse_log(SOURCE) if e["event"] == "eval"]
    for cut in range(0, len(SOURCE), 7):
        evals = [e for e in parse_log(SOURCE[:cut]) if e["event"] == "eval"]
        assert [e["train_loss"] for e in evals] == whole[: len(evals)] and all(e["total_steps"] == 2041 for e in evals[1:])


def test_l05_logs_of_other_encodings(tmp_path):
    for encoding in ("utf-16", "utf-8-sig"):
        (tmp_path / "log.txt").write_bytes(SOURCE.replace("\n", "\r\n").encode(encoding))
        assert sum(e["event"] == "eval" for e in read_run(tmp_path / "log.txt")) == 10
    (tmp_path / "log.txt").write_bytes(b"\xff\x00\xfe" * 50)
    assert read_run(tmp_path / "log.txt") == []


def test_l07_picture_is_redrawn_from_the_whole_log(tmp_path):
    log = RunLog(tmp_path, echo=lambda line: None)
    facts = dict(n_params=1, world_size=1, device="cpu", dtype="f", total_steps=3, tokens_per_step=1)
    for part in (session(1, 100), session(81, 150, resume=80)):
        for e in part:
            log({**e, **(facts if e["event"] == "start" else {})})
    line = plot_runs([tmp_path]).axes[0].lines[0]
    assert list(line.get_xdata()) == list(range(1, 151))


def test_l08_each_rank_prints_each_line():
    lines = [line for line in SOURCE.splitlines(True) for _ in range(3)]
    assert [e["step"] for e in stitch(parse_log("".join(lines))) if e["event"] == "eval"] == list(range(199, 2000, 200))
    late = [record(s, rank=r) for s, r in [(1, 0), (2, 0), (1, 1), (3, 0), (2, 1), (3, 1)]]
    assert stitch(late) == stitch([record(s, rank=0) for s in (1, 2, 3)])


def test_l08_warnings_of_other_ranks_stay_with_their_tag(tmp_path):
    shown = []
    log = RunLog(tmp_path, echo=shown.append)
    for rank in (0, 1):
        log(dict(event="note", step=3, rank=rank, text="slow disk"))
    assert [line.startswith("[rank 1]") for line in shown] == [False, True]
    assert [e.get("rank") for e in stitch(read_run(tmp_path / "train.log"))] == [None, 1]
    assert len(stitch(read_run(tmp_path))) == 2


def test_l09_l10_x05_means_after_a_resume_divide_by_the_steps_seen(tmp_path):
    seen = []

    class Spy(Trainer):
        def train_step(self, group):
            before = self.loss_acc.clone()
            super().train_step(group)
            seen.append((self.step + 1, ((self.loss_acc - before)[0] / (self.loss_acc - before)[1]).item()))

    def trainer(**args):
        t = toy_trainer(tmp_path, RunLog(tmp_path, echo=lambda line: None), log_every=10, num_train_epochs=9, **args)
        t.__class__ = Spy
        return t

    first = trainer(max_steps=30, save_steps=7)
    first.check_and_save_checkpoint_ = first.check_and_save_checkpoint

    def killed():
        first.check_and_save_checkpoint_()
        if first.step == 17:
            raise KeyboardInterrupt

    first.check_and_save_checkpoint = killed
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert seen[-1][0] == 17
    del seen[14:]  # the newest checkpoint is from step 14
    trainer(max_steps=30, save_steps=7).train()
    by_step = dict(seen)
    resumed = runlog.sessions(read_run(tmp_path))[-1]
    assert [e["step"] for e in resumed if e["event"] == "resume"] == [14]
    assert [e["step"] for e in resumed if e["event"] in ("train", "eval")] == [20, 30]  # L09: goes on, not from 0
    at_20 = next(e for e in resumed if e["step"] == 20 and e["event"] == "train")["train_loss"]
    means = [sum(by_step[s] for s in range(a, 21)) / (21 - a) for a in (11, 15)]  # all ten, or those this session has seen
    assert min(abs(at_20 - mean) for mean in means) < 1e-6


def test_x05_a_constant_loss_is_logged_as_it_is(tmp_path):
    trainer = toy_trainer(tmp_path, RunLog(tmp_path, echo=lambda line: None), log_every=10, max_steps=25, learning_rate=1e-12)
    nn.init.zeros_(trainer.model.table.weight)
    trainer.train()
    _, values = curve(stitch(read_run(tmp_path)), "train_loss")
    assert values == pytest.approx([math.log(8)] * 3, abs=1e-4)


def test_x11_evaluation_and_saving_fire_on_the_same_steps(tmp_path):
    toy_trainer(tmp_path, RunLog(tmp_path, echo=lambda line: None), eval_steps=5, save_steps=5, max_steps=10).train()
    events = read_run(tmp_path)
    assert [[e["step"] for e in events if e["event"] == kind] for kind in ("eval", "save")] == [[5, 10], [5, 10]]


def test_l13_one_call_redraws_the_shipped_figure(tmp_path):
    (tmp_path / "log.txt").write_text(SOURCE, encoding="utf-8")
    main([str(tmp_path / "log.txt"), "--out", str(tmp_path / "made" / "f.png")])
    assert (tmp_path / "made" / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_t27_health_line_says_what_the_poor_loss_needs():
    events = [dict(event="start", step=0, time="2026-01-05 09:00:00", baselines=dict(ln_vocab=math.log(2048), unigram=6.5, bigram=4.6))]
    events += [record(s, 7.5, kind="eval") for s in range(100, 500, 100)]
    line = health_line(events)
    assert "eval_loss 7.6" in line and "-0.0246 to ln V" in line and "+1.1 to unigram" in line
    assert "grad_norm" in line and "64 tokens/update" in line and "lr 0.001" in line


@pytest.mark.parametrize("before", [[], [record(50, kind="eval")]])
def test_t27_an_evaluation_that_is_not_finite_is_not_the_loss(before):
    "T27: the last finite evaluation speaks, or else the training loss; the other one is counted"
    baselines = dict(event="start", step=0, baselines=dict(ln_vocab=3.2))
    line = health_line([baselines, *before, record(100, 3.0, kind="eval") | dict(eval_loss=math.nan)])
    assert line.startswith("step 100, eval_loss 3.6 (at step 50), +0.4 to ln V" if before else "step 100, train_loss 3, -0.2 to ln V")
    assert "nan" not in line and f"1 of {len(before) + 1} records not finite" in line
    assert "not finite" not in health_line([baselines, record(100, 3.0) | dict(eval_loss=None)])  # a run without evaluation windows


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_d08_a_narrow_console_degrades_and_the_files_stay_utf8(tmp_path, encoding):
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    log = RunLog(tmp_path, echo=lambda line: print(line, file=console, flush=True))
    log(dict(event="sample", step=1, prompt="话说", text="天下 \U0001f409 \udc80"))
    assert b"sample:" in console.buffer.getvalue()
    assert "天下 \U0001f409" in (tmp_path / "train.log").read_text(encoding="utf-8")
    assert read_run(tmp_path)[0]["prompt"] == "话说"


def test_plot_baselines_gaps_and_smoothing_are_stated():
    events = [dict(event="start", step=0, ln_vocab=3.0, baselines=dict(unigram=2.5))] + [record(s, math.nan if s in (4, 5) else 2.0) for s in range(1, 10)]
    assert run_baselines(events) == dict(ln_vocab=3.0, unigram=2.5)
    figure = plot_runs([events], labels=["a"], smooth=3)
    ax, names = figure.axes[0], legend(figure)
    assert "a: train, mean of last 3 records" in names and "a: train, mean of last 3 records, 2 not finite" in names
    assert [t.get_text().split()[0] for t in ax.texts] == ["ln", "unigram"]
    plain = plot_runs([events], y_max=1.9, labels=["cost $5 $6"])
    assert not any("mean" in name for name in legend(plain)) and "7 points above" in legend(plain)[0]
    assert [math.isnan(y) for y in plain.axes[0].lines[0].get_ydata()] == [s in (4, 5) for s in range(1, 10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # lines above the picture leave its layout alone
        plain.savefig(os.devnull, format="png")
    assert not plain.axes[0].texts


def test_l02_both_draws_what_was_thrown_away_dotted():
    events = session(1, 100) + session(81, 150, shift=0.5, resume=80)
    lines = plot_runs([events], both=True).axes[0].lines
    dotted = [line for line in lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in dotted] == [list(range(81, 101))]
    assert not any(line.get_linestyle() == ":" for line in plot_runs([events]).axes[0].lines)


def test_plot_names_what_is_missing(tmp_path):
    (tmp_path / "log.txt").write_text(SOURCE, encoding="utf-8")
    with pytest.raises(ValueError, match="log.txt.*tokens"):
        plot_runs([tmp_path / "log.txt"], x="tokens")
    with pytest.raises(ValueError, match="x='hours'"):
        plot_runs([tmp_path / "log.txt"], x="hours")
    with pytest.raises(ValueError, match="neither metrics.jsonl nor train.log"):
        read_run(tmp_path)


def test_command_line_many_runs_and_a_mistake_in_one_line(tmp_path, capsys):
    for name in ("a", "b"):
        log = RunLog(tmp_path / name, echo=lambda line: None)
        for s in (10, 20):
            log(record(s, kind="eval"))
    main([str(tmp_path / "a"), str(tmp_path / "b"), "--x", "tokens", "--out", str(tmp_path / "f.svg")])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["a", "b"]
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "c")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "no such run" in said


def test_labels_tell_runs_apart(tmp_path):
    runs = [Events(path=tmp_path / p / "run" / "metrics.jsonl") for p in ("x", "y")]
    assert run_labels(runs, None) == ["x/run", "y/run"] and run_labels(runs[:1], None) == ["run"]
    assert len(run_labels([runs[0], runs[0]], None)) == 2
    with pytest.raises(ValueError, match="1 labels for 2 runs"):
        run_labels(runs, ["a"])


def font_with(path, characters):
    "A font file that draws a box for each character"
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    names = [".notdef"] + [f"u{ord(c):X}" for c in characters]
    pen = TTGlyphPen(None)
    for i, point in enumerate([(50, 0), (50, 700), (700, 700), (700, 0)]):
        (pen.lineTo if i else pen.moveTo)(point)
    pen.closePath()
    font = FontBuilder(1000, isTTF=True)
    font.setupGlyphOrder(names)
    font.setupCharacterMap({ord(c): n for c, n in zip(characters, names[1:])})
    font.setupGlyf(dict.fromkeys(names, pen.glyph()))
    font.setupHorizontalMetrics(dict.fromkeys(names, (800, 50)))
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable(dict(familyName="Boxes For Tests", styleName="Regular"))
    font.setupOS2(sTypoAscender=800, sTypoDescender=-200)
    font.setupPost()
    font.save(path)


def legend(figure):
    "The names in a figure's legend"
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_font_installed_after_matplotlib_made_its_list_is_found(tmp_path, monkeypatch):
    from matplotlib import font_manager

    font_with(tmp_path / "boxes.ttf", "𡈽")
    before = list(font_manager.fontManager.ttflist)
    assert runlog.font_for("𡈽") is None
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "boxes.ttf"), __file__])
    try:
        assert runlog.font_for("𡈽") == ["DejaVu Sans", "Boxes For Tests"]
    finally:
        font_manager.fontManager.ttflist[:] = before


def test_labels_that_begin_with_an_underscore_stay_in_the_legend():
    "Matplotlib leaves such names out"
    figure = plot_runs([[record(1), record(2)]] * 2, labels=["_old", "new"])
    assert [name.split(":")[0].strip() for name in legend(figure)] == ["_old", "new"]


def test_chinese_labels_take_an_installed_font_that_has_them(tmp_path):
    from matplotlib import font_manager

    rare = "𠮷𡈽"  # in no common font
    font_with(tmp_path / "boxes.ttf", rare)
    before = list(font_manager.fontManager.ttflist)
    font_manager.fontManager.addfont(tmp_path / "boxes.ttf")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = plot_runs([[record(1), record(2)]], labels=[rare], out=tmp_path / "f.png")
        assert rare in legend(figure)[0]
    finally:
        font_manager.fontManager.ttflist[:] = before


def test_chinese_labels_without_a_font_become_numbers_and_are_told(tmp_path, capsys, monkeypatch):
    own = runlog.font_for("a")
    monkeypatch.setattr(runlog, "font_for", lambda text: own if text.isascii() else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = plot_runs([[record(1), record(2)]] * 2, labels=["三国", "plain"], title="损失", out=tmp_path / "f.png")
    assert [name.split(":")[0] for name in legend(figure)] == ["run 1", "plain"]
    assert "run 1 is 三国" in capsys.readouterr().out


def test_watch_run_follows_a_run_until_its_end(tmp_path, capsys):
    def write():
        log = RunLog(tmp_path / "live", echo=lambda line: None)
        for s in range(1, 6):
            log(record(s))
            time.sleep(0.05)
        log(dict(event="end", step=5, minutes=0.1))

    writer = threading.Thread(target=write)
    writer.start()
    events = watch_run(tmp_path / "live", interval=0.03, timeout=20)
    writer.join()
    assert events[-1]["event"] == "end" and steps(events) == [1, 2, 3, 4, 5]
    assert "step 5" in capsys.readouterr().out
    assert watch_run(tmp_path / "never", interval=0.01, timeout=0.05) == []


def test_runs_as_a_module_without_a_display(tmp_path):
    (tmp_path / "三国.log").write_text(SOURCE, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")} | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "minigpt.runlog", str(tmp_path / "三国.log"), "--out", str(tmp_path / "f.png")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "f.png").exists(), done.stderr
