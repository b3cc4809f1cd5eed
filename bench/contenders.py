"""The registry of trainers that are compared: name, settings, and how to build one that does a step when asked."""
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.pretrainer_single import TrainArgs, Trainer, build_optimizer, compiler_target
from minigpt.speed import fused_attention
from minigpt.transformer import MiniGPT

from .measure import timed
from .plain import DROP_RATE, PlainGPT
from .work import CLIP, LEARNING_RATE, SEED, WEIGHT_DECAY, Work

PLAIN, CHAPTER_04, ALL_LEVERS = "plain", "chapter 04", "all levers"
FASTER = "by hand up to 1024 tokens on a CPU, else sdpa"  # attention, by one rule for all who have the choice
torch._inductor.config.cpp.march = compiler_target()  # for all alike
torch._dynamo.config.recompile_limit = 64  # the plain loops share their code: one graph for each model
torch._dynamo.config.fail_on_recompile_limit_hit = True  # not eager without a word


@dataclass(frozen=True)
class Contender:
    "One entry of the registry"
    name: str
    build: Callable  # Work -> something with `model`, `step()`, `loss()` and `close()`
    settings: dict  # what the report says of it
    packages: tuple[str, ...]  # that must be installed; none: ours

    @property
    def missing(self) -> list[str]:
        "Its packages that are not installed"
        return [name for name in self.packages if not find_spec(name)]


REGISTRY: dict[str, Contender] = {}


def contender(
    name: str,  # unique
    *packages: str,  # that it needs besides ours
    **settings,  # dtype, compiled, attention, dropout, ...
):
    "Enter the decorated builder into the registry"

    def enter(build):
        if name in REGISTRY:
            raise ValueError(f"two contenders are called {name!r}")
        REGISTRY[name] = Contender(name, build, settings, packages)
        return build

    return enter


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    "Mean loss in nats, in 32 bits"
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Runner:
    "A model that trains a step at a time, from the same seed, on the same batches as all others"

    forward = staticmethod(lambda model, x: model(x))  # (B, T) ids -> (B, T, V) logits
    tf32 = False

    def __init__(self, work: Work, model: nn.Module, dtype: str = "float32"):
        self.work, self.model, self.dtype, self.done = work, model.to(work.device).train(), getattr(torch, dtype), 0

    def autocast(self):
        "The number type that matrix products are done in"
        return torch.autocast(self.work.device, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def turn(self, steps: int) -> float:
        "Seconds of one of some steps"
        if self.work.device == "cuda":  # one setting for the whole process, and each contender has its own
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        return timed(self.step, steps, self.work.device)

    def step(self):
        "One update"
        self.update(*self.work.train_batch(self.done))
        self.done += 1

    @torch.no_grad()
    def loss(self) -> float:
        "Mean loss in nats on the batches that are held out, without dropout"
        self.model.eval()
        with self.autocast():
            losses = [cross_entropy(self.forward(self.model, x), y).item() for x, y in self.work.test_batches]
        self.model.train()
        return sum(losses) / len(losses)

    def close(self):
        "Nothing to end"


class PlainLoop(Runner):
    "The loop that everybody writes: forward, loss, backward, clip, update"

    def __init__(self, work: Work, model: nn.Module, forward=Runner.forward, dtype="float32", compiled=False, optimizer=None):
        super().__init__(work, model, dtype)
        self.forward = forward
        self.optimizer = optimizer or build_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)  # the same for all but plain
        whole = lambda model, x, y: cross_entropy(forward(model, x), y)
        self.loss_of = torch.compile(whole) if compiled else whole  # forward and loss in one graph: what serves it best

    def update(self, x: Tensor, y: Tensor):
        "One update on a batch"
        with self.autocast():
            loss = self.loss_of(self.model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class OurTrainer(Runner):
    "`Trainer.train_step` of chapter 04, its levers set by TrainArgs"

    def __init__(self, work: Work, trainer_class=Trainer, flash_attn=False, **levers):
        torch.manual_seed(SEED)
        super().__init__(work, MiniGPT(replace(work.config, flash_attn=flash_attn)), levers.get("dtype", "float32"))
        self.tf32 = levers.get("tf32", False)
        args = TrainArgs(train_batch_size=work.batch, learning_rate=LEARNING_RATE, clip=CLIP, seed=SEED, resume="never", max_steps=1, **levers)
        optimizer = build_optimizer(self.model, LEARNING_RATE, WEIGHT_DECAY)
        self.trainer = trainer_class(self.model, optimizer, args, device=work.device, log=lambda event: None)
        rows_of = lambda batches: [row for batch in batches for row in zip(*batch)]
        self.trainer.set_dataset(rows_of(work.train_batches), rows_of(work.test_batches))
        self.trainer.setup()

    def step(self):
        "One update"
        self.trainer.train_step([self.work.train_batch(self.done + i) for i in range(self.work.accumulate)])
        self.trainer.step += 1
        self.done += self.work.accumulate

    def evaluations(self, times: int) -> float:
        "Seconds of one of some evaluations, each rank its share"
        return timed(self.trainer.evaluate, times, self.work.device)


# ---- ours


@contender(PLAIN, dtype="float32", attention="by hand", dropout=DROP_RATE, norm="by hand", optimizer="AdamW, as PyTorch gives it")
def plain(work):
    torch.manual_seed(SEED)
    model = PlainGPT(work.config)
    return PlainLoop(work, model, optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY))


def all_levers(work: Work) -> dict:
    "What `--speed auto` pulls in a long run on this device, and compiled whatever the length of the run"
    gpu = dict(tf32=True) if work.device == "cuda" else {}
    return gpu | dict(dtype="bfloat16", compile=True, flash_attn=fused_attention(work.device, work.config.context_length))


def ours(name: str, **levers):
    "A contender of ours: chapter 04's trainer with some levers pulled"

    settings = OURS | levers | (dict(attention="sdpa") if "flash_attn" in levers else {})

    @contender(name, **settings)
    def build(work):
        return OurTrainer(work, **levers)


OURS = dict(dtype="float32", attention="by hand", dropout=0.0, optimizer="AdamW, fused")
ours(CHAPTER_04)
ours(f"{CHAPTER_04} + bf16", dtype="bfloat16")
ours(f"{CHAPTER_04} + compile", compile=True)
ours(f"{CHAPTER_04} + fused attention", flash_attn=True)
ours(f"{CHAPTER_04} + TF32", tf32=True)
ours(f"{CHAPTER_04} + loss in slices", loss_rows=1024)
ours(f"{CHAPTER_04} + recompute", recompute=True)


@contender(ALL_LEVERS, **OURS | dict(dtype="bfloat16", compiled=True, attention=FASTER))
def every_lever(work):
    return OurTrainer(work, **all_levers(work))


def chosen(work: Work) -> tuple[dict[str, Contender], dict[str, list[str]]]:
    "The contenders that are wanted and can run here, and the packages that others lack"
    from . import lean, peers  # noqa: F401  their entries

    wanted = {name: entry for name, entry in REGISTRY.items() if not work.only or name == PLAIN or any(word in name for word in work.only)}
    if len(wanted) < 2:
        raise ValueError(f"--only {' '.join(work.only)}: no contender of such a name; there are {', '.join(REGISTRY)}")
    able = {name: entry for name, entry in wanted.items() if work.device == "cuda" or not entry.settings.get("tf32")}
    return {n: e for n, e in able.items() if not e.missing}, {n: e.missing for n, e in able.items() if e.missing}
