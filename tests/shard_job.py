"""A run of the command line that notes which shards each rank reads in its training steps; torchrun starts it with the notes' folder first."""
import json
import os
import sys
from pathlib import Path

import minigpt.pretrain_dataset as data
import minigpt.pretrainer as pretrainer
from minigpt.pretrainer_single import Trainer


def note_shards(seen):
    "Let a rank note what it reads while it trains and evaluates; what it reads before that, the sampled baselines and a prompt, is left out"
    init, train = data.ShardedDataset.__init__, Trainer.train

    def reading(self, *args):
        init(self, *args)
        read = self.shard
        self.shard = lambda shard: seen.add(shard) or read(shard)

    def noted(self):
        seen.clear()
        train(self)

    data.ShardedDataset.__init__, Trainer.train = reading, noted


if __name__ == "__main__":
    seen = set()
    note_shards(seen)
    code = pretrainer.main(sys.argv[2:])
    Path(sys.argv[1], f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(sorted(seen)))
    sys.exit(code)
