"""Stochastic rounding to bf16, and the random bits for it.

On the CPU, the bits are those of the C program (Philox; llamac/base/random.py). On a GPU, the kernel that
uses them computes them with a hash, because Philox would take longer than the update of the weights. The bits
of an element do not depend on the process that holds it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import llamac.base.random
from llamac.training.weights import Part

ROUNDING_STREAM = 0xFFFFFFFE  # of random numbers; the parameters have the lowest ones


def at_least_fp32(x: Tensor) -> Tensor:
    """x in the precision of arithmetic: bf16 becomes fp32; fp32 and double stay, without a copy."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """x[n], fp32, to bf16: away from zero with the probability that the cut-off bits stand for.

    bits: random int32[n], whose upper halves are added below bf16's last bit; or a seed without dimensions,
    from which hashed_bits() makes them.
    """
    if bits.dim() == 0:
        bits = hashed_bits(bits, x.numel())
    return ((x.view(torch.int32) + (bits >> 16 & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


def hashed_bits(seed: Tensor, n: int) -> Tensor:
    """n random bits, int32[n]: MurmurHash3's finalizer (Appleby 2011) of seed + index · 2³²/golden ratio."""
    x = torch.arange(n, dtype=torch.int32, device=seed.device) * -0x61C88647 + seed
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        x = (x ^ (x >> shift & (1 << 32 - shift) - 1)) * factor
    return x ^ (x >> 16 & 0xFFFF)


def moment_bits(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From the random uint32[n] that round a weight, those that round m and v: one byte each, centered."""
    m, v = ((bits >> shift & 0xFF) << 24 | 0x80_0000 for shift in (8, 0))
    return m, v


def philox_bits(part: Part, stored: list[Tensor], seed: int, step: int) -> list[Tensor | None]:
    """The C program's bits, int32[n], of a part's p, m and v at a step; None for those that are not bf16."""
    narrow = [x.dtype == torch.bfloat16 for x in stored]
    if not any(narrow):
        return [None] * 3
    bits = llamac.base.random.bits(seed, step, 4 * part.index, len(stored[0]), part.start())
    each = zip((bits, *moment_bits(bits)), narrow, strict=True)
    return [upload(x.view(np.int32), stored[0].device) if wanted else None for x, wanted in each]


def hash_seeds(parts: list[Part], seed: int, step: int, device: torch.device) -> Tensor:
    """int32[parts,4]: what hashed_bits() starts from, so that a part's bits are its rows' of the weight."""
    indices = [part.index for part in parts]
    numbers = llamac.base.random.bits(seed, step, ROUNDING_STREAM, 4 * (1 + max(indices)))
    bits = numbers.reshape(-1, 4)[indices]
    ahead = np.array([part.start() * 0x9E3779B9 & 0xFFFFFFFF for part in parts], np.uint32)
    return upload((bits + ahead[:, None]).view(np.int32), device)


def random_bits(parts: list[Part], seed: int, step: int, hashed: bool) -> Callable:
    """Of a step: (index of a part, its p, m, v as they are stored) -> stochastic_round()'s bits for them."""
    if not hashed:
        return lambda k, stored: philox_bits(parts[k], stored, seed, step)
    seeds = hash_seeds(parts, seed, step, parts[0].weight().device)
    return lambda k, stored: seeds[k]


def upload(x: np.ndarray, device: str | torch.device) -> Tensor:
    """x on the device. The host does not wait for the copy: it reads pinned memory."""
    tensor = torch.from_numpy(x)
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
