"""llamac.training.fp8_reference: products in fp8 against plain loops in float64 and llamac's operations."""

import math

import pytest
import torch

from llamac.base import registry
from llamac.training import fp8_reference as fp8

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
    limits = torch.full_like(amax, limit)
    registry.run("update_scales", [compiled, inverse, amax.clone(), None], [limits, None])
    assert torch.equal(found, compiled) and torch.equal(inverse[:, 0], 1 / found)
    bad = torch.tensor([0, math.inf, math.nan])
    assert fp8.power_of_two(bad, limit, torch.full_like(bad, 3)).tolist() == [3] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe, gradients", [("tensor", "e5m2"), ("tensor", "e4m3"), ("row", "e5m2")])
def test_the_three_products(dtype, recipe, gradients):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    x, weight = normal(7, 16, scale=30), normal(5, 16, scale=0.02)
    dout = normal(7, 5, scale=1e-5)
    leaves = [t.requires_grad_() for t in (x, weight)]
    scales = fp8.Scales(fp8.slot_names(1), recipe, gradients=fp8.FP8[gradients])
    out = fp8.linear(x, weight, scales, SLOTS)
    dx, dweight = torch.autograd.grad(out, leaves, dout)
    kinds = ((x, fp8.FP8["e4m3"]), (weight, fp8.FP8["e4m3"]), (dout, fp8.FP8[gradients]))

    def stands_for(t: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """What codes of t [N,C] stand for, in float64: with a scale per row, or one."""
        parts = t.detach() if recipe == "row" else t.detach()[None]
        scales = [power_of_two(p.abs().max().item(), torch.finfo(kind).max) for p in parts]
        return torch.stack([rounded(p, s, kind) / s for p, s in zip(parts, scales)]).view(t.shape)

    x8, w8, d8 = (stands_for(*each) for each in kinds)
    x8_turned, w8_turned, d8_turned = (stands_for(t.T.contiguous(), kind) for t, kind in kinds)
    assert recipe == "row" or torch.equal(x8_turned, x8.T)
    close = {"rtol": 1e-5 if dtype == torch.float32 else 2**-8, "check_dtype": False}
    truths = times(x8, w8.T), times(d8, w8_turned.T), times(d8_turned, x8_turned.T)
    for found, truth in zip((out, dx, dweight), truths):
        assert found.dtype == dtype
        torch.testing.assert_close(found.detach(), truth, atol=1e-6 * truth.abs().max().item(), **close)


def test_scales_per_row_without_a_maximum():
    """1, whose codes of infinities saturate and those of NaN are NaN; other rows have their own."""
    x = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0], [3.0, 1.0]])
    codes, inverse = fp8.codes_by_row(x, fp8.FP8["e4m3"])
    assert inverse.flatten().tolist() == [1, 1, 1, 1 / 128]
    assert codes[[0, 1, 3]].float().tolist() == [[0, 0], [448, 1], [384, 128]]
    assert codes[2].float().isnan().tolist() == [True, False]
    found = [torch.empty(4, 2, dtype=codes.dtype), None, torch.empty(4), torch.empty(2), torch.zeros(1).int()]
    registry.run("quantize_rows", found, [x], [448.0])
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found[2], inverse.flatten()) and found[3].tolist() == [1, 1 / 256]
    assert found[4].item() == 1


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


def test_scales_follow_the_losses_scale():
    """Of gradients alone. Scales and largest values have the bits of update_scales, whatever is measured."""
    generator = torch.Generator().manual_seed(4)
    scales = fp8.Scales(fp8.slot_names(3), calibrated=True)
    gradients = torch.tensor([scales.is_gradient(slot) for slot in scales.slots])
    assert gradients.sum() == 12
    limit = torch.tensor([torch.finfo(scales.dtype(slot)).max for slot in scales.slots])
    tables = [torch.ones(36), torch.ones(36, 4), torch.zeros(36), torch.zeros(36)]
    sizes = 10.0 ** torch.empty(36).uniform_(-9, 3, generator=generator)
    for step, loss_scale in enumerate((1.0, 1.0, 37 / 3, 1.25, 900.0, 1.0)):
        before = scales.scale.clone()
        scales.follow(loss_scale)
        unit = torch.where(gradients, loss_scale, 1.0)
        registry.run("update_scales", tables, [limit, unit])
        measured = sizes * unit
        measured[step] = (0.0, torch.inf, torch.nan)[step % 3]
        if step:
            now = sizes * unit * scales.scale
            assert (now <= limit * (1 + 1e-6)).all() and (now > 0.49 * limit)[step:].all()
            assert torch.equal(scales.scale[~gradients], before[~gradients])
        scales.amax.copy_(measured), tables[2].copy_(measured)
        scales.update()
        registry.run("update_scales", tables, [limit, unit])
        assert torch.equal(tables[0], scales.scale) and torch.equal(tables[3], scales.largest)
        assert torch.equal(tables[1][:, 0], 1 / scales.scale) and not tables[2].any()
