"""What the ranks of test_checkpoint.py do: one launch of three processes, of which each phase takes as many as it needs.

Those that a phase does not need wait in the next one's rendezvous, so phases follow one another.
"""
import os
import sys
from pathlib import Path

import torch

from minigpt.checkpoint import Checkpointer
from minigpt.collectives import process_group
from minigpt.ddp import patch_ddp
from minigpt.pretrainer_single import Trainer
from trainer_job import adamw, make_model, make_trainer, weights

TOTAL, WALK = 14, [(2, 3), (1, 6), (3, 9), (1, 12), (2, 14)]  # processes, and the step they go on to; an epoch is 7 steps
SAVED, LAST = {"mid-epoch": 3, "epoch's end": 4}, 7  # with two micro-batches of 6 windows a step, an epoch is 4 steps


def restless_scaler(trainer):
    "A scaler whose scale moves every second step"
    trainer.set_grad_scaler(True)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)


def stop_before(trainer, last):
    "Ask for an end when the step before `last` is told, as a signal would"
    note = trainer.log

    def log(event):
        note(event)
        if event["event"] in ("train", "eval") and event["step"] == last - 1:
            trainer.stop()

    trainer.log = log


def walk(folder, world, last):
    "One leg: from the newest checkpoint to step `last`, with 6 windows a step"
    trainer = make_trainer(folder, train_batch_size=6 // world, max_steps=TOTAL, save_steps=0, keep_last=0, resume="auto")
    stop_before(trainer, last)
    trainer.train()
    return dict(seen=trainer.train_set.seen, events=trainer.events, step=trainer.step, samples=trainer.samples_seen)


def exact_options(saved, share):
    return dict(optimizer=adamw, train_batch_size=share, accumulate=2, max_steps=LAST, save_steps=saved, keep_last=0)


def exact(folder, saved):
    "The whole run, and the same from step `saved` by another trainer; dropout, AdamW, accumulation and a scaler that moves"
    options, written = exact_options(saved, 3), []
    whole = make_trainer(folder, model=make_model(0.3), **options)
    half = make_trainer(folder, model=make_model(0.3, seed=9), **options | dict(resume=str(folder / f"checkpoint-{saved}.pth")))
    plain = Checkpointer.write
    for trainer in (whole, half):
        restless_scaler(trainer)
        trainer.checkpointer.write = lambda state, keeper=trainer.checkpointer: written.append(state["step"]) or plain(keeper, state)
        trainer.train()
    return dict(whole=weights(whole), half=weights(half), scaler=[t.scaler.state_dict() for t in (whole, half)], written=written)


def main(folder, *ports):
    "The walk, then exactness on two processes"
    torch.set_num_threads(1)
    patch_ddp(Trainer)
    rank = int(os.environ["RANK"])
    for leg, ((world, last), port) in enumerate(zip(WALK, ports)):
        os.environ |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_PORT=port)
        if rank < world:
            torch.save(walk(folder / "walk", world, last), folder / f"leg-{leg}-rank-{rank}.pt")
    if rank < 2:
        os.environ |= dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        told = {}
        for (name, saved), port in zip(SAVED.items(), ports[len(WALK) :]):
            os.environ["MASTER_PORT"] = port
            with process_group():
                told[name] = exact(folder / name, saved)
        torch.save(told, folder / f"exact-rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
