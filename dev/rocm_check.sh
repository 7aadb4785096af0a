#!/bin/bash
# rocm_check.sh [ARCHITECTURE...]: in a fresh clone, on a machine with ROCm, what a user does as far as it needs no GPU. `make rocm`
# calls it in a root of dev/rocm_root.sh.
#
# The README's first command with PLATFORM=amd builds the program, for these architectures or those that the build chooses. The
# program starts with no variable set, built and installed, and has hipBLASLt, Gloo, and RCCL where ROCm has it. llamac._native
# loads beside a stub of a ROCm PyTorch. Then checks and tests that need no device, and the gate of registers, for gfx942. Each
# step's seconds of CPU are printed. Beside what the set-up installs: binutils, libgloo-dev.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/amd python=.venv/bin/python
export PATH=$PWD/.venv/cmake:$PATH CMAKE_GENERATOR=Ninja
TIMEFORMAT='  %1U + %1S s of CPU'

stop() { echo "rocm_check.sh: $*" >&2; exit 1; }
step() {    # step WHAT COMMAND...
    echo "$1:"
    shift
    time "$@" >build/log 2>&1 || { tail -n 30 build/log >&2; stop "failed: $*"; }
}

check_program() {    # starts, finds its libraries, has code for each architecture
    local library architecture needed
    "$1" --version || stop "$1 does not start"
    needed=$(readelf -d "$1")
    for library in hipblaslt gloo omp amdhip64 $rccl; do
        [[ $needed == *"[lib$library.so"* ]] || stop "$1 is not linked with $library: $needed"
    done
    [ "$rocm" = /usr ] || grep -Eq "RUNPATH.*(\[|:)$rocm/lib(:|\])" <<<"$needed" || stop "$1: no $rocm/lib in its RUNPATH: $needed"
    for architecture in $architectures; do
        grep -q "amdgcn-amd-amdhsa--$architecture" "$1" || stop "$1 has no code for $architecture"
    done
}

stub_of_torch() {    # as far as CMake and llamac/base/native.py ask it
    mkdir -p build/stub/torch
    cat >build/stub/torch/__init__.py <<END
import ctypes
from types import SimpleNamespace
__version__ = "2.13.0+rocm"
version = SimpleNamespace(cuda=None, hip="$hip")
runtime = [ctypes.CDLL(f"$rocm_lib/{name}") for name in ("libamdhip64.so", "libhipblaslt.so")]
END
}

native_beside_torch() {
    $python -m pip --quiet install --group build pytest
    cmake -S . -B build/python -DLLAMAC_PYTHON=ON -DBUILD_TESTING=OFF -DPython_EXECUTABLE="$PWD/$python" \
        -Dpybind11_DIR="$($python -m pybind11 --cmakedir)" -DCMAKE_HIP_ARCHITECTURES="${architectures// /;}"
    cmake --build build/python --target _native
    rm llamac/_native.*    # the program's
    cp build/python/csrc/python/_native.* llamac/
    $python -c 'from llamac.base.native import native; assert native.computes_on_device() and native.kernels()
import sys; assert "torch" not in sys.modules; assert not native.without_gemm_library()'
}

compiler=$(dev/platform.sh compiler amd)
[ -n "$compiler" ] || stop "no HIP compiler was found"
read -r rocm hip < <("$compiler" -v 2>&1 | sed -n 's/^Found HIP installation: \(.*\), version /\1 /p')
rocm_lib=$(dirname "$(find -H "$rocm/lib" -maxdepth 2 -name libamdhip64.so | head -n 1)")
rccl=$([ ! -e "$rocm_lib/librccl.so" ] || echo rccl)
mkdir -p build
echo "$compiler, HIP $hip in $rocm; commit $(git log -1 --format=%h)"

step "set-up" make setup PLATFORM=amd
[ $# = 0 ] || step "architectures $*" cmake -S . -B $build -DLLAMAC_PLATFORM=amd -DCMAKE_HIP_ARCHITECTURES="$(IFS=';'; echo "$*")"
step "make train_llama3 PLATFORM=amd" make train_llama3 PLATFORM=amd
architectures=${*:-$(grep -o 'offload-arch=gfx[0-9a-f]*' $build/build.ninja | sed 's/.*=//' | sort -u | paste -sd ' ')}
check_program ./train_llama3
step "make install" make install PLATFORM=amd PREFIX="$PWD/build/installed"
check_program build/installed/bin/train_llama3

stub_of_torch
PYTHONPATH=$PWD/build/stub step "llamac._native beside a ROCm PyTorch" native_beside_torch
checks=(check_data check_dtypes check_options)
step "checks without a device" cmake --build $build --target "${checks[@]}"
for check in "${checks[@]}"; do step "$check" "$build/$check"; done
LLAMAC_BUILD=$build step "tests" $python -m pytest -q tests/tools/test_version.py tests/tools/test_rocm.py
# adamw_quantize with bf16 moments has 3 waves per SIMD with clang 22, and 4 with clang 19 and 21.
step "registers, gfx942" $python dev/hip/resources.py --min-waves 3 --program train_llama3
echo "$hip: all is well"
