"""Where all-reduce dominates: a training step over two hosts, the cable's rate shaped down. As root on Linux:

    ./run python bench/bandwidth.py [--rates 50 200 0] [--rounds 7]

Ways are interleaved, so a machine that slows down slows them all; a line of JSON, then times as medians and as ratios to plain fp32."""
import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from minigpt.collectives import process_group, rank_env
from minigpt.pretrainer import SIZES
from minigpt.transformer import GPTConfig, MiniGPT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from two_hosts import ADDRESSES, LINK, on_hosts, two_hosts, why_not  # noqa: E402

WAYS = {  # name -> bucket size in MiB, gradients in 16 bits (gloo refuses bf16), micro-batches per exchange; 0: never exchanged
    "alone": (25, False, 0),
    "fp32": (25, False, 1),
    "fp32, buckets 1 MB": (1, False, 1),
    "fp32, buckets 100 MB": (100, False, 1),
    "fp16": (25, True, 1),
    "fp32, accumulation 4": (25, False, 4),
    "fp16, accumulation 4": (25, True, 4),
}
BATCH = 8  # windows per micro-batch


def shape(rate):
    "What leaves this host passes at `rate` Mbit/s; 0: unshaped"
    subprocess.run(["tc", "qdisc", "del", "dev", LINK, "root"], capture_output=True)
    if rate:
        subprocess.run(["tc", "qdisc", "add", "dev", LINK, "root", "tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "200ms"], check=True)


def step(ddp, optimizer, micro_batches, exchange, seed):
    "One update; seconds per micro-batch, and the last loss"
    draw = torch.Generator().manual_seed(seed)
    dist.barrier()
    begin = time.perf_counter()
    for number in range(micro_batches):
        last = number == micro_batches - 1
        ids = torch.randint(2048, (BATCH, 129), generator=draw)  # (B, T + 1)
        with nullcontext() if exchange and last else ddp.no_sync():
            logits = ddp(ids[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / micro_batches
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return (time.perf_counter() - begin) / micro_batches, loss.item() * micro_batches


def measure(rates, rounds):
    "In each rank: all ways at all rates"
    torch.set_num_threads(1)
    place = rank_env()
    found = []
    with process_group(timeout=60) as (rank, world):
        torch.manual_seed(0)
        model, made = MiniGPT(GPTConfig(**SIZES["S"], drop_rate=0.0)), {}
        for name, (bucket, half, _) in WAYS.items():
            own = copy.deepcopy(model)
            made[name] = ddp = DistributedDataParallel(own, bucket_cap_mb=bucket, init_sync=False)
            if half:
                ddp.register_comm_hook(None, fp16_compress_hook)
        optimizers = {name: torch.optim.SGD(ddp.parameters(), lr=0.1) for name, ddp in made.items()}
        for rate in rates:
            shape(rate)
            seconds, losses = {name: [] for name in WAYS}, {}
            for number in range(rounds + 2):  # two to warm up: DDP arranges its buckets anew after the first
                for name, (_, _, micro_batches) in WAYS.items():
                    took, losses[name] = step(made[name], optimizers[name], max(1, micro_batches), micro_batches, number * world + place["rank"])
                    if number > 1:
                        seconds[name].append(took)
            found += [dict(rate=rate, way=name, ms=round(statistics.median(s) * 1e3, 1), spread=round((max(s) - min(s)) * 1e3, 1), loss=round(losses[name], 3)) for name, s in seconds.items()]
        if rank == 0:
            print(json.dumps(dict(parameters=sum(p.numel() for p in model.parameters()), tokens=BATCH * 128, found=found)), flush=True)


def table(result):
    "Milliseconds per micro-batch, and the time of plain fp32 over each"
    rates = list(dict.fromkeys(row["rate"] for row in result["found"]))
    cell = {(row["rate"], row["way"]): row["ms"] for row in result["found"]}
    print(f"{result['parameters']:,} parameters, {result['tokens']} tokens per micro-batch and host; ms per micro-batch (speed over plain fp32)")
    print(f"{'':24}" + "".join(f"{f'{rate} Mbit/s' if rate else 'unshaped':>20}" for rate in rates))
    wire = lambda rate: f"{result['parameters'] * 32 / rate / 1e3:.1f}" if rate else "-"  # of two ranks each sends every value once
    print(f"{'32 bits on the wire':24}" + "".join(f"{wire(rate):>11}{'':9}" for rate in rates))
    for way in WAYS:
        print(f"{way:24}" + "".join(f"{cell[rate, way]:>11.1f} ({cell[rate, 'fp32'] / cell[rate, way]:5.2f}x)" for rate in rates))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 200, 0], help="Mbit/s; 0: unshaped")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if rank_env():
        return measure(options.rates, options.rounds)
    if reason := why_not():
        sys.exit(f"bandwidth.py: {reason}")
    wheres = [[f"--node_rank={n}", f"--master_addr={ADDRESSES[0]}", "--master_port=29500"] for n in range(2)]
    words = [__file__, "--rounds", options.rounds, "--rates", *options.rates]
    with two_hosts():
        first, second = on_hosts(wheres, [words, words], GLOO_SOCKET_IFNAME=LINK)
        out = first.communicate(timeout=500)[0]
        second.communicate(timeout=30)
    line = next((line for line in out.splitlines() if line.startswith('{"parameters"')), None)
    if not line:
        sys.exit(out)
    print(line)
    table(json.loads(line))


if __name__ == "__main__":
    main()
