"""The operation `hash` (csrc/ops/hash.hip) in numpy. Tests and the emulated gfx942 compare with it."""

import numpy as np


def _fold(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(32))


def hash_halves(x: np.ndarray) -> np.ndarray:
    """float64[2]: the lower and the upper 32 bits of the hash of an array's memory."""
    memory = np.ascontiguousarray(x).tobytes()
    words = np.frombuffer(memory + bytes(-len(memory) % 16), np.uint64)
    with np.errstate(over="ignore"):
        position = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        terms = _fold(_fold(words + position) * np.uint64(0xBF58476D1CE4E5B9))
        total = int(_fold(terms * np.uint64(0x94D049BB133111EB)).sum(dtype=np.uint64))
    return np.array([total & 0xFFFFFFFF, total >> 32], np.float64)
