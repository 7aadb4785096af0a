"""Written twice on purpose: csrc/core/operation.cpp has the same; test_registry.py::test_flops_by_shape.

FLOPs of matrix products and of attention, from the shapes of the operands, for PyTorch's FLOP counter.
Names and order of the operands are those of the described operations.
"""

import math
from collections.abc import Sequence

Shapes = Sequence[Sequence[int]]


def _sum_to(n: float) -> float:
    """1 + 2 + ... + n."""
    return 0.5 * n * (n + 1) if n > 0 else 0.0


def attention_forward(shapes: Shapes, causal: bool = True, window: int = 0, keys: int = 0) -> float:
    """q [B,T,NH,HD] first: two products over each query and the keys that it sees, documents apart
    (csrc/ops/attention/attention.hip). keys: 0 for as many as queries.
    """
    B, T, NH, HD = shapes[0]
    S = keys or T
    pairs = _sum_to(S) - _sum_to(S - T) if causal else float(T * S)
    if window > 0:
        pairs -= _sum_to(S - window) - _sum_to(S - T - window)
    return 4.0 * B * NH * HD * pairs


def attention_backward(shapes: Shapes, causal: bool = True, window: int = 0, keys: int = 0) -> float:
    """dout [B,T,NH,HD] first: five products instead of two."""
    return 2.5 * attention_forward(shapes, causal, window, keys)


def matmul_forward(shapes: Shapes) -> float:
    """x [...,C], weight [K,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][0]


def matmul_backward_input(shapes: Shapes) -> float:
    """dout [...,K], weight [K,C]; and of any product a [...,K] with b [K,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][-1]


def matmul_backward_weight(shapes: Shapes) -> float:
    """dout [...,K], x [...,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][-1]
