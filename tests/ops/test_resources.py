"""dev/hip/resources.py: injected kernels are judged as they should be, and its waves are the compiler's."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev/hip"))
import loops
import resources
from compiler import Compiler

CHIPS = ["gfx942", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gfx90a", "gfx950", "gfx1100"))]
LISTING = """\
  variant     runs on       idea; limits
injected: kernels with faults
  wide        device        128-bit accesses
  naive       device        the obvious translation
  reference   host          plain loops, not 128-bit
clean: kernels without
  wide        device        128-bit
                            loads
  wide_split  NVIDIA sm_90  128-bit loads, a scalar path of its own
mm_forward: kernels on matrix cores
  tiled       device        tiles on matrix
                            cores
  two         device        passes on matrix cores, without a kernel of the plain name
mm_backward: the same, of a summary
    that goes on
  tiled       device        tiles on matrix cores
"""
HEADER = "#include <hip/hip_runtime.h>\n"
CLEAN = """
template <class T>
__global__ void __launch_bounds__(256) clean_wide_kernel(T* out, const T* x) {
    reinterpret_cast<float4*>(out)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
}
template __global__ void clean_wide_kernel<float>(float*, const float*);
template __global__ void clean_wide_kernel<short>(short*, const short*);
template <class T, bool whole, bool other>
__global__ void __launch_bounds__(256) clean_wide_split_kernel(T* out, const T* x) {
    if (whole) reinterpret_cast<float4*>(out)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
    else out[threadIdx.x] = x[threadIdx.x];
}
template __global__ void clean_wide_split_kernel<float, true, false>(float*, const float*);
template __global__ void clean_wide_split_kernel<float, false, false>(float*, const float*);
__global__ void clean_wide_kernel_tail(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }
"""
MATRIX = """
#if defined(__GFX11__)
using Half = __attribute__((ext_vector_type(16))) short;
using Sums = __attribute__((ext_vector_type(8))) float;
__device__ Sums multiply(Half a, Sums c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, a, c);
}
#else
using Half = __attribute__((ext_vector_type(4))) short;
using Sums = __attribute__((ext_vector_type(4))) float;
__device__ Sums multiply(Half a, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, a, c, 0, 0, 0);
}
#endif
template <class Read>  // what a lane reads from LDS at once
__device__ void product(Sums* out, const Read* x, Half h) {
    __shared__ Read s[256];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const Read r = s[threadIdx.x ^ 1];
    for (unsigned i = 0; i < sizeof(r) / 4; i++) h[i] = short(reinterpret_cast<const float*>(&r)[i]);
    out[threadIdx.x] = multiply(h, out[threadIdx.x]);
}
"""
CLEAN_MATRIX = """
__global__ void __launch_bounds__(256) mm_tiled_kernel(Sums* out, const float4* x, Half h) {
    product(out, x, h);
    asm volatile("" ::: "v199");  // two waves a SIMD
}
__global__ void __launch_bounds__(256) mm_forward_two_kernel_rows(Sums* out, const float4* x, Half h) {
    product(out, x, h);
}
__global__ void mm_forward_two_kernel_sums(float* out, const float* x) { out[0] = x[threadIdx.x]; }
"""
MATRIX_FAULTS = """
__global__ void __launch_bounds__(256) mm_tiled_kernel(Sums* out, const float* x, Half h) {
    product(out, x, h);
}
__global__ void mm_backward_tiled_kernel(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }
__global__ void mm_forward_two_kernel_rows(float* out, const float* x) { out[threadIdx.x] = x[threadIdx.x]; }
__global__ void __launch_bounds__(256) mm_tiled_kernel_greedy(Sums* out, const float4* x, Half h) {
    product(out, x, h);
    asm volatile("" ::: "v250", "a99");
}
__global__ void __launch_bounds__(256) mm_tiled_kernel_flat(Sums* out, const float4* x, Half h, bool lds) {
    __shared__ Sums s[256];
    product(lds ? s : out, x, h);
    if (lds) out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void __launch_bounds__(256) mm_tiled_kernel_helper() { asm volatile("" ::: "v199"); }
"""
FAULTS = """
__global__ void injected_naive_kernel(float* out, const int* index) {  // indexed at run time: scratch
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = out[i];
    out[threadIdx.x] = a[index[threadIdx.x] & 63];
}
template <class T, bool whole>
__global__ void injected_wide_kernel(T* out, const T* x) { out[threadIdx.x] = x[threadIdx.x]; }
template __global__ void injected_wide_kernel<float, true>(float*, const float*);
template __global__ void injected_wide_kernel<float, false>(float*, const float*);
__global__ void __launch_bounds__(1024) injected_naive_kernel_spill(float* out) {
    float a[160];
    for (int i = 0; i < 160; i++) a[i] = out[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 160; i++) out[i * 1023 + threadIdx.x] = a[i];
}
__global__ void __launch_bounds__(256) injected_naive_kernel_greedy() { asm volatile("" ::: "v199"); }
__global__ void injected_other_kernel() {}
__global__ void stranger() {}
"""
COUNTED = """
using v4 = __attribute__((ext_vector_type(4))) float;
using h4 = __attribute__((ext_vector_type(4))) short;
__global__ void __launch_bounds__(256) injected_naive_kernel(v4* out, const v4* x, const float* y, h4 h) {
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
def any_compiler() -> Compiler:
    try:
        return Compiler()
    except resources.Error as error:
        pytest.skip(str(error))


@pytest.fixture
def compiler(any_compiler, request) -> Compiler:
    arch = request.node.callspec.params.get("arch") if hasattr(request.node, "callspec") else None
    if arch and not any_compiler.knows(arch):
        pytest.skip(f"{any_compiler.path} does not know {arch}")
    return any_compiler


@pytest.fixture
def judge(compiler, tmp_path):
    """Runs the script on a source; returns its exit code, its lines on stderr, and what it prints."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    program.chmod(0o755)

    def run(text: str, *arguments: str) -> tuple[int, list[str], str]:
        source = tmp_path / "injected.hip"
        source.write_text(text)
        command = [sys.executable, ROOT / "dev/hip/resources.py", source, "--program", program]
        done = subprocess.run(
            [*command, "--out", tmp_path / "out", *arguments], capture_output=True, text=True
        )
        return done.returncode, done.stderr.splitlines(), done.stdout

    return run


@pytest.mark.parametrize("arch", CHIPS)
def test_clean_kernels_pass(judge, arch):
    code, faults, printed = judge(HEADER + CLEAN, "--arch", arch)
    assert (code, faults) == (0, [])
    head, *rows = [re.split(r"  +", line) for line in printed.splitlines()[1:] if line]
    assert head[:3] == ["operation", "variant", "kernel"]
    assert [row[:3] for row in rows] == [
        ["clean", "wide", "clean_wide_kernel<float>"],
        ["clean", "wide", "clean_wide_kernel<short>"],
        ["clean", "wide", "clean_wide_kernel_tail"],
        ["clean", "wide_split", "clean_wide_split_kernel<float, false, false>"],
        ["clean", "wide_split", "clean_wide_split_kernel<float, true, false>"],
    ]


def test_faults_are_seen(judge):
    code, faults, _ = judge(HEADER + CLEAN + FAULTS)
    assert code == 1
    expected = {
        r"injected_naive_kernel: \d+ bytes of scratch, .*",
        r"injected_wide_kernel<float, true>: expected the 128-bit accesses .*",
        r"injected_wide_kernel<float, false>: expected the 128-bit accesses .*",
        r"injected_naive_kernel_spill: \d+ bytes of scratch, .*",
        r"injected_naive_kernel_spill: \d+ VGPR spills, .*",
        r"injected_naive_kernel_greedy: 2 waves a SIMD, expected at least 4",
        r"injected_other_kernel: expected <operation>_<variant>_kernel .*",
        r"stranger: expected <operation>_<variant>_kernel .*",
    }
    for pattern in expected:
        assert sum(bool(re.fullmatch(f"gfx942 injected.hip {pattern}", fault)) for fault in faults) == 1, (
            pattern
        )
    assert len(faults) == len(expected), faults


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_matrix_kernels_pass(judge, arch):
    assert judge(HEADER + MATRIX + CLEAN_MATRIX, "--arch", arch)[:2] == (0, [])


@pytest.mark.parametrize("arch", CHIPS[:2])
def test_faults_of_matrix_kernels_are_seen(judge, arch):
    code, faults, _ = judge(HEADER + MATRIX + MATRIX_FAULTS, "--arch", arch)
    assert code == 1
    assert sorted(faults) == [
        f"{arch} injected.hip {fault}"
        for fault in (
            "mm_backward_tiled_kernel: expected the matrix instructions of its variant's idea, found none",
            "mm_forward_two_kernel_rows: expected the matrix instructions of its variant's idea, found none",
            "mm_tiled_kernel: expected 128-bit reads of LDS beside its matrix instructions, found none",
            "mm_tiled_kernel_flat: 2 flat accesses, expected none: to the compiler they may be LDS or memory",
            "mm_tiled_kernel_greedy: 1 waves a SIMD, expected at least 2",
            "mm_tiled_kernel_helper: 2 waves a SIMD, expected at least 4",
        )
    ]


@pytest.mark.slow
def test_fewest_waves_are_a_choice(judge):
    greedy = '__global__ void __launch_bounds__(256) injected_naive_kernel() { asm volatile("":::"v199"); }\n'
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
        **{"flat": 0},
    }


LOOP = """
    v_mul_f32_e32 v0, v0, v0                  // 000000000100: 0A000000
    s_cbranch_vccz 1                          // 000000000104: BF860001 <f+0xc>
    ds_write_b128 v0, v[2:5]                  // 000000000108: D9BE0000
    v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1]   // 00000000010C: D3E10000
    ds_read_b128 v[2:5], v0                   // 000000000110: D9FE0000
    ds_read2_b64 v[2:5], v0 offset1:1         // 000000000114: D8EE0000
    v_exp_f32_e32 v0, v0                      // 000000000118: 7E004100
    s_cbranch_scc1 2                          // 00000000011C: BF850012 <f+0x64>
{mask}
    s_cbranch_vccz 65500                      // 000000000164: BF86FFF0 <f+0x8>
    s_branch 65500                            // 000000000168: BF82FFF0 <f+0xc>
    v_mul_f32_e32 v0, v0, v0                  // 00000000016C: 0A000000
    s_branch 65500                            // 000000000180: BF82FFF0 <f+0x0>
    s_endpgm                                  // 000000000184: BF810000
"""


def test_a_loop_is_found_and_counted():
    mask = "\n".join(f"    v_cndmask_b32_e32 v0, v0, v1  // {at:012X}: 00" for at in range(0x120, 0x164, 4))
    loop = loops.loop_of(LOOP.format(mask=mask))
    assert loop[0] == "ds_write_b128" and loop[-1] == "s_branch" and "v_cndmask_b32_e32" not in loop
    row = dict(zip(loops.HEAD, loops.row_of("f", loop)))
    assert (row["MFMA"], row["VALU"], row["exp"], row["LDS reads"], row["LDS writes"]) == tuple("11121")
    assert (row["MFMA cycles"], row["issue cycles"], row["LDS cycles"]) == ("16", "20", "96")
    assert row["most"] == "16%"


@pytest.mark.slow
def test_a_file_without_kernels(judge):
    assert judge("int host() { return 1; }\n") == (0, [], "gfx942: 0 kernels\n")


@pytest.mark.slow
def test_what_does_not_compile_is_shown(judge):
    code, lines, _ = judge("int host() { return nothing; }\n")
    assert code == 2
    assert "injected.hip" in lines[0] and any("undeclared identifier 'nothing'" in line for line in lines)


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
        head = f"__global__ void __launch_bounds__({block}) injected_kernel{i}([[maybe_unused]] int* x)"
        text += f"{head} {{ {body} }}\n"
    return text


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_waves_are_the_compilers(compiler, tmp_path, arch):
    source = tmp_path / "injected.hip"
    source.write_text(occupancy_source(arch))
    command = [compiler.path, *resources.FLAGS, *compiler.flags, f"--offload-arch={arch}"]
    command += ["-Rpass-analysis=kernel-resource-usage", source, "-o", tmp_path / "code"]
    remarks = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    remark = r"Function Name: (\S+).*?Occupancy \[waves/SIMD\]: (\d+)"
    said = {name: int(waves) for name, waves in re.findall(remark, remarks, re.DOTALL)}
    kernels = resources.compile_kernels(compiler, source, arch, tmp_path, {})
    ours = {kernel.name: kernel.waves for kernel in kernels}
    assert ours == {re.search(r"injected_kernel\d+", name)[0]: waves for name, waves in said.items()}
    assert len(ours) > 40 and len(set(ours.values())) > 5


def test_names_are_shortened():
    short = resources.short_name
    assert short("llamac::(anonymous namespace)::f_kernel(float*, void (*)(int))") == "f_kernel"
    assert short("void llamac::f_kernel<llamac::bf16, 4, (llamac::D)1>(int)") == "f_kernel<bf16, 4, (D)1>"
    lambda_type = "llamac::g(float*)::'lambda0'(float)"
    assert short(f"void f_kernel<float, {lambda_type}>(float*, {lambda_type})") == "f_kernel<float, lambda0>"


def test_the_programs_list_is_read(build):
    listing = resources.run(build / "train_llama3", "--list-kernels")
    variants = resources.parse_variants(listing)
    assert variants["rmsnorm_forward", "reference"] == "plain loops"
    assert "matrix cores" in variants["attention_backward", "flash"]
    assert len(variants) == len(re.findall(r"^[ *] \S+ +(?:host|device|AMD|NVIDIA)", listing, re.MULTILINE))
