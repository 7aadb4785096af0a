"""The functions of llamac.ops as users of PyTorch write them, with inputs. The formulas are the reference's
(train_llama3.py). Inputs have the names of the operation's description (--list-kernels).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from llamac import reference
from llamac.base.dtypes import torch_dtypes
from llamac.ops import fp8
from llamac.training import fp8_reference, trace

DTYPES = torch_dtypes("f32", "bf16")
EPS = 1e-5
THETA = 500000.0
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}  # named ones, for attention

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """size: by dimension letter; dtype: "f32" or "bf16"; device: "cpu" or "cuda"."""

    size: dict[str, int]
    dtype: str
    device: str

    def randn(self, *dimensions: str | int) -> torch.Tensor:
        shape = [self.size[d] if isinstance(d, str) else d for d in dimensions]
        return torch.randn(shape, dtype=DTYPES[self.dtype], device=self.device)

    def targets(self) -> torch.Tensor:
        return torch.randint(self.size["V"], (self.size["N"],), device=self.device)


# Inputs: by operand name, as the operation's description calls them.


def normal(**shapes: str) -> Callable[[Case], Inputs]:
    """Inputs by their dimensions, normally distributed."""
    return lambda c: {name: c.randn(*shape.split()) for name, shape in shapes.items()}


def precompute_cis_inputs(c: Case) -> Inputs:
    HD = c.size["HD"]
    frequency = THETA ** (-torch.arange(0, HD, 2, device=c.device).double() / HD)
    return {"position": torch.arange(c.size["T"], device=c.device).float(), "frequency": frequency}


def rope_inputs(c: Case) -> Inputs:
    cis = precompute_cis(*precompute_cis_inputs(c).values())
    cos, sin = (part.contiguous() for part in cis[:, None].unbind(-1))
    return {"x": c.randn("B", "T", "NH", "HD"), "cis": cis, "cos": cos, "sin": sin}


def linear_inputs(c: Case, x: str = "x", rows: str = "F") -> Inputs:
    """The product has a variance of 1."""
    return {x: c.randn("N", "C"), "weight": c.randn(rows, "C") * c.size["C"] ** -0.5}


INPUTS: dict[str, Callable[[Case], Inputs]] = {
    "rmsnorm": normal(x="N C", weight="C"),
    "residual_rmsnorm": normal(x="N C", weight="C", residual="N C"),
    "layernorm": normal(x="N C", weight="C", bias="C"),
    "residual_layernorm": normal(x="N C", residual="N C", weight="C", bias="C"),
    "precompute_cis": precompute_cis_inputs,
    "rope": rope_inputs,
    "qk_norm_rope": lambda c: rope_inputs(c) | {"weight": c.randn("HD")},
    "repeat_kv": normal(x="B T NKV HD", dout="B T NH HD"),
    "attention": normal(k="B T NKV HD", v="B T NKV HD", q="B T NH HD"),
    "swiglu": lambda c: {"gate_up": c.randn("N", 2 * c.size["F"])},
    "gelu": normal(x="N F", bias="F"),
    "cross_entropy": lambda c: {"logits": c.randn("N", "V"), "targets": c.targets()},
    "linear": linear_inputs,
    "linear_cross_entropy": lambda c: linear_inputs(c, "hidden", "V") | {"targets": c.targets()},
}

# Functions: parameters are inputs by name.

rmsnorm = partial(reference.rmsnorm, eps=EPS)
residual_rmsnorm = partial(reference.residual_rmsnorm, eps=EPS)
layernorm = partial(reference.layernorm, eps=EPS)
residual_layernorm = partial(reference.residual_layernorm, eps=EPS)
attention = reference.attention
linear_cross_entropy = reference.linear_cross_entropy


class ScaledLinear(torch.autograd.Function):
    """ops.linear's recipe by PyTorch's own product of fp8, which wants both operands along the sum."""

    @staticmethod
    def forward(ctx, x, weight, values, gradients):
        (a, a_inverse), (b, b_inverse) = quantized(x, values), quantized(weight, values)
        ctx.save_for_backward(a, b, a_inverse, b_inverse)
        ctx.dtype, ctx.gradients = x.dtype, gradients
        return torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, dout):
        a, b, a_inverse, b_inverse = ctx.saved_tensors
        d, inverse = quantized(dout, ctx.gradients)
        b, a, d_turned = (t.t().contiguous().t() for t in (b, a, d))
        dx = torch._scaled_mm(d, b, inverse, b_inverse, out_dtype=ctx.dtype)
        return dx, torch._scaled_mm(d_turned.t(), a, inverse, a_inverse, out_dtype=ctx.dtype), None, None


def quantized(x, dtype):
    """Codes, and 1 / scale."""
    limit, one = torch.finfo(dtype).max, torch.ones((), device=x.device)
    scale = fp8_reference.power_of_two(fp8_reference.largest(x), limit, one)
    return fp8_reference.quantize(x, scale, dtype), 1 / scale


def linear(x, weight):
    """In fp8, recipe "tensor": by torch._scaled_mm on a GPU, else by the reference, which knows float64."""
    if x.is_cuda and x.dtype != torch.float64:
        return ScaledLinear.apply(x, weight, *fp8.types(x.device.index, "e5m2"))
    scales = fp8_reference.Scales(["x", "weight", "d"], "tensor", device=str(x.device))
    return fp8_reference.linear(x, weight, scales, ("x", "weight", "d"))


def precompute_cis(position, frequency):
    angle = torch.outer(position, frequency.to(position.dtype))
    return torch.stack((angle.cos(), angle.sin()), -1)


def gelu(x, bias):
    return F.gelu(x + bias)


def rope(x, cos, sin):
    return reference.rope(x, (cos, sin))


def qk_norm_rope(x, weight, cos, sin):
    return reference.qk_norm_rope(x, weight, EPS, (cos, sin))


def repeat_kv(x, dout):
    return trace.repeat_kv(x, dout.shape[2])


def swiglu(gate_up):
    return reference.swiglu(gate_up)


def cross_entropy(logits, targets):
    return reference.cross_entropy(logits, targets).mean()
