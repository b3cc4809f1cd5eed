"""The main job, in which rank 0 looks up where to go on only when torchrun has asked it once more, as rank 1 has left."""
import os
import sys

import minigpt.pretrainer as pretrainer
from minigpt.pretrainer_single import Trainer

look, stop = pretrainer.what_is_left, Trainer.stop
read, write = os.pipe()


def told_stop(trainer, signum=15):
    stop(trainer, signum)
    os.write(write, b".")


def late_look(args):
    for _ in range(2):  # the first time by the test
        os.read(read, 1)
    return look(args)


Trainer.stop = told_stop
if os.environ["RANK"] == "0":
    pretrainer.what_is_left = late_look
sys.exit(pretrainer.main())
