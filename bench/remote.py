"""A contender in a process of its own, which does steps when asked: for what must be set before a process starts, and for ranks."""
import json
import os
import subprocess
import sys
from dataclasses import asdict

import torch

from minigpt.ddp import patch_ddp
from minigpt.pretrainer_single import Trainer

from .contenders import REGISTRY
from .work import Work


class Remote:
    "The other end: a turn asks for steps, or for evaluations, and returns seconds of one"

    def __init__(
        self,
        name: str,  # of the registry
        work: Work,
        env: dict[str, str],  # variables to set
        unset: tuple[str, ...] = (),  # variables to remove
        warm_up: int = 4,  # steps before the first turn
    ):
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        command = [sys.executable, "-m", "bench.remote", json.dumps(dict(name=name, work=asdict(work), warm_up=warm_up))]
        self.name = name
        self.process = subprocess.Popen(command, env=inherited | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        "The next line it writes; a RuntimeError where it died"
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name!r} ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, times: int, what: str = "turn"):
        "Let it do steps (`turn`) or `evaluations`; it answers when it is done"
        self.process.stdin.write(f"{what} {times}\n")
        self.process.stdin.flush()

    def turn(self, steps: int) -> float:
        "Seconds of one of some steps"
        self.ask(steps)
        return self.answer()

    def close(self):
        "Let it end"
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(name: str, work: Work, warm_up: int):
    "Build a contender, then answer each number of steps with the seconds of one"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes elsewhere
    torch.set_num_threads(work.threads)
    patch_ddp(Trainer)  # changes nothing for a process without a rank
    runner = REGISTRY[name].build(work)
    runner.turn(warm_up)
    print(json.dumps("ready"), file=answers, flush=True)
    for what, times in map(str.split, sys.stdin):
        print(json.dumps(getattr(runner, what)(int(times))), file=answers, flush=True)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    serve(asked["name"], Work(**asked["work"]), asked["warm_up"])
