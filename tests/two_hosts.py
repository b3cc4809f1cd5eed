"Two hosts with an address each, joined by a cable: network namespaces of this machine. Needs root on Linux."
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from minigpt.collectives import RANK_VARIABLES, launch_env

os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])  # where `ip` lies, often outside a user's path
ROOT = Path(__file__).resolve().parent.parent
NAMES = [f"minigpt-{os.getpid()}-{n}" for n in range(2)]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
LINK = "cable"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def remove():
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)  # the cable goes with it


def build():
    for name in NAMES:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("link", "add", LINK, "netns", NAMES[0], "type", "veth", "peer", "name", LINK, "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
        ip("-n", name, "link", "set", LINK, "up")
        # TCP's patience with a peer that is gone: by default a quarter of an hour, and torchrun's store has no other
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_retries2=3"], check=True)


def why_not():
    "What keeps this machine from playing two; empty: nothing"
    if sys.platform != "linux" or not shutil.which("ip"):
        return "needs Linux with iproute2"
    try:
        build()
        return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces with a veth pair here: {error}"
    finally:
        remove()


def processes(name):
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


@contextmanager
def two_hosts():
    "The namespaces; on every way out what runs in them is ended, and they are removed"
    try:
        build()
        yield
    finally:
        for pid in (pid for name in NAMES for pid in processes(name)):
            subprocess.run(["kill", "-KILL", pid], capture_output=True)
        remove()


def on_hosts(wheres, targets, **env):
    "A torchrun on each host, its output in one pipe; GLOO_SOCKET_IFNAME only where it is given"
    started, unset = [], (*RANK_VARIABLES, "GLOO_SOCKET_IFNAME")
    clean = {key: value for key, value in launch_env(2, dict(OMP_NUM_THREADS="1")).items() if key not in unset} | env
    for name, where, target in zip(NAMES, wheres, targets):
        command = ["ip", "netns", "exec", name, *TORCHRUN, *where, *map(str, target)]
        pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        started.append(subprocess.Popen(command, cwd=ROOT, env=clean, **pipe))
    return started
