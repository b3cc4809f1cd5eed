"""`bench start`: what it costs to import the main job, each import in a new process, in turns."""
import os
import subprocess
import sys
from importlib.util import find_spec

from .measure import interleave, ratio, summary
from .work import Work

ABOUT = "each import in a new process, in turns; CPU seconds of user and system, ratios are medians over rounds with their 95 % interval"
BASE, MAIN = "import torch", "import minigpt.pretrainer"
IMPORTS = {BASE: "torch", MAIN: "minigpt", "from transformers import Trainer": "transformers", "import litgpt": "litgpt", "import lightning": "lightning"}


def cpu_seconds(code: str) -> float:
    "User and system time of a new process that runs it"
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def run(work: Work) -> dict:
    "CPU seconds of each import, over those of torch alone"
    wanted = dict([*IMPORTS.items()][: 3 if work.quick else None])
    able = [code for code, package in wanted.items() if find_spec(package)]
    for code in able:
        cpu_seconds(code)  # files come into the system's cache
    seconds = interleave({code: lambda code=code: cpu_seconds(code) for code in able}, work.rounds)
    rows = [dict(name=code, ratio=ratio(values, seconds[BASE]), cpu_s=summary(values)) for code, values in seconds.items()]
    missing = {code: [package] for code, package in wanted.items() if code not in able}
    table = dict(title="Imports", label="CPU seconds over `import torch`", rows=rows)
    return dict(tables=[table], figures=dict(over_torch=rows[1]["ratio"]), not_installed=missing, about=ABOUT)
