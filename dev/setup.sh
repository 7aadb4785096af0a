#!/bin/sh
# setup.sh [build|test|targets|fuzz|levels|lint]: installs what training needs; with "build", only what compiling the
# program needs; with "test", also what the Python package and the tests need; with "targets", also what compiling for AMD
# without ROCm needs; with "fuzz", clang with libFuzzer; with "levels", an emulator of other processors; with "lint", also
# dev/lint.sh's tools. Nothing else in the project installs anything. What is there already is kept: it can be called, or
# interrupted, at any time.
#
# System packages are installed with apt as root; otherwise they are named with the line that installs them. Python
# packages go into .venv. Environment (the Makefile passes its variables on):
#   PYTHON     makes .venv where there is none (python3); 3.11 or newer
#   PLATFORM   amd, nvidia, cpu, or auto: that of this machine's device
#   GPUS       how many the program is for, where this machine has others, as a login node: several need libgloo-dev
#   TOOLKIT    pip: CUDA's compiler from PyPI into .venv, where the system has none
#   TORCH      what pip is asked for in place of the PyTorch that install_torch.py chooses
set -eu
cd "$(dirname "$0")/.."

kind=${1:-run}
python=${PYTHON:-python3}
venv=.venv/bin/python
platform=${PLATFORM:-auto}
[ "$platform" != auto ] || platform=$(dev/platform.sh)

stop() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}
runs() { "$@" >/dev/null 2>&1; }
case "${GPUS:-0}" in *[!0-9]*) stop "GPUS: expected a number, found $GPUS" ;; esac
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }
version_of() { "$1" -c 'import platform; print(platform.python_version())'; }

check_python() {    # before apt is asked, and after: it may have brought an old one
    ! runs command -v "$python" || is_new_enough "$python" || runs is_new_enough "$venv" ||
        stop "$python is Python $(version_of "$python"), expected 3.11 or newer: install one and name it, for example:" \
            "  sudo apt-get install python3.11 python3.11-venv python3.11-dev && make PYTHON=python3.11 ..."
}

missing=""
need() {    # need PACKAGE TEST...: the package is missing if the test fails
    package=$1
    shift
    runs "$@" || missing="$missing $package"
}
has_header() { printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | c++ -x c++ -E -; }
has_python_header() { "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'; }

count_gpus() {    # as the drivers list them
    case "${GPUS:-$platform}" in
        amd) cat /sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null | grep -c '^simd_count [1-9]' || true ;;
        nvidia) find /proc/driver/nvidia/gpus -mindepth 1 -maxdepth 1 2>/dev/null | wc -l ;;
        cpu) echo 0 ;;
        *) echo "$GPUS" ;;
    esac
}

can_install() { [ "$(id -u)" = 0 ] && runs command -v apt-get; }

install_system_packages() {
    case "${python##*/}" in
        python3.*) name=${python##*/} ;;    # python3.11-venv, where python3 is an older one
        *) name=python3 ;;
    esac
    need g++ command -v c++
    need cmake command -v cmake
    need ninja-build command -v ninja
    need "$name" command -v "$python"
    need "$name-venv" "$python" -c 'import ensurepip, venv'
    if runs "$venv" -c ""; then
        need "$name-dev" has_python_header "$venv"
    else
        need "$name-dev" has_python_header "$python"
    fi
    need libcli11-dev has_header CLI/CLI.hpp
    need nlohmann-json3-dev has_header nlohmann/json.hpp
    need libtomlplusplus-dev has_header toml++/toml.h
    need libxxhash-dev has_header xxhash.h
    need libboost-context-dev has_header boost/context/fiber.hpp
    if [ "$kind" = targets ] && [ -z "$(dev/platform.sh compiler amd)" ]; then
        need clang-19 command -v clang++-19
        need lld-19 command -v ld.lld-19
        need llvm-19 command -v llvm-readelf-19
        need clang-tools-19 command -v clang-offload-bundler-19
        need libamdhip64-dev test -e /usr/include/hip/hip_runtime.h
        need rocm-device-libs test -d "/usr/lib/$(c++ -print-multiarch)/amdgcn/bitcode"
        need libomp-19-dev test -e /usr/lib/llvm-19/lib/libomp.so
    fi
    if [ "$kind" = fuzz ]; then
        need clang-19 command -v clang++-19
        need libclang-rt-19-dev test -e "/usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.fuzzer-$(uname -m).a"
        need llvm-19 command -v llvm-symbolizer-19    # names the functions of a report
    fi
    if [ "$kind" = levels ]; then
        need qemu-user command -v qemu-x86_64    # older processors
    fi
    # These two are no reason to stop: ccache, which the Makefile uses, and Gloo, for runs of several GPUs.
    if [ -n "$missing" ] || can_install; then
        need ccache command -v ccache
        [ "$(count_gpus)" -lt 2 ] || need libgloo-dev has_header gloo/context.h
    elif [ "$(count_gpus)" -gt 1 ] && ! runs has_header gloo/context.h; then
        echo "setup: without Gloo, only one GPU is used: sudo apt-get install libgloo-dev, then call make again" >&2
    fi
    [ -n "$missing" ] || return 0
    if ! can_install; then
        stop "system packages are missing:$missing" "install them with: sudo apt-get install$missing"
    fi
    echo "installing system packages with apt:$missing"
    export DEBIAN_FRONTEND=noninteractive
    dpkg --configure -a >/dev/null    # what an interrupted installation left half done
    apt-get update -qq -o DPkg::Lock::Timeout=300
    # shellcheck disable=SC2086 # words
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $missing >/dev/null
}

# A CUDA toolkit of PyTorch's version, so that either can be installed after the other.
pip_toolkit='cuda-toolkit[nvcc,nvvm,crt,cudart,cccl,cublas]==13.0.*'

check_compiler() {    # of the GPU's kernels; before CMake looks for it
    if [ "${TOOLKIT:-}" = pip ]; then
        [ "$platform" = nvidia ] || stop "TOOLKIT=pip is for PLATFORM=nvidia, found PLATFORM=$platform"
        return 0
    fi
    case "$kind" in build | run) ;; *) return 0 ;; esac
    [ -z "$(dev/platform.sh compiler "$platform")" ] || return 0
    case "$platform" in
        nvidia) stop "no CUDA compiler (nvcc) was found for this machine's NVIDIA GPU. Any one of these helps:" \
            "  make setup TOOLKIT=pip       takes it from PyPI into .venv (0.6 GB; driver 580 or newer)" \
            "  NVIDIA's system packages     cuda-toolkit-13-0 (CUDA 13.0 is tested), or CUDACXX=/path/to/nvcc" \
            "  make PLATFORM=cpu ...        works now, on the CPU" ;;
        amd) stop "no HIP compiler was found for this machine's AMD GPU. Any one of these helps:" \
            "  ROCm's system packages       amdrocm-core-sdk of AMD's repository (older: rocm-hip-sdk), or HIPCXX=..." \
            "  make PLATFORM=cpu ...        works now, on the CPU" ;;
    esac
}

pip_install() { "$venv" -m pip --disable-pip-version-check --quiet install --no-compile "$@"; }

# make_venv: an environment that works is kept, whoever made it; one without a Python, as a system's upgrade leaves it, is
# made anew.
make_venv() {
    if ! runs "$venv" -c ""; then
        [ ! -e .venv ] || echo "making .venv again: its Python is gone"
        "$python" -m venv --clear .venv
    fi
    is_new_enough "$venv" ||
        stop ".venv has Python $(version_of "$venv"), expected 3.11 or newer: remove it with rm -r .venv"
    runs "$venv" -m pip --version || "$venv" -m ensurepip >/dev/null
}

# stamp KIND: what .venv/KIND holds when the packages of that kind are installed.
stamp() { echo "$1 $(cksum <pyproject.toml) $(version_of "$venv")"; }
is_done() { [ "$(cat ".venv/$1" 2>/dev/null)" = "$(stamp "$1")" ]; }

# What the Makefile finds before the system's: ROCm's libraries need CMake 3.25.
has_cmake_for_rocm() { printf '%s\n' 3.25 "$(cmake --version | sed -n 's/cmake version //p')" | sort -CV; }
install_cmake() {
    pip_install 'cmake>=3.25'
    mkdir -p .venv/cmake
    ln -sf ../bin/cmake ../bin/ctest .venv/cmake/
}

install_python_packages() {
    if ! is_done build; then
        pip_install 'pip>=25.1'
        pip_install --group build
        stamp build >.venv/build
    fi
    [ "$platform" != amd ] || has_cmake_for_rocm || install_cmake
    if [ "${TOOLKIT:-}" = pip ]; then
        driver=$(sed 's/\..*//' /sys/module/nvidia/version 2>/dev/null || true)
        [ "${driver:-580}" -ge 580 ] || stop \
            "the NVIDIA driver is $driver, CUDA 13 needs 580 or newer: update it, or install CUDA 12's system packages"
        pip_install "$pip_toolkit"
        for toolkit in .venv/lib/python3*/site-packages/nvidia/cu13; do
            ln -sfn lib "$toolkit/lib64"    # where nvcc 13.0 and CMake look, by the names that they look for
            ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
        done
    fi
    [ "$kind" != build ] || return 0
    if ! is_done run; then
        pip_install --group run
        # The command llamac; what it imports is the checkout's. `make native` installs it with the compiled modules.
        [ -e .venv/bin/llamac ] || pip_install --no-build-isolation --no-deps --config-settings wheel.cmake=false -e .
        stamp run >.venv/run
    fi
    if [ "$kind" != run ] && ! is_done test; then
        # shellcheck disable=SC2086 # words
        "$venv" dev/install_torch.py ${TORCH:-}
        pip_install --group test
        stamp test >.venv/test
    fi
    if [ "$kind" = lint ] && ! is_done lint; then
        pip_install --group lint
        stamp lint >.venv/lint
    fi
    if [ "$kind" = targets ] && [ -n "$(dev/platform.sh compiler nvidia)" ]; then
        pip_install --no-deps 'nvidia-cublas>=13,<14'    # cublasLt.h, which not every toolkit has
    fi
}

check_python
install_system_packages
check_python
check_compiler
make_venv
install_python_packages
