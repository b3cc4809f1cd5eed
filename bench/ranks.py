"""Groups of processes that do steps at the same time: ranks of one job, or processes that know nothing of each other."""
import os
import socket
import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from .remote import Remote
from .work import Work


class Group:
    "Some processes; what a turn took is their mean: ranks of one job wait for each other, strangers need not"

    def __init__(self, remotes: list[Remote]):
        self.remotes = remotes

    def answers(self) -> list:
        "Of all"
        return [remote.answer() for remote in self.remotes]

    def turn(self, times: int, what: str = "turn") -> float:
        "Seconds of one of some steps or evaluations, done by all at once"
        for remote in self.remotes:
            remote.ask(times, what)
        return statistics.fmean(self.answers())

    def close(self):
        "End them, all asked before the first is waited for"
        for remote in self.remotes:
            remote.process.stdin.close()
        for remote in self.remotes:
            remote.close()


def processes(work: Work) -> int:
    "One a card; two on a CPU; a ValueError where there is but one card"
    world = torch.cuda.device_count() if work.device == "cuda" else 2
    if world < 2:
        raise ValueError("one card: several processes need two cards or more, or --device cpu")
    return world


def cards() -> list[str]:
    "Those this job may use, as CUDA_VISIBLE_DEVICES names them"
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")


def share(work: Work, world: int) -> Work:
    "The work of one of some processes: its part of the batch and of the threads"
    return replace(work, batch=max(1, work.batch // world), threads=max(1, work.threads // world))


def free_port() -> str:
    "One that nobody listens at now"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def group(
    name: str,  # of the registry
    work: Work,  # of one process
    world: int = 1,  # processes
    synced: bool = False,  # ranks of one job; else strangers
) -> Group:
    "Start the processes of one group"
    port, remotes = free_port(), []
    for rank in range(world):
        env = dict(CUDA_VISIBLE_DEVICES=cards()[rank]) if work.device == "cuda" else {}
        if synced:
            env |= dict(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        remotes.append(Remote(name, replace(work, rank=rank, world=world), env))
    return Group(remotes)


@contextmanager
def started(makers: dict):
    "Name -> group, all ready; whatever happens, no process is left"
    with ExitStack() as stack:
        groups = {}
        for name, make in makers.items():
            groups[name] = make()
            stack.callback(groups[name].close)
            groups[name].answers()  # ready: one group after the other, as they share the cores
        yield groups
