"""`bench checkpoint`: what a save costs a running training, in training steps; saves in the background, in the foreground and by torch.save take turns."""
import tempfile
import time
from pathlib import Path

from minigpt.checkpoint import Checkpointer
from minigpt.pretrainer_single import PlainCheckpoints

from .contenders import OurTrainer, all_levers
from .measure import summary, timed
from .work import Work

ABOUT = "saves of each kind in turns, plain steps before each; all in steps, medians with their 95 % interval"
STEPS = 3  # plain steps before each save


def measure(runner: OurTrainer, folder: str, rounds: int) -> dict[str, list[float]]:
    "Seconds of plain steps, of steps that began while a file was being written, and of what the loop waits for in each kind of save"
    trainer, keeper, plain = runner.trainer, Checkpointer(folder, 1), PlainCheckpoints(folder)
    names = ("step", "step_beside_write", "blocked", "write", "foreground", "torch_save")

    def save_and_wait():
        keeper.save(trainer.checkpoint())
        keeper.saved(wait=True)

    for number in range(rounds + 1):
        if number <= 1:  # the first round only warms up: memory of the snapshot, kernels, caches
            times = {name: [] for name in names}
        times["step"].append(runner.turn(STEPS))
        times["blocked"].append(timed(lambda: keeper.save(trainer.checkpoint())))
        started, beside = time.perf_counter(), []
        while not keeper.pending[0].done():
            beside.append(runner.turn(1))
        times["write"].append(time.perf_counter() - started)
        times["step_beside_write"].append(sum(beside) / len(beside) if beside else runner.turn(1))
        keeper.saved(wait=True)
        runner.turn(STEPS)
        times["foreground"].append(timed(save_and_wait))
        runner.turn(STEPS)
        times["torch_save"].append(timed(lambda: plain.save(trainer.checkpoint())))
    return times


def run(work: Work) -> dict:
    "What a save blocks, in steps"
    with tempfile.TemporaryDirectory() as folder:
        runner = OurTrainer(work, **all_levers(work))
        runner.turn(STEPS)
        times = measure(runner, folder, work.rounds)
        size = max(path.stat().st_size for path in Path(folder).glob("*.pth"))
    in_steps = {name: [seconds / step for seconds, step in zip(values, times["step"])] for name, values in times.items()}
    texts = dict(
        blocked="saved in the background: training waits", write="saved in the background: until the file is whole",
        step_beside_write="a step beside the write", foreground="the same, waited for", torch_save="torch.save, no check, no sync",
    )  # fmt: skip
    rows = [dict(name=text, ratio=summary(in_steps[name]), ms=summary([1e3 * s for s in times[name]])) for name, text in texts.items()]
    table = dict(title=f"A checkpoint of {size / 1e6:.0f} MB", label="steps", rows=rows)
    limits = dict(step_ms=summary([1e3 * s for s in times["step"]]))
    return dict(tables=[table], figures=dict(blocked_steps=rows[0]["ratio"]), limits=limits, about=ABOUT)
