#!/bin/sh
# platform.sh                       prints the platform of this machine's device: amd, nvidia or cpu
# platform.sh compiler PLATFORM     prints the compiler of that platform's kernels, or nothing where there is none
# platform.sh architectures [DIR]   prints the architectures of this machine's AMD devices, each once; DIR: where their
#                                   driver lists them
#
# The set-up and CMake both ask here. The platform follows from the device's driver: a toolkit on a machine without a GPU
# is no reason to use it.
set -eu
cd "$(dirname "$0")/.."

first() {    # prints the first argument that is a program
    for file in "$@"; do
        if [ -x "$file" ] && [ ! -d "$file" ]; then
            echo "$file"
            return
        fi
    done
}
on_path() { command -v "$1" || true; }
newest() { printf '%s\n' "$@" | sort -V | tail -n 1; }

case "$*" in
    "")
        if [ -e /dev/kfd ]; then
            echo amd
        elif [ -e /dev/nvidiactl ]; then
            echo nvidia
        else
            echo cpu
        fi ;;
    "compiler amd")
        if [ -n "${HIPCXX:-}" ]; then
            first "$(on_path "$HIPCXX")"
        else
            # The folder that is named, then what PATH has, then AMD's usual place. hipconfig knows where the compiler is in
            # any layout; amdclang++ may be a script that only calls it.
            first "${ROCM_PATH:-/none}/llvm/bin/clang++" "${HIP_PATH:-/none}/llvm/bin/clang++" \
                "$(hipconfig --hipclangpath 2>/dev/null || true)/clang++" "$(on_path amdclang++)" \
                /opt/rocm/llvm/bin/clang++ \
                "$(newest /opt/rocm-*/lib/llvm/bin/clang++ /opt/rocm/core-*/lib/llvm/bin/clang++)"    # from 7.13
        fi ;;
    architectures | "architectures "*)    # 90402 is gfx942, 90010 gfx90a; 0 is a CPU
        cat "${2:-/sys/class/kfd/kfd/topology/nodes}"/*/properties 2>/dev/null | awk '$1 == "gfx_target_version" && $2 {
            printf "gfx%d%x%x\n", $2 / 10000, int($2 / 100) % 100, $2 % 100 }' | sort -u ;;
    "compiler nvidia")
        if [ -n "${CUDACXX:-}" ]; then
            first "$(on_path "$CUDACXX")"
        else
            # `make setup TOOLKIT=pip` puts a toolkit into .venv: whoever asked for it wants it used.
            first "$PWD"/.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc "$(on_path nvcc)" \
                "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc"
        fi ;;
    "compiler cpu")
        on_path "${CXX:-c++}" ;;
    *)
        echo "platform.sh: expected no argument, or: compiler amd|nvidia|cpu, or: architectures, found: $*" >&2
        exit 2 ;;
esac
