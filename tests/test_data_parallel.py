"""Chapter 09: DDP by hand against torch's. Two launches, at once, serve all cases that need processes."""
import math
import random
import textwrap
import threading

import pytest
import torch
from torch import nn

import minigpt.data_parallel as d
from minigpt.collectives import process_group, run_ranks

JOB = '''
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from minigpt.collectives import process_group
import minigpt.data_parallel as d

class Net(nn.Module):
    "Tied weights, a frozen layer, a buffer that changes"
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.frozen, self.second, self.head = nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 7), nn.Linear(7, 5, bias=False)
        self.head.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = self.second
    def forward(self, x): return self.head(self.again(self.frozen(self.second(self.norm(self.first(x))))))

def train(rank, world, wrap, after=lambda ddp: None):
    "SGD, two micro-batches a step of which the first keeps its gradients to itself; rows alternate between ranks"
    torch.manual_seed(rank)
    ddp = wrap(Net())
    sgd = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    rows = torch.randn(3, 2, 4 * world, 5, generator=torch.Generator().manual_seed(0))[:, :, rank::world]
    for first, second in rows:
        sgd.zero_grad()
        with ddp.no_sync(): ddp(first).square().mean().backward()
        ddp(second).square().mean().backward()
        after(ddp)
        sgd.step()
    return ddp.module.state_dict(), getattr(ddp, "mail", None) and ddp.mail.sent

class Branches(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.order, self.layers = order, nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
    def forward(self, x):
        out = {i: self.layers[i](x) for i in self.order}
        return sum(10 ** i * y for i, y in sorted(out.items()))

def branches(rank, world):
    "Every rank computes the branches in another order"
    ddp = d.OverlappedDDP(Branches([(i + rank) % 3 for i in range(3)]), 1e-6)
    ddp(torch.tensor([[rank + 1.0]])).sum().backward()
    return [layer.weight.grad.item() for layer in ddp.module.layers]

def errors(wrap, after=lambda ddp: None):
    "What a parameter without a gradient, and a second backward pass, say; afterwards all is well again"
    said, ddp = [], wrap(Branches([0, 2]))
    for _ in range(2):
        try: ddp(torch.ones(1, 1)).sum().backward(); after(ddp)
        except RuntimeError as error: said.append(str(error))
    ddp = wrap(nn.Linear(1, 1))
    loss = ddp(torch.ones(1, 1)).sum()
    loss.backward(retain_graph=True)
    try: loss.backward()
    except RuntimeError as error: said.append(str(error))
    ddp(torch.ones(1, 1)).sum().backward()
    return said

def flags(rank, wrap):
    "P36: the flag set after the forward pass; no_sync around the backward pass only"
    found = []
    for around_backward in (False, True):
        ddp = wrap(nn.Linear(1, 1, bias=False))
        loss = ddp(torch.tensor([[1.0 + rank]])).sum()
        if around_backward:
            with ddp.no_sync(): loss.backward()
        else:
            ddp.require_backward_grad_sync = False
            loss.backward()
        loss, ddp.require_backward_grad_sync = ddp(torch.tensor([[10.0 + rank]])).sum(), True
        loss.backward()
        found.append(ddp.module.weight.grad.item())
    return found

def quiet(rank):
    "Rank 0 alone evaluates through the wrapper: without gradients nothing is sent, so nobody is missed"
    ddp = d.OverlappedDDP(Net())
    before = len(ddp.mail.sent)
    if rank == 0:
        with torch.no_grad(): ddp(torch.zeros(2, 5))
    return len(ddp.mail.sent) - before

def means(rank):
    "P37: the loss for the log, and the gradient, of unequal token counts"
    ddp = d.OverlappedDDP(nn.Linear(1, 1, bias=False))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0][:4] if rank == 0 else [7.0] * rank)[:, None]
    loss, logged = d.joint_mean((ddp(x) / ddp.module.weight.detach()).sum(), len(x))
    loss.backward()
    return logged.item(), (ddp.module.weight.grad * ddp.module.weight).item()

WRAPS = {"1": (d.MiniDDP, d.average_gradients), "2": (d.HookedDDP,), "3": (lambda m: d.BucketedDDP(m, 2e-4),),
         "4": (lambda m: d.OverlappedDDP(m, 2e-4),), "4, one bucket": (d.OverlappedDDP,), "torch": (DistributedDataParallel,)}
torch.set_num_threads(1)
with process_group(timeout=30) as (rank, world):
    out = dict(train={name: train(rank, world, *how) for name, how in WRAPS.items()}, branches=branches(rank, world), quiet=quiet(rank))
    out["flags"] = {name: flags(rank, wrap) for name, wrap in dict(ours=d.OverlappedDDP, torch=DistributedDataParallel).items()}
    out["means"] = means(rank)
    out["errors"] = {name: errors(*WRAPS[name]) for name in ("1", "2", "3", "4")}
    dist.barrier()
    torch.save(out, f"{sys.argv[1]}/{world}-{rank}.pt")
'''


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "What each rank of two and of three found: {world size: [rank 0's, ...]}"
    folder = tmp_path_factory.mktemp("ranks")
    job = folder / "job.py"
    job.write_text(textwrap.dedent(JOB), encoding="utf-8")
    failed = []

    def launch(n):
        try:
            run_ranks(job, n, args=(folder,), env=dict(OMP_NUM_THREADS="1"), stream=False)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=launch, args=(n,)) for n in (2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    return {n: [torch.load(folder / f"{n}-{rank}.pt") for rank in range(n)] for n in (2, 3)}


def gap(one, other):
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


VERSIONS = ["1", "2", "3", "4", "4, one bucket"]


def parameters(state):
    "Without BatchNorm's buffers: under accumulation torch sends these by what the forward pass *before* said, we by this one"
    return {name: w for name, w in state.items() if name.split(".")[0] != "norm" or name in ("norm.weight", "norm.bias")}


@pytest.mark.parametrize("version", VERSIONS)
def test_p38_p42_every_version_equals_torchs_ddp(ranks, version):
    "Bit for bit on two ranks, to the rounding of the sum on three; first weights differ by rank, data too"
    for n, tolerance in ((2, 0.0), (3, 1e-5)):
        ours, torchs = ([parameters(seen["train"][name][0]) for seen in ranks[n]] for name in (version, "torch"))
        for rank in range(n):
            assert gap(ours[rank], torchs[rank]) <= tolerance
            assert gap(ours[rank], ours[0]) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_p36_messages(ranks, version):
    "Tied weights once, frozen ones never, nothing while no_sync holds; a broadcast of all state, then of buffers"
    sent = ranks[2][0]["train"][version][1]
    trained = 4 * (5 * 7 + 7 + 7 + 7 + 7 * 7 + 7 + 7 * 5)  # first, norm, second, head
    state, buffers = trained + 4 * (7 * 7 + 7), 4 * (7 + 7) + 8
    assert sum(size for kind, size in sent if kind == "all-reduce") == 3 * trained
    assert sum(size for kind, size in sent if kind == "broadcast") == state + buffers + 3 * buffers
    messages = sum(kind == "all-reduce" for kind, _ in sent) / 3
    assert messages == {"1": 7, "2": 7, "3": 4, "4": 4, "4, one bucket": 1}[version]


def test_order_of_gradients_does_not_matter(ranks):
    for n, seen in ranks.items():
        mean = (n + 1) / 2
        for rank in seen:
            assert rank["branches"] == pytest.approx([mean, 10 * mean, 100 * mean])


def test_p36_flag_after_forward(ranks):
    "Our wrapper decides where torch's does, so the same mistake has the same result"
    for seen in ranks[2]:
        assert seen["flags"]["ours"] == seen["flags"]["torch"]
    (parted0, right0), (parted1, right1) = (seen["flags"]["ours"] for seen in ranks[2])
    assert parted0 != parted1 and right0 == right1 == 12.0


def test_p47_errors_name_the_parameter(ranks):
    for seen in ranks[3]:
        for version, said in seen["errors"].items():
            assert ["no gradient for layers.1.weight:" in error for error in said[:2]] == [True, True]
            second = ["second backward pass" in error for error in said[2:]]
            assert second == ([] if version == "1" else [True])  # version 1 has no hook that could see it


def test_evaluation_sends_nothing(ranks):
    assert [seen["quiet"] for n in ranks for seen in ranks[n]] == [0] * 5


def test_p37_joint_mean(ranks):
    for n, rows in ((2, [1, 2, 3, 4, 7]), (3, [1, 2, 3, 4, 7, 7, 7])):
        mean = sum(rows) / len(rows)
        for seen in ranks[n]:
            assert seen["means"] == pytest.approx((mean, mean), rel=1e-5)


def test_alone():
    "One process needs no launcher; a model without trainable weights and a batch without tokens are refused"
    with process_group():
        model = nn.Linear(3, 2)
        ddp = d.OverlappedDDP(model)
        x = torch.randn(4, 3)
        wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        ddp(x).sum().backward()
        for p, g in zip(model.parameters(), wanted):
            assert torch.equal(p.grad, g)
        with pytest.raises(ValueError, match="nothing to average"):
            d.MiniDDP(nn.Linear(1, 1).requires_grad_(False))
        with pytest.raises(ValueError, match="all targets masked"):
            d.joint_mean(torch.zeros(()), 0)


@pytest.mark.parametrize("rows, devices", [(1, 4), (4, 4), (7, 3), (9, 8)])
def test_data_parallel_equals_one_step(rows, devices):
    "Frozen and unused weights included; moves touch device 0 only"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 2))
    model.spare = nn.Linear(1, 1)
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    x, y = torch.randn(rows, 6), torch.randn(rows, 2)
    plain = nn.functional.mse_loss(model(x), y)
    plain.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    loss, moves = d.data_parallel_step(model, x, y, nn.functional.mse_loss, devices)
    torch.testing.assert_close(loss, plain.detach())
    for name, p in model.named_parameters():
        assert (p.grad is None) == (wanted[name] is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted[name])
    busy = len(x.chunk(devices))
    assert len(moves) == 5 * (busy - 1) and all(0 in (source, target) for _, source, target, _ in moves)


def test_buckets_hold_every_parameter_once():
    rng = random.Random(0)
    for _ in range(50):
        params = [torch.zeros(rng.randint(1, 4000), dtype=rng.choice([torch.float32, torch.bfloat16])) for _ in range(rng.randint(1, 20))]
        buckets = d.fill_buckets(params, 0.01)
        assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(params))))
        for bucket in buckets:
            assert len({params[i].dtype for i in bucket}) == 1
            assert len(bucket) == 1 or sum(params[i].nbytes for i in bucket) <= 0.01 * 2**20


def test_step_time_equals_bucket_by_bucket():
    rng = random.Random(0)
    for _ in range(200):
        forward, backward, all_reduce, n = rng.random(), rng.random(), 3 * rng.random(), rng.randint(1, 40)
        link = 0.0
        for k in range(1, n + 1):
            link = max(link, backward * k / n) + all_reduce / n
        assert math.isclose(d.step_time(forward, backward, all_reduce, n), forward + link)
    assert d.step_time(1, 2, 3) == 6 and d.all_reduce_time(1e9, 1, 1e9, 1e-3) == 0
    assert math.isclose(d.all_reduce_time(1e9, 4, 1e9, 1e-3, 10), 1.5 + 0.04)
    assert d.ring_bytes(90, 3) == 120 and d.all_reduce_time(0, 3, 1, 1.0) == 4  # a tree of three has two levels, as one of four
