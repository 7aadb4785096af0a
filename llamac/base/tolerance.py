"""Written twice on purpose: csrc/core/tolerance.h has the same rule; test_tolerance.py::test_both_languages.

The largest accepted difference of a result from float64's: a factor of the error of PyTorch's own operation
in the same type on the same input, by relative L2 norm and by largest element. The floor is two units in the
last place, of every value for the norm, and of the largest value for an element; no result has to be closer.
Nothing else in Python states this rule: tests, benchmarks, llamac.doctor and dev/hip/isa import it. Needs
only numpy.
"""

from dataclasses import dataclass

import numpy as np

from llamac.base.dtypes import TABLE

FORWARD, BACKWARD = 2.0, 3.0
FLOOR_ULP = 2.0


@dataclass
class Error:
    relative_l2: float
    largest: float


def error_of(found: np.ndarray, truth: np.ndarray) -> Error:
    """Of `found` against `truth`, same shape, any float types. NaN is right where the truth is NaN (a mean of
    nothing); any other NaN or infinity is an infinite error.
    """
    found, truth = np.asarray(found, np.float64).ravel(), np.asarray(truth, np.float64).ravel()
    if found.shape != truth.shape:
        return Error(np.inf, np.inf)
    counted = ~(np.isnan(found) & np.isnan(truth))
    found, truth = found[counted], truth[counted]
    if not (np.isfinite(found) & np.isfinite(truth)).all():
        return Error(np.inf, np.inf)
    difference = np.abs(found - truth)
    norm = np.linalg.norm(truth)
    return Error(
        float(np.linalg.norm(difference) / norm) if norm else float(np.linalg.norm(difference)),
        float(difference.max(initial=0.0)),
    )


def ulp(x: np.ndarray | float, dtype: str) -> np.ndarray:
    """The distance between neighboring numbers of the type at each x; at 0 that of the denormals."""
    x, smallest = np.abs(np.asarray(x, np.float64)), -14 if dtype == "fp16" else -126  # of a normal number
    exponent = np.floor(np.log2(np.where(x > 0, x, 2.0**smallest)))
    return np.exp2(np.maximum(exponent, smallest) - TABLE[dtype].mantissa_bits)


def floor_of(truth: np.ndarray, dtype: str) -> Error:
    """The floor for the norm, and for one element."""
    truth = np.asarray(truth, np.float64)
    largest = np.abs(truth[~np.isnan(truth)]).max(initial=0.0)
    if not largest:
        return Error(0.0, 0.0)
    return Error(FLOOR_ULP * 2.0 ** -TABLE[dtype].mantissa_bits, FLOOR_ULP * float(ulp(largest, dtype)))


def allowed_of(baseline: Error, truth: np.ndarray, dtype: str, factor: float) -> Error:
    """The tolerance beside a baseline, PyTorch's error: the largest error that is accepted."""
    floor = floor_of(truth, dtype)
    return Error(
        max(factor * baseline.relative_l2, floor.relative_l2), max(factor * baseline.largest, floor.largest)
    )


def violation(ours: np.ndarray, torch: np.ndarray, truth: np.ndarray, dtype: str, factor: float) -> str:
    """Empty if `ours` is within the tolerance beside `torch`, else what is wrong."""
    return violation_of(ours, error_of(torch, truth), truth, dtype, factor)


def violation_of(ours: np.ndarray, baseline: Error, truth: np.ndarray, dtype: str, factor: float) -> str:
    """The same where PyTorch's error is known otherwise."""
    return beyond(error_of(ours, truth), baseline, floor_of(truth, dtype), factor)


def beyond(error: Error, baseline: Error, floor: Error, factor: float) -> str:
    """The same of errors, where the truth is not at hand."""
    for kind in ("relative_l2", "largest"):
        mine, theirs, least = (getattr(e, kind) for e in (error, baseline, floor))
        most = max(factor * theirs, least)
        if not mine <= most or np.isinf(mine):  # an infinite error is outside, whatever PyTorch's
            return (
                f"{kind.replace('_', ' ')} error {mine:.3g}, allowed {most:.3g} "
                f"(PyTorch's {theirs:.3g}, factor {factor:g})"
            )
    return ""
