"""An output of a call, its expected values and its tolerance. Needs no emulator."""

from dataclasses import dataclass
from typing import Any

import numpy as np


def ulp(x, dtype) -> np.ndarray:
    """The distance between neighbouring numbers of the dtype at x."""
    x = np.abs(np.asarray(x, np.float64))
    exponent = np.maximum(np.floor(np.log2(np.where(x > 0, x, 1.0))), -126)
    mantissa, smallest = (7, 2.0**-133) if dtype == "bf16" else (23, 2.0**-149)
    return np.where(x > 0, np.exp2(exponent - mantissa), smallest)


def dtype_name(dtype) -> str:
    return dtype if dtype == "bf16" else {np.float32: "f32", np.float64: "f64", np.int32: "i32"}[dtype]


@dataclass
class Output:
    """A tensor that a call writes, and its tolerance.

    The largest error is at most `largest` ulp of the largest expected value, and each element's at most
    `each` ulp of itself plus `slack` of the largest value. With a baseline, what another implementation
    computes in the same precision, the largest error and the L2 error are at most twice the baseline's
    instead. `exact`: no error.
    """

    tensor: Any  # device.Tensor
    expected: np.ndarray
    largest: float = 2.0
    each: float = 2.0
    slack: float = 0.0
    name: str = ""
    exact: bool = False
    baseline: np.ndarray | None = None

    def judge(self) -> tuple[float, str]:
        """The largest error as a share of its tolerance, and the line that says so."""
        found = self.tensor.get()
        expected = np.asarray(self.expected, np.float64).reshape(self.tensor.shape)
        if not np.isfinite(found).all():
            return float("inf"), f"{self.name}: {np.count_nonzero(~np.isfinite(found))} values are not finite"
        error = np.abs(found - expected)
        if self.exact:
            equal = bool((error == 0).all())
            return (0.0 if equal else float("inf")), f"{self.name} {'exact' if equal else 'DIFFERS'}"
        top = np.abs(expected).max()
        unit = float(ulp(top, self.tensor.dtype))
        text = f"{self.name} {error.max() / unit:.2f} ulp"
        if self.baseline is not None:
            other = np.abs(np.asarray(self.baseline, np.float64).reshape(self.tensor.shape) - expected)
            l2, other_l2 = np.sqrt((error**2).mean()), np.sqrt((other**2).mean())
            share = max(error.max() / max(2 * other.max(), 2 * unit), l2 / (2 * other_l2))
            return share, f"{text} (baseline {other.max() / unit:.2f}, L2 {l2 / other_l2:.2f} of it)"
        each = (error / (self.each * ulp(expected, self.tensor.dtype) + self.slack * top)).max()
        return max(error.max() / unit / self.largest, each), text
