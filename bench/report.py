"""What a command found, as JSON, as Markdown and as a plot."""
import json
from pathlib import Path

HEADINGS = dict(
    name="contender", step_ms="step, ms", tokens_per_s="tokens/s", mb_per_s="MB/s", memory_mib="memory, MiB", peak_share="% of bf16 peak",
    cpu_s="CPU seconds",
)  # fmt: skip
IN_JSON_ONLY = ("ours",)


def write(result: dict, folder: Path) -> list[Path]:
    "COMMAND-SIZE.json, .md and .png in a folder; their paths"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{result['command']}-{result['size']}{suffix}" for suffix in (".json", ".md", ".png")]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(result), encoding="utf-8")
    plot(result, paths[2])
    return paths


# ---- Markdown


def number(value) -> str:
    "A value as a reader wants it: three significant digits, thousands parted, an interval in brackets"
    if isinstance(value, dict) and "value" in value:
        ends = f" [{number(value['low'])}, {number(value['high'])}]" if value["low"] != value["high"] else ""
        return number(value["value"]) + ends
    if isinstance(value, dict):
        return ", ".join(f"{name} {number(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(number, value)) or "none"
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def grid(headings: list[str], rows: list[list[str]]) -> str:
    "A table in Markdown"
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def table(title: str, rows: list[dict], base: str = "", label: str = "") -> str:
    "One table of contenders, with its title"
    names = dict.fromkeys(name for row in rows for name in row if name not in IN_JSON_ONLY)
    headings = dict(HEADINGS, ratio=label or f"speed over {base}")
    return f"## {title}\n\n" + grid([headings.get(n, n.replace("_", " ")) for n in names], [[number(row.get(n)) for n in names] for row in rows])


def goal_cells(goal: dict, yes: str = "reached", no: str = "not reached", unknown: str = "not measured") -> list[str]:
    "Target, what was reached, and the verdict"
    sign, unit = ("at least" if goal["at_least"] else "at most"), f" {goal['unit']}".rstrip()
    verdict = {True: yes, False: no, None: unknown}[goal["met"]]
    note = f" ({goal['note']})" if goal.get("note") else ""
    return [f"{sign} {number(goal['target'])}{unit}", number(goal["reached"]) + unit * (goal["reached"] is not None) + note, verdict]


def goals_table(goals: list[dict]) -> str:
    "Goal beside what was reached"
    if not goals:
        return ""
    rows = [[goal["what"], *goal_cells(goal)] for goal in goals]
    return "## Goals\n\n" + grid(["what", "goal", "reached [95 %]", "verdict"], rows)


def facts(title: str, values: dict) -> str:
    "Name and value, a line each"
    return f"## {title}\n\n" + "".join(f"- {name.replace('_', ' ')}: {number(value)}\n" for name, value in values.items())


def markdown(result: dict) -> str:
    "The whole report of a command"
    parts = [f"# bench {result['command']}, size {result['size']}{', quick' * result['quick']}\n\n{result['date']}; {result['about']}\n"]
    parts += [table(**each) for each in result["tables"]]
    parts += [goals_table(result["goals"])]
    if result["not_installed"]:
        lines = [f"- {name}: not installed, `pip install {' '.join(packages)}`\n" for name, packages in result["not_installed"].items()]
        parts.append("## Not installed\n\n" + "".join(lines))
    if result["notes"]:
        parts.append("## Notes\n\n" + "".join(f"- {note}\n" for note in result["notes"]))
    parts += [facts("Limits of this machine", result["limits"])] if result["limits"] else []
    parts += [facts("Work", result["work"]), facts("Machine", result["machine"])]
    return "\n".join(part for part in parts if part)


# ---- plot


def plot(result: dict, path: Path):
    "Each table of ratios as bars, with their intervals and what stands beside them"
    from matplotlib.figure import Figure  # heavy, and no screen is needed

    tables = [each for each in result["tables"] if any("ratio" in row for row in each["rows"])]
    heights = [max(2, len(each["rows"])) for each in tables]
    figure = Figure(figsize=(9, 0.34 * sum(heights) + 1.1 * len(tables)), layout="constrained")
    for axes, each in zip(figure.subplots(len(tables), squeeze=False, height_ratios=heights)[:, 0], tables):
        bars(axes, each)
    figure.savefig(path, dpi=110)


def bars(axes, each: dict):
    "One table"
    rows = [row for row in each["rows"] if row.get("ratio")][::-1]
    values = [row["ratio"]["value"] for row in rows]
    spread = [[row["ratio"]["value"] - row["ratio"]["low"] for row in rows], [row["ratio"]["high"] - row["ratio"]["value"] for row in rows]]
    colors = ["C0" if row.get("ours", True) else "C7" for row in rows]
    axes.barh([row["name"] for row in rows], values, xerr=spread, color=colors, capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, row in enumerate(rows):
        loss = f", loss {row['loss']:.2f}" if row.get("loss") is not None else ""
        axes.text(row["ratio"]["high"], place, f"  {number(row['ratio']['value'])}{loss}", va="center", fontsize=8)
    axes.set(title=each["title"], xlabel=each.get("label") or f"speed over {each['base']}", xlim=(0, 1.3 * max(row["ratio"]["high"] for row in rows)))
