"""An output of a call, its expected values and its tolerance. Needs no emulator."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[3]))
from llamac.base.tolerance import FORWARD, allowed_of, error_of, ulp


def dtype_name(dtype) -> str:
    return dtype if isinstance(dtype, str) else {np.float32: "f32", np.float64: "f64", np.int32: "i32"}[dtype]


def label(shape: str, **marks: object) -> str:
    """The shape and the names of the marks that are set."""
    return " ".join([shape, *(name for name, given in marks.items() if given)])


@dataclass
class Output:
    """A tensor that a call writes, and its tolerance.

    The largest error is at most `largest` ulp of the largest expected value, and each element's at most
    `each` ulp of itself plus `slack` of the largest value. With a baseline, what another implementation
    computes in the same precision, llamac.base.tolerance applies instead, without the floor for the L2 error.
    `exact`: no error.
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
        dtype = dtype_name(self.tensor.dtype)
        unit = float(ulp(top, dtype))
        text = f"{self.name} {error.max() / unit:.2f} ulp"
        if self.baseline is not None:
            ours, other = error_of(found, expected), error_of(self.baseline, expected)
            allowed = allowed_of(other, expected, dtype, FORWARD).largest
            l2 = ours.relative_l2 / other.relative_l2
            share = max(ours.largest / allowed, l2 / FORWARD)
            return share, f"{text} (baseline {other.largest / unit:.2f}, L2 {l2:.2f} of it)"
        each = (error / (self.each * ulp(expected, dtype) + self.slack * top)).max()
        return max(error.max() / unit / self.largest, each), text
