#!/usr/bin/env bash
# Slurm: ./run sbatch launch/slurm.sh, from this repository, which all nodes see. Words after it go to pretrainer.py.
# DATA=texts or a .bin, OUTPUT=run folder, in front: both on a disk that all nodes see.
#SBATCH --job-name=minigpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one torchrun per node; it starts one process per card
#SBATCH --gpus-per-node=8            # without cards: leave this line out
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=minigpt-%j.log
#SBATCH --open-mode=append           # a requeued job goes on in the same log
#SBATCH --requeue
#SBATCH --signal=B:TERM@120          # 120 s before the time is up, SIGTERM to this script (B: to it alone)
set -euo pipefail

# NCCL (CUDA cards) and gloo (CPU) each choose a network; on a login network they crawl. `ip addr` on a node shows the names.
#   export NCCL_SOCKET_IFNAME=ib0      # NCCL's sockets; over InfiniBand only its first words pass through them
#   export GLOO_SOCKET_IFNAME=ib0      # gloo's whole traffic
#   export NCCL_IB_DISABLE=1           # InfiniBand is there but broken: use sockets
#   export NCCL_DEBUG=INFO             # which interface and transport each rank took
# torchrun's restarts reuse the dead attempt's addresses unless each attempt makes a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # silences torchrun's banner; pretrainer.py shares the cores itself

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # one a line
head=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs that share a node don't collide
processes=${SLURM_GPUS_ON_NODE:+gpu}  # one per card, and none at all where the driver does not answer
output=${OUTPUT:-runs/slurm-$SLURM_JOB_ID}  # a requeued job keeps its id, so it finds its checkpoints

# SLURM_NODEID differs per node, so the shell that srun starts there fills it in, not this one. Where one node fails, the others
# have 100 s to end by themselves, as rank 0 may still be writing its checkpoint; killed at once, they could not.
on_each_node() {
    # shellcheck disable=SC2016
    srun --kill-on-bad-exit=0 --wait=100 bash -c 'exec torchrun --nnodes="$SLURM_NNODES" --node_rank="$SLURM_NODEID" "$@"' torchrun \
        --nproc_per_node="${processes:-auto}" --master_addr="$head" --master_port="$port" --max-restarts=0 --shutdown-timeout=100 "$@"
}

# A look before the leap, some seconds: do the nodes meet, with the same software and clock? Its findings are in the log.
on_each_node -m minigpt.failure_lab check --timeout 60 ${DATA:+--data "$DATA"} || { echo "the nodes are not fit: see the lines with warn"; exit 1; }

# bash runs a trap only once a foreground command has ended; so srun runs in the background and is waited for.
again() {
    trap '' TERM
    echo "time is nearly up: the job saves, then waits in the queue again"
    scancel --signal=TERM "$SLURM_JOB_ID"  # to every step, not to this script: torchrun hands it to our processes, which save and end
    wait "$step" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 143
}
on_each_node minigpt/pretrainer.py ${DATA:+--dataset_path "$DATA"} --output_dir "$output" --save_steps 200 "$@" &
step=$!
trap again TERM
wait "$step"
