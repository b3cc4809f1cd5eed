"""`bench train`: one training step of all contenders, in one process, in turns; then memory pages, each setting in processes of its own."""
import sys

from minigpt.speed import flops_per_token

from . import machine
from .contenders import ALL_LEVERS, PLAIN, chosen
from .measure import interleave, inverse, ratio, scaled, summary
from .remote import Remote
from .work import Work

STEPS, WARM_UP = 3, 4  # steps of a turn, steps before the first


ABOUT = "all contenders in one process, in turns; ratios are medians over rounds with their 95 % interval"
NOTES = [
    "loss: nats per token on held-out batches, without dropout, after the same number of updates on the same batches",
    "% of bf16 peak: (6 N + 12 L T C) tokens/s, over the best measured rate of large bf16 matrix products (arXiv:2204.02311, appendix B)",
]


def run(work: Work) -> dict:
    "The table of contenders, the table of memory pages, and the figures that goals are judged by"
    entries, missing = chosen(work)
    before, runners = machine.limits(work), built(work, entries)
    seconds = interleave({name: lambda r=r: r.turn(STEPS) for name, r in runners.items()}, work.rounds)
    limits = machine.better(before, machine.limits(work))
    losses = {name: runner.loss() for name, runner in runners.items()}
    sizes = {name: sum(p.numel() for p in runner.model.parameters()) for name, runner in runners.items()}
    for runner in runners.values():
        runner.close()
    table = [row(work, entries[name], seconds, sizes[name], losses[name], limits) for name in runners]
    found, limits = figures(table, seconds), limits | ceiling(limits, table)
    if "over_plain" in found:
        found["over_plain"]["note"] = f"{limits['ceiling_over_plain']:.2g}x if a step were its bf16 matrix products alone"
    tables = [dict(title=f"Training step; loss after {runners[PLAIN].done} steps", base=PLAIN, rows=table)]
    if not work.only and sys.platform == "linux" and work.device == "cpu":
        tables.append(pages_table(work))
    return dict(tables=tables, figures=found, limits=limits, not_installed=missing, notes=NOTES, about=ABOUT)


def built(work: Work, entries: dict) -> dict:
    "Runners past their first steps, where graphs are compiled and memory is found"
    runners = {}
    for name, entry in entries.items():
        print(f"building {name}", file=sys.stderr, flush=True)
        runners[name] = entry.build(work)
        runners[name].turn(WARM_UP)
    return runners


def row(work: Work, entry, seconds: dict, parameters: int, loss: float, limits: dict) -> dict:
    "One contender's line"
    step = summary(seconds[entry.name])
    flops = work.tokens * (flops_per_token(work.config) + 6 * (parameters - work.config.n_params()))  # 6 N + 12 L T C, N its own
    return dict(
        name=entry.name, ratio=ratio(seconds[PLAIN], seconds[entry.name]), step_ms=scaled(step, 1e3), tokens_per_s=work.tokens / step["value"],
        peak_share=100 * flops / step["value"] / limits["bf16_flops"], loss=loss, parameters=parameters, ours=not entry.packages, settings=entry.settings,
    )  # fmt: skip


def figures(rows: list[dict], seconds: dict) -> dict:
    "What goals are judged by: our best over plain, over the fastest peer, over a lean GPT-2, and of the peak"
    by_name = {row["name"]: row for row in rows}
    found = {}
    if best := by_name.get(ALL_LEVERS):
        found = dict(over_plain=best["ratio"], peak_share=scaled(inverse(best["step_ms"]), best["peak_share"] * best["step_ms"]["value"]))
    rivals = dict(over_peer=[row for row in rows if not row["ours"]], over_lean=[row for row in rows if row["name"].startswith("lean")])
    for figure, others in rivals.items():
        if best and others:
            fastest = min(others, key=lambda row: row["step_ms"]["value"])["name"]
            found[figure] = ratio(seconds[fastest], seconds[ALL_LEVERS]) | dict(note=fastest)
    return found


def ceiling(limits: dict, rows: list[dict]) -> dict:
    "How far over plain a step could come that did nothing but its matrix products, in 16 bits and at their own shapes"
    plain = next(row["step_ms"]["value"] for row in rows if row["name"] == PLAIN) / 1e3
    return dict(ceiling_over_plain=plain / limits["bf16_products_seconds"])


def pages_table(work: Work) -> dict:
    "What memory pages alone do to a step: the same contender in two processes, one with the system's default, one as `run` sets them"
    ways = {"default pages": (dict(), tuple(machine.PAGES)), "huge pages, kept": (machine.PAGES, ())}
    remotes = {(name, way): Remote(name, work, *how) for name in (PLAIN, ALL_LEVERS) for way, how in ways.items()}
    try:
        for remote in remotes.values():
            remote.answer()  # ready
        seconds = interleave({key: lambda r=r: r.turn(STEPS) for key, r in remotes.items()}, work.rounds)
    finally:
        for remote in remotes.values():
            remote.close()
    rows = [
        dict(name=f"{name}, {way}", ratio=ratio(seconds[name, "default pages"], values), step_ms=scaled(summary(values), 1e3))
        for (name, way), values in seconds.items()
    ]
    return dict(title="Memory pages alone", base="default pages", rows=rows)
