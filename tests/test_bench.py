"The benchmark: its statistics, its registry, its verdicts, and two commands from end to end"
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # bench is no installed package

from bench import __main__ as command_line  # noqa: E402
from bench import contenders, goals, measure, readme, report  # noqa: E402
from bench.plain import PlainGPT  # noqa: E402
from bench.work import Work  # noqa: E402
from minigpt.collectives import run_ranks  # noqa: E402

WORK = Work("S", True, "cpu", 1, 2)


def result(**changes):
    "A small result as a command writes it"
    figure = dict(value=2.0, low=1.5, high=2.5)
    rows = [dict(name="plain", ratio=dict(value=1.0, low=1.0, high=1.0)), dict(name="all levers", ratio=figure, loss=3.0)]
    base = dict(command="train", size="S", quick=True, date="2026-11-30 08:00", about="in turns", limits={}, not_installed={}, notes=[])
    base |= dict(tables=[dict(title="Step", base="plain", rows=rows)], goals=goals.judged("train", "S", dict(over_plain=figure)))
    machine = dict(cpu="a CPU", cores=2, gpus=[], packages=dict(torch="2.13"))
    return base | dict(work={}, machine=machine) | changes


def test_a_machine_that_slows_down_leaves_the_ratio_alone():
    slow, fast = ([seconds * drift for drift in (1, 2, 5, 1, 3, 9, 1)] for seconds in (0.6, 0.2))
    found = measure.ratio(slow, fast)
    assert all(abs(value - 3) < 1e-9 for value in found.values())


def test_the_interval_holds_the_median_as_often_as_it_says():
    draw = torch.Generator().manual_seed(0)
    for n in (6, 7, 15):
        held = 0
        for _ in range(2000):
            low, high = measure.median_interval(torch.rand(n, generator=draw).tolist())
            held += low <= 0.5 <= high
        assert held / 2000 > 0.94, n
    with pytest.raises(ValueError, match="6 are the fewest"):
        measure.median_interval([1.0] * 5)


def test_contenders_take_turns():
    calls = []
    found = measure.interleave({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 3)
    assert calls == list("ababab") and found == dict(a=[1, 3, 5], b=[2, 4, 6])


def test_the_registry_holds_plain_each_lever_all_levers_and_the_peers():
    able, missing = contenders.chosen(WORK)
    names = {*able, *missing}
    assert {contenders.PLAIN, contenders.CHAPTER_04, contenders.ALL_LEVERS} <= names
    for word in ("bf16", "compile", "fused attention", "slices", "recompute", "Llama", "GPT-2", "litgpt", "transformers.Trainer", "lightning.Trainer"):
        assert any(word in name for name in names), word
    assert all("dtype" in entry.settings for entry in contenders.REGISTRY.values())


def test_a_missing_peer_is_told_with_its_pip_line(monkeypatch):
    monkeypatch.setattr(contenders, "find_spec", lambda name: None if name == "litgpt" else object())
    able, missing = contenders.chosen(WORK)
    assert missing["litgpt GPT, bf16"] == ["litgpt"] and "litgpt GPT, bf16" not in able
    assert "`pip install litgpt`" in report.markdown(result(not_installed=missing))


def test_plain_is_as_large_as_ours():
    plain = PlainGPT(WORK.config).eval()
    assert sum(weight.numel() for weight in plain.parameters()) == WORK.config.n_params()
    ids = torch.randint(WORK.config.vocab_size, (1, 8))
    changed = ids.clone()
    changed[0, 7] += 1 if changed[0, 7] == 0 else -1
    assert torch.allclose(plain(ids)[:, :7], plain(changed)[:, :7], atol=1e-6)  # causal


def test_verdicts_are_computed_and_what_was_not_measured_is_no_success():
    near = lambda value: dict(value=value, low=value, high=value)
    met = lambda figures, command="train": {goal["figure"]: goal["met"] for goal in goals.judged(command, "S", figures)}
    assert met(dict(over_plain=near(3.5), over_peer=near(1.99))) == dict(over_plain=True, over_peer=False, over_lean=None, peak_share=None)
    assert met(dict(over_torch=near(1.2)), "start") == dict(over_torch=False)
    assert "not measured" in report.markdown(result()) and "not reached" in report.markdown(result())


@pytest.mark.parametrize("words", [["train", "--batch", "0"], ["nonsense"], ["train", "--only", "nobody"], ["train", "--size", "XL"]])
def test_a_mistake_is_one_line_and_exit_code_2(words, capsys):
    try:
        code = command_line.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ") and error.count("\n") == 1


def test_train_from_end_to_end(tmp_path):
    words = ["train", "--quick", "--batch", "1", "--threads", "1", "--only", "+ bf16", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "bench", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "train-S.json").read_text(encoding="utf-8"))
    plain, ours = found["tables"][0]["rows"]
    assert (plain["name"], ours["name"]) == ("plain", "chapter 04 + bf16") and plain["ratio"]["value"] == 1
    assert ours["ratio"]["low"] <= ours["ratio"]["value"] <= ours["ratio"]["high"]
    assert ours["settings"]["dtype"] == "bfloat16" and 4 < ours["loss"] < 8 and ours["parameters"] == plain["parameters"]
    assert found["machine"]["cpu"] and found["limits"]["bf16_flops"] > 0 and [goal["met"] for goal in found["goals"]] == [None] * 4
    assert (tmp_path / "train-S.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "train-S.md").read_text(encoding="utf-8")
    assert "chapter 04 + bf16" in text


def test_the_readmes_table_is_written_between_its_marks(tmp_path):
    rows = [dict(row, peak_share=40.0, loss=3.0) for row in result()["tables"][0]["rows"]]
    pages = [dict(row, name=f"{row['name']}, huge pages, kept") for row in rows]
    report.write(result(tables=[dict(title="Step", base="plain", rows=rows), dict(title="Pages", base="default pages", rows=pages)]), tmp_path)
    for file in readme.WORDS:
        (tmp_path / file).write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n", encoding="utf-8")
    readme.rewrite(tmp_path, tmp_path)
    english, chinese = ((tmp_path / file).read_text(encoding="utf-8") for file in readme.WORDS)
    assert english.startswith("before\n") and english.endswith("\nafter\n") and "old" not in english
    assert "| training step over plain | S | ≥ 3.5 x | 2 [1.5, 2.5] x | no |" in english and "| 未达到 |" in chinese
    assert "| all levers, huge pages, kept, S | 2 [1.5, 2.5] |" in english and "仅改内存页" in chinese
    assert english.index("all levers, S") < english.index("plain, S")  # the fastest first
    assert readme.rewrite(tmp_path, tmp_path) and (tmp_path / "README.md").read_text(encoding="utf-8") == english
    with pytest.raises(ValueError, match="no results in"):
        readme.rewrite(tmp_path / "nothing", tmp_path)


def test_both_readmes_have_the_marks():
    for file in readme.WORDS:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(readme.BEGIN) == text.count(readme.END) == 1


def test_accumulating_ranks_exchange_once_an_update():
    found = json.loads(run_ranks("bench.parallel", 2, args=["S"], stream=False)[0].splitlines()[-1])
    assert found["exchanges_per_update"] == 1 and found["all_reduce_bytes_per_s"] > 0
