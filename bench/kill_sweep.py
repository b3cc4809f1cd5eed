"""SIGKILL processes of small training jobs, at random moments and inside every stage of saving, and go on each time.

    python bench/kill_sweep.py --kills 200

PyTorch is imported once; each job is a fork of this process. For the time of a job, the functions that a save goes through
tell a pipe that they were reached, and wait: so a kill hits the stage that was drawn, without sleeping and without a hook in
minigpt itself. After every kill the newest checkpoint must be a whole one, no older than what was reported whole, and equal
to the bit to the uninterrupted run's at that step; and so must be the end of the run.
"""
import argparse
import json
import os
import random
import select
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel imports it: once here, not in every fork
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

import minigpt.checkpoint as checkpoint
from minigpt.ddp import patch_ddp
from minigpt.pretrainer_single import TrainArgs, Trainer, build_optimizer
from minigpt.transformer import GPTConfig, MiniGPT

STEPS, SAVE_STEPS, LIMIT = 12, 2, 60  # steps of a job, between its checkpoints, seconds after which a job hangs
STAGES = [
    "save begins", "copy", "copy is made",
    *(f"{what} {file}" for file in ("weights", "sidecar") for what in ("open", "half", "sync", "synced", "rename", "renamed")),
    "sync folder", "delete weights", "delete sidecar", "write is done",
]  # fmt: skip


# ---- in the child


class Stage:
    "Tells the parent what was reached, and waits where it was told to"

    def __init__(self, rank, tell, go, stop_at):
        self.rank, self.tell, self.go, self.stop_at, self.reached, self.lock = rank, tell, go, stop_at, Counter(), threading.Lock()

    def say(self, text):
        "One line to the parent: short, so it arrives whole"
        os.write(self.tell, f"{self.rank} {text}\n".encode())

    def reach(self, name):
        "Stop here if the draw says so"
        with self.lock:
            self.reached[name] += 1
            here = (self.rank, name, self.reached[name]) == self.stop_at
        if here:
            self.say(f"at {name}")
            if name != "step":  # training runs on into its kill
                os.read(self.go, 1)


def instrument(stage):
    "Let the functions that a save goes through tell their stage; of this fork only"
    plain = dict(save=checkpoint.Checkpointer.save, write=checkpoint.Checkpointer.write, copy=checkpoint.snapshot, data=checkpoint.HashedFile.write)
    plain |= dict(fsync=os.fsync, replace=os.replace, unlink=Path.unlink, step=Trainer.train_step)
    kind = lambda name: "sidecar" if ".json" in str(name) else "weights"

    def save(self, state):
        stage.reach("save begins")
        plain["save"](self, state)

    def snapshot(*args):
        stage.reach("copy")
        return plain["copy"](*args)

    def write(self, state):
        stage.reach("copy is made")
        result = plain["write"](self, state)
        stage.reach("write is done")
        return result

    def data(self, part):
        file = kind(self.file.name)
        stage.reach(f"open {file}")
        if stage.stop_at[1] == f"half {file}":
            part = bytes(part)
            plain["data"](self, part[: len(part) // 2])
            self.flush()
            stage.reach(f"half {file}")
            return len(part) // 2 + plain["data"](self, part[len(part) // 2 :])
        return plain["data"](self, part)

    def fsync(handle):
        name = os.readlink(f"/proc/self/fd/{handle}")
        file = "folder" if os.path.isdir(name) else kind(name)
        stage.reach(f"sync {file}")
        plain["fsync"](handle)
        stage.reach(f"synced {file}")

    def replace(source, target):
        stage.reach(f"rename {kind(target)}")
        plain["replace"](source, target)
        stage.reach(f"renamed {kind(target)}")

    def unlink(self, *args, **how):
        stage.reach(f"delete {kind(self)}")
        plain["unlink"](self, *args, **how)

    def train_step(self, group):
        stage.reach("step")
        plain["step"](self, group)

    checkpoint.Checkpointer.save, checkpoint.Checkpointer.write, checkpoint.snapshot, checkpoint.HashedFile.write = save, write, snapshot, data
    os.fsync, os.replace, Path.unlink, Trainer.train_step = fsync, replace, unlink, train_step


def train(folder, stage, keep_last):
    "The job: a tiny model with dropout under AdamW, as far as it gets"

    def log(event):
        if event["event"] in ("save", "resume"):
            stage.say(f"{event['event']} {event['step']}")

    torch.manual_seed(0)
    model = MiniGPT(GPTConfig(vocab_size=64, context_length=8, emb_dim=16, n_layers=1, n_heads=2, drop_rate=0.3))
    args = TrainArgs(max_steps=STEPS, train_batch_size=4, warmup_steps=2, save_steps=SAVE_STEPS, eval_steps=0, timeout=20, output_dir=str(folder))
    trainer = Trainer(model, build_optimizer(model, 1e-2, 0.1), args, device="cpu", log=log, checkpointer=checkpoint.Checkpointer(folder, keep_last))
    rows = (torch.arange(40)[:, None] + 5 * torch.arange(9)) % 64  # (windows, T + 1)
    trainer.set_dataset([(row[:-1], row[1:]) for row in rows], None)
    trainer.train()


def child(folder, rank, world, port, tell, go, stop_at, keep_last):
    "What a fork does: it never returns"
    code = 1
    try:
        if world > 1:
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ |= {name: str(value) for name, value in place.items()} | dict(GLOO_SOCKET_IFNAME="lo")
            patch_ddp(Trainer)
        stage = Stage(rank, tell, go, stop_at)
        instrument(stage)
        train(folder, stage, keep_last)
        code = 0
    except BaseException as error:
        os.write(tell, f"{rank} error {type(error).__name__} {' '.join(str(error).split())[:300]}\n".encode())
    finally:
        os._exit(code)


# ---- in the parent


def free_port():
    "A port that nobody listens on"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    "Forks that train in one folder, and what they say"

    def __init__(self, folder, world, stop_at=(0, "", 0), keep_last=2):
        self.heard, tell = os.pipe()
        pipes, port = [os.pipe() for _ in range(world)], free_port()
        self.pids, self.gos, self.said = [], [go for _, go in pipes], []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os.close(self.heard)
                for _, go in pipes:
                    os.close(go)
                child(folder, rank, world, port, tell, pipes[rank][0], stop_at, keep_last)
            self.pids.append(pid)
        os.close(tell)
        for wait, _ in pipes:
            os.close(wait)

    def lines(self):
        "(rank, words) as they come, until every fork has ended"
        rest, until = b"", time.monotonic() + LIMIT
        while True:
            if not select.select([self.heard], [], [], max(0, until - time.monotonic()))[0]:
                self.kill(*range(len(self.pids)))
                raise AssertionError(f"a job did not end within {LIMIT} s; it said {self.said}")
            if not (data := os.read(self.heard, 65536)):
                return
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                rank, *words = line.decode().split(" ", 2)
                self.said.append((int(rank), *words))
                yield self.said[-1]

    def kill(self, *ranks):
        "SIGKILL"
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def release(self):
        "Let those that wait go on"
        for go in self.gos:
            try:
                os.write(go, b"g")
            except BrokenPipeError:  # it has ended
                pass

    def end(self):
        "Exit codes; -9 for a killed fork"
        for go in (*self.gos, self.heard):
            os.close(go)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def told(self, what):
        "Steps that were reported as saved or resumed from"
        return [int(words[2]) for words in self.said if words[1] == what]


def leaves(value, path=()):
    "path -> tensor or plain value of a nested state"
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {at: leaf for key, item in items for at, leaf in leaves(item, (*path, key)).items()}


def check_equal(path, other):
    "A checkpoint equals the uninterrupted run's, all of it but the folder's name"
    one, two = (leaves(torch.load(p)) for p in (path, other))
    for at in one.keys() | two.keys():
        a, b = one[at], two[at]
        if at != ("train_args", "output_dir") and not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            raise AssertionError(f"{path}: {at} is not the uninterrupted run's")


def finish(folder, world, **how):
    "A run without a kill, to its end"
    job = Job(folder, world, **how)
    assert all(words[1] != "error" for words in job.lines()) and job.end() == [0] * world, job.said
    return folder


def draw(rng, world):
    "Where to stop whom, and whom to kill"
    training = rng.random() < 0.3
    name = "step" if training else rng.choice(STAGES)
    often = {"step": STEPS, "copy": 60, "open weights": 20, "half weights": 20}.get(name, 3)
    rank = rng.randrange(world) if training else 0  # rank 0 saves
    victims = [[0], [1], [0, 1]][rng.randrange(3)] if world == 2 else [0]
    return (rank, name, rng.randint(1, often)), victims


def newest_step(folder):
    "Step of the newest whole checkpoint, 0 without one"
    newest, _ = checkpoint.Checkpointer(folder).newest()
    return checkpoint.step_of(newest) if newest else 0


def attempt(folder, kept, world, rng, figures):
    "One job with one kill; True where it reached its end before"
    stop_at, victims = draw(rng, world)
    before = newest_step(folder)
    job, killed = Job(folder, world, stop_at), None
    for _, what, *rest in job.lines():
        if what == "at":
            if rest[0] == "step":
                time.sleep(rng.random() * 0.01)  # some moment of training
            job.kill(*victims)
            killed = time.monotonic()
            job.release()
    codes = job.end()
    if job.told("resume") or before == 0:  # killed before that else
        figures["resumed from"][before] += 1
        assert job.told("resume") == [before][: before > 0], (before, job.said)
    if killed is None:
        assert codes == [0] * world, (stop_at, codes, job.said)
        return True
    assert all(codes[rank] == -signal.SIGKILL for rank in victims), (stop_at, codes, job.said)
    assert all(code in (0, 1) for rank, code in enumerate(codes) if rank not in victims), (stop_at, codes, job.said)
    figures["kills"][stop_at[1]] += 1
    figures["victims"]["all" if len(victims) == world else f"rank {victims[0]}"] += 1
    if len(victims) < world:
        figures["slowest survivor, s"] = max(figures["slowest survivor, s"], round(time.monotonic() - killed, 2))
    check_after_kill(folder, kept, before, job.told("save"), figures)
    return False


def check_after_kill(folder, kept, before, reported, figures):
    "The newest checkpoint is whole and the uninterrupted run's, and none that was reported is newer; the torn ones are named"
    keeper = checkpoint.Checkpointer(folder)
    whole, (newest, notes) = keeper.complete(), keeper.newest()
    torn = {*folder.glob("checkpoint-*.pth")} - {*whole}
    figures["torn files"] += len(torn) + len([*folder.glob("*.tmp")])
    assert len(notes) == len(torn) and all(any(str(path) in note for note in notes) for path in torn), notes
    assert newest_step(folder) >= max([before, *reported]) and newest == (whole[-1] if whole else None), (newest, before, reported)
    if newest:
        check_equal(newest, kept / newest.name)


def sweep(kills, seed, worlds=(1, 2)):
    "Kill so often, and go on each time; returns the figures, raises AssertionError where anything was lost"
    rng, started = random.Random(seed), time.monotonic()
    figures = {"kills": Counter(), "victims": Counter(), "resumed from": Counter(), "torn files": 0, "runs": 0, "slowest survivor, s": 0.0}
    with tempfile.TemporaryDirectory() as home:
        kept = {world: finish(Path(home) / f"whole-{world}", world, keep_last=0) for world in worlds}
        while sum(figures["kills"].values()) < kills:
            world = worlds[figures["runs"] % len(worlds)]
            folder = Path(home) / f"run-{figures['runs']}"
            done = False
            while not done and sum(figures["kills"].values()) < kills:
                done = attempt(folder, kept[world], world, rng, figures)
            if not done:
                finish(folder, world)
            check_equal(folder / f"checkpoint-{STEPS}.pth", kept[world] / f"checkpoint-{STEPS}.pth")
            assert not [*folder.glob("*.tmp")]
            figures["runs"] += 1
    return figures | {"seconds": round(time.monotonic() - started, 1)}


def main(argv=None):
    "Print the figures"
    parser = argparse.ArgumentParser(description=sweep.__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many processes or groups of two to kill")
    parser.add_argument("--seed", type=int, default=0, help="of moments, stages and victims")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=[1, 2], help="sizes of the jobs, in turn")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps(sweep(options.kills, options.seed, options.processes), indent=1))


if __name__ == "__main__":
    main()
