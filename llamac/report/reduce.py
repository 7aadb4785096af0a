"""Few points for long curves: smoothing, and a reduction that keeps extremes."""

import math
from collections.abc import Sequence

import numpy as np

Curve = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]  # steps, values
MOST_POINTS = 2000  # more than a chart has pixels across


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean of the finite values in a window of 3% of the run, cut at its ends; NaN if there are none."""
    n = values.size
    half = n * 3 // 200
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first = np.maximum(np.arange(n) - half, 0)
    end = np.minimum(np.arange(n) + half + 1, n)
    count = counts[end] - counts[first]
    total = sums[end] - sums[first]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def kept(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Indices of at most `most` + 2 values in ascending order: the least and the largest of each of most / 2
    stretches of equal length, the first and the last. A stretch of NaN keeps one: the gap of the curve."""
    n = values.size
    if n <= most:
        return np.arange(n)
    length = math.ceil(n / (most // 2))
    rows = math.ceil(n / length)
    padded = np.full(rows * length, np.nan)
    padded[:n] = values
    table = padded.reshape(rows, length)
    unknown = np.isnan(table)
    least = np.where(unknown, np.inf, table).argmin(axis=1)
    largest = np.where(unknown, -np.inf, table).argmax(axis=1)
    base = np.arange(rows) * length
    chosen = np.concatenate([[0], base + least, base + largest, [n - 1]])
    return np.unique(np.minimum(chosen, n - 1))


def stretches(values: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """The mean of the finite values in each of at most `most` stretches of equal length."""
    begins = np.arange(0, values.size, math.ceil(values.size / most))
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), begins)
    counts = np.add.reduceat(known.astype(int), begins)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def rounded(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """For JSON: so many significant digits, NaN as null."""
    return [None if math.isnan(v) else float(f"{v:.{digits}g}") for v in values.tolist()]


def difference(of: Curve, minus: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The steps that two curves have in common, and the first one's values minus the second one's."""
    steps, mine, other = np.intersect1d(of[0], minus[0], return_indices=True)
    return steps, np.asarray(of[1], float)[mine] - np.asarray(minus[1], float)[other]
