"""`bench readme`: the README's table, from the results that lie in bench/results; never written by hand."""
import json
import re
from pathlib import Path

from .goals import GOALS
from .report import goal_cells, grid, number

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
WORDS = {  # file -> its words
    "README.md": dict(
        what="what", size="size", goal="to reach", reached="reached [95 %]", yes="yes", no="no", unknown="not measured", contender="contender, size",
        pages="memory pages alone, size", over_default="speed over default pages [95 %]", ratio="speed over plain [95 %]", share="% of bf16 peak", loss="loss", where="Measured on {cpu}, {cores} cores, torch {torch}, {date}, by `./run python -m bench{quick}`.",
    ),
    "README.zh-CN.md": dict(
        what="项目", size="规模", goal="目标", reached="实测 [95 %]", yes="达到", no="未达到", unknown="未测", contender="对比对象，规模",
        pages="仅改内存页，规模", over_default="比默认内存页的速度 [95 %]", ratio="比朴素实现的速度 [95 %]", share="占 bf16 峰值 %", loss="损失", where="测于 {cpu}，{cores} 核，torch {torch}，{date}，命令 `./run python -m bench{quick}`。",
    ),
}  # fmt: skip
SIGNS = {"at least ": "≥ ", "at most ": "≤ "}


def results(folder: Path) -> list[dict]:
    "What was measured, by command and size; a ValueError where nothing was"
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"), key=lambda p: p.stem.split("-")[::-1])]
    if not found:
        raise ValueError(f"bench readme: no results in {folder}; run `python -m bench` first")
    return found


def goal_rows(found: list[dict], words: dict, chinese: bool) -> list[list[str]]:
    "A line for each goal and size that has one"
    order, rows = {goal.figure: (place, goal) for place, goal in enumerate(GOALS)}, []
    for result in found:
        for goal in result["goals"]:
            if goal["figure"] not in order:
                raise ValueError(f"bench readme: {result['command']}-{result['size']} is of an older bench, it knows {goal['figure']}: measure again")
            place, known = order[goal["figure"]]
            target, reached, verdict = goal_cells(goal, words["yes"], words["no"], words["unknown"])
            for text, sign in SIGNS.items():
                target = target.replace(text, sign)
            rows.append((place, [known.zh if chinese else known.what, result["size"], target, reached.replace("not measured", words["unknown"]), verdict]))
    return [row for _, row in sorted(rows, key=lambda pair: (pair[0], pair[1][1] != "S"))]


def speed_rows(found: list[dict]) -> list[list[str]]:
    "The contenders of `bench train`, the fastest first"
    rows = [(result["size"], row) for result in found if result["command"] == "train" for row in result["tables"][0]["rows"]]
    ordered = sorted(rows, key=lambda pair: (pair[0] != "S", pair[0], -pair[1]["ratio"]["value"]))
    return [[f"{row['name']}, {size}", number(row["ratio"]), number(row["peak_share"]), f"{row['loss']:.3f}"] for size, row in ordered]


def pages_rows(found: list[dict]) -> list[list[str]]:
    "What memory pages alone do, where `bench train` measured it"
    rows = [(result["size"], row) for result in found if result["command"] == "train" for table in result["tables"][1:] for row in table["rows"]]
    return [[f"{row['name']}, {size}", number(row["ratio"])] for size, row in sorted(rows, key=lambda pair: pair[0] != "S")]


def block(found: list[dict], file: str) -> str:
    "What stands between the marks"
    words, machine, quick = WORDS[file], found[-1]["machine"], " --quick" * any(result["quick"] for result in found)
    if others := {result["machine"]["cpu"] for result in found} - {machine["cpu"]}:
        raise ValueError(f"bench readme: results of several machines, {', '.join([machine['cpu'], *others])}: measure all on one")
    where = words["where"].format(
        cpu=" and ".join([machine["cpu"], *machine["gpus"]]), cores=machine["cores"], torch=machine["packages"]["torch"], quick=quick, date=max(result["date"] for result in found)[:10],
    )  # fmt: skip
    goals = grid([words[name] for name in ("what", "size", "goal", "reached")] + [""], goal_rows(found, words, file != "README.md"))
    speeds = grid([words[name] for name in ("contender", "ratio", "share", "loss")], speed_rows(found))
    pages = "\n" + grid([words["pages"], words["over_default"]], rows) if (rows := pages_rows(found)) else ""
    return f"{BEGIN}\n{where}\n\n{goals}\n{speeds}{pages}{END}"


def rewrite(
    folder: Path,  # of the results
    root: Path = ROOT,  # where the READMEs lie
) -> list[Path]:  # the files
    "Put the newest figures between the marks of both READMEs"
    found, paths = results(folder), [root / file for file in WORDS]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            raise ValueError(f"{path}: no {BEGIN} ... {END} in it to write between")
        path.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: block(found, path.name), text, flags=re.S), encoding="utf-8")
    return paths
