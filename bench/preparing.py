"""`bench data`: memory that preparing a large file takes, and time and memory of loading batches."""
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from minigpt.pretrain_dataset import (
    PretrainBinaryDataset, default_corpus, load_sidecar, prepare_corpus, prepare_dataset, prepare_files, read_corpus, read_documents, sidecar_path,
    tokenizer_path,
)  # fmt: skip
from minigpt.pretrainer_single import BatchOrder, collate
from minigpt.tokenizer import Tokenizer

from .contenders import OurTrainer, all_levers
from .measure import interleave, ratio, scaled, summary
from .work import SEED, Work

ABOUT = "each preparation and each way of loading 8 million windows in a process of its own; memory is private memory over what imports took"
LARGE, WINDOWS = 200_000_000, 8_000_000  # bytes of text, windows
BATCHES = 50  # a turn of loading
OURS, THEIRS = "BatchOrder, windows gathered", "DataLoader(shuffle=True), window by window"


class PeakMemory:
    "Within: the most private memory of this process over what it had at first, in MiB; mapped files are the system's to take back"

    def __enter__(self):
        self.first, self.most, self.over = self.now(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def now(self) -> float:
        "MiB of private memory"
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

    def watch(self):
        "Look every two milliseconds"
        while not self.over.wait(0.002):
            self.most = max(self.most, self.now() - self.first)

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


def in_child(job: str, *args) -> dict:
    "What one of JOBS returns in a process of its own, and its peak of memory"
    command = [sys.executable, "-m", "bench.preparing", job, *map(str, args)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


# ---- in a process of its own


def prepare(source: str, vocab_size: str, folder: str):
    "Text to tokens, tokenizer included"
    prepare_files([source], int(vocab_size), folder, progress=False)


def load(path: str, context: str, batch: str, way: str):
    "Some batches of a file, in an order drawn over all of it"
    batches = iter(loader(PretrainBinaryDataset(path, int(context)), int(batch), way))
    for _ in range(BATCHES):
        next(batches)


def encode(source: str, tokenizer: str, folder: str):
    "Text to tokens by a tokenizer that is there"
    prepare_dataset(read_documents([source]), Path(folder) / "tokens.bin", Tokenizer.load(tokenizer), progress=False)


JOBS = dict(prepare=prepare, encode=encode, load=load)


# ---- here


def loader(data: PretrainBinaryDataset, batch: int, way: str) -> DataLoader:
    "Batches of shuffled windows, as our trainer loads them or as PyTorch's own sampler does"
    if way == OURS:
        return DataLoader(data, batch_sampler=BatchOrder(len(data), batch, SEED, order=getattr(data, "order", None)), collate_fn=collate)
    return DataLoader(Windows(data), batch_size=batch, shuffle=True, drop_last=True)


class Windows(torch.utils.data.Dataset):
    "A dataset without `__getitems__`: what most are"

    def __init__(self, data: PretrainBinaryDataset):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        return self.data[number]


def write_text(path: Path, size: int):
    "The corpus over and over"
    text = "\n".join(read_corpus(default_corpus())).encode()
    with open(path, "wb") as file:
        for _ in range(size // len(text) + 1):
            file.write(text)


def prepared(work: Work, folder: Path) -> list[dict]:
    "Rows: a quarter of the large file and all of it by a tokenizer that was learnt before, then all of it with its own"
    rows, vocab_size = [], work.config.vocab_size
    words, large = tokenizer_path(prepare_corpus(default_corpus(), vocab_size)), folder / f"{LARGE}.txt"
    jobs = [(folder / f"{LARGE // 4}.txt", "encode", words), (large, "encode", words), (large, "prepare", vocab_size)]
    for number, (source, job, given) in enumerate(jobs):
        if not source.exists():
            write_text(source, int(source.stem))
        found, megabytes = in_child(job, source, given, folder / str(number)), source.stat().st_size / 1e6
        name = f"text of {megabytes:.0f} MB, {'tokenizer learnt too' if job == 'prepare' else 'encoding alone'}"
        rows.append(dict(name=name, memory_mib=found["memory_mib"], mb_per_s=megabytes / found["seconds"]))
    return rows


def sparse_tokens(work: Work, folder: Path) -> Path:
    "A token file of WINDOWS windows that takes no room on the disk"
    meta = load_sidecar(prepare_corpus(default_corpus(), work.config.vocab_size))
    path, count = folder / "large.bin", WINDOWS * work.config.context_length + 1
    with open(path, "wb") as file:
        file.truncate(2 * count)
    sidecar_path(path).write_text(json.dumps(meta | dict(count=count)), encoding="utf-8")
    return path


def endless(way: str, data: PretrainBinaryDataset, batch: int):
    "Batches, epoch after epoch"
    while True:
        yield from loader(data, batch, way)


def loaded(work: Work, folder: Path) -> tuple[list[dict], dict]:
    "Rows of the ways to load, and the figures"
    data = PretrainBinaryDataset(prepare_corpus(default_corpus(), work.config.vocab_size), work.config.context_length)
    runner = OurTrainer(work, **all_levers(work))
    runner.turn(4)
    streams = {way: endless(way, data, work.batch) for way in (OURS, THEIRS)}

    def turn(way):
        start = time.perf_counter()
        for _ in range(BATCHES):
            next(streams[way])
        return (time.perf_counter() - start) / BATCHES

    seconds = interleave({way: lambda way=way: turn(way) for way in streams} | dict(step=lambda: runner.turn(2)), work.rounds)
    large, rows, shares = sparse_tokens(work, folder), [], {}
    for way in streams:
        shares[way] = scaled(ratio(seconds[way], seconds["step"]), 100)
        memory = in_child("load", large, work.config.context_length, work.batch, way)["memory_mib"]
        rows.append(dict(name=way, ratio=ratio(seconds[THEIRS], seconds[way]), batch_ms=scaled(summary(seconds[way]), 1e3), percent_of_a_step=shares[way], memory_mib=memory))
    return rows, dict(load_share=shares[OURS], load_mib=rows[0]["memory_mib"])


def run(work: Work) -> dict:
    "Memory of preparing, time and memory of loading"
    if sys.platform != "linux":
        raise ValueError("bench data: reads /proc, so it needs Linux")
    with tempfile.TemporaryDirectory() as name:
        small, large, learnt = prepared(work, Path(name))
        loading, figures = loaded(work, Path(name))
    figures |= dict(prepare_mib=large["memory_mib"], prepare_growth_mib=large["memory_mib"] - small["memory_mib"])
    tables = [dict(title="Preparing text", rows=[small, large, learnt]), dict(title=f"Loading batches; memory at {WINDOWS:,} windows", base=THEIRS, rows=loading)]
    return dict(tables=tables, figures=figures, about=ABOUT)


if __name__ == "__main__":
    started = time.perf_counter()
    with PeakMemory() as memory:
        JOBS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(dict(memory_mib=memory.most, seconds=time.perf_counter() - started)))
