"""The functions of llamac.ops beside PyTorch's: for test_ops.py, test_losses.py and test_ops_errors.py."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import op_cases
import torch
import torch.nn.functional as F

from llamac import ops, reference
from llamac.base import extension
from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.training.trace import repeat_kv

DEVICES = ["cpu"] + [device for device in [extension.device()] if device != "cpu"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
EPS, SCALE, IGNORED = op_cases.EPS, op_cases.SCALE, reference.IGNORED


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def targets(vocabulary: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, shape, generator=generator)
    ids.view(-1)[1::5] = IGNORED
    return ids


@functools.cache
def angles_of(HD: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return ops.precompute_cis(64, HD, dtype=dtype, device="cpu").to(device)


def angles(like: torch.Tensor) -> torch.Tensor:
    """cis of longer sequences than any here, in the type that belongs to `like`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angles_of(like.shape[-1], dtype, like.device)


def rope(x, interleaved=False):
    return reference.rope(x, op_cases.pair(angles(x)), interleaved)


def cross_entropy(logits, ids, reduction="mean"):
    losses = reference.cross_entropy(logits, ids)
    return {"none": losses, "sum": losses.sum(), "mean": reference.mean_loss(losses, ids)[0]}[reduction]


def linear_cross_entropy(hidden, weight, ids, reduction="mean"):
    return cross_entropy(F.linear(hidden, weight), ids, reduction)


@dataclass
class Case:
    """One function of llamac.ops, and PyTorch's, of the same float inputs."""

    ours: Callable
    torch: Callable
    inputs: tuple[torch.Tensor, ...]
    ids: torch.Tensor | None = None

    def arguments(self, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        return [x.to(device, dtype, copy=True).requires_grad_() for x in self.inputs]

    def call(self, function: Callable, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ids = () if self.ids is None else (self.ids.to(arguments[0].device),)
        out = function(*arguments, *ids)
        return out if isinstance(out, tuple) else (out,)

    def results(self, function: Callable, arguments: list[torch.Tensor]) -> tuple[tuple, tuple]:
        """Outputs, and gradients of a sum of theirs weighted by what every type holds exactly."""
        outs = self.call(function, arguments)
        douts = [(torch.arange(out.numel(), device=out.device) % 7 - 3).view(out.shape) for out in outs]
        douts = [(dout if dout.dim() else dout + 5).to(out.dtype) for dout, out in zip(douts, outs)]
        wanted = [x for x in arguments if x.requires_grad]
        return tuple(out.detach() for out in outs), torch.autograd.grad(outs, wanted, douts)


HEADS = (randn(2, 7, 4, 16), randn(2, 7, 2, 16), randn(2, 7, 2, 16) + 1)
CASES = {
    "rmsnorm": Case(ops.rmsnorm, partial(reference.rmsnorm, eps=EPS), (randn(2, 5, 96), randn(96))),
    "residual_rmsnorm": Case(
        ops.residual_rmsnorm,
        partial(reference.residual_rmsnorm, eps=EPS),
        (randn(2, 5, 96), randn(5, 2, 96).view(2, 5, 96), randn(96)),
    ),
    "layernorm": Case(
        ops.layernorm, partial(reference.layernorm, eps=EPS), (randn(2, 5, 96), randn(96), randn(96) + 1)
    ),
    "residual_layernorm": Case(
        ops.residual_layernorm,
        partial(reference.residual_layernorm, eps=EPS),
        (randn(2, 5, 96), randn(5, 2, 96).view(2, 5, 96), randn(96), randn(96) + 1),
    ),
    "rope": Case(lambda x: ops.rope(x, angles(x)), rope, (randn(2, 7, 4, 16),)),
    "rope-interleaved": Case(
        lambda x: ops.rope(x, angles(x), interleaved=True), lambda x: rope(x, True), (randn(2, 7, 4, 16),)
    ),
    "qk_norm_rope": Case(
        lambda x, weight: ops.qk_norm_rope(x, weight, EPS, angles(x)),
        lambda x, weight: rope(reference.rmsnorm(x, weight, EPS)),
        (randn(2, 7, 4, 16), randn(16)),
    ),
    "qk_norm": Case(
        partial(ops.qk_norm_rope, eps=EPS),
        partial(reference.rmsnorm, eps=EPS),
        (randn(2, 7, 4, 16), randn(16)),
    ),
    "bias": Case(torch.ops.llamac.bias_forward, torch.add, (randn(2, 5, 62), randn(62))),
    "repeat_kv": Case(lambda x: ops.repeat_kv(x, 6), lambda x: repeat_kv(x, 6), HEADS[1:2]),
    "attention": Case(lambda *x: ops.attention(*x, scale=SCALE), op_cases.attention, HEADS),
    "swiglu": Case(ops.swiglu, reference.swiglu, (randn(2, 5, 62),)),
    "gelu": Case(ops.gelu, lambda x, bias: reference.gelu(x + bias), (randn(2, 5, 62), randn(62))),
    "gelu-tanh": Case(partial(ops.gelu, approximate="tanh"), reference.gelu_tanh, (randn(2, 5, 62),)),
} | {
    f"{name}-{reduction}": Case(
        lambda *x, f=ours, r=reduction: f(*x, reduction=r),
        lambda *x, f=theirs, r=reduction: f(*x, reduction=r),
        inputs,
        targets(65, 3, 11),
    )
    for name, ours, theirs, inputs, reductions in (
        ("cross_entropy", ops.cross_entropy, cross_entropy, (randn(3, 11, 65),), ("mean", "sum", "none")),
        (
            "linear_cross_entropy",
            ops.linear_cross_entropy,
            linear_cross_entropy,
            (randn(3, 11, 24), randn(65, 24)),
            ("mean", "sum"),
        ),
    )
    for reduction in reductions
}


def differences(case: Case, dtype: str, device: str = "cpu") -> list[str]:
    """What is outside the tolerance, of outputs and gradients."""
    ours = case.results(case.ours, case.arguments(DTYPES[dtype], device))
    theirs = case.results(case.torch, case.arguments(DTYPES[dtype], device))
    rounded = [x.to(DTYPES[dtype]).double().requires_grad_() for x in case.inputs]
    truth = case.results(case.torch, rounded)
    wrong = []
    for kind, factor, *columns in zip(("output", "gradient"), (FORWARD, BACKWARD), ours, theirs, truth):
        for index, (mine, other, exact) in enumerate(zip(*columns)):
            assert mine.dtype == other.dtype and mine.shape == other.shape
            arrays = (x.double().cpu().numpy() for x in (mine, other, exact))
            if message := violation(*arrays, dtype, factor):
                wrong.append(f"{kind} {index}: {message}")
    return wrong
