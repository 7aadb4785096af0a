"""llamac.fp8_reference: products in fp8 against plain loops in float64 and llamac's operations."""

import math

import pytest
import torch

from llamac import fp8_reference as fp8
from llamac import registry

SLOTS = ("0.input_norm", "0.qkv.weight", "0.d.qkv")
LIMITS = [448.0, 57344.0, 240.0]


def power_of_two(amax: float, limit: float) -> float:
    exponent = 126
    while exponent > -126 and amax * 2.0**exponent > limit:
        exponent -= 1
    return 2.0**exponent


def rounded(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The values that codes of x stand for, times scale, in float64."""
    limit = torch.finfo(dtype).max
    return (x.double() * scale).clamp(-limit, limit).float().to(dtype).double()


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [N,C] · b [C,K], one element after the other."""
    return torch.tensor([[math.fsum((row * column).tolist()) for column in b.T] for row in a])


@pytest.mark.parametrize("limit", LIMITS)
def test_scales(limit):
    bits = torch.randint(1, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(1)).int()
    edges = [limit, math.nextafter(limit, 0), limit * (1 + 2**-23), 1e-45, 2.0**-126, 3.4e38]
    amax = torch.cat((bits.view(torch.float32), torch.tensor(edges)))
    found = fp8.power_of_two(amax, limit, torch.full_like(amax, 3))
    assert found.tolist() == [power_of_two(x, limit) for x in amax.tolist()]
    compiled, inverse = torch.ones_like(amax), torch.ones(len(amax), 4)
    registry.run("update_scales", [compiled, inverse, amax.clone()], [torch.full_like(amax, limit)])
    assert torch.equal(found, compiled) and torch.equal(inverse[:, 0], 1 / found)
    bad = torch.tensor([0, math.inf, math.nan])
    assert fp8.power_of_two(bad, limit, torch.full_like(bad, 3)).tolist() == [3] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
def test_the_three_products(dtype, gradients):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    x, weight, residual = normal(7, 16, scale=30), normal(5, 16, scale=0.02), normal(7, 5, scale=1)
    dout = normal(7, 5, scale=1e-5)
    leaves = [t.requires_grad_() for t in (x, weight, residual)]
    scales = fp8.Scales(fp8.slot_names(1), "tensor", gradients=fp8.FP8[gradients])
    out = fp8.linear(x, weight, scales, SLOTS, residual)
    dx, dweight, dresidual = torch.autograd.grad(out, leaves, dout)
    kinds = ((x, fp8.FP8["e4m3"]), (weight, fp8.FP8["e4m3"]), (dout, fp8.FP8[gradients]))
    s = [power_of_two(t.abs().max().item(), torch.finfo(kind).max) for t, kind in kinds]
    x8, w8 = (rounded(t.detach(), k, fp8.FP8["e4m3"]) / k for t, k in ((x, s[0]), (weight, s[1])))
    d8 = rounded(dout, s[2], fp8.FP8[gradients]) / s[2]
    close = {"rtol": 1e-5 if dtype == torch.float32 else 2**-8, "check_dtype": False}
    truths = times(x8, w8.T) + residual.detach().double(), times(d8, w8), times(d8.T, x8)
    for found, truth in zip((out, dx, dweight), truths):
        assert found.dtype == dtype
        torch.testing.assert_close(found.detach(), truth, atol=1e-6 * truth.abs().max().item(), **close)
    assert torch.equal(dresidual, dout)


@pytest.mark.parametrize("name", fp8.FP8)
def test_saturates(name):
    """torch's own cast does for some types, in some versions."""
    limit = torch.finfo(fp8.FP8[name]).max
    codes = fp8.quantize(torch.tensor([1e9, -1e9, math.inf]), torch.tensor(1.0), fp8.FP8[name])
    assert codes.float().tolist() == [limit, -limit, limit]


def test_delayed_scales():
    """As recipe tensor in the first step; then by the maximum of all micro-batches of the step before."""
    scales, weight = fp8.Scales(fp8.slot_names(1)), torch.ones(4, 4)
    assert len(scales.slots) == 12 and fp8.slot_names(1, head=True)[-1] == "d.head"
    for size in (10.0, 3.0):
        fp8.linear(torch.full((2, 4), size), weight, scales, SLOTS)
    assert scales.scale[0] == 128  # of 3
    scales.update()
    assert scales.scale[:2].tolist() == [32, 256] and not scales.amax.any()  # of 10 and of 1
    assert torch.equal(scales.scale[2:], torch.ones(10))  # nothing measured
    with torch.no_grad():
        fp8.linear(torch.full((2, 4), 100.0), weight, scales, SLOTS)
    assert not scales.amax.any() and scales.scale[0] == 32
    fp8.linear(torch.full((2, 4), 100.0), weight, scales, SLOTS)
    assert scales.scale[0] == 32 and scales.amax[0] == 100


@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
def test_losses_fall_as_in_bf16(recipe):
    """20 steps of two layers."""

    def losses(scales: fp8.Scales | None) -> list[float]:
        generator = torch.Generator().manual_seed(3)
        x, wanted = (torch.randn(64, n, generator=generator).bfloat16() for n in (32, 16))
        weights = [(0.2 * torch.randn(s, generator=generator)).bfloat16() for s in ((64, 32), (16, 64))]
        found, slots = [], (SLOTS, ("0.attention", "0.o.weight", "0.d.o"))
        for _ in range(20):
            y = x
            leaves = [w.clone().requires_grad_() for w in weights]
            for w, slot in zip(leaves, slots):
                y = fp8.linear(y.relu(), w, scales, slot) if scales else y.relu() @ w.T
            loss = (y.float() - wanted.float()).square().mean()
            grads = torch.autograd.grad(loss, leaves)
            weights = [(w - 0.5 * g).bfloat16() for w, g in zip(weights, grads)]
            if scales:
                scales.update()
            found.append(loss.item())
        return found

    bf16, ours = losses(None), losses(fp8.Scales(fp8.slot_names(1), recipe))
    assert bf16[-1] < 0.7 * bf16[0]
    assert ours == pytest.approx(bf16, rel=0.05) and ours != bf16
