"""The codes of the 8-bit floating-point types, by their definition in csrc/core/fp8.h. Needs no emulator."""

from functools import cache

import numpy as np

# Bits of the mantissa, bias of the exponent, code of the largest number.
FORMS = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B), "e4m3fnuz": (3, 8, 0x7F), "e5m2fnuz": (2, 16, 0x7F)}


@cache
def magnitudes(form: str) -> np.ndarray:
    """float64 of the codes 0 to that of the largest number."""
    mantissa, bias, largest = FORMS[form]
    code = np.arange(largest + 1)
    exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


def largest_of(form: str) -> float:
    return float(magnitudes(form)[-1])


def decode(codes: np.ndarray, form: str) -> np.ndarray:
    """float64 of codes; NaN for all that is no number, infinity among it."""
    values = np.full(256, np.nan)
    positive = magnitudes(form)
    values[: len(positive)], values[0x80 : 0x80 + len(positive)] = positive, -positive
    if form.endswith("fnuz"):
        values[0x80] = np.nan
    return values[codes]


def encode(x: np.ndarray, form: str) -> np.ndarray:
    """Codes of x: to nearest, ties to even; what is too large becomes the largest number, NaN stays NaN."""
    fnuz, positive = form.endswith("fnuz"), magnitudes(form)
    x = np.asarray(x, np.float64)
    middles = (positive[:-1] + positive[1:]) / 2
    below = np.searchsorted(middles, np.abs(x), "left")  # a middle goes to the code below
    tie = (below < len(middles)) & (np.abs(x) == middles[np.minimum(below, len(middles) - 1)])
    code = below + (tie & (below % 2 == 1))
    code = np.where(np.signbit(x) & ~(fnuz & (code == 0)), code | 0x80, code)
    return np.where(np.isnan(x), 0x80 if fnuz else 0x7F, code).astype(np.uint8)
