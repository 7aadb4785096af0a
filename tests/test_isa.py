"""dev/hip/isa without tinygrad: what it refuses, its tolerance, and the search of disassembly."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
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


class Written:
    """What output.Output knows of a tensor."""

    def __init__(self, values, dtype):
        self.values, self.dtype, self.shape = np.asarray(values, np.float64), dtype, np.shape(values)

    def get(self):
        return self.values


@pytest.mark.parametrize(
    ("dtype", "values", "right"),
    [
        ("bf16", [1 + 2**-7, 2.0], True),
        ("bf16", [1.0, 2 + 3 * 2**-6], False),  # three ulp of the largest
        ("bf16", [1 + 3 * 2**-7, 2.0], False),  # three ulp of its own
        ("bf16", [1.0, np.nan], False),
        ("bf16", [1.0, np.inf], False),
        (np.float32, [1 + 2**-22, 2.0], True),
        (np.float32, [1 + 2**-20, 2.0], False),
    ],
)
def test_tolerance_in_ulp(isa, dtype, values, right):
    from output import Output

    share, _ = Output(Written(values, dtype), np.array([1.0, 2.0])).judge()
    assert (share <= 1) == right


def test_tolerance_of_a_baseline(isa):
    from output import Output

    expected = np.linspace(1, 2, 100)
    baseline = expected + 1e-2
    for error, right in ((1.9e-2, True), (2.1e-2, False)):
        share, _ = Output(Written(expected + error, "bf16"), expected, baseline=baseline).judge()
        assert (share <= 1) == right


def hazards_of(lines: list[str]) -> list[str]:
    from hazards import find_hazards, parse

    body = "".join(f"\t{line:40s} // {4 * i:012X}:\n" for i, line in enumerate(lines))
    ((name, code),) = parse(f"0000000000000000 <kernel>:\n{body}")
    return find_hazards(name, code)[0]


LOAD, USE, END = "global_load_dword v1, v[2:3], off", "v_add_f32 v4, v1, v1", "s_endpgm"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([LOAD, "s_waitcnt vmcnt(0)", USE, END], None),
        ([LOAD, USE, END], "v_add_f32 v4, v1, v1 uses [('v', 1)] before it arrives"),
        ([LOAD, "global_load_dword v5, v[2:3], off", "s_waitcnt vmcnt(1)", USE, END], None),
        ([LOAD, "s_waitcnt lgkmcnt(0)", USE, END], "before it arrives"),
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
    ],
)
def test_hazards(isa, lines, fault):
    found = hazards_of(lines)
    assert len(found) == (fault is not None), found
    assert fault is None or fault in found[0]
