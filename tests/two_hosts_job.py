"The main job; after the checkpoint of step 10 rank 0 waits until the pipe named in GATE has been opened and closed by the test"
import os
import sys

import minigpt.pretrainer as pretrainer
from minigpt.pretrainer_single import Trainer

save = Trainer.check_and_save_checkpoint


def save_then_wait(self):
    save(self)
    if self.step == 10 and self.rank == 0:
        with open(os.environ["GATE"]) as gate:
            gate.read()


Trainer.check_and_save_checkpoint = save_then_wait
sys.exit(pretrainer.main())
