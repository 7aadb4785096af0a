"""Written twice on purpose: csrc/core/random.h has the same numbers; test_agreement.py::test_random_numbers.

Counter-based random numbers: Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. Element e of the stream `stream` at `step`
takes word e % 4 of the block whose counter is (lo32(e/4), hi32(e/4), stream, step) under the key (lo32(seed),
hi32(seed)). The bits are those of the C program, for any order and any number of devices.
"""

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_CHUNK = 1 << 18  # blocks at a time: bounds the temporaries to a few MiB


def _rounds(counter, key: tuple[int, int]):
    """Ten rounds of Philox over four words int64[n] each, numpy's or torch's: four words. A product may pass
    2^63: its 64 bits are right, and the masks take them as they are.
    """
    c0, c1, c2, c3 = counter
    for rounds in range(10):
        k0, k1 = ((k + rounds * weyl) & _LOW for k, weyl in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
    return c0, c1, c2, c3


def _key(seed: int) -> tuple[int, int]:
    return seed & _LOW, seed >> 32 & _LOW


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox over counters uint32[n,4] under a key of two 32-bit words: uint32[n,4]."""
    words = _rounds(counter.astype(np.int64).T, key)
    return np.stack(words, axis=1).astype(np.uint32)


def bits(seed: int, step: int, stream: int, n: int, start: int = 0) -> np.ndarray:
    """The 32 random bits of elements start .. start+n-1: uint32[n]."""
    first, last = start // 4, (start + n + 3) // 4
    block = np.arange(first, last, dtype=np.uint64)
    counter = np.empty((last - first, 4), np.uint32)
    counter[:, 0], counter[:, 1] = block & _LOW, block >> 32
    counter[:, 2], counter[:, 3] = stream, step
    drawn = philox4x32(counter, _key(seed)).reshape(-1)
    return drawn[start - 4 * first :][:n]


def uniform(seed: int, step: int, stream: int, n: int, start: int = 0) -> np.ndarray:
    """Uniform numbers in (0,1), never an end point: (bits + 0.5)·2^-32, float64[n]."""
    return (bits(seed, step, stream, n, start) + 0.5) * 2.0**-32


def _pairs(lib, u):
    """Standard normal numbers of uniform ones, numpy's or torch's (`lib`): float64[2n] of float64[2n].
    Products and sums are rounded one by one, as in C, whose source says how the series are found.
    """
    m, e = lib.frexp(u[0::2])
    small = m < 0.70710678118654752
    m, e = lib.where(small, 2 * m, m), lib.where(small, e - 1, e)
    s = (m - 1) / (m + 1)
    z, series = s * s, 1 / 21
    for n in range(19, 2, -2):
        series = series * z + 1 / n
    whole = e * lib.full_like(m, 0.69314718055994530942)
    radius = lib.sqrt(-2 * (whole + (2 * s + 2 * s * (z * series))))

    quarters = lib.round(4 * u[1::2])
    angle = 6.28318530717958647693 * u[1::2]
    x = angle - quarters * 1.57079632673412561417 - quarters * 6.07710050650619224932e-11
    xx, cosine, sine = x * x, 1, 1
    for n in range(16, 1, -2):
        cosine = 1 - cosine * (xx * (1 / (n * (n - 1))))
        sine = 1 - sine * (xx * (1 / (n * (n + 1))))
    sine = sine * x
    odd = quarters % 2 == 1
    c, s = lib.where(odd, sine, cosine), lib.where(odd, cosine, sine)
    c = lib.where((quarters == 1) | (quarters == 2), -c, c)
    s = lib.where((quarters == 2) | (quarters == 3), -s, s)
    return lib.stack((radius * c, radius * s), 1).reshape(-1)


def normal(seed: int, step: int, stream: int, n: int, start: int = 0) -> np.ndarray:
    """Standard normal numbers of elements start .. start+n-1: Box-Muller in double, rounded to float32[n]."""
    out = np.empty(n, np.float32)
    for first in range(start // 2 * 2, start + n, 4 * _CHUNK):  # elements 2j and 2j+1 make each other
        count = min(4 * _CHUNK, start + n - first)
        pairs = _pairs(np, uniform(seed, step, stream, (count + 1) // 2 * 2, first))
        skip = max(0, start - first)
        out[first + skip - start : first + count - start] = pairs[skip:count]
    return out


def normal_on(device: str, seed: int, step: int, stream: int, n: int, start: int = 0, chunk: int = 1 << 24):
    """normal() as a torch tensor f32[n] that is made on a device, `chunk` blocks at a time: 8 billion take a
    GPU seconds, one core minutes.
    """
    import torch

    out = torch.empty(n, device=device)
    for first in range(start // 4 * 4, start + n, 4 * chunk):
        count = min(4 * chunk, start + n - first)
        block = torch.arange(first // 4, (first + count + 3) // 4, device=device)
        counter = block & _LOW, block >> 32, torch.full_like(block, stream), torch.full_like(block, step)
        u = torch.stack(_rounds(counter, _key(seed)), 1).view(-1).double().add_(0.5).mul_(2.0**-32)
        skip = max(0, start - first)
        out[first + skip - start : first + count - start] = _pairs(torch, u)[skip:count]
    return out
