"""run_ranks and what it promises, by real launches: each costs seconds of imports, so several cases share one."""
import io, json, multiprocessing, os, re, signal, subprocess, sys, textwrap, threading, time
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import pytest, torch
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
    "Have we the right to give a process another host name and hosts file, in namespaces of its own?"
    try: return subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode == 0
    except OSError: return False

def under_a_host_name_that_does_not_resolve(command, hosts):
    "... and with a localhost that is IPv6 only"
    hosts.write_text("::1 localhost\n")
    rename = 'mount --bind "$0" /etc/hosts && hostname no-such-host.invalid && exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-c", rename, hosts, *command]

@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory):
    """Two launches at once, with a foreign torchrun first on PATH, variables of other launches in the environment and a patch
    made in this process only: a script, and the module itself, this one under a host name that does not resolve"""
    folder, logs = tmp_path_factory.mktemp("ok"), {}
    job = script(folder, """
        x = torch.tensor([rank + 1.0]); dist.all_reduce(x)
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "LOCAL_RANK")
        print(f"sum={x.item():g} world={world} 你好 args={sys.argv[2:]}", *(f"{n}={os.environ[n]}" for n in names))
        print(f"patched={hasattr(c, 'patched_in_parent')} python={sys.executable}")
        print("to stderr", file=sys.stderr)
        for step in range(1, 4): print(f"\\rbar {step}/3", end="" if step < 3 else "\\n", file=sys.stderr, flush=True); time.sleep(0.2)
        print("\\rplain bar 1/2", end=""); print("\\rplain bar 2/2")
        if rank == 1: sys.exit(0)
    """)
    fake = folder / "bin"; fake.mkdir()
    (fake / "torchrun").write_text("#!/bin/sh\necho fake torchrun; exit 3\n"); (fake / "torchrun").chmod(0o755)
    def launch_command(target, *how, launch_command=c.launch_command, rename=may_rename_host()):
        command = launch_command(target, *how)
        return under_a_host_name_that_does_not_resolve(command, folder / "hosts") if rename and target == "minigpt.collectives" else command
    def script_job(): logs["script"] = c.run_ranks(job, 2, args=[folder, "a", 7], env={"CUDA_VISIBLE_DEVICES": "1,0"})
    def module_job(): logs["module"] = c.run_ranks("minigpt.collectives", 2, stream=False)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as m, redirect_stdout(shown):
        m.setenv("PATH", str(fake) + os.pathsep + os.environ["PATH"])
        for name, value in dict(OMP_NUM_THREADS="abc", MASTER_ADDR="no-such-host.invalid", MASTER_PORT="1", RANK="7", WORLD_SIZE="99", LOCAL_RANK="x",
                                PET_NNODES="2", PET_MASTER_PORT="1", GLOO_SOCKET_IFNAME="").items(): m.setenv(name, value)
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

def test_progress_bars_are_shown_and_leave_their_last_state(two_jobs):
    "A bar on the error stream is shown as well; what redraws a line must not fill the logs"
    logs, shown = two_jobs
    assert "\rbar 3/3\n" in shown and "\rplain bar 2/2" in shown
    assert all("\nbar 3/3\n" in log and "\nplain bar 2/2\n" in log and "bar 1/" not in log and "\r" not in log for log in logs["script"])

def test_left_over_variables_of_other_launches_change_nothing(two_jobs):
    "MASTER_PORT, RANK and PET_NNODES of the fixture: PET_ are torchrun's own options, as Kubernetes sets them"
    assert all("world=2" in log and "MASTER_ADDR=127.0.0.1" in log and "Invalid value" not in log for log in two_jobs[0]["script"])


@pytest.fixture(scope="module")
def two_failures(tmp_path_factory):
    "Two launches at once in which rank 1 fails, by an error of its own and by a signal: name -> RankError, and the ranks' pids"
    folders, errors = {name: tmp_path_factory.mktemp(name) for name in ("raises", "killed")}, {}
    ways = dict(raises='raise ValueError("bad batch at step 3")', killed="os.kill(os.getpid(), signal.SIGKILL)")
    def launch(name):
        job = script(folders[name], f"""
            note("rank")
            dist.barrier()
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

@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_of_the_group_outlives_it(tmp_path):
    "One that does may touch Python while that ends: a rank that has done its work then ends by SIGABRT, now and then"
    body = """
        def step():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
            torch.optim.AdamW(model.parameters()).step()  # imports half of torch
        step()
        def threads(): return [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
        during = any("gloo" in name for name in threads())
    """
    path = script(tmp_path, body)
    path.write_text(path.read_text() + 'print("during", during, "after", [name for name in threads() if "gloo" in name])\n')
    assert all("during True after []" in log for log in c.run_ranks(path, stream=False))

def test_each_groups_prefix_goes(tmp_path):
    "torch puts `[rank1]: ` before a traceback once for every group that the process has made"
    path = tmp_path / "none" / "attempt_0" / "1" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text("[rank1]: [rank1]: Traceback (most recent call last):\n[rank1]: [rank1]:   File x\n[rank1]: [rank1]: ValueError: bad\n")
    assert c._own_error(c.read_stream(tmp_path, 1, "stderr")) == "ValueError: bad"

def test_a_folder_of_the_users_called_torch_is_no_library():
    "The innermost line that is neither torch's nor Python's"
    frame = '  File "{}", line {} in {}\n'
    own, libraries = "/home/me/torch/train.py", (torch.distributed.__file__, os.__file__, "<frozen runpy>")
    stack = "Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
    stack += "".join(frame.format(file, 1, "f") for file in libraries)
    assert c._where_it_stands(stack) == "an unknown place"
    assert c._where_it_stands(stack + frame.format(own, 7, "main")) == "train.py line 7 in main"

def test_spawn_of_the_page_ends_a_child_that_hangs_and_reads_an_empty_log(tmp_path, monkeypatch):
    "The cell of chapter 08: a child that says nothing, and one that never ends"
    cells = json.loads((Path(__file__).parents[1] / "nbs" / "08_collectives.ipynb").read_text(encoding="utf-8"))["cells"]
    page = dict(os=os, Path=Path, contextmanager=contextmanager, multiprocessing=multiprocessing)
    exec("".join(next(cell["source"] for cell in cells if cell["id"] == "spawn-here")), page)
    (tmp_path / "hangs.py").write_text("import time\ndef hang(rank): time.sleep(60)\n")
    monkeypatch.chdir(tmp_path); monkeypatch.syspath_prepend(tmp_path)
    assert page["spawn"](time.sleep) == (0, "no word")
    begin = time.monotonic()
    code, _ = page["spawn"](__import__("hangs").hang, seconds=1)
    assert code != 0 and time.monotonic() - begin < 30

@posix
def test_a_killed_rank_is_named_with_its_signal(two_failures):
    "As the system does when memory runs out"
    error, started = two_failures[0]["killed"], two_failures[1]["killed"]
    assert str(error).startswith("rank 1: ended by SIGKILL") and error.rank == 1
    assert len(started) == 2 and none_left(started)

def sleeper(folder):
    "A file whose ranks note their pids and never end, each with a child of its own; no torch, so they start soon"
    job = Path(folder) / "sleep.py"
    job.write_text(textwrap.dedent("""
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "300"])
        for name, pid in (("child", child.pid), ("rank", os.getpid())):
            with open(f"{sys.argv[1]}/{name}-{os.environ['RANK']}.new", "w") as f: f.write(str(pid))
            os.rename(f.name, f.name[:-4])
        time.sleep(300)
    """))
    return job

def launch_code(job, folder): return f"import minigpt.collectives as c; c.run_ranks({str(job)!r}, 2, args=[{str(folder)!r}])"

def both_ranks(folder, seconds=60):
    "Wait until both ranks of `sleeper` stand; the pids of torchrun, ranks and their children"
    until = time.monotonic() + seconds
    while len(list(folder.glob("rank-?"))) < 2 and time.monotonic() < until: time.sleep(0.05)
    ranks = [int(path.read_text()) for path in folder.glob("rank-?")]
    assert len(ranks) == 2
    torchrun = c.parents()[ranks[0]]
    return [torchrun, *c.children(torchrun)]

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "A page whose ranks never end (they need no torch, so they start soon), in a process of its own: for Ctrl-C"
    folder = tmp_path_factory.mktemp("page")
    job = sleeper(folder)
    code = launch_code(job, folder)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process, folder
        if process.poll() is None:
            for pid in [*c.children(process.pid), process.pid]: os.kill(pid, signal.SIGKILL)

@posix
def test_time_out_tells_where_each_rank_stood_and_leaves_no_orphan(tmp_path, monkeypatch, page):
    "The time-out starts to count when both ranks are where they hang, so that a busy machine changes nothing (`page` starts meanwhile)"
    def follow(*how, follow=c.follow):
        until = time.monotonic() + 60
        while len(pids(tmp_path, "rank")) < 3 and time.monotonic() < until: time.sleep(0.1)
        return follow(*how)
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
    started = both_ranks(folder)
    process.send_signal(signal.SIGINT); time.sleep(0.2); process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert len(started) == 5 and none_left(started)

@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    "What a launch leaves when its page is killed, its kernel restarted, its torchrun killed: name -> pids; all three at once"
    started, errors = {}, []
    def folder_and_job(name): folder = tmp_path_factory.mktemp(name); return folder, sleeper(folder)
    def page_killed():
        folder, job = folder_and_job("page-killed")
        process = subprocess.Popen([sys.executable, "-c", launch_code(job, folder)], start_new_session=True)
        try: started["page killed"] = both_ranks(folder)
        finally: process.kill(); process.wait()
    def kernel_restarted():
        from jupyter_client import KernelManager
        folder, job = folder_and_job("kernel")
        kernel = KernelManager(); kernel.start_kernel()
        try:
            client = kernel.client(); client.start_channels()
            client.wait_for_ready(timeout=60); client.execute(launch_code(job, folder))
            started["kernel restarted"] = both_ranks(folder)
            kernel.restart_kernel(now=True)
            client.stop_channels()
        finally: kernel.shutdown_kernel(now=True)
    def torchrun_killed():
        folder, job = folder_and_job("torchrun-killed")
        def kill(): started["torchrun killed"] = both_ranks(folder); os.kill(started["torchrun killed"][0], signal.SIGKILL)
        killer = threading.Thread(target=kill); killer.start()
        with pytest.raises(c.RankError) as e: c.run_ranks(job, 2, args=[folder], timeout=60, stream=False)
        errors.append(e.value); killer.join()
    together(page_killed, kernel_restarted, torchrun_killed)
    return started, errors

@posix
@pytest.mark.parametrize("death", ["page killed", "kernel restarted", "torchrun killed"])
def test_no_orphan_whoever_dies(deaths, death):
    "SIGKILL can't be caught: torchrun sees its input end, and run_ranks remembers the ranks"
    started = deaths[0][death]
    assert len(started) == 5 if death != "kernel restarted" else len(started) >= 5
    assert none_left(started)

@posix
def test_killed_torchrun_is_named(deaths):
    assert [str(e) for e in deaths[1]] == ["torchrun: ended by SIGKILL"]

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

@pytest.mark.parametrize("given, expected", [("", "1"), ("abc", "1"), ("0", "1"), ("-2", "1"), ("4", "4"), ("4,2", "4,2")])
def test_a_number_of_threads_that_is_none_is_replaced(monkeypatch, given, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert c.launch_env(10_000)["OMP_NUM_THREADS"] == expected

def test_an_empty_variable_keeps_its_meaning_for_others(monkeypatch):
    "CUDA_VISIBLE_DEVICES= means no card, and stays; GLOO_SOCKET_IFNAME= means nothing"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ""); monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    env = c.launch_env(2, platform="linux")
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env["GLOO_SOCKET_IFNAME"] == "lo"

def test_without_a_loopback_interface_the_reason_is_told_at_once(monkeypatch):
    "torchrun would try for minutes"
    def refuse(address): raise OSError(99, "Cannot assign requested address")
    monkeypatch.setattr(c.socket, "create_server", refuse)
    with pytest.raises(OSError, match="^127.0.0.1: Cannot assign requested address; ranks meet there"): c.run_ranks("minigpt.collectives")

def test_n01_n02_function_of_a_page_is_refused_and_nothing_forks():
    "N01, N02: the reason is told at once; a launch is a new interpreter, never a fork of this one"
    def hello(): pass
    with pytest.raises(ValueError, match="hello is a function of this page"): c.run_ranks(hello)
    with pytest.raises(ValueError, match="partial.*is a function of this page"): c.run_ranks(partial(hello))
    assert c.launch_command("minigpt.collectives", 2, (), ".")[:3] == [sys.executable, "-c", c.TORCHRUN]

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

@pytest.mark.parametrize("cards, env, words", [
    (0, {}, "--backend nccl: PyTorch sees no CUDA GPU here"),
    (1, dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1"), "2 processes, 1 visible GPU.*--nproc-per-node 1"),
    (1, dict(RANK="0"), "RANK set but LOCAL_RANK"),
])
def test_p23_p30_what_cannot_be_is_one_line(monkeypatch, capsys, cards, env, words):
    "P23, P30: no card, fewer cards than processes, half a set of variables; on the first as on any rank"
    for name in (*c.RANK_VARIABLES, "LOCAL_WORLD_SIZE"): monkeypatch.delenv(name, raising=False)
    for name, value in env.items(): monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0); monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(c.dist, "is_nccl_available", lambda: True)
    with pytest.raises(SystemExit) as e: c.main(["--backend", "nccl"])
    assert e.value.code == 2 and re.search(words, capsys.readouterr().err.splitlines()[-1])

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
    ([TRACE.format("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
      TRACE.format("KeyError: 'x'")], {0: 1, 1: 1}, (1, "KeyError: 'x'")),
    ([TRACE.format("RuntimeError: [pair.cc:1] Application timeout caused pair closure"), TRACE.format("KeyError: 'x'")], {0: 1, 1: 1}, (1, "KeyError: 'x'")),
    ([TRACE.format("ValueError: inner") + "\nDuring handling:\n\n" + TRACE.format("OSError: outer"), ""], {0: 1}, (0, "OSError: outer")),
])
@posix
def test_p06_who_failed_first(errors, codes, expected):
    "P06: by message, exit code and time of the last write"
    assert c.first_failure(errors, [1.0, 2.0], codes) == expected


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """One launch of 4 ranks: each all-reduce by hand against the library's, in groups of 1 to 4 ranks and of ranks 3 and 1; asserted in
    the ranks, where the tensors are. Returns what each rank sent: (name of the function, ranks, type, length) -> bytes"""
    folder = tmp_path_factory.mktemp("hand")
    job = script(folder, """
        import itertools, json
        sent, lengths = {}, (0, 1, 2, 3, 5, 7, 64, 1001)
        groups = {n: dist.new_group(range(n)) for n in range(1, 5)}
        for n, dtype, length in itertools.product(range(rank + 1, 5), (torch.float32, torch.bfloat16, torch.int64), lengths):
            x = (10 * torch.randn(length, generator=torch.Generator().manual_seed(100 * rank + length))).to(dtype)
            theirs, size = x.clone(), x.abs().double()
            dist.all_reduce(theirs, group=groups[n]); dist.all_reduce(size, group=groups[n])
            rounding = torch.finfo(dtype).eps * size * (n - 1) if dtype.is_floating_point and n > 2 else torch.zeros(length)
            for name in ("ring_all_reduce", "root_all_reduce", "tree_all_reduce"):
                ours = x.clone()
                with c.record_sends() as sends: getattr(c, name)(ours, groups[n])
                assert ((ours.double() - theirs.double()).abs() <= rounding).all(), (name, n, dtype, length, ours, theirs)
                same = [torch.empty_like(ours) for _ in range(n)]; dist.all_gather(same, ours, group=groups[n])
                assert all(torch.equal(ours, other) for other in same), "ranks must not drift apart"
                assert all(s["rank"] == rank and s["to"] != rank for s in sends)
                sent[f"{name} {n} {x.element_size()} {length}"] = sum(s["bytes"] for s in sends)
        far = dist.new_group([3, 1])  # ranks in the group are not the global ones
        weight = torch.nn.Parameter(torch.full((3, 2), 10.0 ** rank))
        if rank in (1, 3): c.ring_all_reduce(weight, far); assert (weight == 1010).all() and weight.requires_grad
        else:
            try: c.ring_all_reduce(weight, far); raise AssertionError
            except ValueError as e: assert str(e).startswith(f"rank {rank} is not in this group"), e
        base = torch.full((4, 3), 1.0 * rank); turned, scalar = base.T, torch.tensor(rank + 1.0)
        c.ring_all_reduce(turned); c.tree_all_reduce(base[:, 1:]); c.root_all_reduce(scalar)
        assert base.tolist() == [[6, 24, 24]] * 4 and scalar == 10, (base, scalar)
        with c.record_sends() as outer:
            c.ring_all_reduce(torch.ones(4))
            with c.record_sends() as inner: c.ring_all_reduce(torch.ones(4))
        assert (len(outer), len(inner)) == (12, 6) and not c._open_records
        open(f"{sys.argv[1]}/sent-{rank}", "w").write(json.dumps(sent))
    """)
    c.run_ranks(job, 4, args=[folder], timeout=100, stream=False)
    return [json.loads((folder / f"sent-{rank}").read_text()) for rank in range(4)]

@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_reduce_by_hand_sends_what_the_formula_says(by_hand, n):
    "In all 2N(P-1) bytes, whichever way; in the ring each rank within two chunks of 2N(P-1)/P (equality with dist.all_reduce: the fixture)"
    cases = [key for key in by_hand[0] if key.split()[1] == str(n)]
    assert len(cases) == 3 * 3 * 8
    for key in cases:
        (name, _, width, length), sent = key.split(), [rank[key] for rank in by_hand[:n]]
        N, chunk = int(width) * int(length), int(width) * -(-int(length) // n)
        assert sum(sent) == 2 * N * (n - 1), key
        if name == "ring_all_reduce": assert all(abs(s - 2 * N * (n - 1) / n) <= 2 * chunk for s in sent), key

def test_all_reduce_by_hand_alone_is_nothing():
    x = torch.arange(5.0)
    with c.process_group(), c.record_sends() as sends:
        for way in (c.ring_all_reduce, c.tree_all_reduce, c.root_all_reduce): way(x)
    assert x.tolist() == [0, 1, 2, 3, 4] and sends == []

def test_fit_finds_alpha_and_beta_and_the_model_counts_steps():
    sizes = torch.tensor([2.0**k for k in range(10, 25)])
    assert c.fit_alpha_beta(sizes, 3e-5 + 2e-10 * sizes) == pytest.approx((3e-5, 2e-10))
    assert [c.all_reduce_seconds(100, P, 1, 0, "tree") for P in (1, 2, 3, 4, 5, 8)] == [0, 2, 4, 4, 6, 6]
    assert [c.all_reduce_seconds(100, P, 1, 0, way) for P in (1, 4) for way in ("ring", "root")] == [0, 0, 6, 6]
    assert [c.all_reduce_seconds(100, 4, 0, 1, way) for way in ("ring", "tree", "root")] == [150, 400, 600]
