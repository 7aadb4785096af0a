"""Written twice on purpose: csrc/core/operation.cpp has the same; test_registry.py::test_flops_by_shape.

FLOPs of matrix products and of causal attention by the shapes of the operands, for what runs in PyTorch: the
compiled module may be missing there. Names, and the order of the operands, are the described operations'.
"""

import math
from collections.abc import Sequence

Shapes = Sequence[Sequence[int]]


def attention_forward(shapes: Shapes) -> float:
    """q [B,T,NH,HD] first: two products over each position and those before it."""
    q = shapes[0]
    return 2.0 * math.prod(q) * (q[1] + 1)


def attention_backward(shapes: Shapes) -> float:
    """dout [B,T,NH,HD] first: five products instead of two."""
    return 2.5 * attention_forward(shapes)


def matmul_forward(shapes: Shapes) -> float:
    """x [...,C], weight [K,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][0]


def matmul_backward_input(shapes: Shapes) -> float:
    """dout [...,K], weight [K,C]; and of any product a [...,K] with b [K,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][-1]


def matmul_backward_weight(shapes: Shapes) -> float:
    """dout [...,K], x [...,C]."""
    return 2.0 * math.prod(shapes[0]) * shapes[1][-1]
