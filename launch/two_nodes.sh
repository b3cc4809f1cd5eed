#!/usr/bin/env bash
# Two machines, no scheduler. On each, in this repository, with Python and data alike:
#   NODE_RANK=0 is the machine whose address is HEAD_ADDRESS:   ./run launch/two_nodes.sh 0 192.168.1.1
#   the other one:                                              ./run launch/two_nodes.sh 1 192.168.1.1
# `./run` brings its own Python; where torchrun is on the PATH, leave it out.
# Words after these two go to pretrainer.py: ./run launch/two_nodes.sh 0 192.168.1.1 --size M --max_steps 20000
# DATA=texts or a .bin, OUTPUT=run folder, in front: both on a disk that both machines see (NFS or the like), as both read data
# and checkpoints when the job is started anew. Without DATA each machine prepares the bundled text, or --corpus, for itself.
# CHECK=1 in front runs the self-test over both machines instead: do they meet, with the same software, data and clock?
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: [CHECK=1] $0 NODE_RANK HEAD_ADDRESS [options of pretrainer.py]" >&2; exit 2; fi
node_rank=$1 head_address=$2; shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# gloo (CPU) listens on the address that the host name leads to; where that is 127.0.x.1, pretrainer.py takes the interface
# that reaches HEAD_ADDRESS. With several networks name yours, as `ip addr` shows it:
#   export GLOO_SOCKET_IFNAME=eth0
# NCCL (CUDA cards) chooses among all interfaces but loopback and docker; name the fast one, or a list, or rule one out by ^:
#   export NCCL_SOCKET_IFNAME=eth0      # or ib0, or ^docker0,virbr0
#   export NCCL_IB_DISABLE=1            # InfiniBand or RoCE cards are there, but not cabled or not set up: use sockets
#   export NCCL_DEBUG=INFO              # which interface and which transport it took, per rank
# With a firewall, open MASTER_PORT and the ports above 1024 between the two: gloo and NCCL take free ones.

# torchrun's restarts reuse the dead attempt's addresses unless each attempt makes a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # silences torchrun's banner; pretrainer.py shares the cores itself
processes=${PROCESSES:-auto}                  # per machine; auto: one per card, without cards one per core

what=(minigpt/pretrainer.py ${DATA:+--dataset_path "$DATA"} --output_dir "${OUTPUT:-runs/two-nodes}" --save_steps 200)
if [ "${CHECK:-}" = 1 ]; then
    data=${DATA:-}
    while [ $# -gt 0 ]; do  # the data that the job would read; of several paths the first
        case $1 in --dataset_path) data=${2:-} ;; --dataset_path=*) data=${1#*=} ;; esac
        shift
    done
    what=(-m minigpt.failure_lab check ${data:+--data "$data"})
fi

exec torchrun --nnodes=2 --nproc_per_node="$processes" --node_rank="$node_rank" --master_addr="$head_address" \
    --master_port="${MASTER_PORT:-29500}" --shutdown-timeout=100 "${what[@]}" "$@"
