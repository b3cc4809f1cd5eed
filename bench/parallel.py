"""`bench ddp`: processes that exchange gradients against processes that don't, against one, and against one with all threads."""
import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minigpt.collectives import process_group, run_ranks
from minigpt.ddp import patch_ddp
from minigpt.pretrainer_single import Trainer

from .contenders import ALL_LEVERS, CHAPTER_04, PLAIN, OurTrainer
from .measure import interleave, ratio, scaled, summary, timed
from .ranks import group, processes, share, started
from .work import Work

ABOUT = "groups of processes take turns, all members of a group at once; speed is in tokens/s, so batches may differ; ratios are medians over rounds with their 95 % interval"
STEPS, ACCUMULATE = 3, 4
NOTES = [
    "the ladder of the source documents, plain, all levers, three cards: 128, 50 and 21 minutes, in which batch and number of evaluations changed too; "
    "with cards, this table at --size L is that ladder with one thing changed a rung",
]


def levers(work: Work) -> str:
    "The contender that all groups but the first train; on a CPU eager, as compiling takes longer than the rounds"
    return ALL_LEVERS if work.device == "cuda" else f"{CHAPTER_04} + bf16"


def groups(work: Work, world: int) -> dict:
    "Name -> how to start it, how many tokens one of its steps has over all processes"
    one, name = share(work, world), levers(work)
    return {
        f"{PLAIN}, one process": (lambda: group(PLAIN, work), work.tokens),
        "one process": (lambda: group(name, work), work.tokens),
        "one process alone, its share of the threads": (lambda: group(name, one), one.tokens),
        f"{world} processes that never sync": (lambda: group(name, one, world), one.tokens * world),
        f"{world} processes, DDP": (lambda: group(name, one, world, synced=True), one.tokens * world),
        f"{world} processes, DDP, {ACCUMULATE} batches an update": (
            lambda: group(name, replace(one, accumulate=ACCUMULATE), world, synced=True), one.tokens * world * ACCUMULATE),
    }  # fmt: skip


def run(work: Work) -> dict:
    "The table of groups, and what a gradient exchange costs"
    world = processes(work)
    makers = groups(work, world)
    with started({name: make for name, (make, _) in makers.items()}) as ready:
        seconds = interleave({name: lambda g=g: g.turn(STEPS) for name, g in ready.items()}, work.rounds)
    per_token = {name: [s / makers[name][1] for s in values] for name, values in seconds.items()}
    plain, whole, alone, strangers, ddp, _ = per_token
    rows = [
        dict(name=name, ratio=ratio(per_token[plain], per_token[name]), step_ms=scaled(summary(values), 1e3), tokens_per_s=1 / summary(per_token[name])["value"])
        for name, values in seconds.items()
    ]  # fmt: skip
    found = dict(
        over_never_synced=ratio(per_token[strangers], per_token[ddp]), over_alone=scaled(ratio(per_token[alone], per_token[ddp]), 1 / world),
        over_threads=ratio(per_token[whole], per_token[ddp]),
    )  # fmt: skip
    exchange = json.loads(run_ranks("bench.parallel", 2, args=[work.size], stream=False)[0].splitlines()[-1]) if work.device == "cpu" else {}
    found |= dict(exchanges_per_update=exchange.pop("exchanges_per_update", None))
    if exchange:
        step = summary(seconds[strangers])["value"]
        found["over_never_synced"]["note"] = f"{step / (step + exchange['all_reduce_seconds']):.3f}x if the all-reduce alone came on top"
        found["over_alone"]["note"] = f"{summary(per_token[alone])['value'] / summary(per_token[strangers])['value'] / world:.3f}x for the processes that never sync"
    title = f"{world} processes; all but the first: {levers(work)}"
    return dict(tables=[dict(title=title, base=plain, rows=rows)], figures=found, limits=exchange, notes=NOTES, about=ABOUT)


def count_exchanges(size: str):
    "In each of two ranks: gradient exchanges per update of ACCUMULATE batches, and the time of an all-reduce as large as the model"
    patch_ddp(Trainer)
    calls, updates = [], 4

    def counted(state, bucket):
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    with process_group(timeout=60) as (rank, world):
        work = Work(size, True, "cpu", 1, 2, rank=rank, world=world, accumulate=ACCUMULATE)
        runner = OurTrainer(work)
        runner.trainer.model.register_comm_hook(None, counted)
        runner.turn(updates)
        numbers = torch.ones(work.config.n_params())
        seconds = min(timed(lambda: dist.all_reduce(numbers)) for _ in range(20))
        runner.trainer.cleanup()
        if rank == 0:
            print(json.dumps(dict(exchanges_per_update=calls.count(0) / updates, all_reduce_seconds=seconds, all_reduce_bytes_per_s=numbers.nbytes / seconds)))


if __name__ == "__main__":
    count_exchanges(sys.argv[1])
