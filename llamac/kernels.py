"""The compiled operations by name, on numpy arrays and CPU torch tensors: what tests and benchmarks call.

`kernels()` lists every operation with its operands, scalars and variants; `run()` calls one of them.
"""

from collections.abc import Sequence
from typing import Any

from llamac import _native

kernels = _native.kernels
Error = _native.Error

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float64": "f64", "int32": "i32"}


def _describe(array: Any) -> tuple[int, str, list[int], list[int]] | None:
    """(address, dtype, shape, strides in elements) of a numpy array or a CPU torch tensor."""
    if array is None:
        return None
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise Error(f"dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    if hasattr(array, "data_ptr"):
        return array.data_ptr(), _DTYPES[dtype], list(array.shape), list(array.stride())
    strides = [stride // array.itemsize for stride in array.strides]
    return array.__array_interface__["data"][0], _DTYPES[dtype], list(array.shape), strides


def run(
    operation: str, outputs: Sequence, inputs: Sequence, scalars: Sequence = (), variant: str = ""
) -> None:
    """Run one call; outputs are written in place.

    outputs, inputs: numpy arrays or CPU torch tensors of the description's shapes and types, None for an
    operand that is left out. scalars: in the description's order. variant: its name; empty: the first that
    supports the call.
    Raises Error (a ValueError) naming the operand, what was expected and what was found.
    """
    arrays = [_describe(array) for array in (*outputs, *inputs)]
    _native.run(operation, arrays, list(scalars), variant)
