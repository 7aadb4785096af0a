"""The codes of the 8-bit floating-point types, by ml_dtypes. Needs no emulator."""

import ml_dtypes
import numpy as np

FORMS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def largest_of(form: str) -> float:
    return float(ml_dtypes.finfo(FORMS[form]).max)


def decode(codes: np.ndarray, form: str) -> np.ndarray:
    """float64 of codes; NaN for all that is no number, infinity among it."""
    values = np.asarray(codes, np.uint8).view(FORMS[form]).astype(np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def encode(x: np.ndarray, form: str) -> np.ndarray:
    """Codes of x: to nearest, ties to even; what is too large becomes the largest number, NaN stays NaN."""
    limit = largest_of(form)
    codes = np.clip(x, -limit, limit).astype(FORMS[form]).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x80 if form.endswith("fnuz") else 0x7F), codes)
