"""Faults that really happen: kills, signals, full and read-only disks, ranks that hang, losses that are no number.

Launches cost seconds of imports, so they run side by side; each waits for lines of its job, never for a time.
"""
import fcntl
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import minigpt.pretrainer as pretrainer
import minigpt.pretrainer_single as single
from minigpt.checkpoint import Checkpointer, damage
from minigpt.collectives import RankError, children, end_processes, launch_env, run_ranks
from minigpt.pretrainer_single import Trainer, unpatch
from test_collectives import none_left
from test_ddp import ONE_THREAD, free_ports, largest_difference
from test_pretrainer import ENTRY, ROOT, SMALL, alone, cli, events, texts, weights  # noqa: F401
from trainer_job import losses, make_trainer
from trainer_job import weights as weights_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and mounts of Linux")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"]
TOTAL = 160
JOB = [*SMALL, "--drop_rate", 0.2, "--train_batch_size", 4, "--eval_steps", 0, "--log_every", 1]


@pytest.fixture(autouse=True)
def plain_trainer():
    unpatch(Trainer)
    yield
    unpatch(Trainer)


def notes(trainer):
    return [event["text"] for event in trainer.events if event["event"] == "note"]


# ---- launches


class Launch:
    "A job whose lines are read as they come; a small pipe keeps it from running ahead of its reader"

    def __init__(self, command, beside=None, **env):
        self.lines = []
        if beside is None:
            read, self.write = os.pipe()
            fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 4096)
            self.out = open(read, encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            [str(c) for c in command], cwd=ROOT, env=launch_env(2, ONE_THREAD | env), stdin=subprocess.DEVNULL,
            stdout=self.write if beside is None else beside.write, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def until(self, pattern):
        "Read on to the line that says it; its match"
        for line in self.out:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern}:\n{self.text[-3000:]}")

    @property
    def text(self):
        return "".join(self.lines)

    def ranks(self):
        "rank -> process"
        found = {}
        for pid in children(self.process.pid):
            with suppress(OSError):  # it has ended
                variables = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
                if "RANK" in variables:
                    found.setdefault(int(variables["RANK"]), pid)  # what a rank starts itself comes later
        return found

    def end(self):
        "Exit code, once every line is read"
        os.close(self.write)
        self.lines += self.out
        return self.process.wait()


@contextmanager
def launched(command, **how):
    "A launch that is gone afterwards, whatever happens; watched by a clock"
    launch = Launch(command, **how)
    clock = threading.Timer(150, end_processes, [launch.process])
    clock.start()
    try:
        yield launch
    finally:
        clock.cancel()
        end_processes(launch.process)


def job(texts, folder, steps=TOTAL):
    return [ENTRY, "--dataset_path", texts, *JOB, "--max_steps", steps, "--save_steps", 20, "--output_dir", folder]


def two(*more):
    return [*TORCHRUN, "--standalone", "--nproc_per_node", 2, *more]


def whole(texts, folder):
    "Two ranks, uninterrupted"
    with launched([*two(), *job(texts, folder)]) as launch:
        return dict(code=launch.end(), text=launch.text)


def broken(texts, folder):
    "Rank 0, which saves, is killed; later rank 1 alone is asked to end; torchrun starts all again each time"
    with launched([*two("--max-restarts", 3), *job(texts, folder)]) as launch:
        launch.until("checkpoint-40.pth")
        ranks = launch.ranks()
        os.kill(ranks[0], signal.SIGKILL)
        launch.until("checkpoint-80.pth")
        os.kill(launch.ranks()[1], signal.SIGTERM)
        return dict(code=launch.end(), text=launch.text, pids=[*ranks.values()])


def preempted(texts, folder):
    "Rank 0 is asked to end, and is slow to say so"
    script = Path(__file__).with_name("stop_job.py")
    with launched([*two(script), *job(texts, folder, steps=100_000)[1:]]) as launch:
        launch.until("checkpoint-20.pth")
        os.kill(launch.ranks()[0], signal.SIGTERM)
        return dict(code=launch.end(), text=launch.text)


def terminated(texts, folder):
    "torchrun is asked to end"
    with launched([*two(), *job(texts, folder, steps=100_000)]) as launch:
        launch.until("checkpoint-40.pth")
        ranks = launch.ranks()
        launch.process.send_signal(signal.SIGTERM)
        return dict(code=launch.end(), text=launch.text, pids=[*ranks.values()])


def elastic(texts, folder):
    "One or two machines: the second is lost with its rank, then another one joins; all are asked to end"
    port = free_ports(1)[0]

    def agent(is_host, beside=None):
        where = ["--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 3, "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d"]
        conf = f"is_host={is_host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
        where += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf]
        return launched([*TORCHRUN, *where, *job(texts, folder, steps=100_000)], beside=beside)

    told = {}
    with agent(1) as first:
        with agent(0, beside=first) as second:
            first.until("checkpoint-40.pth")
            ranks = second.ranks()
            for pid in (second.process.pid, *ranks.values()):
                os.kill(pid, signal.SIGKILL)
            told["alone"] = int(first.until(r"resume from: .*checkpoint-(\d+)")[1])
            first.until("processes 2 before, 1 now")
            first.until("save checkpoint")
        with agent(0, beside=first) as third:
            told["stopped"] = int(first.until(r"stopped by SIGTERM after step (\d+)")[1])
            told["joined"] = int(first.until(r"resume from: .*checkpoint-(\d+)")[1])
            first.until("processes 1 before, 2 now")
            first.until("save checkpoint")
            pids = [pid for launch in (first, third) for pid in launch.ranks().values()]
            for launch in (first, third):
                launch.process.send_signal(signal.SIGTERM)
            told["code"] = first.end()
            third.process.wait()
    return told | dict(text=first.text, pids=pids)


def lame(texts, folder):
    "The error of a launch in which rank 1 does what the folder's name says"
    folder.mkdir()
    with pytest.raises(RankError) as failure:
        run_ranks(Path(__file__).with_name("fault_job.py"), 2, args=[folder, folder.name], env=ONE_THREAD, stream=False, timeout=120)
    return failure.value


def swept(texts, folder):
    "Twenty kills, of one process and of groups of two; the sweep itself raises where anything was lost"
    command = [sys.executable, ROOT / "bench" / "kill_sweep.py", "--kills", "20", "--seed", "1"]
    done = subprocess.run(command, env=launch_env(1, ONE_THREAD), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


SCENARIOS = dict(elastic=elastic, broken=broken, whole=whole, preempted=preempted, terminated=terminated, hangs=lame, leaves=lame, swept=swept)


@pytest.fixture(scope="module")
def launches(texts, tmp_path_factory):
    "name -> (folder, what came of it); all run side by side: while one waits for a time-out, the others import"
    folder = tmp_path_factory.mktemp("launches")
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        running = {name: pool.submit(scenario, texts, folder / name) for name, scenario in SCENARIOS.items()}
    return lambda name: (folder / name, running[name].result())


def test_a_killed_rank_is_restarted_and_the_end_is_the_same(launches):
    "torchrun --max-restarts=3: from the newest checkpoint, and to the bit where the uninterrupted run ends"
    folder, told = launches("broken")
    assert told["code"] == 0, told["text"][-3000:]
    assert 40 <= events(folder, "resume")[0]["step"] < 80 and none_left(told["pids"])
    assert launches("whole")[1]["code"] == 0
    assert largest_difference(weights(launches("whole")[0], TOTAL), weights(folder, TOTAL)) == 0


def test_one_preempted_rank_stops_all_at_its_step(launches):
    "with a checkpoint of that very step, from which all go on"
    folder, told = launches("broken")
    step, = re.findall(r"stopped by SIGTERM after step (\d+) of", told["text"])
    assert [event["step"] for event in events(folder, "resume")][1:] == [int(step)] and int(step) >= 80
    assert "Traceback" not in told["text"]


def test_a_rank_that_leaves_does_not_cut_short_what_rank_0_says(launches):
    "torchrun asks all to end once one has left; rank 0 says where it was stopped all the same"
    folder, told = launches("preempted")
    step, = re.findall(r"stopped by SIGTERM after step (\d+) of 100000; the same command", told["text"])
    assert told["code"] != 0 and Checkpointer(folder).newest()[0].name == f"checkpoint-{step}.pth"


def test_sigterm_to_torchrun_stops_all_ranks_with_one_checkpoint(launches):
    folder, told = launches("terminated")
    step, = re.findall(r"stopped by SIGTERM after step (\d+) of 100000; the same command", told["text"])
    assert told["code"] != 0 and none_left(told["pids"]), told["text"][-3000:]
    assert Checkpointer(folder).newest() == (folder / f"checkpoint-{step}.pth", [])
    assert told["text"].count(f"checkpoint-{step}.pth\n") == 2  # saved, and where to go on from


def test_an_elastic_job_goes_on_when_a_machine_is_lost_and_when_one_joins(launches):
    _, told = launches("elastic")
    assert told["alone"] >= 40 and told["joined"] == told["stopped"] > told["alone"]
    assert told["code"] != 0 and none_left(told["pids"])


# ---- one process and signals


def test_sigterm_ends_one_process_at_its_step_and_the_rest_is_the_same(texts, tmp_path):
    with launched([sys.executable, *job(texts, tmp_path / "run")]) as launch:
        launch.until("checkpoint-40.pth")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.end() == 143
    step, = re.findall(r"stopped by SIGTERM after step (\d+) of", launch.text)
    assert Checkpointer(tmp_path / "run").newest()[0].name == f"checkpoint-{step}.pth" and 40 < int(step) < TOTAL
    for folder in ("run", "whole"):
        assert cli(*job(texts, tmp_path / folder)[1:]) == 0
    assert largest_difference(weights(tmp_path / "whole", TOTAL), weights(tmp_path / "run", TOTAL)) == 0


STUCK = """
import runpy, sys, threading
import minigpt.checkpoint as checkpoint, minigpt.pretrainer_single as single
write, stop = checkpoint.Checkpointer.write, single.Trainer.stop
def slow(self, state):
    if state["step"] < 4: return write(self, state)
    print("a write that does not end", flush=True)
    threading.Event().wait()
def told(self, signum):
    stop(self, signum)
    print("asked to end", flush=True)
checkpoint.Checkpointer.write, single.Trainer.stop = slow, told
runpy.run_module("minigpt.pretrainer", run_name="__main__")
"""


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(signum, code, texts, tmp_path):
    "also while a write is under way; the last checkpoint is whole"
    options = ["--dataset_path", texts, *SMALL, "--max_steps", 100_000, "--save_steps", 2, "--output_dir", tmp_path / "run"]
    with launched([sys.executable, "-c", STUCK, *options]) as launch:
        launch.until("a write that does not end")
        launch.process.send_signal(signum)
        launch.until("asked to end")
        launch.process.send_signal(signum)
        assert launch.end() == code
    assert re.search(r"pretrainer\.py: interrupted; the same command with --output_dir \S+ goes on from checkpoint-2\.pth\n$", launch.text)
    assert "Traceback" not in launch.text and Checkpointer(tmp_path / "run").newest() == (tmp_path / "run" / "checkpoint-2.pth", [])


# ---- disks


@contextmanager
def small_disk(folder, size="1m"):
    "A file system of its own"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def at_steps(trainer, **actions):
    "Do something in a step, once what is being written is whole: at_steps(trainer, step_3=...)"
    plain = trainer.optimizer_step

    def optimizer_step():
        plain()
        if action := actions.get(f"step_{trainer.step + 1}"):
            trainer.report_saved(wait=True)
            action()

    trainer.optimizer_step = optimizer_step


def fill(folder):
    "Until nothing more goes in"
    with open(folder / "junk", "wb", buffering=0) as file:
        try:
            while file.write(b"0" * 4096):
                pass
        except OSError:
            pass


def test_a_full_disk_costs_a_checkpoint_not_the_run(tmp_path):
    "one line that names the file and the last whole one; when there is room again, saving goes on"
    with small_disk(tmp_path / "disk") as disk:
        trainer = make_trainer(disk, train_batch_size=4, max_steps=10, save_steps=2)
        at_steps(trainer, step_3=lambda: fill(disk), step_7=(disk / "junk").unlink)
        trainer.train()
        assert [event["step"] for event in trainer.events if event["event"] == "save"] == [2, 8, 10]
        assert len(notes(trainer)) == 2 and all(re.fullmatch(r"checkpoint not written: .*No space left.*checkpoint-[46]\.pth.*; the last whole one is .*checkpoint-2\.pth; training goes on", note) for note in notes(trainer)), notes(trainer)
        assert not any(damage(path) for path in disk.glob("*.pth")) and not [*disk.glob("*.tmp")]


def test_a_last_checkpoint_that_finds_no_room_is_an_error(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        trainer = make_trainer(disk, train_batch_size=4, max_steps=4, save_steps=2)
        at_steps(trainer, step_3=lambda: fill(disk))
        with pytest.raises(OSError, match="No space left.*checkpoint-4.pth"):
            trainer.train()
        assert trainer.checkpointer.newest() == (disk / "checkpoint-2.pth", [])


def test_files_that_may_not_grow(texts, tmp_path, capsys):
    "as a full disk, for any user: told once, exit code 1 where the end is not saved, then the same command goes on"
    command = ["--dataset_path", texts, *SMALL, "--save_steps", 2, "--output_dir", tmp_path / "run"]
    assert cli(*command, "--max_steps", 2) == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "run" / "checkpoint-2.pth").stat().st_size
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        code = cli(*command, "--max_steps", 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    assert code == 1 and len(err.splitlines()) == 1 and "checkpoint-6.pth: File too large" in err
    assert len(re.findall(r"note: checkpoint not written: .*checkpoint-4\.pth.*checkpoint-2\.pth; training goes on", out)) == 1
    assert Checkpointer(tmp_path / "run").newest() == (tmp_path / "run" / "checkpoint-2.pth", [])
    assert cli(*command, "--max_steps", 6) == 0 and events(tmp_path / "run", "resume")[-1]["step"] == 2


def test_a_disk_that_becomes_read_only(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        trainer = make_trainer(disk, train_batch_size=4, max_steps=5, save_steps=2)
        at_steps(trainer, step_3=lambda: subprocess.run(["mount", "-o", "remount,ro", disk], check=True))
        with pytest.raises(OSError, match="Read-only file system.*checkpoint-5.pth"):
            trainer.train()
        assert "checkpoint-4.pth" in notes(trainer)[0] and trainer.checkpointer.newest() == (disk / "checkpoint-2.pth", [])


def test_a_read_only_folder_is_refused_before_the_first_step(texts, tmp_path, capsys):
    with small_disk(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--output_dir", disk / "run") == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and "Read-only file system" in err and str(disk) in err


def test_a_folder_that_is_removed_comes_back_with_the_next_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path / "run", train_batch_size=4, max_steps=6, save_steps=2)
    at_steps(trainer, step_3=lambda: shutil.rmtree(tmp_path / "run"))
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").glob("*.pth")) == ["checkpoint-4.pth", "checkpoint-6.pth"]
    assert trainer.checkpointer.newest() == (tmp_path / "run" / "checkpoint-6.pth", [])


# ---- ranks


@pytest.mark.parametrize("kind, said", [("hangs", "Timed out waiting 8000ms"), ("leaves", "[Cc]onnection (closed|reset)")])
def test_a_rank_that_hangs_or_leaves_ends_the_job(kind, said, launches):
    "by the group's time-out, or at once: an error, no process left, the last checkpoint whole"
    folder, error = launches(kind)
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    assert error.rank == 0 and re.search(said, str(error)), str(error)
    assert error.log.count("Traceback (most recent call last)") == 1
    assert len(pids) == 2 and none_left(pids)
    assert Checkpointer(folder).newest() == (folder / "checkpoint-2.pth", [])


# ---- kills


def test_c01_after_every_kill_the_run_goes_on_from_the_newest_whole_checkpoint(launches):
    "C01: inside saving and between, at stages that were drawn; 200 of them: python bench/kill_sweep.py"
    _, swept = launches("swept")
    assert sum(swept["kills"].values()) == 20 and len(swept["kills"]) >= 8 and swept["kills"]["step"] < 15
    assert swept["torn files"] > 0 and len(swept["resumed from"]) >= 3
    assert swept["slowest survivor, s"] < 30


# ---- losses that are no number


def with_infinity_at(trainer, *steps):
    "The loss of these updates is infinite"
    plain = trainer.backward
    trainer.backward = lambda loss: plain(loss * (math.inf if trainer.step + 1 in steps else 1))
    return trainer


def test_t07_skipped_updates_are_counted_and_the_rest_goes_on(tmp_path):
    "T07: one infinite loss leaves one update out; the run and its checkpoint count it"
    trainer = with_infinity_at(make_trainer(tmp_path, train_batch_size=4, max_steps=6, on_nan="skip"), 3)
    trainer.train()
    assert notes(trainer) == ["step 3: gradient norm is nan; update left out, 1 so far"]
    assert trainer.step == 6 and all(math.isfinite(loss) for loss in losses(trainer.events))
    assert all(value.isfinite().all() for value in weights_of(trainer).values())
    assert torch.load(tmp_path / "checkpoint-6.pth")["skipped_steps"] == 1
    rest = with_infinity_at(make_trainer(tmp_path, train_batch_size=4, max_steps=8, on_nan="skip", resume="auto"), 7)
    rest.train()
    assert "2 so far" in notes(rest)[-1] and rest.skipped_steps == 2


def test_t07_an_interval_without_an_update(tmp_path):
    "T07: infinite losses in both steps of the second record, which has no loss then, and in one of the third, which has the other's"
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=6, log_every=2, eval_steps=0, on_nan="skip")
    plain = single.token_loss
    with pytest.MonkeyPatch.context() as m:
        m.setattr(single, "token_loss", lambda logits, y: ((loss := plain(logits, y))[0] * (math.inf if trainer.step in (2, 3, 5) else 1), loss[1]))
        trainer.train()
    assert trainer.skipped_steps == 3 == len(notes(trainer)) and [math.isfinite(loss) for loss in losses(trainer.events)] == [True, False, True]


def test_t07_stop_is_the_default_and_names_step_checkpoint_and_causes(tmp_path):
    "T07"
    trainer = with_infinity_at(make_trainer(tmp_path, train_batch_size=4, max_steps=6, save_steps=2), 5)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    line = str(error.value)
    assert "step 5: gradient norm is nan" in line and "last checkpoint: " in line and "checkpoint-4.pth" in line
    assert all(cause in line for cause in ("--learning_rate", "warm-up", "--clip", "--on_nan skip")) and "\n" not in line


# ---- the environment


def test_a_port_in_use_is_one_line(texts, tmp_path, monkeypatch, capsys):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
            monkeypatch.setenv(name, str(value))
        assert cli("--dataset_path", texts, *SMALL, "--max_steps", 2, "--output_dir", tmp_path / "run") == 2
    err = capsys.readouterr().err.splitlines()
    assert len([line for line in err if line.startswith("pretrainer.py:")]) == 1 and f"MASTER_PORT {port}" in err[-1] and "in use" in err[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, starter", pretrainer.STARTERS.items())
def test_copies_that_do_not_know_of_each_other_are_refused(name, starter, texts, tmp_path, monkeypatch, capsys):
    "a plain `srun python pretrainer.py` would train the same thing N times into one folder"
    monkeypatch.setenv(name, "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 1, "--output_dir", tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and all(word in err for word in (starter, "4 copies", name, "torchrun", "--strategy single"))
    choose = pretrainer.choose_strategy
    assert choose("single", {name: "4"}) == "single" and choose("auto", {name: "1"}) == "single" and choose("auto", {name: "2", "RANK": "0"}) == "ddp"
    assert choose("auto", dict(SLURM_NTASKS="4")) == "single"  # the shell of an allocation, which runs one copy


def test_restarts_need_a_folder_to_find_again(texts, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert cli("--dataset_path", texts, *SMALL, "--max_steps", 1) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "--output_dir" in err and "--max-restarts" in err
