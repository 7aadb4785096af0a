"""Records calls of operations with their gradients, from which a debug state is made."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llamac.model.block import BLOCK


class Call(NamedTuple):
    """The tensors that go into an operation, except weights, and come out of it; with gradients."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def sources(self) -> tuple[Tensor, ...]:
        """The inputs of the last output: of residual_rmsnorm the sum, which is its first output."""
        return self.outputs[:-1] or self.inputs


def traced(operations: SimpleNamespace, *names: str) -> tuple[SimpleNamespace, list[Call]]:
    """The operations with those of these names recorded, and their calls in order."""
    calls: list[Call] = []

    def recorded(name: str) -> Callable:
        def call(*args: Any, **others: Any) -> Any:
            result = getattr(operations, name)(*args, **others)
            inputs = tuple(x for x in args if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
            outputs = result if isinstance(result, tuple) else (result,)
            for x in (*inputs, *outputs):
                x.retain_grad()
            calls.append(Call(inputs, outputs))
            return result

        return call

    return SimpleNamespace(**vars(operations) | {name: recorded(name) for name in names}), calls


def block_tensors(calls: list[Call], rstd: Callable, attention: Callable) -> tuple[dict, dict]:
    """({activation: tensor}, {activation: its gradient}) of a block, in the order of computation. calls: from
    the block's first on. rstd(x) and attention(q, k, v)[1] are what norms and attention keep for their
    backward.
    """
    act, grad = {}, {}
    for row, call, reader in zip(BLOCK, calls, calls[1:]):
        x = call.outputs[-1]
        act[row.x.name], grad[row.x.name] = x.flatten(2), x.grad.flatten(2)
        if row.x.statistics:
            own = call.sources()
            act[row.x.statistics] = rstd(*own) if row.x.producer == "norm" else attention(*own)[1]
        for k, name in enumerate(row.out):  # gate_up may be one tensor or two
            parts = reader.sources()[k :: len(row.out)]
            act[name], grad[name] = torch.cat(parts, -1), torch.cat([part.grad for part in parts], -1)
    return act, grad
