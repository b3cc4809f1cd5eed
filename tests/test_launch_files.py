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
    for name in ("DATA", "OUTPUT", "CHECK", "PROCESSES", "MASTER_PORT", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
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
    "The port can be chosen, options go through, --corpus among them, CHECK=1 looks before the leap at the job's own data"
    script = LAUNCH / "two_nodes.sh"
    monkeypatch.setenv("MASTER_PORT", "29777")
    assert subprocess.run([script, "1", "10.0.0.5", "--size", "M"]).returncode == 0
    for words, env in (("--corpus sotu", {}), ("--size M", dict(DATA="my.bin", OUTPUT="mine")), ("--size M", dict(CHECK="1")),
                       ("--size M", dict(CHECK="1", DATA="my.bin")), ("--dataset_path a.bin --size M", dict(CHECK="1", DATA="my.bin"))):
        assert subprocess.run([script, "0", "10.0.0.5", *words.split()], env=os.environ | env).returncode == 0
    job, corpus, own, *checks = [words[1:] for words in cluster()]
    options, (run, train, _) = understood(job)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == ("2", 1, "10.0.0.5", 29777)
    assert run.size == "M" and run.dataset_path == [] and (train.output_dir, train.save_steps) == ("runs/two-nodes", 200)
    assert understood(corpus)[1][0].corpus == "sotu"
    assert understood(own)[1][0].dataset_path == ["my.bin"] and understood(own)[1][1].output_dir == "mine"
    ends = ["minigpt.failure_lab check", "check --data my.bin", "check --data a.bin"]
    assert all(" ".join(check).endswith(end) for check, end in zip(checks, ends)) and len(checks) == 3
    told = subprocess.run([script], capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.startswith("usage:") and len(told.stderr.splitlines()) == 1


@posix
def test_slurm_checks_then_trains(cluster):
    assert subprocess.run([LAUNCH / "slurm.sh", "--max_steps", "50"]).returncode == 0
    called = cluster()
    check, job = [words[1:] for words in called if words[0] == "torchrun"]
    assert check[-5:-2] == ["-m", "minigpt.failure_lab", "check"] and "--nproc_per_node=auto" in job
    options, (run, train, _) = understood(job)
    assert (options.nnodes, options.node_rank, options.master_addr, options.master_port) == ("2", 1, "node7", 23456)
    assert train.output_dir == "runs/slurm-123456" and train.max_steps == 50
    assert not [words for words in called if words[:2] == ["scontrol", "requeue"]]


@posix
def test_slurm_counts_cards_where_the_job_was_given_some(cluster):
    "`auto` would start one process per core on a node whose driver does not answer"
    assert subprocess.run([LAUNCH / "slurm.sh"], env=os.environ | dict(SLURM_GPUS_ON_NODE="8", DATA="my.bin", OUTPUT="mine")).returncode == 0
    check, job = [words[1:] for words in cluster() if words[0] == "torchrun"]
    options, (run, train, _) = understood(job)
    assert options.nproc_per_node == "gpu" and "--nproc_per_node=gpu" in check and check[-2:] == ["--data", "my.bin"]
    assert run.dataset_path == ["my.bin"] and train.output_dir == "mine"


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


@posix
def test_the_readme_starts_the_scripts_by_run():
    "A fresh checkout has torchrun in .venv alone"
    for name in ("README.md", "README.zh-CN.md"):
        text = (LAUNCH.parent / name).read_text(encoding="utf-8")
        assert "`./run launch/two_nodes.sh 0 " in text and "`./run sbatch launch/slurm.sh`" in text


RUN = LAUNCH.parent / "run"


@posix
def test_run_mends_a_half_made_environment(tmp_path):
    "Ctrl-C while pip was being installed leaves a Python without it"
    tree, stand_in = tmp_path / "tree", tmp_path / "python3"
    tree.mkdir()
    shutil.copy(RUN, tree)
    (tree / "settings.ini").touch()
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").symlink_to("/bin/false")
    stand_in.write_text(f'''#!/bin/sh
echo "$@" >> {tmp_path}/notes
if [ "$2" = venv ]; then rm -f "$3/bin/python"; printf '#!/bin/sh\\necho "$@" >> {tmp_path}/notes' > "$3/bin/python"; chmod +x "$3/bin/python"; fi
''')
    stand_in.chmod(0o755)
    env = os.environ | dict(PYTHON=str(stand_in), MINIGPT_VENV=str(tree / ".venv"))
    done = subprocess.run([tree / "run", "true"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr
    notes = (tmp_path / "notes").read_text()
    assert f"-m venv {tree}/.venv" in notes and f"--editable {tree}[dev]" in notes and (tree / ".venv" / "installed").exists()


@posix
def test_run_without_a_python_that_fits_is_one_line_and_exit_code_2(tmp_path):
    env = os.environ | dict(PYTHON="/bin/false", MINIGPT_VENV=str(tmp_path / "venv"))
    done = subprocess.run([RUN, "true"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "needs Python 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


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
