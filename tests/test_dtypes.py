"""The two tables of storage types, csrc/core/dtype.h and llamac/dtypes.py: against each other, and their
names, sizes and mantissas against numpy's, safetensors' and torch's.
"""

import ctypes
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

from llamac.dtypes import TABLE, dtype_row, torch_dtypes
from llamac.native import native

NAMES = list(TABLE)


def compiled() -> dict[str, dict]:
    return {row["name"]: row for row in native.dtypes()}


def dlpack_type(x: torch.Tensor) -> tuple[int, int, int]:
    """code, bits and lanes of DLPack's DLTensor: behind an address, a device (8 bytes) and a rank (4)."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = x.__dlpack__()
    content = ctypes.string_at(pointer(capsule, b"dltensor"), 24)
    return content[20], content[21], int.from_bytes(content[22:24], "little")


def test_both_tables_are_the_same():
    rows = compiled()
    assert list(rows) == NAMES
    for name, row in rows.items():
        mine = TABLE[name]
        assert (mine.name, mine.mantissa_bits, mine.safetensors, mine.torch, mine.narrow) == (
            name,
            row["mantissa_bits"],
            row["safetensors"],
            row["python"],
            row["mantissa_bits"] > 0 and row["arithmetic"] != name,
        )


@pytest.mark.parametrize("name", NAMES)
def test_torch_calls_it_so(name):
    row, dtype = compiled()[name], torch_dtypes(name)[name]
    assert dtype == getattr(torch, row["python"]) and dtype_row(dtype) == TABLE[name]
    assert dtype.itemsize == row["bytes"]
    assert dtype.is_floating_point == (row["mantissa_bits"] > 0)
    if dtype.is_floating_point:
        assert -math.log2(torch.finfo(dtype).eps) == row["mantissa_bits"]
        wide = torch_dtypes(row["arithmetic"])[row["arithmetic"]]
        assert wide == torch.promote_types(dtype, torch.float32)
    assert dlpack_type(torch.zeros(2, dtype=dtype)) == row["dlpack"]


@pytest.mark.parametrize("name", NAMES)
def test_numpy_calls_it_so(name):
    row = compiled()[name]
    if hasattr(np, row["python"]):
        dtype, limits = np.dtype(row["python"]), np.finfo
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        dtype, limits = np.dtype(getattr(ml_dtypes, row["python"])), ml_dtypes.finfo
    assert (dtype.name, dtype.itemsize) == (row["python"], row["bytes"])
    assert row["mantissa_bits"] == (0 if dtype.kind == "i" else limits(dtype).nmant)


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_calls_it_so(name):
    data = safetensors.torch.save({"x": torch.zeros(3, dtype=torch_dtypes(name)[name])})
    length = int.from_bytes(data[:8], "little")
    assert json.loads(data[8 : 8 + length])["x"]["dtype"] == compiled()[name]["safetensors"]
