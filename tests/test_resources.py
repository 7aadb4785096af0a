"""dev/hip/resources.py: planted kernels are judged as they should be, and its waves are the compiler's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev/hip"))
import resources

LISTING = """\
planted: kernels with faults
  2          device  128-bit accesses
  1          device  the obvious translation
  reference  host    plain loops, not 128-bit
clean: kernels without
  2          device  128-bit loads
  3          device  128-bit loads, a scalar path of its own
"""
HEADER = "#include <hip/hip_runtime.h>\n"
CLEAN = """
template <class T>
__global__ void __launch_bounds__(256) clean_kernel2(T* out, const T* x) {
    reinterpret_cast<float4*>(out)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
}
template __global__ void clean_kernel2<float>(float*, const float*);
template __global__ void clean_kernel2<short>(short*, const short*);
template <class T, bool whole, bool other>
__global__ void __launch_bounds__(256) clean_kernel3(T* out, const T* x) {
    if (whole) reinterpret_cast<float4*>(out)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
    else out[threadIdx.x] = x[threadIdx.x];
}
template __global__ void clean_kernel3<float, true, false>(float*, const float*);
template __global__ void clean_kernel3<float, false, false>(float*, const float*);
__global__ void clean_kernel2_tail(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }
"""
FAULTS = """
__global__ void planted_kernel1(float* out, const int* index) {  // an array indexed at run time: scratch
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = out[i];
    out[threadIdx.x] = a[index[threadIdx.x] & 63];
}
template <class T, bool whole>
__global__ void planted_kernel2(T* out, const T* x) { out[threadIdx.x] = x[threadIdx.x]; }
template __global__ void planted_kernel2<float, true>(float*, const float*);
template __global__ void planted_kernel2<float, false>(float*, const float*);
__global__ void __launch_bounds__(1024) planted_kernel1_spill(float* out) {
    float a[160];
    for (int i = 0; i < 160; i++) a[i] = out[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 160; i++) out[i * 1023 + threadIdx.x] = a[i];
}
__global__ void __launch_bounds__(256) planted_kernel1_greedy() { asm volatile("" ::: "v199"); }
__global__ void planted_kernel3() {}
__global__ void stranger() {}
"""
COUNTED = """
using v4 = __attribute__((ext_vector_type(4))) float;
using h4 = __attribute__((ext_vector_type(4))) short;
__global__ void __launch_bounds__(256) planted_kernel1(v4* out, const v4* x, const float* y, h4 h) {
    __shared__ v4 s[256];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    v4 v = s[threadIdx.x ^ 1] + y[threadIdx.x];
    v = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(h, h, v, 0, 0, 0);
    out[threadIdx.x] = v;
    atomicAdd(reinterpret_cast<int*>(out) + 4096 * threadIdx.x, 1);
}
"""


@pytest.fixture(scope="module")
def rocm() -> Path:
    try:
        return resources.rocm_folder()
    except resources.Error as error:
        pytest.skip(str(error))


@pytest.fixture
def judge(rocm, tmp_path):
    """Runs the script on a source; returns its exit code, its lines on stderr, and what it prints."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)

    def run(text: str, *arguments: str) -> tuple[int, list[str], str]:
        source = tmp_path / "planted.hip"
        source.write_text(text)
        command = [sys.executable, ROOT / "dev/hip/resources.py", source, "--program", program]
        done = subprocess.run(
            [*command, "--out", tmp_path / "out", *arguments], capture_output=True, text=True
        )
        return done.returncode, done.stderr.splitlines(), done.stdout

    return run


@pytest.mark.parametrize("arch", resources.CHIPS)
def test_clean_kernels_pass(judge, arch):
    code, faults, printed = judge(HEADER + CLEAN, "--arch", arch)
    assert (code, faults) == (0, [])
    head, *rows = [re.split(r"  +", line) for line in printed.splitlines()[1:] if line]
    assert head[:3] == ["operation", "variant", "kernel"]
    assert [row[:3] for row in rows] == [
        ["clean", "2", "clean_kernel2<float>"],
        ["clean", "2", "clean_kernel2<short>"],
        ["clean", "2", "clean_kernel2_tail"],
        ["clean", "3", "clean_kernel3<float, false, false>"],
        ["clean", "3", "clean_kernel3<float, true, false>"],
    ]


def test_faults_are_seen(judge):
    code, faults, _ = judge(HEADER + CLEAN + FAULTS)
    assert code == 1
    expected = {
        r"planted_kernel1: \d+ bytes of scratch, .*",
        r"planted_kernel2<float, true>: expected the 128-bit accesses .*",
        r"planted_kernel2<float, false>: expected the 128-bit accesses .*",
        r"planted_kernel1_spill: \d+ bytes of scratch, .*",
        r"planted_kernel1_spill: \d+ VGPR spills, .*",
        r"planted_kernel1_greedy: 2 waves a SIMD, expected at least 4",
        r"planted_kernel3: expected <operation>_kernel<N> .*",
        r"stranger: expected <operation>_kernel<N> .*",
    }
    for pattern in expected:
        assert sum(bool(re.fullmatch(f"gfx942 planted.hip {pattern}", fault)) for fault in faults) == 1, (
            pattern
        )
    assert len(faults) == len(expected), faults


def test_fewest_waves_are_a_choice(judge):
    greedy = '\n__global__ void __launch_bounds__(256) planted_kernel1() { asm volatile("" ::: "v199"); }\n'
    assert judge(HEADER + greedy, "--min-waves", "3")[0] == 1
    assert judge(HEADER + greedy, "--min-waves", "2")[0] == 0


def test_json_holds_the_counts(judge):
    code, faults, printed = judge(HEADER + COUNTED, "--json")
    assert (code, faults) == (0, [])
    (kernel,) = json.loads(printed)["kernels"]
    assert (kernel["lds"], kernel["block"], kernel["scratch"]) == (4096, 256, 0)
    assert kernel["instructions"] == {
        **{"mfma": 1, "loads": 2, "loads128": 1, "stores": 1, "stores128": 1, "lds_loads": 1},
        **{"lds_loads128": 1, "lds_stores": 1, "lds_stores128": 1, "barriers": 1, "atomics": 1},
    }


def test_a_file_without_kernels(judge):
    assert judge("int host() { return 1; }\n") == (0, [], "gfx942: 0 kernels\n")


def test_what_does_not_compile_is_shown(judge):
    code, lines, _ = judge("int host() { return nothing; }\n")
    assert code == 2
    assert "planted.hip" in lines[0] and any("undeclared identifier 'nothing'" in line for line in lines)


def test_a_missing_program_is_one_line(judge, tmp_path):
    code, lines, _ = judge("", "--program", str(tmp_path / "nowhere"))
    assert code == 2
    assert lines == [f"resources.py: {tmp_path}/nowhere --list-kernels: No such file or directory"]


def occupancy_source(arch: str) -> str:
    """Kernels that claim registers (through asm), static LDS and blocks of many sizes."""
    limits = [(v, s, 0, 256) for v in (24, 25, 65, 84, 97, 129, 169, 193, 256) for s in (32, 96, 102)]
    limits += [(24, 32, lds, b) for lds in (0, 4096, 12000, 16384, 65536) for b in (32, 64, 192, 256, 1024)]
    text = HEADER
    for i, (vgprs, sgprs, lds, block) in enumerate(limits):
        accumulators = ', "a99"' if arch != "gfx1100" and vgprs == 97 else ""
        body = f'asm volatile("" ::: "v{vgprs - 1}", "s{sgprs - 1}"{accumulators});'
        if lds:
            body += f"__shared__ float s[{lds // 4}]; s[*x] = 1; __syncthreads(); *x = int(s[*x + 1]);"
        head = f"__global__ void __launch_bounds__({block}) planted_kernel{i}([[maybe_unused]] int* x)"
        text += f"{head} {{ {body} }}\n"
    return text


@pytest.mark.parametrize("arch", resources.CHIPS)
def test_waves_are_the_compilers(rocm, tmp_path, arch):
    source = tmp_path / "planted.hip"
    source.write_text(occupancy_source(arch))
    command = [rocm / "llvm/bin/clang++", *resources.FLAGS, f"--rocm-path={rocm}", f"--offload-arch={arch}"]
    command += ["-Rpass-analysis=kernel-resource-usage", source, "-o", tmp_path / "code"]
    remarks = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    remark = r"Function Name: (\S+).*?Occupancy \[waves/SIMD\]: (\d+)"
    said = {name: int(waves) for name, waves in re.findall(remark, remarks, re.DOTALL)}
    kernels = resources.compile_kernels(rocm, source, arch, tmp_path)
    ours = {kernel.name: kernel.waves for kernel in kernels}
    assert ours == {re.search(r"planted_kernel\d+", name)[0]: waves for name, waves in said.items()}
    assert len(ours) > 40 and len(set(ours.values())) > 5


def test_names_are_shortened():
    short = resources.short_name
    assert short("llamac::(anonymous namespace)::f_kernel1(float*, void (*)(int))") == "f_kernel1"
    assert short("void llamac::f_kernel2<llamac::bf16, 4, (llamac::D)1>(int)") == "f_kernel2<bf16, 4, (D)1>"
    lambda_type = "llamac::g(float*)::'lambda0'(float)"
    assert (
        short(f"void f_kernel2<float, {lambda_type}>(float*, {lambda_type})") == "f_kernel2<float, lambda0>"
    )


def test_the_programs_list_is_read(build):
    listing = resources.run(build / "train_llama3", "--list-kernels")
    variants = resources.parse_variants(listing)
    assert variants["rmsnorm_forward", "reference"]
    assert len(variants) == len([line for line in listing.splitlines() if line.startswith("  ")])
