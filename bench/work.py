"""The work that all contenders do: one model shape, the same batches of the same text in the same order, one learning rate."""
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

from minigpt.pretrain_dataset import PretrainBinaryDataset, default_corpus, prepare_corpus
from minigpt.pretrainer import SIZES
from minigpt.transformer import GPTConfig

LEARNING_RATE, WEIGHT_DECAY, CLIP, SEED = 1e-3, 0.1, 1.0, 123
BATCH = {"cpu": dict(S=32, M=8, L=2), "cuda": dict(S=512, M=64, L=8)}  # windows per process and step
ROUNDS = dict(full=15, quick=6)
TEST_BATCHES = 4  # held out, for the loss beside each speed


@dataclass(frozen=True)
class Work:
    "What is to be done, alike for all"
    size: str  # S, M or L
    quick: bool  # fewer rounds
    device: str  # cpu or cuda
    threads: int  # of one process
    batch: int  # windows a step, of one process
    rank: int = 0  # which of the processes this is
    world: int = 1  # processes
    accumulate: int = 1  # batches per update
    only: tuple[str, ...] = ()  # words of which a contender's name must hold one; none: all contenders

    @property
    def config(self) -> GPTConfig:
        "The model's shape"
        return GPTConfig(**SIZES[self.size])

    @property
    def rounds(self) -> int:
        "Turns of each contender"
        return ROUNDS["quick" if self.quick else "full"]

    @property
    def tokens(self) -> int:
        "Of one process's update"
        return self.batch * self.config.context_length * self.accumulate

    @cached_property
    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        "(x, y), each (B, T), in an order drawn once; the first TEST_BATCHES are held out"
        corpus = default_corpus()
        data = PretrainBinaryDataset(prepare_corpus(corpus, self.config.vocab_size), self.config.context_length)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED))
        rows = order[: len(data) // self.batch * self.batch].view(-1, self.batch)
        return [tuple(t.to(self.device) for t in data[row]) for row in rows[:400]]

    def train_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        "The batch of a step, another one for each process"
        return self.train_batches[(step * self.world + self.rank) % len(self.train_batches)]

    @cached_property
    def train_batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        "What all train on; a ValueError where a batch is too large to leave any"
        if len(self.batches) <= TEST_BATCHES:
            raise ValueError(f"--batch {self.batch}: {default_corpus()} holds only {len(self.batches)} batches of that size, and {TEST_BATCHES} are for testing")
        return self.batches[TEST_BATCHES:]

    @property
    def test_batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        "What nobody trains on"
        return self.batches[:TEST_BATCHES]

    def described(self) -> dict:
        "For the report"
        facts = dict(corpus=default_corpus(), learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip=CLIP, seed=SEED)
        return asdict(self) | facts | dict(model=asdict(self.config), parameters=self.config.n_params(), tokens_per_step=self.tokens)
