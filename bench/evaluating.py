"""`bench evaluate`: all ranks evaluate, each its share, against rank 0 alone that evaluates all."""
from .contenders import ALL_LEVERS, CHAPTER_04
from .measure import interleave, ratio, scaled, summary
from .ranks import group, processes, share, started
from .work import Work

ABOUT = "evaluation of the same windows by one process and by several, each with its share of the threads, in turns; ratios are medians over rounds with their 95 % interval"
TIMES = 5  # evaluations of a turn


def run(work: Work) -> dict:
    "Evaluations of one rank, of all, and of all in 16 bits"
    world = processes(work)
    one, bf16 = share(work, world), ALL_LEVERS if work.device == "cuda" else f"{CHAPTER_04} + bf16"
    makers = {
        "rank 0 alone": lambda: group(CHAPTER_04, one),
        f"{world} ranks": lambda: group(CHAPTER_04, one, world, synced=True),
        f"{world} ranks, bf16": lambda: group(bf16, one, world, synced=True),
    }
    with started(makers) as ready:
        seconds = interleave({name: lambda g=g: g.turn(TIMES, "evaluations") for name, g in ready.items()}, work.rounds)
    alone, both, _ = seconds
    rows = [dict(name=name, ratio=ratio(seconds[alone], values), ms=scaled(summary(values), 1e3)) for name, values in seconds.items()]
    return dict(tables=[dict(title="Evaluation", base=alone, rows=rows)], figures=dict(over_rank_0=ratio(seconds[alone], seconds[both])), about=ABOUT)
