"""The machine: what it is, and what it can do at most in matrix products and memory traffic. Shares of these limits are what a step reaches."""
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from minigpt.collectives import cpu_cores
from minigpt.speed import call_times, card_flops, matmul_flops
from minigpt.transformer import GPTConfig


PAGES = dict(GLIBC_TUNABLES="glibc.malloc.hugetlb=1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="8000000000")  # as `run` sets them
PACKAGES = ("torch", "numpy", "tiktoken", "tokenizers", "transformers", "accelerate", "litgpt", "lightning")


def installed(package: str) -> str:
    "Its version, or that it is not there"
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    "As the system tells it"
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine())


def memory_gib() -> float | None:
    "Of the machine; None where the system does not tell"
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    return round(os.sysconf(names[0]) * os.sysconf(names[1]) / 2**30, 1) if hasattr(os, "sysconf") and {*names} <= {*os.sysconf_names} else None


def pages() -> str:
    "How this process's memory is paged"
    return "huge, kept" if all(os.environ.get(name) == value for name, value in PAGES.items()) else "as the system does by default"


def described() -> dict:
    "The machine, for the report"
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(
        cpu=cpu_name(), cores=cpu_cores(), memory_gib=memory_gib(), vector=torch.backends.cpu.get_cpu_capability(), gpus=cards, system=platform.platform(),
        python=sys.version.split()[0], packages={name: installed(name) for name in PACKAGES}, memory_pages=pages(),
    )  # fmt: skip


# ---- what it can do


def best(function, device: str) -> float:
    "Seconds of the fastest of some calls: a limit is what is reached undisturbed"
    return min(call_times(function, torch.device(device)))


def product_seconds(batch: int, m: int, k: int, n: int, dtype: torch.dtype, device: str) -> float:
    "Seconds of `batch` matrix products (m, k) x (k, n)"
    a, b = torch.randn(batch, m, k, device=device).to(dtype), torch.randn(batch, k, n, device=device).to(dtype)
    a, b = (a[0], b[0]) if batch == 1 else (a, b)
    return best(lambda: a @ b, device)


def peak(dtype: torch.dtype, device: str) -> float:
    "FLOP/s of large square matrix products, the better of two sizes"
    return max(matmul_flops(torch.device(device), dtype, n) for n in ((1024, 2048) if device == "cpu" else (8192, 16384)))


def bandwidth(device: str) -> float:
    "Bytes/s of memory, read and written, by a copy far larger than the caches"
    source = torch.ones(1 << (26 if device == "cpu" else 29), device=device)  # 4 bytes each
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), device)


def products(
    config: GPTConfig,
    batch: int,  # windows
) -> list[tuple[int, tuple[int, int, int, int]]]:  # how often, and (batch, m, k, n)
    "The matrix products of one training step: each of the forward pass has two of its size in the backward pass"
    c, tokens = config, batch * config.context_length
    qkv = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    layers = [(c.n_layers, c.emb_dim, qkv), (c.n_layers, c.emb_dim, c.emb_dim), (c.n_layers, c.emb_dim, 2 * c.hidden_dim), (c.n_layers, c.hidden_dim, c.emb_dim)]
    shapes = []
    for times, inner, outer in [*layers, (1, c.emb_dim, c.vocab_size)]:
        shapes += [(times, (1, tokens, inner, outer)), (times, (1, tokens, outer, inner)), (times, (1, outer, tokens, inner))]
    heads, T, D = batch * c.n_heads, c.context_length, c.head_dim
    return [*shapes, (3 * c.n_layers, (heads, T, D, T)), (3 * c.n_layers, (heads, T, T, D))]


def products_seconds(config: GPTConfig, batch: int, dtype: torch.dtype, device: str) -> float:
    "Seconds that a training step's matrix products alone take, each at its own shape"
    return sum(times * product_seconds(*shape, dtype, device) for times, shape in products(config, batch))


def limits(work) -> dict:
    "What this device can do at most, and what that means for a step"
    device, types = work.device, dict(bf16=torch.bfloat16, fp32=torch.float32)
    found = {f"{name}_flops": peak(dtype, device) for name, dtype in types.items()}
    found |= {f"{name}_products_seconds": products_seconds(work.config, work.batch, dtype, device) for name, dtype in types.items()}
    if device == "cuda":
        found["data_sheet_flops"] = card_flops(torch.cuda.get_device_name())
    return found | dict(memory_rate=bandwidth(device))


def better(one: dict, other: dict) -> dict:
    "The tighter of two measurements of the same limits: what disturbs a measurement only ever makes it worse"
    return {name: one[name] and (min if name.endswith("_seconds") else max)(one[name], other[name]) for name in one}
