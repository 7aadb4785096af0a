"""The functions of llamac.ops with PyTorch's equivalents and common inputs. llamac.doctor checks them, and
llamac.bench times them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llamac import ops
from llamac.base.dtypes import dtype_row
from llamac.base.registry import least_work
from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.bench import torch_operations as torch_ops
from llamac.bench.timing import Call
from llamac.bench.torch_operations import Case, Inputs
from llamac.model.config import load_config
from llamac.ops import fp8

# Described operations by name, with the operands that are left out.
Work = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Function:
    """ours, torch: take inputs by the names of their parameters; leaves: those differentiated.

    forward, backward: the described operations that say what must at least be moved and computed.
    """

    ours: Callable
    torch: Callable
    inputs: Callable[[Case], Inputs]
    leaves: tuple[str, ...]
    forward: Work
    backward: Work = field(default_factory=dict)
    computes: bool = False  # its limit is the products' rate, not the memory's
    sizes: dict[str, str] = field(default_factory=dict)  # of letters of these operations, where others' serve
    unsupported: Callable[[str], str] = lambda device: ""  # why a device cannot compute it

    def work(self, case: Case, backward: bool) -> tuple[float, float]:
        """(bytes, FLOPs) that a call must at least move and compute."""
        parts = self.forward | self.backward if backward else self.forward
        size = case.size | {letter: case.size[other] for letter, other in self.sizes.items()}
        each = [least_work(name, size, case.dtype, absent) for name, absent in parts.items()]
        return sum(b for b, _ in each), sum(f for _, f in each)


def precompute_cis(position: Tensor, frequency: Tensor) -> Tensor:
    return ops.cis_of_frequencies(position.numel(), frequency)


def qk_norm_rope(x: Tensor, weight: Tensor, cis: Tensor) -> Tensor:
    return ops.qk_norm_rope(x, weight, torch_ops.EPS, cis)


def repeat_kv(x: Tensor, dout: Tensor) -> Tensor:
    return ops.repeat_kv(x, dout.shape[2])


def without_fp8(device: str) -> str:
    try:
        fp8.types(torch.cuda.current_device() if device == "cuda" else None, "e5m2")
    except ValueError as error:
        return str(error)
    return ""


def _row(
    name: str,
    leaves: tuple[str, ...] = (),
    backward: Work | None = None,
    forward: Work | None = None,
    ours: Callable | None = None,
    **more: Any,
) -> tuple[str, Function]:
    """Functions and inputs are those of this name in llamac.ops and torch_operations; ours: another."""
    both = ours or getattr(ops, name), getattr(torch_ops, name)
    work = forward or {f"{name}_forward": ()}, backward or {}
    return name, Function(*both, torch_ops.INPUTS[name], leaves, *work, **more)


_PRODUCT: Work = {"matmul_forward": ("residual",)}
_PRODUCTS: Work = {"matmul_backward_input": (), "matmul_backward_weight": ()}
_LOSSES: Work = {"cross_entropy": ("dlogits", "dlosses", "mean", "num_valid")}
# In the place of the forward's: one call makes losses and gradients.
_LOSSES_AND_GRADIENTS: Work = {"cross_entropy": ("dlosses", "mean", "num_valid")}
_WIDE = {"K": "F"}  # rows of the feed-forward's width, not the head's
_ROWS = [
    _row("rmsnorm", ("x", "weight"), {"rmsnorm_backward": ("out", "dresidual")}),
    _row("residual_rmsnorm", ("x", "residual", "weight"), {"rmsnorm_backward": ("out",)}),
    _row("layernorm", ("x", "weight", "bias"), {"layernorm_backward": ("out", "bias", "dresidual")}),
    _row("residual_layernorm", ("x", "residual", "weight", "bias"), {"layernorm_backward": ("out", "bias")}),
    _row("precompute_cis", forward={"precompute_cis": ()}, ours=precompute_cis),
    _row("rope", ("x",), {"rope_backward": ()}),
    _row("qk_norm_rope", ("x", "weight"), {"qk_norm_rope_backward": ()}, ours=qk_norm_rope),
    _row("repeat_kv", ("x",), {"repeat_kv_backward": ()}, ours=repeat_kv),
    _row("attention", ("q", "k", "v"), {"attention_backward": ()}, computes=True),
    _row("swiglu", ("gate_up",), {"swiglu_backward": ("out",)}),
    _row("gelu", ("x", "bias"), {"gelu_backward": ("out",), "bias_backward": ()}, sizes=_WIDE),
    _row("cross_entropy", ("logits",), _LOSSES_AND_GRADIENTS, _LOSSES),
    _row("linear", ("x", "weight"), _PRODUCTS, _PRODUCT, computes=True, sizes=_WIDE, unsupported=without_fp8),
    _row("linear_cross_entropy", ("hidden", "weight"), _PRODUCTS, _PRODUCT, computes=True),
]
FUNCTIONS = dict(_ROWS)


def arguments_of(function: Callable, inputs: Inputs) -> list[Tensor]:
    """A function's arguments, by the names of its parameters."""
    return [inputs[name] for name in inspect.signature(function).parameters if name in inputs]


def with_leaves(inputs: Inputs, leaves: tuple[str, ...]) -> Inputs:
    return inputs | {leaf: inputs[leaf].detach().requires_grad_() for leaf in leaves}


def outputs_of(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def output_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Normal ones for tensors, 1 for a loss."""
    return [torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outputs]


def call_of(
    function: Callable, inputs: Inputs, leaves: tuple[str, ...], douts: list[Tensor] | None = None
) -> Call:
    """The call with its gradients by the leaves; without leaves: without gradient.

    douts: the outputs' gradients, made by the first call where the list is empty.
    """
    given = with_leaves(inputs, leaves)
    arguments, wanted = arguments_of(function, given), [given[leaf] for leaf in leaves]
    if not leaves:
        return torch.no_grad()(lambda: function(*arguments))
    douts = [] if douts is None else douts

    def call() -> tuple[Tensor, ...]:
        outputs = outputs_of(function(*arguments))
        if not douts:
            douts.extend(output_gradients(outputs))
        gradients = torch.autograd.grad(outputs, wanted, douts)
        return *(out.detach() for out in outputs), *gradients

    return call


def differences(function: Function, case: Case) -> list[str]:
    """What is outside the tolerance, of outputs and gradients; empty: nothing. Seeds torch.

    One of a few thousand draws breaks it by chance, as the largest of PyTorch's errors is a small one: two
    have to.
    """
    wrong: list[str] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        wrong = _differences_of_a_draw(function, case)
        if not wrong:
            break
    return wrong


def _differences_of_a_draw(function: Function, case: Case) -> list[str]:
    inputs = function.inputs(case)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    found, douts = [], None
    for formula, given in ((function.ours, inputs), (function.torch, inputs), (function.torch, exact)):
        given = with_leaves(given, function.leaves)
        outputs = outputs_of(formula(*arguments_of(formula, given)))
        douts = output_gradients(outputs) if douts is None else douts
        leaves = [given[leaf] for leaf in function.leaves]
        typed = [dout.to(out.dtype) for dout, out in zip(douts, outputs, strict=True)]
        found.append((outputs, torch.autograd.grad(outputs, leaves, typed) if leaves else ()))
    wrong = []
    for kind, factor, *columns in zip(("output", "gradient"), (FORWARD, BACKWARD), *found, strict=True):
        for index, (mine, theirs, truth) in enumerate(zip(*columns, strict=True)):
            arrays = [t.detach().double().cpu().numpy() for t in (mine, theirs, truth)]
            if message := violation(arrays[0], arrays[1], arrays[2], dtype_row(mine.dtype).name, factor):
                wrong.append(f"{kind} {index}: {message}")
    return wrong


def sizes(model: str, batch: int, length: int) -> dict[str, int]:
    """By dimension letter, of a preset's or file's model at batch x length tokens; K: the head's rows."""
    c = load_config(model)
    rows = {"B": batch, "T": length, "N": batch * length}
    widths = {"C": c.hidden_size, "F": c.intermediate_size, "V": c.vocab_size, "K": c.vocab_size}
    heads = {"NH": c.num_attention_heads, "NKV": c.num_key_value_heads, "HD": c.head_dim}
    return rows | widths | heads
