"""Records calls of operations with their gradients, from which a debug state is made."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Calls = dict[str, list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]]


def traced(operations: SimpleNamespace, *names: str) -> tuple[SimpleNamespace, Calls]:
    """The operations with those of these names recorded, and the record: for each
    name its calls in order, as (tensors that go in, tensors that come out). All of them keep their gradients.
    """
    calls: Calls = {name: [] for name in names}

    def recorded(name: str) -> Callable:
        def call(*args: Any, **others: Any) -> Any:
            result = getattr(operations, name)(*args, **others)
            inputs = tuple(x for x in args if isinstance(x, Tensor))
            outputs = result if isinstance(result, tuple) else (result,)
            for x in (*inputs, *outputs):
                x.retain_grad()
            calls[name].append((inputs, outputs))
            return result

        return call

    return SimpleNamespace(**vars(operations) | {name: recorded(name) for name in names}), calls


def layer_tensors(i: int, calls: Calls, rstd: Callable, attention: Callable) -> tuple[dict, dict]:
    """({activation: tensor}, {activation: its gradient}) of block i, in the order of computation. rstd(x) and
    attention(q, k, v)[1] are what a norm and attention keep for their backward.
    """
    (x, _), (input_norm,) = calls["rmsnorm"][i]
    (q, k, v), (heads,) = calls["attention"][i]
    _, (residual_mid, post_norm) = calls["residual_rmsnorm"][i]
    gate_up, (product,) = calls["swiglu"][i]  # gate and up, or one tensor of both
    (residual_out, _), _ = calls["rmsnorm"][i + 1]
    act = {"input_norm": input_norm, "input_rstd": rstd(x), "q": q, "k": k, "v": v, "attention": heads}
    act |= {"attention_lse": attention(q, k, v)[1], "residual_mid": residual_mid}
    act |= {"post_norm": post_norm, "post_rstd": rstd(residual_mid)}
    act |= {"gate_up": torch.cat(gate_up, -1), "swiglu": product, "residual_out": residual_out}
    grad = {name: x.grad if x.retains_grad else None for name, x in act.items()}
    grad["gate_up"] = torch.cat([x.grad for x in gate_up], -1)
    act["attention"], grad["attention"] = heads.flatten(2), heads.grad.flatten(2)
    return act, {name: x for name, x in grad.items() if x is not None}
