#!/bin/sh
# rccl_header.sh: compiles csrc/platform/ranks/device_communicator.cpp for AMD against RCCL's header, or where there is none,
# against NCCL's, whose interface it has, with HIP's names for CUDA's types. Compiles only; without either it says so.
set -eu
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
set -- "${NCCL_INCLUDE:-/usr/include}" .venv/lib/python3*/site-packages/nvidia/nccl/include
for include in "$@"; do
    if [ ! -e "$include/nccl.h" ] || [ -e /usr/include/rccl/rccl.h ]; then continue; fi
    mkdir "$folder/rccl"
    echo "#include \"$(realpath "$include")/nccl.h\"" >"$folder/rccl/rccl.h"
    printf '#include <hip/hip_runtime.h>\nusing cudaStream_t = hipStream_t;\nusing cudaEvent_t = hipEvent_t;\n' >"$folder/cuda_runtime.h"
    : >"$folder/cuda_fp16.h"
    break
done
if [ ! -e "$folder/rccl/rccl.h" ] && [ ! -e /usr/include/rccl/rccl.h ]; then
    echo "rccl_header.sh: neither rccl/rccl.h nor nccl.h: not compiled (apt-get install librccl-dev)"
    exit 0
fi
clang++-19 -std=c++20 -fsyntax-only -Wall -Wextra -Werror -D__HIP_PLATFORM_AMD__=1 -DLLAMAC_AMD -DLLAMAC_NCCL -Icsrc \
    -isystem "$folder" csrc/platform/ranks/device_communicator.cpp
