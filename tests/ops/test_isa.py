"""dev/hip/isa without tinygrad: what it refuses, instructions of fp8, and the search of disassembly."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from run import ROOT

ISA = ROOT / "dev/hip/isa"


@pytest.fixture
def isa(monkeypatch):
    monkeypatch.syspath_prepend(ISA)


def run(*words, **environment) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name != "TINYGRAD"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment)


@pytest.mark.parametrize("script", ["check.py", "special.py", "large.py"])
def test_refuses_to_run_without_tinygrad(script, tmp_path):
    for environment, found in (({}, "nothing"), ({"TINYGRAD": str(tmp_path)}, str(tmp_path))):
        result = run(ISA / script, **environment)
        assert result.returncode == 2
        assert result.stderr.startswith("TINYGRAD: expected a checkout of tinygrad")
        assert result.stderr.endswith(f"found {found}\n") and result.stderr.count("\n") == 1


def test_hazards_wants_code_objects(tmp_path):
    result = run(ISA / "hazards.py", tmp_path)
    assert result.returncode == 2 and "expected *.hsaco files, found none" in result.stderr


class Wave:
    """What corrections.corrected knows of a wave."""

    def __init__(self):
        random = np.random.default_rng(1)
        self.vgpr, self.acc = (random.integers(0, 1 << 32, (16, 64), dtype=np.uint32) for _ in range(2))
        self.sgpr = np.zeros(256, np.uint32)
        self.sgpr[126:128] = 0xFFFFFFFF, 0x0000FFFF  # the upper 16 lanes are off


def test_conversion_to_fp8(isa):
    from corrections import corrected
    from fp8 import encode

    wave = Wave()
    values = np.array([1.7, -3.1, 240.0, 241.0, np.nan, -1e-9, 0.01, -0.0] * 8, np.float32)
    wave.vgpr[2], wave.vgpr[4] = values.view(np.uint32), values[::-1].view(np.uint32)
    before = wave.vgpr[3].copy()
    word = 0x00020902D2A24003  # v_cvt_pk_fp8_f32 v3, v2, v4 op_sel:[0,0,1]
    corrected("V_CVT_PK_FP8_F32", word, None)(wave)
    too_large_is_nan = np.where(np.abs(values) > 240, np.nan, values)
    codes = encode(too_large_is_nan, "e4m3fnuz").astype(np.uint32)
    expected = before & 0xFFFF | codes << 16 | codes[::-1] << 24
    assert np.array_equal(wave.vgpr[3], np.where(np.arange(64) < 48, expected, before))


def test_matrix_product_of_fp8(isa):
    from corrections import corrected
    from fp8 import decode

    wave = Wave()
    for row in (2, 3, 4, 5):
        wave.vgpr[row] &= 0x7F7F7F7F  # no NaN
    for row in range(8, 12):
        wave.vgpr[row] = np.arange(64, dtype=np.float32).view(np.uint32)
    # v_mfma_f32_16x16x32_bf8_fp8 v[8:11], v[2:3], v[4:5], v[8:11]
    word = 0x04220902D3F10008
    a, b = np.zeros((16, 32)), np.zeros((16, 32))
    for lane in range(64):
        for j in range(8):
            byte = [int(wave.vgpr[at + j // 4, lane]) >> 8 * (j % 4) & 0xFF for at in (2, 4)]
            a[lane % 16, 8 * (lane // 16) + j] = decode(byte[0], "e5m2fnuz")
            b[lane % 16, 8 * (lane // 16) + j] = decode(byte[1], "e4m3fnuz")
    corrected("V_MFMA_F32_16X16X32_BF8_FP8", word, None)(wave)
    for lane in range(64):
        for i in range(4):
            expected = np.float32(a[4 * (lane // 16) + i] @ b[lane % 16] + lane)
            assert wave.vgpr[8 + i, lane : lane + 1].view(np.float32)[0] == expected


def hazards_of(lines: list[str]) -> list[str]:
    from hazards import find_hazards, parse

    body = "".join(f"\t{line:40s} // {4 * i:012X}:\n" for i, line in enumerate(lines))
    ((name, code),) = parse(f"0000000000000000 <kernel>:\n{body}")
    return find_hazards(name, code)


LOAD, USE, END = "global_load_dword v1, v[2:3], off", "v_add_f32 v4, v1, v1", "s_endpgm"
# 2^12 paths.
MAYBE_LOADS = [
    x for i in range(12) for x in ("s_cbranch_scc1 1", f"global_load_dword v{10 + i}, v[2:3], off")
]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([LOAD, "s_waitcnt vmcnt(0)", USE, END], None),
        ([LOAD, USE, END], "v_add_f32 v4, v1, v1 uses [('v', 1)] before it arrives"),
        ([LOAD, "global_load_dword v5, v[2:3], off", "s_waitcnt vmcnt(1)", USE, END], None),
        ([LOAD, "s_waitcnt lgkmcnt(0)", USE, END], "before it arrives"),
        (["scratch_load_dword v1, off, off", "scratch_load_dword v1, off, off offset:4", END], None),
        (["ds_read_b128 v[4:7], v0", "v_mov_b32 v8, v6", END], "uses [('v', 6)]"),
        (["ds_read_b128 v[4:7], v0", "s_waitcnt lgkmcnt(0)", "v_mov_b32 v8, v6", END], None),
        (["ds_write_b32 v0, v1", "s_barrier", END], "LDS write in flight at a barrier"),
        (["ds_write_b32 v0, v1", "s_waitcnt lgkmcnt(0)", "s_barrier", END], None),
        # A scalar load in flight: LDS may arrive after it, so a count above 0 says nothing.
        (
            ["ds_read_b32 v1, v0", "s_load_dword s4, s[0:1], 0x0", "s_waitcnt lgkmcnt(1)", USE, END],
            "v_add_f32",
        ),
        # Only the path that jumps over the wait is wrong.
        ([LOAD, "s_cbranch_execz 1", "s_waitcnt vmcnt(0)", USE, END], "before it arrives"),
        # A loop whose load is used in the next turn.
        ([USE, LOAD, "s_cbranch_scc1 65533", "s_waitcnt vmcnt(0)", END], "before it arrives"),
        ([LOAD, *MAYBE_LOADS, "s_waitcnt vmcnt(12)", USE, END], "before it arrives"),
        ([LOAD, *MAYBE_LOADS, "s_waitcnt vmcnt(0)", USE, END], None),
        ([*MAYBE_LOADS, LOAD, "s_waitcnt vmcnt(1)", USE, END], "before it arrives"),
        # A scalar load on one of two paths.
        *(
            (
                [
                    "ds_read_b32 v1, v0",
                    "s_cbranch_scc1 1",
                    maybe,
                    "ds_read_b32 v5, v0",
                    "s_waitcnt lgkmcnt(1)",
                    USE,
                    END,
                ],
                fault,
            )
            for maybe, fault in (("s_load_dword s4, s[0:1], 0x0", "v_add_f32"), ("s_nop 0", None))
        ),
    ],
)
def test_hazards(isa, lines, fault):
    found = hazards_of(lines)
    assert len(found) == (fault is not None), found
    assert fault is None or fault in found[0]


def simulate(*streams, memory=None, **changes):
    """The waves of one block, one of these streams of instructions each, and the simulated compute unit."""
    from timing_unit import Memory, Unit, Wave, decode, numbers

    code = [decode(*line.split(" ", 1)) for stream in streams for line in stream]
    ends = np.cumsum([len(stream) for stream in streams])
    paths = [list(range(end - len(stream), end)) for stream, end in zip(streams, ends)]
    # Waves of one SIMD: every fourth.
    waves = [Wave(path, 0, 4 * n, tuple(range(len(path)))) for n, path in enumerate(paths)]
    unit = Unit(code, waves, numbers(**changes), memory or Memory())
    unit.run()
    return [wave.times for wave in waves], unit


ADD, EXP = "v_add_f32_e32 v1, v1, v2", "v_exp_f32_e32 v1, v1"
MFMA, BIG = (
    "v_mfma_f32_16x16x16_bf16 {0}, v[0:1], v[2:3], {0}",
    "v_mfma_f32_32x32x8_bf16 {0}, v[0:1], v[2:3], {0}",
)
READ = "ds_read_b128 v[8:11], v4"


@pytest.mark.parametrize(
    "stream, times",
    [
        ([ADD] * 3, [0, 4, 8]),
        ([EXP, ADD], [0, 20]),  # quarter rate, and a wait state
        ([EXP, "v_add_f32_e32 v3, v2, v2"], [0, 16]),
        (["v_mul_lo_u32 v1, v2, v3", ADD], [0, 16]),
        ([MFMA.format(f"v[{16 + 4 * i}:{19 + 4 * i}]") for i in range(3)], [0, 16, 32]),
        ([MFMA.format("v[16:19]")] * 3, [0, 16, 32]),  # accumulators are forwarded
        ([BIG.format("a[0:15]")] * 2, [0, 32]),
        ([MFMA.format("v[16:19]"), "v_add_f32_e32 v1, v16, v2"], [0, 28]),  # passes and three wait states
        ([MFMA.format("v[16:19]"), ADD], [0, 16]),  # not under the MFMA
        ([MFMA.format("v[16:19]"), "v_pk_mul_f32 v[4:5], v[6:7], v[8:9]"], [0, 24]),  # two slots later still
        (
            [READ, "s_waitcnt lgkmcnt(0)", "v_add_f32_e32 v1, v8, v2"],
            [0, 72, 76],
        ),  # 8 cycles of data, 64 of latency
        (["s_nop 3", ADD], [0, 16]),
        (["s_cmp_lt_u32 s1, s2", "s_cselect_b32 s3, s4, s5"], [0, 4]),
    ],
)
def test_cycles_of_a_wave(isa, stream, times):
    assert simulate(stream)[0] == [times]


def test_waves_share_a_simd(isa):
    products, sums = [MFMA.format("v[16:19]")] * 2, [ADD] * 4
    # One vector instruction per slot; the second wave's run under the products.
    assert simulate(products, sums, mfma_hold=0.0)[0] == [[0, 16], [4, 8, 12, 20]]
    assert simulate(products, sums)[0] == [[0, 16], [32, 36, 40, 44]]
    first, second = simulate([ADD] * 2, ["s_setprio 1", *[ADD] * 2])[0]
    assert (first, second) == ([0, 12], [0, 4, 8])


def test_lds_conflicts_and_barrier(isa):
    from timing_unit import Memory

    wait = [READ] * 2 + ["s_waitcnt lgkmcnt(0)"]
    assert simulate(wait)[0][0][2] == 2 * 8 + 64
    assert simulate(wait, memory=Memory(conflicts={0: 32, 1: 32}))[0][0][2] == 2 * 32 + 64
    late = ["s_nop 15", "s_barrier", ADD]
    (_, arrives, after), (_, goes_on) = simulate(late, ["s_barrier", ADD])[0]
    assert (arrives, after, goes_on) == (64, 72, 76)  # the barrier's 8 cycles; one port for both


def test_loads_share_the_memory_pipe(isa):
    load = "global_load_dwordx4 v[{0}:{1}], v[0:1], off"
    stream = [load.format(4 * i, 4 * i + 3) for i in range(4, 8)] + ["s_waitcnt vmcnt(0)"]
    from timing_unit import Memory

    times, unit = simulate(stream, memory=Memory(l1=1.0))
    assert times[0][-1] == 4 * 16 + unit.n.l1_latency + 3 & -4  # 64 bytes per cycle, 1024 bytes each
    far, _ = simulate(stream, memory=Memory(far=1.0), far_bytes=16.0)
    assert far[0][-1] == 4 * 64 + unit.n.far_latency


LISTING = """0000000000001000 <kernel>:
\ts_mov_b32 s0, 8                                            // 000000001000: BE800088
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]     // 000000001004: D3E18000 04020500
\ts_sub_u32 s0, s0, 1                                        // 00000000100C: 80808100
\ts_cmp_lg_u32 s0, 0                                         // 000000001010: BF078000
\ts_cbranch_scc1 65531                                       // 000000001014: BF85FFFB
\ts_endpgm                                                   // 000000001018: BF810000
"""


def test_loop_of_a_listing(isa):
    from timing_kernel import Kernel
    from timing_unit import parse

    kernel = Kernel("kernel", parse(LISTING)["kernel"], threads=256, registers=128, lds=32768)
    assert kernel.loops == [(1, 4)] and kernel.resident() == 2
    before, body, after = kernel.parts((1, 4), frozenset())
    assert (before, body, after) == ([0], [1, 2, 3, ~4], [5])


def test_timing_wants_code_objects(tmp_path):
    result = run(ISA / "timing.py", "--only", "AITER", LLAMAC_TIMING_OBJECTS=str(tmp_path))
    assert result.returncode == 2 and "found none" in result.stderr


def test_measured_beside_predicted(isa):
    """The row of the variant, its fastest block size; no row is an error."""
    from timing import measured_ms

    text = """matmul_forward (bf16) N=8192 C=8192 K=8192 on AMD Instinct MI300X; limit 4300 GB/s by copy
  variant       block          ms      GB/s   TFLOP/s  % of limit  error / bound
  tiled           256      1.8500     217.7   594.327         5.1           0.20
  tiled           512      1.7000     236.9   646.768         5.5           0.20
"""
    assert measured_ms(text, "tiled") == 1.7
    with pytest.raises(ValueError, match="expected a row of flash"):
        measured_ms(text, "flash")


def test_a_sum_needs_all_of_its_kernels(isa, monkeypatch, tmp_path):
    """flash's backward pass has two; one alone would be twice as fast."""
    import timing

    def simulated(broken: str) -> list[str]:
        def entry(facts: dict, *_) -> SimpleNamespace:
            if facts["name"].endswith(broken):
                raise ValueError(broken)
            return SimpleNamespace(name=facts["name"], facts=facts)

        monkeypatch.setattr(timing, "Entry", entry)
        return [e.name for e in timing.entries("flash backward <128>", {})]

    monkeypatch.setattr(timing, "OURS", tmp_path)
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention/flash_backward.hsaco").touch()
    assert len(simulated("none")) == 2 and simulated("keys") == []


def test_timing_benches(isa):
    from timing_bench import BENCHES, predicted, source

    assert source().count("__global__") == len(BENCHES) and "%" not in source().split("measure(")[-1]
    assert predicted(BENCHES["MFMA 32x32x8, independent"], "serial") == 64
    for name in ("two waves: vector beside MFMA", "MFMA and 3 vector, one wave"):  # tell the rules apart
        assert predicted(BENCHES[name], "serial") > 1.2 * predicted(BENCHES[name], "overlap")
