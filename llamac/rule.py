"""The rule that says what is right: the error against float64 may be at most a factor of PyTorch's own
error in the same type on the same input, and never has to be below two units in the last place of the largest
value.
"""

from dataclasses import dataclass

import numpy as np

FORWARD, BACKWARD = 2.0, 3.0
MANTISSA_BITS = {"f32": 23, "bf16": 7}


@dataclass
class Error:
    relative_l2: float
    largest: float


def error_of(found: np.ndarray, truth: np.ndarray) -> Error:
    """Of `found` against `truth`, same shape, any float types. NaN or infinity is an infinite error."""
    found, truth = np.asarray(found, np.float64).ravel(), np.asarray(truth, np.float64).ravel()
    if found.shape != truth.shape or not np.isfinite(found).all():
        return Error(np.inf, np.inf)
    difference = np.abs(found - truth)
    norm = np.linalg.norm(truth)
    return Error(
        float(np.linalg.norm(difference) / norm) if norm else float(np.linalg.norm(difference)),
        float(difference.max(initial=0.0)),
    )


def floor_of(truth: np.ndarray, dtype: str) -> Error:
    """Two units in the last place of the largest value: for one element, and for all of them at once."""
    truth = np.asarray(truth, np.float64)
    largest = np.abs(truth).max(initial=0.0)
    two_ulp = 2.0 * 2.0 ** (np.floor(np.log2(largest)) - MANTISSA_BITS[dtype]) if largest else 0.0
    norm = np.linalg.norm(truth)
    return Error(float(two_ulp * np.sqrt(truth.size) / norm) if norm else 0.0, float(two_ulp))


def violation(ours: np.ndarray, torch: np.ndarray, truth: np.ndarray, dtype: str, factor: float) -> str:
    """Empty if `ours` keeps the rule beside `torch`, else what is wrong."""
    return violation_of(ours, error_of(torch, truth), truth, dtype, factor)


def violation_of(ours: np.ndarray, baseline: Error, truth: np.ndarray, dtype: str, factor: float) -> str:
    """The same where PyTorch's error is known otherwise."""
    for kind in ("relative_l2", "largest"):
        errors = (error_of(ours, truth), baseline, floor_of(truth, dtype))
        mine, theirs, floor = (getattr(error, kind) for error in errors)
        allowed = max(factor * theirs, floor)
        if not mine <= allowed:
            return (
                f"{kind.replace('_', ' ')} error {mine:.3g}, allowed {allowed:.3g} "
                f"(PyTorch's {theirs:.3g}, factor {factor:g}, floor {floor:.3g})"
            )
    return ""
