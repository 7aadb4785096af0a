"""Access to the compiled operations by name, with arrays of any library; tests and benchmarks use it.

`kernels()` lists every operation with its operands, scalars and variants; `run()` calls one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llamac.base.native import native


def kernels() -> list[dict[str, Any]]:
    """Every operation, by name; dictionaries that the caller may change.

    name, summary; `types`: the types that each type letter may take; `dimensions`: by letter, each with
    name, may_be_zero, rows (callers in PyTorch may pass several), multiple_of and at_most (a letter or
    ""); `operands`: outputs, then inputs, each with name, type (a letter, or a type), shape ((letter or
    "", factor, divisor) a dimension) and the marks output, nullable, in_place, strided, positive,
    rounded, bound, begins, may_share (operands), adds_if, except and random (a scalar's name or ""), as
    docs/operations.md says; `scalars`: (name, f|i|b); `values`: by scalar, those that tests take;
    `not_negative`: the scalars that may not be less than 0;
    `variants` in order of preference: name, idea, where ("host" or "device"), types (the operands' types, one
    list for each combination that it takes), limits (what else it asks of a call, in words, or ""), threads
    (per block, the default first), chip (the only one that it runs on, or "");
    `default`: the variant that a call where this build computes asks first: those behind it in `variants`
    that compute in the same place follow, until one takes the call. None: no variant does.
    """
    return native.kernels()


def run(
    operation: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    scalars: Sequence[float | int | bool] = (),
    variant: str = "",
    stream: int | None = None,
) -> None:
    """Run one call; outputs are written in place.

    outputs, inputs: arrays of the description's shapes and types, f32, bf16 (ml_dtypes' in numpy), f64 or
    i32; numpy's, or any object with `__dlpack__`; None for an operand that is left out. scalars: in the
    description's order. variant: its name; empty or "optimized": the first default that supports the call.
    Arrays on the current device are used in place, on `stream` (its address; the call does not wait), or on
    the default stream, which is waited for. Arrays in host memory go to a variant of the host in place, to
    one of the device by way of copies. Outputs have memory of their own, or exactly that of an input that the
    description lets them share. Indices in host memory are checked; in a device's they address memory, as in
    torch.ops.
    Raises Error (a ValueError) naming the operand, what was expected and what was found; outputs are as they
    were then.
    """
    native.run(operation, [*outputs, *inputs], list(scalars), variant, stream)


def least_work(
    operation: str, sizes: Mapping[str, int], dtype: str, absent: Sequence[str] = ()
) -> tuple[float, float]:
    """(bytes, FLOPs) that a call must at least move and compute, by its description.

    sizes: by dimension letter; dtype: "f32", "bf16" or "f64", of storage; absent: operands that are left out.
    Raises Error (a ValueError).
    """
    return native.least_work(operation, dict(sizes), dtype, list(absent))
