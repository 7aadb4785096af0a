"""dev/hip/isa without tinygrad: what it refuses, instructions of fp8, and the search of disassembly."""

import os
import subprocess
import sys

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
