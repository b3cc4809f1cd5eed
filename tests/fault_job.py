"""What the ranks of test_faults.py do: they train, and rank 1 hangs, or leaves early, in its third step."""
import os
import sys
import threading
from pathlib import Path

import torch

from minigpt.ddp import patch_ddp
from minigpt.pretrainer_single import Trainer
from trainer_job import make_trainer


def main(folder, kind):
    "Collectives give up after eight seconds"
    torch.set_num_threads(1)
    patch_ddp(Trainer)
    trainer = make_trainer(folder, train_batch_size=4, timeout=8, save_steps=2)
    plain = trainer.optimizer_step
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

    def optimizer_step():
        if trainer.rank == 1 and trainer.step == 2:
            threading.Event().wait() if kind == "hangs" else sys.exit(0)
        plain()

    trainer.optimizer_step = optimizer_step
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
