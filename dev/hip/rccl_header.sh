#!/bin/sh
# rccl_header.sh: compiles csrc/platform/ranks/device_communicator.cpp for AMD against RCCL's header, or where there is none,
# against NCCL's, whose interface it has, with HIP's names for CUDA's types. Compiles only; without either it says so. The
# compiler is ROCm's, else Debian's.
set -eu
cd "$(dirname "$0")/../.."
compiler=$(dev/platform.sh compiler amd)
compiler=${compiler:-clang++-19}
rocm=$("$compiler" -v 2>&1 | sed -n 's/^Found HIP installation: \(.*\), version .*/\1/p')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ ! -e "$rocm/include/rccl/rccl.h" ]; then
    for include in "${NCCL_INCLUDE:-/usr/include}" .venv/lib/python3*/site-packages/nvidia/nccl/include; do
        [ -e "$include/nccl.h" ] || continue
        mkdir "$folder/rccl"
        echo "#include \"$(realpath "$include")/nccl.h\"" >"$folder/rccl/rccl.h"
        printf '#include <hip/hip_runtime.h>\nusing cudaStream_t = hipStream_t;\nusing cudaEvent_t = hipEvent_t;\n' >"$folder/cuda_runtime.h"
        : >"$folder/cuda_fp16.h"
        break
    done
    if [ ! -e "$folder/rccl/rccl.h" ]; then
        echo "rccl_header.sh: neither rccl/rccl.h nor nccl.h: not compiled (apt-get install librccl-dev)"
        exit 0
    fi
fi
"$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -D__HIP_PLATFORM_AMD__=1 -DLLAMAC_AMD -DLLAMAC_NCCL -Icsrc \
    -isystem "$folder" -idirafter "$rocm/include" csrc/platform/ranks/device_communicator.cpp
