"""The platform layer: what the emulated device and the sanitizers must see; vendors' names stay in it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from run import ROOT

BUILD = ROOT / os.environ.get("LLAMAC_BUILD", "build/auto")


def cached(name: str) -> str:
    """The value of a CMake variable of the build under test; empty where it has none."""
    cache = BUILD / "CMakeCache.txt"
    found = re.search(rf"^{name}:\w+=(.*)$", cache.read_text() if cache.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def aborts(what: str) -> dict[str, str]:
    return dict.fromkeys(("", "address", "thread"), rf"^emulated kernel: \S+:\d+: {what}")


RACE = r"^WARNING: ThreadSanitizer: data race"
OVERRUN = r"AddressSanitizer: heap-buffer-overflow"
# By fault and sanitizer: what the output of the program, which must fail, has to say. None: it must pass.
# Left out: nothing is promised.
FAULTS = {
    "none": {"": None, "address": None, "thread": None},
    "missing-barrier": {"": r"wrong in reversed order", "thread": RACE},
    "missing-second-barrier": {"": r"wrong in forward order", "thread": RACE},
    "divergent-barrier": aborts(r"__syncthreads that not all threads of the block reach; another thread is "),
    "half-barrier": aborts(r"__syncthreads after threads of the block have returned"),
    "barrier-after-return": aborts(r"__syncthreads after threads of the block have returned"),
    "shuffle-as-barrier": {"": None, "thread": RACE},
    "wave32-reduction": {"": r"wrong in forward order"},
    "divergent-shuffle": aborts(r"a warp operation that not all lanes of the warp reach; another thread "),
    "inactive-lane-shuffle": aborts(r"a shuffle reads a lane that has returned or does not exist"),
    "lds-overrun": {"address": OVERRUN},
    "dynamic-lds-overrun": {"address": OVERRUN},
    "memory-overrun": {"address": OVERRUN},
    "uninitialised-lds": {"": r"wrong in forward order: element \d+ is -?nan"},
    "uninitialised-memory": {"": r"wrong in forward order: element \d+ is -?nan"},
    "misaligned-access": {"address": r"runtime error: .*misaligned address"},
    "shared-output": {"thread": RACE},
    "copied-tile": {"": None, "address": None, "thread": None},
    "unfinished-copy": {"": r"wrong in forward order: element \d+ is -?nan", "thread": RACE},
    "copy-over-readers": {"thread": RACE},
    "product": {"": None, "address": None, "thread": None},
    "divergent-product": aborts(r"a warp operation that not all lanes of the warp reach; another thread "),
    "product-after-return": aborts(r"a matrix instruction without all lanes of its warp"),
}
# Right by accident where a warp has 32 lanes.
RIGHT_AT_32 = "wave32-reduction"


def run_fault(fault: str) -> subprocess.CompletedProcess:
    """Runs the fault's kernel; output in stdout."""
    if not cached("LLAMAC_WARP"):
        pytest.skip("this build is for a GPU: no emulated device")
    launcher = ["setarch", "-R"] if cached("LLAMAC_SANITIZE") == "thread" else []
    command = [*launcher, BUILD / "emulation_faults", fault]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)


@pytest.mark.program
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault):
    expected = FAULTS[fault]
    sanitizer = cached("LLAMAC_SANITIZE")
    if sanitizer not in expected:
        pytest.skip("another build sees it")
    found = run_fault(fault)
    wanted = None if fault == RIGHT_AT_32 and cached("LLAMAC_WARP") == "32" else expected[sanitizer]
    if wanted is None:
        assert found.returncode == 0, found.stdout
        return
    assert found.returncode != 0
    assert re.search(wanted, found.stdout, re.MULTILINE), found.stdout
    named = re.search(r"^emulated kernel: (\S+):(\d+): ", found.stdout)
    if named:  # the line that it names is the one
        # A compiler cache may make the path relative to the build's folder.
        line = (ROOT / named[1].replace("../", "")).read_text().splitlines()[int(named[2]) - 1]
        assert any(call in line for call in ("__syncthreads()", "__shfl_xor(", "mfma<E>(", "mma_m16n8k16("))


@pytest.mark.program
def test_every_fault_has_an_expectation():
    found = run_fault("no such fault")
    assert found.returncode == 2
    assert found.stdout.split("one of ")[1].split() == list(FAULTS)


# What belongs to one vendor's API; prose may say CUDA, AMD, NVIDIA. hipBLASLt's names are everybody's here.
VENDOR = re.compile(
    r"""\bcuda[A-Z_]\w* | \bcu(?:blas|rand|solver|dnn)\w* | \bnccl\w* | \bnv(?:cuda|ml|tx|rtc)\w* | __nv_\w+
    | __CUDA\w* | __NVCC__ | __HIP\w* | __GFX\w* | __gfx\d\w* | __AMDGCN\w* | amdgcn | \brocm\w*(?=/|\.h)
    | __\w+_sync\b(?<!__syncthreads) | __syncwarp | __ld(?:g|cs|cg)\b | __st(?:cs|cg)\b | __activemask
    | \bwarpSize\b | \basm\b | \bLLAMAC_(?:AMD|NVIDIA|CPU)\b""",
    re.VERBOSE,
)
# 32 and 64 where they can only be the warp size: next to a thread's or lane's index, a warp, a shuffle.
INDEX = r"\b(?:threadIdx\s*\.\s*[xyz]|blockDim\s*\.\s*[xyz]|\w*lane\w*|tid|thread|threads)\b\)?"
WARP = re.compile(
    rf"""{INDEX}\s*(?:[/%*]\s*(?:32|64)|&\s*(?:31|63|0x1f|0x3f)|(?:>>|<<)\s*[56])\b
    | (?i:\b\w*warp(?!_tile)\w*)\s*(?:[/%*]|=|==)\s*(?:32|64)\b | \b(?:32|64)\s*\*\s*(?i:\w*(?:warp|lane)\w*)
    | __(?:shfl|ballot|any|all|match|reduce)\w*\([^;]*(?:0x[fF]{{8,16}}|(?<![\w.])(?:16|31|32|63)\b(?!\.))
    | \bfor\s*\(\s*\w+\s+\w+\s*=\s*(?:16|32)\s*;[^;]*>[^;]*;[^)]*(?:/=\s*2|>>=\s*1)""",
    re.VERBOSE,
)


def found_in(pattern: re.Pattern, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def sources(*folders: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".h", ".cpp", ".hip")
        # The second stands in for HIP's runtime.
        and not re.search("csrc/platform/|isa/fake_hip.cpp", str(path))
    )


def test_vendor_names_stay_in_the_platform_layer():
    tests = [line for line in found_in(VENDOR, sources("tests")) if "LLAMAC_CPU" not in line]
    assert found_in(VENDOR, sources("csrc", "dev/hip")) + tests == []


def test_no_literal_warp_size():
    assert found_in(WARP, sources("csrc/ops", "csrc/core")) == []


@pytest.mark.parametrize(
    "line",
    [
        "cudaMalloc(&p, bytes);",
        "x += __shfl_xor_sync(0xffffffffu, x, 1);",
        "#if defined(__CUDACC__)",
        "#ifdef __HIP_DEVICE_COMPILE__",
        "#if defined(__GFX11__)",
        "v = __builtin_amdgcn_readfirstlane(v);",
        "__syncwarp();",
        '#include "rocm/x.h"',
        "ncclAllReduce(a);",
        'asm volatile("bar.sync 0;");',
        "#if defined(LLAMAC_NVIDIA)",
        "const uint4 v = __ldg(p);",
    ],
)
def test_vendor_names_are_recognised(line):
    assert VENDOR.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "const int lane = threadIdx.x % 32;",
        "int warp = threadIdx.x >> 6;",
        "if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = x;",
        "const int warps = blockDim.x / 64;",
        "constexpr int warp_size = 32;",
        "x += __shfl_xor(x, 16);",
        "for (int d = 16; d > 0; d /= 2) x += __shfl_xor(x, d);",
        "for (int d = 32; d > 0; d >>= 1)",
        "mask = __ballot(p) & 0xffffffff; y = __shfl(x, 0, 32);",
        "float part[32 * warps];",
        "const int base = lane * 32;",
    ],
)
def test_literal_warp_sizes_are_recognised(line):
    assert WARP.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "__syncthreads();",
        "// NVIDIA's CUDA and AMD's ROCm call it so",
        "const int64_t rows = std::max<int64_t>(32, (N + 63) / 64);",
        "constexpr int max_forward = 32, forward_threads = 1024;",
        "x = __uint_as_float(word & 0xffff0000u);",
        "x += __shfl_xor(x, warp_size / 2);",
        "for (int distance = warp_size / 2; distance > 0; distance /= 2)",
        "const unsigned half = bits >> 16 & 0xffffffffu;",
        "CHECK(hipMalloc(&p, 64));",
    ],
)
def test_other_lines_are_left_alone(line):
    assert not VENDOR.search(line) and not WARP.search(line)
