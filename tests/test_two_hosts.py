"""The main job over two hosts, the cable pulled, the job taken up again. Data and run folder are on one file system, as with NFS."""
import os
import re
import time
from types import SimpleNamespace

import pytest

from minigpt.pretrain_dataset import prepare_files
from minigpt.runlog import read_run
from test_pretrainer import alone, cli, texts  # noqa: F401  fixtures among them
from two_hosts import ADDRESSES, LINK, NAMES, ROOT, ip, on_hosts, processes, two_hosts, why_not

TIMEOUT = 10  # seconds until a collective gives up
JOB = "--n_layers 1 --emb_dim 32 --n_heads 2 --context_length 16 --warmup_steps 2 --sample_tokens 0 --log_every 1 --accumulate 2 --dtype float32".split()
JOB += "--max_steps 20 --save_steps 10".split()

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)


def static(port):
    return [[f"--node_rank={n}", f"--master_addr={ADDRESSES[0]}", f"--master_port={port}"] for n in range(2)]


def c10d(port):
    where = ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:{port}", "--rdzv_id=two-hosts"]
    return [[*where, f"--rdzv_conf=is_host={1 - n},read_timeout=5", f"--local-addr={ADDRESSES[n]}"] for n in range(2)]


def ends(started, limit):
    "Of each host: output, exit code and the seconds it took"
    begin, found = time.monotonic(), []
    for process in started:
        out = process.communicate(timeout=max(1, limit - (time.monotonic() - begin)))[0]
        found.append(SimpleNamespace(out=out, code=process.returncode, seconds=time.monotonic() - begin))
    return found


@pytest.fixture(scope="module")
def hosts():
    with two_hosts():
        yield


@pytest.fixture(scope="module")
def data(texts, tmp_path_factory):  # noqa: F811
    return prepare_files([texts], 300, tmp_path_factory.mktemp("shared"), progress=False)


@pytest.fixture(scope="module")
def one_host(data, tmp_path_factory):
    "One process with the joined batch"
    folder = tmp_path_factory.mktemp("one") / "run"
    assert cli("--dataset_path", data, *JOB, "--train_batch_size", 4, "--output_dir", folder) == 0
    return folder


@pytest.fixture(scope="module")
def cut_off(hosts, data, tmp_path_factory):
    "c10d rendezvous; the cable is pulled while all wait for rank 0 after step 10"
    place = tmp_path_factory.mktemp("two")
    folder, gate = place / "run", place / "gate"
    os.mkfifo(gate)
    words = [ROOT / "tests" / "two_hosts_job.py", "--dataset_path", data, *JOB, "--train_batch_size", 2, "--timeout", TIMEOUT, "--output_dir", folder]
    started = on_hosts(c10d(29401), [words, words], GATE=str(gate), GLOO_SOCKET_IFNAME=LINK)
    try:
        until = time.monotonic() + 100
        while True:  # rank 0 is at the gate once it can be opened without waiting for a reader
            try:
                opened = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
                break
            except OSError:
                assert time.monotonic() < until and all(process.poll() is None for process in started), ends(started, 1)
                time.sleep(0.02)
        while not (folder / "checkpoint-10.json").exists() and time.monotonic() < until:
            time.sleep(0.02)
        ip("-n", NAMES[1], "link", "set", LINK, "down")
        os.close(opened)
        found = ends(started, 60)
        left = [processes(name) for name in NAMES]
    finally:
        for process in started:
            process.kill()
        ip("-n", NAMES[1], "link", "set", LINK, "up")
    return SimpleNamespace(folder=folder, hosts=found, left=left)


@pytest.fixture(scope="module")
def taken_up(cut_off, data, tmp_path_factory):
    "Static address, no interface named; at the same time the self-test, for which the second host has other data"
    words = ["minigpt/pretrainer.py", "--dataset_path", data, *JOB, "--train_batch_size", 2, "--timeout", 60, "--output_dir", cut_off.folder]
    texts = [tmp_path_factory.mktemp(f"host{n}") / "x.txt" for n in range(2)]
    for n, text in enumerate(texts):
        text.write_text(f"data of host {n}")
    checks = [["-m", "minigpt.failure_lab", "check", "--timeout", 60, "--data", text] for text in texts]
    started = on_hosts(static(29402), [words, words]) + on_hosts(static(29403), checks)
    try:
        found = ends(started, 100)
    finally:
        for process in started:
            process.kill()
    return SimpleNamespace(job=found[:2], check=found[2:])


def steps(folder):
    return {event["step"]: event["train_loss"] for event in read_run(folder) if event.get("train_loss")}


def test_p12_t33_two_hosts_train_like_one(cut_off, taken_up, one_host):
    "By c10d until the cut, by static address after it: the losses of one process with the joined batch, accumulation counted over all hosts"
    assert [host.code for host in taken_up.job] == [0, 0], taken_up.job
    alone_, together = steps(one_host), steps(cut_off.folder)
    assert list(together) == list(alone_) == list(range(1, 21))
    assert list(together.values()) == pytest.approx(list(alone_.values()), abs=2e-4)
    assert "(global batch 8)" in taken_up.job[0].out and "2 processes x 2 micro-batches x 2 windows" in taken_up.job[0].out


def test_a_host_cut_off_ends_both_in_one_line_and_leaves_no_process(cut_off):
    "Within the time-out, and TCP's on the host that lost its store; the line says what to look at"
    for host in cut_off.hosts:
        own = [line for line in host.out.splitlines() if line.startswith("pretrainer.py:")]
        assert host.code == 1 and len(own) == 1 and "its machine is cut off" in own[0], host.out[-3000:]
    assert cut_off.hosts[0].seconds < TIMEOUT + 15
    assert cut_off.left == [[], []]


def test_the_cut_job_is_taken_up_from_its_checkpoint(cut_off, taken_up):
    assert [event["step"] for event in read_run(cut_off.folder) if event["event"] == "resume"] == [10]
    assert (cut_off.folder / "checkpoint-20.json").exists()


def test_p16_p18_without_a_named_interface_the_one_that_reaches_the_master_is_taken(taken_up):
    "The host name leads to 127.0.0.1 on both, as on Debian: gloo alone would listen there"
    for host in taken_up.check:
        assert f"GLOO_SOCKET_IFNAME={LINK}" in host.out, host.out[-3000:]


def test_p35_the_preflight_compares_nodes(taken_up):
    "They meet, with the same software; the data differ, and that is told by rank"
    for n, host in enumerate(taken_up.check):
        lines = [line.partition(f"node {n}: ")[2] for line in host.out.splitlines() if line.startswith(f"node {n}: ")]
        start = lambda words: next(line for line in lines if re.match(words, line))
        assert start("ok +ranks: 2 met") and start("ok +same torch: .* on 2 of 2") and start("ok +same minigpt: ") and start("ok +clock: ")
        assert re.search(r"rank 1 [0-9a-f]{16}; cure: ", start("warn +same data: ")), lines
        assert host.code == 1
