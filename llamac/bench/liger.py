"""Liger's functions for the same operations, from its public functional API, if it is installed.

Liger writes gradients into the memory of inputs and of outputs' gradients, so it gets separate copies, in the
layout that its users have; their values drift from call to call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from llamac.bench.torch_operations import EPS, Inputs


@dataclass(frozen=True)
class Form:
    function: Callable
    leaves: tuple[str, ...]
    prepare: Callable[[Inputs], Inputs]


def _copied(inputs: Inputs) -> Inputs:
    return {name: t.clone() for name, t in inputs.items()}


def _halves(inputs: Inputs) -> Inputs:
    gate, up = (part.contiguous() for part in inputs["gate_up"].chunk(2, -1))
    return {"gate": gate, "up": up}


def _queries_and_keys(inputs: Inputs) -> Inputs:
    """rope's heads as the queries and keys that Liger turns together, an eighth of them keys."""
    x, keys = inputs["x"], max(1, inputs["x"].shape[2] // 8)
    q, k = (part.contiguous() for part in x.split((x.shape[2] - keys, keys), 2))
    cos, sin = (torch.cat((t, t), -1).view(1, x.shape[1], -1) for t in (inputs["cos"], inputs["sin"]))
    return {"q": q, "k": k, "cos": cos, "sin": sin}


@cache
def forms() -> dict[str, Form]:
    """By the names of llamac.ops; empty where Liger is not installed."""
    if find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.transformers import functional as liger

    def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
        return liger.liger_rms_norm(x, weight, EPS)

    def residual_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, total = liger.liger_fused_add_rms_norm(x, residual, weight, EPS)
        return total, out

    def layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return liger.liger_layer_norm(x, weight, bias, EPS)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return liger.liger_swiglu(gate, up)

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return liger.liger_cross_entropy(logits, targets)

    def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return liger.liger_fused_linear_cross_entropy(hidden, weight, targets)

    return {
        "rmsnorm": Form(rmsnorm, ("x", "weight"), _copied),
        "residual_rmsnorm": Form(residual_rmsnorm, ("x", "residual", "weight"), _copied),
        "layernorm": Form(layernorm, ("x", "weight", "bias"), _copied),
        "rope": Form(rope, ("q", "k"), _queries_and_keys),
        "swiglu": Form(swiglu, ("gate", "up"), _halves),
        "cross_entropy": Form(cross_entropy, ("logits",), _copied),
        "linear_cross_entropy": Form(linear_cross_entropy, ("hidden", "weight"), _copied),
    }
