"launch/: every file starts the main job by a line that torchrun and pretrainer.py understand, told by stand-ins for a cluster's programs"
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

import minigpt.pretrainer as pretrainer

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
NCCL_AND_GLOO = "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_DEBUG TORCH_DISABLE_SHARE_RDZV_TCP_STORE".split()
posix = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")

STAND_INS = {  # each notes its words; where JOB_WAITS is set, torchrun says there that it has begun, and waits for SIGTERM
    "torchrun": """note torchrun "$@"
case "$*${JOB_WAITS:+ waits}" in *pretrainer*waits)
    sleep 60 & trap "kill $!; note saved; exit 1" TERM; echo > "$JOB_WAITS"; wait;;
esac""",
    "srun": 'note srun "$@"; while [ "${1#--}" != "$1" ]; do shift; done; echo $$ > "$NOTES.pid"; SLURM_NODEID=1 exec "$@"',
    "scontrol": 'note scontrol "$@"; [ "$1" != show ] || printf "node7\\nnode8\\n"',
    "scancel": 'note scancel "$@"; kill -TERM "$(cat "$NOTES.pid")"',
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    "A PATH of stand-ins, and what they were called with"
    for name, body in STAND_INS.items():
        note = f'note() {{ {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@" >> "$NOTES"; }}'
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{note}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    notes = tmp_path / "notes"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(notes))
    for name, value in dict(SLURM_JOB_NODELIST="node[7-8]", SLURM_JOB_ID="123456", SLURM_NNODES="2").items():
        monkeypatch.setenv(name, value)
    return lambda: [json.loads(line) for line in notes.read_text().splitlines()]


def understood(words):
    "torchrun's options and pretrainer.py's, both parsed by their own parsers"
    options = torchrun.parse_args(words)
    assert options.training_script == "minigpt/pretrainer.py" and options.shutdown_timeout == 100
    return options, pretrainer.parse_args(options.training_script_args)


@posix
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_shell(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", script], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("file", [*SCRIPTS, LAUNCH / "kubernetes.yaml"], ids=lambda path: path.name)
def test_p18_interface_variables_are_explained(file):
    text = file.read_text(encoding="utf-8")
    assert all(name in text for name in NCCL_AND_GLOO), [name for name in NCCL_AND_GLOO if name not in text]


@posix
def test_p12_two_nodes(cluster, monkeypatch):
    "The port can be chosen, options go through, CHECK=1 looks before the leap"
    script = LAUNCH / "two_nodes.sh"
    monkeypatch.setenv("MASTER_PORT", "29777")
    assert subprocess.run([script, "1", "10.0.0.5", "--size", "M"]).returncode == 0
    assert subprocess.run([script, "0", "10.0.0.5", "--size", "M"], env=dict(os.environ, CHECK="1")).returncode == 0
    job, check = [words[1:] for words in cluster()]
    options, (run, train, _) = understood(job)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == ("2", 1, "10.0.0.5", 29777)
    assert run.size == "M" and run.dataset_path == ["shared/my.bin"] and train.save_steps == 200
    assert "minigpt.failure_lab check --data shared/my.bin" in " ".join(check) and "--size" not in check
    told = subprocess.run([script], capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.startswith("usage:") and len(told.stderr.splitlines()) == 1


@posix
def test_slurm_checks_then_trains(cluster):
    assert subprocess.run([LAUNCH / "slurm.sh", "--max_steps", "50"]).returncode == 0
    called = cluster()
    check, job = [words[1:] for words in called if words[0] == "torchrun"]
    assert check[-5:-2] == ["-m", "minigpt.failure_lab", "check"]
    options, (run, train, _) = understood(job)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == ("2", 1, "node7", 23456)
    assert train.output_dir == "runs/slurm-123456" and train.max_steps == 50
    assert not [words for words in called if words[:2] == ["scontrol", "requeue"]]


@posix
def test_slurm_near_the_end_of_its_time_saves_and_queues_again(cluster, tmp_path, monkeypatch):
    "SIGTERM to the batch script alone, as --signal=B:TERM sends it"
    text = (LAUNCH / "slurm.sh").read_text()
    assert re.search(r"^#SBATCH --signal=B:TERM@120\b", text, re.M) and re.search(r"^#SBATCH --requeue$", text, re.M)
    os.mkfifo(tmp_path / "waits")
    begun = os.open(tmp_path / "waits", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("JOB_WAITS", str(tmp_path / "waits"))
    batch = subprocess.Popen([LAUNCH / "slurm.sh"], start_new_session=True)
    try:
        assert select.select([begun], [], [], 30)[0], "the job never began"
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(60) == 143
    finally:
        os.close(begun)
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
    assert [words[0] for words in cluster()][-3:] == ["scancel", "saved", "scontrol"]
    assert cluster()[-1] == ["scontrol", "requeue", "123456"]


def test_kubernetes_manifest():
    "Kubeflow Trainer v2: a runtime of ours and a job that refers to it; torchrun takes nodes and address from PET_ variables"
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert {doc["apiVersion"] for doc in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] and job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    node, trainer = runtime["spec"]["template"]["spec"]["replicatedJobs"][0], job["spec"]["trainer"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    assert node["name"] == pod["containers"][0]["name"] == "node"  # the name that the trainer's fields are merged into
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    names = [entry["name"] for entry in trainer["env"]]
    assert not [name for name in names if name.startswith("PET_")] and all(isinstance(entry["value"], str) for entry in trainer["env"])
    assert trainer["command"][0] == "torchrun"
    options, (_, train, _) = understood([*trainer["command"][1:], *trainer["args"]])
    assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"] and train.output_dir.startswith("/shared/")
