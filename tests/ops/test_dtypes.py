"""The two tables of storage types, csrc/core/dtype.h and llamac/base/dtypes.py: against each other, and their
names, sizes and mantissas against numpy's, safetensors' and torch's.
"""

import ctypes
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

from llamac.base import registry
from llamac.base.dtypes import TABLE, dtype_row, torch_dtypes
from llamac.base.native import native

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
        # finfo's eps of float8_e5m2fnuz is half of it in PyTorch 2.13.
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        after_one = (torch.ones(1, dtype=dtype).view(integer) + 1).view(dtype)
        assert -math.log2(after_one.double().item() - 1) == row["mantissa_bits"]
        wide = torch_dtypes(row["arithmetic"])[row["arithmetic"]]
        float8 = dtype.itemsize == 1  # PyTorch promotes none of these
        assert wide == (torch.float32 if float8 else torch.promote_types(dtype, torch.float32))
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


# The four types of products: as PyTorch converts, but for what lies beyond the largest value

FP8 = [name for name, row in TABLE.items() if row.torch.startswith("float8_")]


def fp8_of(name: str, x: torch.Tensor, variant: str) -> torch.Tensor:
    """x in the type `name`, by `quantize` with a scale of 1; each variant takes 16 columns."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % 256)).reshape(-1, 16)
    out = torch.empty(rows.shape, dtype=torch_dtypes(name)[name])
    registry.run("quantize", [out, None, None, None], [rows, torch.ones(1)], (), variant)
    return out.reshape(-1)[: x.numel()]


def finite_codes(name: str) -> torch.Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(torch_dtypes(name)[name]).float()
    return values[values.isfinite()].unique()


def boundaries(name: str) -> torch.Tensor:
    """Every value, every midpoint of neighbours, and the floats on both sides of them."""
    values = finite_codes(name)
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    points = torch.cat((values, middles))
    up, down = (torch.nextafter(points, torch.tensor(side)) for side in (torch.inf, -torch.inf))
    points = torch.cat((points, up, down))
    return points[points.abs() <= values.max()]


VARIANTS = [v["name"] for op in registry.kernels() if op["name"] == "quantize" for v in op["variants"]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FP8)
def test_fp8_rounds_as_torch(name, variant):
    generator = torch.Generator().manual_seed(1)
    exponents = torch.rand(20000, generator=generator) * 40 - 28
    x = torch.cat((boundaries(name), torch.randn(20000, generator=generator) * exponents.exp2()))
    x = x[x.abs() <= finite_codes(name).max()]
    assert (finite_codes(name).unsqueeze(1) == x).any(1).all()
    found, expected = fp8_of(name, x, variant), x.to(torch_dtypes(name)[name])
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FP8)
def test_fp8_saturates(name, variant):
    largest = finite_codes(name).max()
    beyond = torch.tensor([torch.nextafter(largest, torch.tensor(torch.inf)), 2 * largest, 3e38, torch.inf])
    assert (fp8_of(name, beyond, variant).float() == largest).all()
    assert (fp8_of(name, -beyond, variant).float() == -largest).all()
    assert fp8_of(name, torch.tensor([torch.nan, -torch.nan]), variant).float().isnan().all()


@pytest.mark.parametrize("name", FP8)
def test_fp8_has_torchs_values(name):
    """By a product with 1 of every code, which also shows infinity and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch_dtypes(name)[name])[:, None]
    partner = name.replace("e5m2", "e4m3")
    one, scale = torch.ones(1, 1).to(torch_dtypes(partner)[partner]), torch.ones(1)
    out = torch.empty(256, 1)
    registry.run("scaled_matmul", [out], [codes, one, scale, scale, None], (False, 0), "reference")
    torch.testing.assert_close(out, codes.float(), rtol=0, atol=0, equal_nan=True)
