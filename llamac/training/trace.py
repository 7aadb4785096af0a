"""Calls of operations, recorded with their gradients: what a debug state is made from."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

Calls = dict[str, list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]]


def traced(operations: SimpleNamespace, *names: str) -> tuple[SimpleNamespace, Calls]:
    """The operations with those of these names recorded, and the record: for each
    name its calls in order, as (tensors that go in, tensors that come out). All of them keep their gradients.
    """
    calls: Calls = {name: [] for name in names}

    def recorded(name: str) -> Callable:
        def call(*args: Any) -> Any:
            result = getattr(operations, name)(*args)
            inputs = tuple(x for x in args if isinstance(x, Tensor))
            outputs = result if isinstance(result, tuple) else (result,)
            for x in (*inputs, *outputs):
                x.retain_grad()
            calls[name].append((inputs, outputs))
            return result

        return call

    return SimpleNamespace(**vars(operations) | {name: recorded(name) for name in names}), calls
