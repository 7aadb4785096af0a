#!/bin/bash
# mpirun.sh HOSTS [FLAG...]: ./train_llama3 by Open MPI, one process per GPU. HOSTS: node1:8,node2:8
#
# mpirun starts the processes by ssh. This folder, --out and the token files are on a file system that all hosts see.
# Weights and gradients of GPUs go over RCCL or NCCL, whose variables slurm.sbatch describes; MPI carries the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ ${1:-} != *:* ]]; then
    echo "mpirun.sh: expected hosts with their numbers of processes, as in node1:8,node2:8, found \"${1:-}\"" >&2
    exit 2
fi
hosts=$1
shift

# The other hosts get no variable that is not named. LD_LIBRARY_PATH: a module's ROCm and RCCL's plugins for networks.
exports=()
while IFS= read -r name; do exports+=(-x "$name"); done < <(
    compgen -e | grep -E '^((NCCL|RCCL|GLOO|FI|HSA|HIP|HIPBLASLT|ROCR|ROCM|AMD|UCX|OMP|LLAMAC)_|LD_LIBRARY_PATH$)')
# The cores are left to the processes, which have several threads.
exec mpirun --host "$hosts" --bind-to none "${exports[@]}" ./train_llama3 "$@"
