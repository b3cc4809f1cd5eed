"""run_ranks and what it promises, by real launches: each costs seconds of imports, so several cases share one."""
import io, os, signal, subprocess, sys, textwrap, threading, time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import minigpt.collectives as c

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

def script(folder, body, name="job.py"):
    "A file for run_ranks that joins the group, then runs `body` with rank and world at hand"
    head = """
        import os, signal, sys, time
        import torch, torch.distributed as dist
        import minigpt.collectives as c
        torch.set_num_threads(1)
        def note(name): open(os.path.join(sys.argv[1], f"{name}-{rank}"), "w").write(str(os.getpid()))
        with c.process_group(timeout=30) as (rank, world):
    """
    path = Path(folder) / name
    path.write_text(textwrap.dedent(head).strip() + "\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n", encoding="utf-8")
    return path

def alive(pid):
    "Is there such a process, not counting one that has ended and waits for its parent?"
    try: os.kill(pid, 0)
    except ProcessLookupError: return False
    stat = Path(f"/proc/{pid}/stat")
    try: return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError: return False

def pids(folder, name): return [int(text) for p in Path(folder).glob(f"{name}-*") if (text := p.read_text())]

def none_left(started, seconds=10):
    "All processes gone within `seconds`"
    until = time.monotonic() + seconds
    while any(map(alive, started)) and time.monotonic() < until: time.sleep(0.1)
    return not any(map(alive, started))


def together(*launches):
    "Run these at once: while one imports, the other can, too"
    threads = [threading.Thread(target=launch) for launch in launches]
    for t in threads: t.start()
    for t in threads: t.join()

def may_rename_host():
    "Have we the right to give a process another host name, in a namespace of its own?"
    try: return subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
    except OSError: return False

def under_a_host_name_that_does_not_resolve(command):
    return ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh", *command]

@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory):
    """Two launches at once, with a foreign torchrun first on PATH and a patch made in this process only:
    a script, and the module itself, this one under a host name that does not resolve"""
    folder, logs = tmp_path_factory.mktemp("ok"), {}
    job = script(folder, """
        x = torch.tensor([rank + 1.0]); dist.all_reduce(x)
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "LOCAL_RANK")
        print(f"sum={x.item():g} world={world} 你好 args={sys.argv[2:]}", *(f"{n}={os.environ[n]}" for n in names))
        print(f"patched={hasattr(c, 'patched_in_parent')} python={sys.executable}")
        print("to stderr", file=sys.stderr)
        if rank == 1: sys.exit(0)
    """)
    fake = folder / "bin"; fake.mkdir()
    (fake / "torchrun").write_text("#!/bin/sh\necho fake torchrun; exit 3\n"); (fake / "torchrun").chmod(0o755)
    def launch_command(target, *how, launch_command=c.launch_command, rename=may_rename_host()):
        command = launch_command(target, *how)
        return under_a_host_name_that_does_not_resolve(command) if rename and target == "minigpt.collectives" else command
    def script_job(): logs["script"] = c.run_ranks(job, 2, args=[folder, "a", 7], env={"CUDA_VISIBLE_DEVICES": "1,0"})
    def module_job(): logs["module"] = c.run_ranks("minigpt.collectives", 2, stream=False)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as m, redirect_stdout(shown):
        m.setenv("PATH", str(fake) + os.pathsep + os.environ["PATH"])
        m.delenv("OMP_NUM_THREADS", raising=False)
        m.setattr(c, "patched_in_parent", True, raising=False)
        m.setattr(c, "launch_command", launch_command)
        together(script_job, module_job)
    return logs, shown.getvalue()

def test_p12_p15_two_launches_at_once_both_run(two_jobs):
    "P12, P15: free ports, no collision"
    logs, _ = two_jobs
    assert set(logs) == {"script", "module"} and all(len(each) == 2 for each in logs.values())
    assert all("sum=3 world=2 你好" in log and "args=['a', '7']" in log for log in logs["script"])
    assert all("sum 3 (expected 3)" in log and f"rank {rank} of 2" in log for rank, log in enumerate(logs["module"]))

def test_p21_this_interpreter_not_the_torchrun_on_path(two_jobs):
    "P21: sys.executable -m torch.distributed.run"
    assert all(f"python={sys.executable}" in log for log in two_jobs[0]["script"])

def test_p25_threads_shared_and_no_banner(two_jobs):
    "P25: OMP_NUM_THREADS is cores / processes, so torchrun prints no banner"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert all(f"OMP_NUM_THREADS={max(1, cores // 2)}" in log and "Setting OMP" not in log for log in two_jobs[0]["script"])

def test_p26_group_left_on_every_path(two_jobs):
    "P26: normal end and early exit of one rank leave no warning"
    assert not any("destroy_process_group" in log for log in two_jobs[0]["script"])

def test_n05_cards_chosen_before_the_process_starts(two_jobs):
    "N05: env= reaches the ranks before any CUDA call of theirs"
    assert all("CUDA_VISIBLE_DEVICES=1,0" in log for log in two_jobs[0]["script"])

def test_n08_patches_of_the_page_are_not_in_the_ranks(two_jobs):
    "N08: a patch made in this process does not exist in a rank"
    assert all("patched=False" in log for log in two_jobs[0]["script"])

def test_stream_shows_rank_0_once_and_logs_keep_both_streams(two_jobs):
    logs, shown = two_jobs
    assert shown.count("sum=3") == 1 and "LOCAL_RANK=0" in shown and "to stderr" not in shown
    assert all("to stderr" in log and f"LOCAL_RANK={rank}" in log for rank, log in enumerate(logs["script"]))


@pytest.fixture(scope="module")
def two_failures(tmp_path_factory):
    "Two launches at once in which rank 1 fails, by an error of its own and by a signal: name -> RankError, and the ranks' pids"
    folders, errors = {name: tmp_path_factory.mktemp(name) for name in ("raises", "killed")}, {}
    ways = dict(raises='raise ValueError("bad batch at step 3")', killed="os.kill(os.getpid(), signal.SIGKILL)")
    def launch(name):
        job = script(folders[name], f"""
            note("rank")
            if rank == 1: {ways[name]}
            dist.all_reduce(torch.ones(1))
        """)
        with pytest.raises(c.RankError) as e: c.run_ranks(job, 2, args=[folders[name]], timeout=60, stream=False)
        errors[name] = e.value
    together(lambda: launch("raises"), *[lambda: launch("killed")] * (sys.platform != "win32"))
    return errors, {name: pids(folder, "rank") for name, folder in folders.items()}

def test_p06_first_failing_ranks_own_error(two_failures):
    "P06, P26: rank 1 raises, rank 0 only sees the connection go"
    error, started = two_failures[0]["raises"], two_failures[1]["raises"]
    assert str(error) == "rank 1: ValueError: bad batch at step 3" and error.rank == 1
    assert error.log.count("ValueError: bad batch") == 1 and "Connection closed" not in error.log
    assert len(error.logs) == 2 and not any("destroy_process_group" in log for log in error.logs)
    assert len(started) == 2 and none_left(started)

def test_each_groups_prefix_goes(tmp_path):
    "torch puts `[rank1]: ` before a traceback once for every group that the process has made"
    path = tmp_path / "none" / "attempt_0" / "1" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text("[rank1]: [rank1]: Traceback (most recent call last):\n[rank1]: [rank1]:   File x\n[rank1]: [rank1]: ValueError: bad\n")
    assert c._own_error(c.read_stream(tmp_path, 1, "stderr")) == "ValueError: bad"

@posix
def test_a_killed_rank_is_named_with_its_signal(two_failures):
    "As the system does when memory runs out"
    error, started = two_failures[0]["killed"], two_failures[1]["killed"]
    assert str(error).startswith("rank 1: ended by SIGKILL") and error.rank == 1
    assert len(started) == 2 and none_left(started)

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "A page whose ranks never end (they need no torch, so they start soon), in a process of its own: for Ctrl-C"
    folder = tmp_path_factory.mktemp("page")
    job = folder / "sleep.py"
    job.write_text("import os, sys, time\nopen(f\"{sys.argv[1]}/rank-{os.environ['RANK']}\", 'w').write(str(os.getpid()))\ntime.sleep(300)\n")
    code = f"import minigpt.collectives as c; c.run_ranks({str(job)!r}, 2, args=[{str(folder)!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process, folder
        if process.poll() is None:
            for pid in [*c.children(process.pid), process.pid]: os.kill(pid, signal.SIGKILL)

@posix
def test_time_out_tells_where_each_rank_stood_and_leaves_no_orphan(tmp_path, monkeypatch, page):
    "The time-out starts to count when both ranks are where they hang, so that a busy machine changes nothing (`page` starts meanwhile)"
    def follow(launcher, log_dir, timeout, stream, follow=c.follow):
        until = time.monotonic() + 60
        while len(pids(tmp_path, "rank")) < 3 and time.monotonic() < until: time.sleep(0.1)
        return follow(launcher, log_dir, timeout, stream)
    monkeypatch.setattr(c, "follow", follow)
    job = script(tmp_path, """
        if rank == 1: child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300"); open(f"{sys.argv[1]}/rank-child", "w").write(str(child))
        note("rank")
        if rank == 1: time.sleep(300)
        dist.all_reduce(torch.ones(1))
    """)
    with pytest.raises(c.RankError, match="not ended after 1 s") as e: c.run_ranks(job, 2, args=[tmp_path], timeout=1, stream=False)
    lines = job.read_text().splitlines()
    place = lambda text: next(n for n, line in enumerate(lines, 1) if text in line)
    assert f"rank 0 stood at job.py line {place('dist.all_reduce')}" in str(e.value)
    assert f"rank 1 stood at job.py line {place('time.sleep(300)')}" in str(e.value)
    assert e.value.rank is None and len(pids(tmp_path, "rank")) == 3 and none_left(pids(tmp_path, "rank"))

@posix
def test_p28_interrupt_twice_leaves_no_process(page):
    "P28: Ctrl-C on the page, and again during the clean-up"
    process, folder = page
    until = time.monotonic() + 60
    while len(pids(folder, "rank")) < 2 and time.monotonic() < until: time.sleep(0.1)
    started = pids(folder, "rank") + c.children(process.pid)
    process.send_signal(signal.SIGINT); time.sleep(0.2); process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert len(started) >= 5 and none_left(started)

def test_p16_p18_host_name_that_does_not_resolve(two_jobs):
    "P16, P18: ranks of one machine meet on the loopback interface whatever the host is called"
    if not may_rename_host(): pytest.skip("needs the right to rename the host in a namespace")
    assert all("host no-such-host.invalid" in log and "sum 3 (expected 3)" in log for log in two_jobs[0]["module"])


def test_p20_windows_switches_libuv_off():
    "P20: mocked platform"
    assert c.launch_env(2, platform="win32")["USE_LIBUV"] == "0"
    assert "USE_LIBUV" not in c.launch_env(2, platform="linux") or "USE_LIBUV" in os.environ

def test_launch_env_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5"); monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    env = c.launch_env(64, env={"EXTRA": "1"}, platform="linux")
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"], env["EXTRA"]) == ("5", "eth7", "1")
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"

def test_n01_n02_function_of_a_page_is_refused_and_nothing_forks():
    "N01, N02: the reason is told at once; a launch is a new interpreter, never a fork of this one"
    def hello(): pass
    with pytest.raises(ValueError, match="hello is a function of this page"): c.run_ranks(hello)
    assert c.launch_command("minigpt.collectives", 2, (), ".")[:3] == [sys.executable, "-m", "torch.distributed.run"]

@pytest.mark.parametrize("target, nproc, error, words", [
    ("nope.py", 2, FileNotFoundError, "nope.py: no such file"),
    ("minigpt.nope", 2, ValueError, "minigpt.nope: no module"),
    ("nopackage.nope", 2, ValueError, "nopackage.nope: no module"),
    ("minigpt.collectives", 0, ValueError, "nproc=0"),
])
def test_bad_launches_are_one_line(target, nproc, error, words):
    with pytest.raises(error, match=words) as e: c.run_ranks(target, nproc)
    assert "\n" not in str(e.value)

def test_p30_rank_variables_all_none_or_named():
    "P30: none = single process; a part = immediate message with the missing names"
    assert c.rank_env({}) is None and c.rank_env({"MASTER_ADDR": "x"}) is None
    with pytest.raises(ValueError, match="^RANK set but LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"): c.rank_env({"RANK": "0"})
    full = dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="1")
    assert c.rank_env(full) == dict(rank=3, local_rank=1, world_size=4)
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT missing"): c.rank_env(dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"))
    with pytest.raises(ValueError, match="RANK=4 does not fit WORLD_SIZE=4"): c.rank_env({**full, "RANK": "4"})

def test_p30_plain_python_is_one_process(capsys):
    "P30: the module without a launcher"
    c.main([])
    assert "rank 0 of 1" in capsys.readouterr().out and not c.dist.is_initialized()

TRACE = "Traceback (most recent call last):\n  File \"x.py\", line 1\n    boom\n{}\n"
@pytest.mark.parametrize("errors, codes, expected", [
    ([TRACE.format("RuntimeError: Connection closed by peer [127.0.0.1]:1"), TRACE.format("KeyError: 'x'\nnote")], {0: 1, 1: -15}, (1, "KeyError: 'x'")),
    ([TRACE.format("KeyError: 'a'"), TRACE.format("KeyError: 'b'")], {0: 1, 1: 1}, (0, "KeyError: 'a'")),
    (["", "usage: x\nx.py: error: bad flag\n"], {0: -15, 1: 2}, (1, "x.py: error: bad flag")),
    (["a warning\n", ""], {0: -15, 1: -11}, (1, "ended by SIGSEGV")),
    (["", ""], {1: 7}, (1, "exit code 7")),
    ([TRACE.format("OSError: handled and logged"), TRACE.format("KeyError: 'x'")], {0: -15, 1: 1}, (1, "KeyError: 'x'")),
    ([TRACE.format("OSError: handled and logged"), TRACE.format("KeyError: 'x'")], {1: 1}, (1, "KeyError: 'x'")),
    (["", TRACE.format("KeyError: 'x'")], {0: -9, 1: 1}, (1, "KeyError: 'x'")),
    ([TRACE.format("RuntimeError: Timed out waiting 5000ms for recv"), ""], {0: 1, 1: -15}, (0, "RuntimeError: Timed out waiting 5000ms for recv")),
    (["", TRACE.format("RuntimeError: Connection closed by peer")], {0: -15, 1: 1}, (0, "ended by SIGTERM")),
    ([TRACE.format("ValueError: inner") + "\nDuring handling:\n\n" + TRACE.format("OSError: outer"), ""], {0: 1}, (0, "OSError: outer")),
])
@posix
def test_p06_who_failed_first(errors, codes, expected):
    "P06: by message, exit code and time of the last write"
    assert c.first_failure(errors, [1.0, 2.0], codes) == expected
