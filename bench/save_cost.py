"""What a checkpoint costs a running training, in training steps.

    ./run python bench/save_cost.py

Saves in the background and in the foreground take turns with plain steps, so that a machine that slows down slows all alike.
"""
import argparse
import json
import statistics
import tempfile
import time

import torch

from minigpt.checkpoint import Checkpointer
from minigpt.pretrainer import SIZES
from minigpt.pretrainer_single import TrainArgs, Trainer, build_optimizer
from minigpt.transformer import GPTConfig, MiniGPT

def timed(function, *args):
    "Seconds of one call"
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def make_trainer(folder, size, batch, dtype):
    "A trainer on random windows, and one batch of them"
    torch.manual_seed(0)
    config = GPTConfig(**SIZES[size])
    model = MiniGPT(config)
    rows = torch.randint(config.vocab_size, (batch, config.context_length + 1))  # (B, T + 1)
    args = TrainArgs(train_batch_size=batch, max_steps=10_000, dtype=dtype, output_dir=folder)
    trainer = Trainer(model, build_optimizer(model, 1e-3, 0.1), args, device="cpu", log=lambda event: None, checkpointer=Checkpointer(folder, 1))
    trainer.set_dataset([(row[:-1], row[1:]) for row in rows], None)
    trainer.setup()
    return trainer, (rows[:, :-1], rows[:, 1:])


def measure(trainer, batch, rounds, steps):
    "Seconds of plain steps, of steps that began while a file was being written, and of what the loop waits for in each kind of save"
    keeper, times = trainer.checkpointer, dict(step=[], step_beside_write=[], blocked=[], write=[], foreground=[])

    def step():
        trainer.train_step([batch])
        trainer.step += 1

    def save():
        keeper.save(trainer.checkpoint())

    def save_and_wait():
        save()
        keeper.saved(wait=True)

    for number in range(rounds + 1):
        if number == 1:  # the first round only warms up: memory of the snapshot, kernels, caches
            times = {name: [] for name in times}
        times["step"] += [timed(step) for _ in range(steps)]
        times["blocked"].append(timed(save))
        started = time.perf_counter()
        while not keeper.pending[0].done():
            times["step_beside_write"].append(timed(step))
        times["write"].append(time.perf_counter() - started)
        keeper.saved(wait=True)
        times["step"] += [timed(step) for _ in range(steps)]
        times["foreground"].append(timed(save_and_wait))
    return times


def main(argv=None):
    "Print JSON, then one line"
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--size", choices=SIZES, default="M", help="of the model")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind")
    parser.add_argument("--steps", type=int, default=3, help="plain steps before each save")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trainer, batch = make_trainer(folder, options.size, options.batch, options.dtype)
        times = measure(trainer, batch, options.rounds, options.steps)
        size = max(path.stat().st_size for path in Checkpointer(folder).complete())
    median = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: [min(values), max(values)] for name, values in times.items()}
    figures = vars(options) | dict(threads=torch.get_num_threads(), megabytes=size / 1e6, median_s=median, range_s=spread)
    figures |= {f"{name}_in_steps": median[name] / median["step"] for name in ("blocked", "foreground", "step_beside_write")}
    print(json.dumps(figures, indent=1))
    print(f"{options.size}, {size / 1e6:.0f} MB: a save holds training up for {figures['blocked_in_steps']:.3f} of a step (written in the foreground: "
          f"{figures['foreground_in_steps']:.3f}); a step beside the write takes {figures['step_beside_write_in_steps']:.2f} of one without")


if __name__ == "__main__":
    main()
