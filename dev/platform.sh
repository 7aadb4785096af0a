#!/bin/sh
# platform.sh                       prints the platform of this machine's device: amd, nvidia or cpu
# platform.sh compiler PLATFORM     prints the compiler of that platform's kernels, or nothing where there is none
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
            first "${ROCM_PATH:-/opt/rocm}/llvm/bin/clang++" "$(on_path amdclang++)"
        fi ;;
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
        echo "platform.sh: expected no argument, or: compiler amd|nvidia|cpu, found: $*" >&2
        exit 2 ;;
esac
