"""A small training job for the trainer's tests, built alike in this process and in every rank.

Run under torchrun with a folder and five free ports, it is what the ranks of test_ddp.py do.
"""
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import Dataset

from minigpt.checkpoint import Checkpointer
from minigpt.pretrainer_single import TrainArgs, Trainer, print_event
from minigpt.transformer import GPTConfig, MiniGPT

VOCAB, CONTEXT = 64, 8


class Windows(Dataset):
    "Windows that count by fives; the first token is the window's number; `seen` notes which the loader read"

    def __init__(self, numbers, masked=False):
        rows = (torch.tensor(list(numbers), dtype=torch.long)[:, None] + 5 * torch.arange(CONTEXT + 1)) % VOCAB  # (n, T+1)
        self.x, self.y, self.seen = rows[:, :-1], rows[:, 1:].clone(), []
        if masked:  # window i has i % 8 targets that do not count
            self.y[torch.arange(CONTEXT)[None] < torch.arange(len(rows))[:, None] % CONTEXT] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def __getitems__(self, numbers):
        self.seen += self.x[numbers, 0].tolist()
        return self[numbers]


def make_model(drop_rate=0.0, seed=0):
    torch.manual_seed(seed)
    return MiniGPT(GPTConfig(vocab_size=VOCAB, context_length=CONTEXT, emb_dim=32, n_layers=2, n_heads=2, drop_rate=drop_rate))


def make_trainer(folder, model=None, optimizer=None, train=43, evaluation=11, masked=False, log=None, about=None, **options):
    "A trainer on 43 training and 11 evaluation windows; its events go to `trainer.events`"
    model = make_model() if model is None else model
    defaults = dict(num_train_epochs=1, learning_rate=0.3, warmup_steps=2, eval_steps=3, log_every=1, resume="never", output_dir=str(folder))
    args = TrainArgs(**defaults | options)
    events = []
    keeper = Checkpointer(folder, args.keep_last)
    trainer = Trainer(model, (optimizer or sgd)(model), args, device="cpu", log=log or events.append, checkpointer=keeper, about=about)
    trainer.set_dataset(Windows(range(train), masked), Windows(range(43, 43 + evaluation)))
    trainer.events = events
    return trainer


def trained(folder, **options):
    "The same, trained"
    trainer = make_trainer(folder, **options)
    trainer.train()
    return trainer


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def losses(events, name="train_loss"):
    return [event[name] for event in events if name in event]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.unwrap_model().state_dict().items()}


# ---- what the ranks do

# the global batch is 12 windows on 1, 2 and 3 processes; `share` is what one of them takes
EQUAL_CASES = {
    "sgd": lambda share: dict(train_batch_size=share),
    "adamw": lambda share: dict(train_batch_size=share, optimizer=adamw, learning_rate=4e-3),
    "accumulate": lambda share: dict(train_batch_size=share // 2, accumulate=2),
    "accumulate three": lambda share: dict(train_batch_size=share // 2, accumulate=3),
    "masked": lambda share: dict(train_batch_size=share, masked=True),
}


def spy_on_sums(trainer):
    "Note what this rank hands to `reduce_sum`"
    parts, plain = [], trainer.reduce_sum

    def reduce_sum(tensor):
        parts.append(tensor.tolist())
        return plain(tensor)

    trainer.reduce_sum = reduce_sum
    return parts


def train_and_tell(trainer):
    parts = spy_on_sums(trainer)
    trainer.train()
    return dict(
        events=trainer.events, weights=weights(trainer), parts=parts, seen=trainer.train_set.seen,
        eval_seen=trainer.eval_set.seen if trainer.eval_set else [], steps=trainer.step,
        text=trainer.predict(torch.tensor([[3]]), 5, temperature=0).tolist(),
    )  # fmt: skip


def first_weights(folder, rank):
    "Weights drawn differently on each rank, before and after the set-up"
    trainer = make_trainer(folder, model=make_model(seed=rank), train_batch_size=4)
    before = weights(trainer)
    trainer.setup()
    after, module = weights(trainer), trainer.model
    ignored = sorted(module.parameters_to_ignore)
    managed = [b.dtype for name, b in module.module.named_buffers() if name not in ignored]
    trainer.cleanup()
    return dict(before=before, after=after, ignored=ignored, managed_complex=any(d.is_complex for d in managed))


def noise(folder):
    "After training with dropout: one window through the model, in training and in evaluation mode"
    trainer = make_trainer(folder, model=make_model(drop_rate=0.3), train_batch_size=4)
    result = train_and_tell(trainer)
    x = trainer.eval_set[0][0][None]
    result["noisy"], result["quiet"] = (trainer.model.train(mode)(x).sum().item() for mode in (True, False))
    return result


def resumed(folder):
    "Six steps with dropout, and the same with a new trainer from step 3"
    options = dict(train_batch_size=4, max_steps=6, save_steps=3)
    whole = make_trainer(folder, model=make_model(drop_rate=0.3), **options)
    whole.train()
    half = make_trainer(folder, model=make_model(drop_rate=0.3, seed=9), **options | dict(resume=str(folder / "checkpoint-3.pth")))
    half.train()
    return dict(whole=weights(whole), half=weights(half), rng_states=len(torch.load(folder / "checkpoint-6.pth")["rng_states"]))


def exchanges(folder):
    "How often gradients travelled in two steps of three micro-batches"
    trainer, sent = make_trainer(folder, train_batch_size=2, accumulate=3, max_steps=2), []
    trainer.setup()

    def send(sent, bucket):
        sent.append(bucket.index())
        return allreduce_hook(None, bucket)

    trainer.model.register_comm_hook(sent, send)
    trainer.train()
    return len(sent)


def refusals(folder, rank):
    "What ranks say that were given different things, or too few windows"
    given = {
        "windows": dict(train=43 - rank, train_batch_size=4),
        "batch": dict(train_batch_size=4 + rank),
        "too few": dict(train=7, train_batch_size=4),
        "checkpoint": dict(train_batch_size=4, resume=str(folder / f"checkpoint-{rank}.pth")),
    }
    said = {}
    for name, options in given.items():
        try:
            make_trainer(folder, **options).train()
        except ValueError as error:
            said[name] = str(error)
    trainer = make_trainer(folder, train_batch_size=4)
    trainer.choices = replace(trainer.choices, dtype="bfloat16" if rank else "float32")  # as --dtype auto does on unlike cards
    try:
        trainer.train()
    except ValueError as error:
        said["cards"] = str(error)
    return said


def all_cases(folder, rank, world, port):
    "Everything in one group, which outlives its trainers; what each of them told goes to a file"
    from minigpt.collectives import process_group

    os.environ["MASTER_PORT"] = port
    share = 12 // world
    with process_group():
        told = {name: train_and_tell(make_trainer(folder / name, **case(share))) for name, case in EQUAL_CASES.items()}
        told["epochs"] = train_and_tell(make_trainer(folder / "epochs", train_batch_size=share, num_train_epochs=3))
        told["first"] = first_weights(folder / "first", rank)
        told["one window"] = train_and_tell(make_trainer(folder / "one", train_batch_size=share, evaluation=1))
        told["no window"] = train_and_tell(make_trainer(folder / "none", train_batch_size=share, evaluation=0))
        told["dropout"] = noise(folder / "dropout")
        told["resumed"] = resumed(folder / "resumed")
        told["exchanges"] = exchanges(folder / "exchanges")
        told["refusals"] = refusals(folder / "refusals", rank)
    return told


def own_group(folder, port):
    "The trainer makes its group and leaves it; its events as lines"
    os.environ["MASTER_PORT"] = port
    make_trainer(folder, train_batch_size=4, max_steps=3, log=print_event).train()
    return not torch.distributed.is_initialized()


def fail(folder, port):
    "Rank 1 fails in its third step"
    os.environ["MASTER_PORT"] = port
    trainer = make_trainer(folder / "fail", train_batch_size=4, timeout=60)
    plain = trainer.optimizer_step

    def optimizer_step():
        if trainer.rank == 1 and trainer.step == 2:
            (folder / "failed").touch()
            raise RuntimeError("the third step is bad")
        plain()

    trainer.optimizer_step = optimizer_step
    trainer.train()


def main(folder, *ports):
    "Three processes take all cases, then two of them; these end with an error of rank 1"
    before = dict(vars(Trainer))
    from minigpt.ddp import patch_ddp

    patched_by_import = vars(Trainer) != before
    torch.set_num_threads(1)
    patch_ddp(Trainer)
    rank = int(os.environ["RANK"])
    for world, own, shared in ((3, *ports[:2]), (2, *ports[2:4])):
        if rank >= world:
            return
        os.environ |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        print(f"world of {world}", flush=True)
        left = own_group(folder / f"{world}/own", own)
        told = all_cases(folder / str(world), rank, world, shared)
        torch.save(told | {"left own group": left, "patched by import": patched_by_import}, folder / f"{world}/rank-{rank}.pt")
    fail(folder, ports[4])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
