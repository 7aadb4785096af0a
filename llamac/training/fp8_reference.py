"""Matrix products in fp8 in plain PyTorch: the definition that the C program (csrc/model/fp8.cpp) is
compared with.

A tensor x is quantized with one scale, a power of two: codes fp8(clamp(x · scale)). A product sums codes in
fp32, multiplies the sum by the inverses of both scales, and rounds once. The three
products of a linear layer (out = x · weightᵀ, dx = dout · weight, dweight = doutᵀ · x) take the same three
quantized tensors. Scales come from a tensor's own largest value (recipe tensor) or from that of the same
tensors in the previous optimizer step (recipe delayed).

With the recipe row, each row has a scale, from its largest value. A scale can be applied after the sum of a
product only if it is constant along the sum. So transposed operands are quantized with separate scales, one
per column of the tensor.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from llamac.base.dtypes import torch_dtypes
from llamac.model import block as table

FP8 = torch_dtypes("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
HEAD = "final_norm", "head.weight", "d.head"  # the slots of the head, in the order of Linear.slots()


def power_of_two(amax: Tensor, limit: float, before: Tensor) -> Tensor:
    """The largest power of two with amax · scale <= limit, exponents clamped to [-126, 126]: fp8_scale() of
    csrc/core/fp8.h, bit by bit. `before` where amax is 0, infinite or NaN. All f32.
    """
    usable = amax.isfinite() & (amax > 0)
    a, p = torch.frexp(torch.where(usable, amax, 1.0))
    b, q = torch.frexp(torch.full_like(amax, limit))
    exponent = (q - p - (a > b).int()).clamp(-126, 126)
    return torch.where(usable, torch.ldexp(torch.ones_like(a), exponent), before)


def largest(x: Tensor) -> Tensor:
    """max |x|, f32[]; NaN where x has one."""
    return x.detach().abs().amax().float()


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of x · scale; torch's own cast need not saturate."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def scaled(sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sums · a · b of two positive scales, as scaled() in csrc/ops/matmul/matmul.h: a · b can leave the
    normal numbers where the result does not.
    """
    both, limits = a * b, torch.finfo(sums.dtype)
    is_normal = (both >= limits.tiny) & (both <= limits.max)
    return torch.where(is_normal, sums * both, sums * a * b)


def product(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """a [N,C] · transposed b [K,C] of codes, times 1/scale of both (one number, or one per row [N,1], [K,1]),
    rounded once. In double where that is the dtype.
    """
    exact = torch.promote_types(dtype, torch.float32)
    out = scaled(a.to(exact) @ b.to(exact).T, a_inverse.to(exact), b_inverse.to(exact).flatten())
    return out.to(dtype)


class Codes(NamedTuple):
    """A tensor [N,C] quantized: rows of codes and the transposed codes, and 1 / scale of each: one number, or
    one per row [N,1], [C,1].
    """

    rows: Tensor
    inverse: Tensor
    transposed: Tensor
    inverse_transposed: Tensor


def codes_by_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of x [N,C] with a scale per row (1 if its maximum is 0, infinite or NaN); 1 / scale [N,1]."""
    amax = x.detach().abs().amax(1, keepdim=True).float()
    scale = power_of_two(amax, torch.finfo(dtype).max, torch.ones_like(amax))
    return quantize(x, scale, dtype), 1 / scale


def slot_names(blocks: int, head: bool = False, rows: tuple[table.Linear, ...] = table.BLOCK) -> list[str]:
    """The tensors that have a scale, in the order of the state and of checkpoints' fp8.scale."""
    names: list[str] = []
    for i in range(blocks):
        slots = [row.slots(i) for row in rows]
        names += [name for x, weight, _ in slots for name in (x, weight)] + [out for *_, out in slots]
    return names + (list(HEAD) if head else [])


@dataclass
class Scales:
    """The scales of a model's slots and the maxima for the next ones; recipe row: inverses of rows."""

    slots: list[str]
    recipe: str = "delayed"
    values: torch.dtype = FP8["e4m3"]
    gradients: torch.dtype = FP8["e5m2"]
    device: str = "cpu"
    calibrated: bool = False  # delayed: whether an optimizer step, or a checkpoint, has set the scales
    scale: Tensor = field(init=False)
    amax: Tensor = field(init=False)
    largest: Tensor = field(init=False)  # of the last update, of tensors divided by `unit`; 0: it had none
    unit: Tensor = field(init=False)  # what tensors are multiples of

    def __post_init__(self):
        self.index = {name: k for k, name in enumerate(self.slots)}
        self.scale = torch.ones(len(self.slots), device=self.device)
        self.amax, self.largest = (torch.zeros(len(self.slots), device=self.device) for _ in range(2))
        self.unit = torch.ones(len(self.slots), device=self.device)
        self.inverses: dict[str, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def is_gradient(slot: str) -> bool:
        return "d" in slot.split(".")

    def dtype(self, slot: str) -> torch.dtype:
        return self.gradients if self.is_gradient(slot) else self.values

    @torch.no_grad()
    def codes(self, slot: str, x: Tensor, measures: bool) -> Codes:
        """x [N,C] quantized. measures: it takes part in the next maximum."""
        k, dtype = self.index[slot], self.dtype(slot)
        if self.recipe == "row":
            codes = Codes(*codes_by_row(x, dtype), *codes_by_row(x.T, dtype))
            self.inverses[slot] = codes.inverse, codes.inverse_transposed
            return codes
        current = self.recipe == "tensor" or not self.calibrated
        if current:
            self.scale[k] = power_of_two(largest(x), torch.finfo(dtype).max, self.scale[k])
        if measures and self.recipe == "delayed":
            self.amax[k] = torch.maximum(self.amax[k], largest(x))
        rows, inverse = quantize(x, self.scale[k], dtype), 1 / self.scale[k]
        return Codes(rows, inverse, rows.T, inverse)

    @torch.no_grad()
    def follow(self, loss_scale: float) -> None:
        """Before a step whose loss, and so whose gradients, are multiples of loss_scale: scales of the
        gradients follow from the largest values of the step before.
        """
        for name, k in self.index.items():
            if self.is_gradient(name):
                self.unit[k] = loss_scale
        self._make_scales(torch.zeros_like(self.amax))

    @torch.no_grad()
    def update(self) -> None:
        """The next step's scales, after an optimizer step."""
        if self.recipe != "delayed":
            return
        self._make_scales(self.amax)
        self.amax.zero_()
        self.calibrated = True

    def _make_scales(self, amax: Tensor) -> None:
        """update_scales of csrc/ops/quantize.hip."""
        measured = amax.isfinite() & (amax > 0)
        self.largest = torch.where(measured, amax / self.unit, self.largest)
        sizes = torch.where(measured, amax, self.largest * self.unit)
        for name, k in self.index.items():
            self.scale[k] = power_of_two(sizes[k], torch.finfo(self.dtype(name)).max, self.scale[k])


class Linear(torch.autograd.Function):
    """x [N,C] · weightᵀ [C,K] in fp8, with the gradients' products in fp8."""

    @staticmethod
    def forward(ctx, x, weight, scales: Scales, slots: tuple[str, str, str], measures: bool):
        a, b = (scales.codes(slot, t, measures) for slot, t in zip(slots, (x, weight)))
        ctx.save_for_backward(*a[2:], *b[2:])
        ctx.scales, ctx.slot, ctx.dtype = scales, slots[2], x.dtype
        return product(a.rows, a.inverse, b.rows, b.inverse, x.dtype)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        a, a_inverse, b, b_inverse = ctx.saved_tensors  # the transposed
        d = ctx.scales.codes(ctx.slot, dout, True)
        dx = product(d.rows, d.inverse, b, b_inverse, ctx.dtype)
        dweight = product(d.transposed, d.inverse_transposed, a, a_inverse, ctx.dtype)
        return dx, dweight, None, None, None


def linear(x: Tensor, weight: Tensor, scales: Scales, slots: tuple[str, str, str]) -> Tensor:
    """x [..., C] · weightᵀ. slots: of x, the weight, the gradient of out. Without gradients nothing is
    measured for the next scales.
    """
    out = Linear.apply(x.flatten(0, -2), weight, scales, slots, torch.is_grad_enabled())
    return out.unflatten(0, x.shape[:-1])
