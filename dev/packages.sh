#!/bin/sh
# packages.sh [test|targets]: what the build, or the build of the tests too, or compiling the kernels for AMD without a
# GPU or ROCm, needs from the system. As root, what is missing is
# installed with apt, and said; otherwise it is named with the one line that installs it, and the exit code is 1.
set -eu

missing=""
python=${PYTHON:-python3}
need() {    # need PACKAGE TEST...: the package is missing if the test fails
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}
have_header() { echo "#include <$1>" | c++ -std=c++17 -x c++ $2 -fsyntax-only -; }

need g++ command -v c++
need cmake command -v cmake
need python3 command -v "$python"
need python3-venv "$python" -c 'import ensurepip, venv'
if [ "${1:-}" = test ]; then
    need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
fi
if command -v c++ >/dev/null 2>&1; then
    multiarch=$(c++ -print-multiarch)
    need libcli11-dev have_header CLI/CLI.hpp ""
    need nlohmann-json3-dev have_header nlohmann/json.hpp ""
    need libtomlplusplus-dev have_header toml++/toml.h ""
    need libxxhash-dev have_header xxhash.h ""
    need libboost-context-dev have_header boost/context/fiber.hpp ""
    need libopenblas-openmp-dev test -e "/usr/lib/$multiarch/openblas-openmp/libopenblas.so"
else
    missing="$missing libboost-context-dev libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libxxhash-dev libopenblas-openmp-dev"
fi
if [ "${1:-}" = targets ] && [ -z "${ROCM_PATH:-}" ] && [ ! -d /opt/rocm ]; then
    need clang-19 command -v clang++-19
    need lld-19 command -v ld.lld-19
    need llvm-19 command -v llvm-readelf-19
    need clang-tools-19 command -v clang-offload-bundler-19
    need libamdhip64-dev test -e /usr/include/hip/hip_runtime.h
    need rocm-device-libs test -d "/usr/lib/$(c++ -print-multiarch)/amdgcn/bitcode"
    need libomp-19-dev test -e /usr/lib/llvm-19/lib/libomp.so
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing system packages with apt:$missing"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
else
    echo "system packages are missing:$missing" >&2
    echo "install them with: sudo apt-get install$missing" >&2
    exit 1
fi
