"""llamac.ops.linear: products of fp8 beside llamac.training.fp8_reference and float64 of the same codes, and
what PyTorch asks of an operation.
"""

import sys

import pytest
import torch
from function_cases import DEVICES, DTYPES
from launch import as_ranks
from library_product import library_products
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from llamac import ops
from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.ops import fp8
from llamac.training import fp8_reference as reference

STORED = ["f32", "bf16"]
SLOTS = ("0.input_norm", "0.qkv.weight", "0.d.qkv")
SIZES = [((3, 7), 48, 32), ((64,), 16, 80), ((1, 1), 32, 16)]  # rows, C, K


EXTREMES = [(1e-20, 1e25, 1e-18), (1e-30, 1e-8, 1e25), (1e30, 1e-30, 1e-7)]


def operands(
    size, dtype: str, device: str, seed: int = 1, magnitudes=(30.0, 0.02, 1e-5)
) -> tuple[torch.Tensor, ...]:
    """x, weight, dout: each of its own magnitude."""
    rows, C, K = size
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(((*rows, C), (K, C), (*rows, K)), magnitudes, strict=True)
    tensors = (scale * torch.randn(shape, generator=generator) for shape, scale in shapes)
    x, weight, dout = (t.to(device, DTYPES[dtype]) for t in tensors)
    return x.requires_grad_(), weight.requires_grad_(), dout


def results(linear, x, weight, dout) -> tuple[torch.Tensor, ...]:
    out = linear(x, weight)
    return out.detach(), *torch.autograd.grad(out, [t for t in (x, weight) if t.requires_grad], dout)


def baseline(x, weight, dout, scales: reference.Scales) -> tuple[torch.Tensor, ...]:
    """What PyTorch makes of the same codes. On a GPU the forward product sums with fewer bits (fast
    accumulation), as llamac's does.
    """
    with library_products(x.is_cuda, fast=True):
        out = reference.linear(x, weight, scales, SLOTS)
    with library_products(x.is_cuda, fast=False):
        return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def exact(x, weight, dout, scales: reference.Scales) -> tuple[torch.Tensor, ...]:
    """The same products in double."""
    doubles = (t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, dout))
    return results(lambda x, w: reference.linear(x, w, scales, SLOTS), *doubles)


def own_scales(x, gradients: str = "e5m2", recipe: str = "tensor") -> reference.Scales:
    """Of the types that x's device multiplies."""
    values, of_gradients = fp8.types(x.device.index if x.is_cuda else None, gradients)
    return reference.Scales(reference.slot_names(1), recipe, values, of_gradients, str(x.device))


def assert_within_tolerance(found, theirs, truths, dtype: str) -> None:
    for kind, factor, ours, torchs, truth in zip(
        ("out", "dx", "dweight"), (FORWARD, BACKWARD, BACKWARD), found, theirs, truths, strict=True
    ):
        arrays = [t.double().cpu().numpy() for t in (ours, torchs, truth)]
        assert not (wrong := violation(*arrays, dtype, factor)), f"{kind}: {wrong}"
        assert ours.dtype == DTYPES[dtype] and ours.shape == truth.shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", fp8.GRADIENTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_agreement(recipe, dtype, size, gradients, device):
    """Beside float64 of the same codes, with the error of PyTorch's products of them as the baseline."""
    given = operands(size, dtype, device)
    scales = own_scales(given[0], gradients, recipe)
    truths, theirs = exact(*given, scales), baseline(*given, scales)
    found = results(lambda x, w: ops.linear(x, w, recipe, gradients), *given)
    assert_within_tolerance(found, theirs, truths, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["tensor", "row"])
@pytest.mark.parametrize("magnitudes", EXTREMES, ids=str)
def test_scales_whose_product_is_no_number(magnitudes, recipe, device):
    """1 / scale of two small operands underflows where the result does not."""
    given = operands(SIZES[1], "f32", device, magnitudes=magnitudes)
    scales = own_scales(given[0], recipe=recipe)
    truths, theirs = exact(*given, scales), baseline(*given, scales)
    found = results(lambda x, w: ops.linear(x, w, recipe), *given)
    for t in truths:
        assert 1e-37 < t.abs().max() < 1e38
    assert_within_tolerance(found, theirs, truths, "f32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", STORED)
def test_delayed(dtype, device):
    """Several passes a step, of other magnitudes: scales are the reference's, bit by bit, and results."""
    scaling, scales = ops.DelayedScaling(2, device=device), None
    for step in range(3):
        for part in range(2):
            given = operands(SIZES[0], dtype, device, seed=7 * step + part)
            given[0].data *= 3.0**step * (1 + part)
            scales = scales or own_scales(given[0], recipe="delayed")
            found = results(lambda x, w: ops.linear(x, w, scaling[1]), *given)
            theirs, truths = baseline(*given, scales), exact(*given, scales)
            assert_within_tolerance(found, theirs, truths, dtype)
            with torch.no_grad():
                ops.linear(1e3 * given[0], given[1], scaling[1])  # is not measured
        scaling.update(), scales.update()
        assert scaling.scale[1].tolist() == [scales.scale[scales.index[slot]] for slot in SLOTS]
    assert torch.equal(scaling.scale[0], torch.ones(3, device=device))  # of a layer that is not called
    resumed = ops.DelayedScaling(2, device=device)
    resumed.load_state_dict(scaling.state_dict())
    again = [results(lambda x, w, s=s: ops.linear(x, w, s[1]), *given) for s in (scaling, resumed)]
    torch.testing.assert_close(*again, rtol=0, atol=0)
    assert not ops.DelayedScaling(2).state_dict()


@pytest.mark.more
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor", "row"))]
)
def test_compiled_without_a_break(recipe, device):
    """Two layers in one graph, for every size; with delayed scales one more, of the first step."""

    def network(x, first, second, recipes):
        y = ops.linear(x.sin(), first, recipes[0])
        return ops.linear(y.relu(), second, recipes[1]).float().square().mean()

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
    both = [ops.DelayedScaling(2, device=device) for _ in range(2)]
    for batch, time in ((3, 64), (5, 80), (2, 96)):  # sizes that no weight has
        found = []
        for function, scaling in zip((network, compiled), both, strict=True):
            recipes = (scaling[0], scaling[1]) if recipe == "delayed" else (recipe, recipe)
            x, first, _ = operands(((batch, time), 32, 48), "bf16", device)
            _, second, _ = operands(((1,), 48, 16), "bf16", device)
            loss = function(x, first, second, recipes)
            found.append((loss.detach(), *torch.autograd.grad(loss, (x, first, second))))
            scaling.update()
        torch.testing.assert_close(*found, rtol=0, atol=0)
        assert torch.equal(both[0].scale, both[1].scale)
    assert (both[0].scale != 1).any() == (recipe == "delayed")
    assert counters["stats"]["unique_graphs"] == (2 if recipe == "delayed" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device):
    """Compiled to the end: the bits of eager."""
    given = operands(((4, 16), 32, 48), "bf16", device)
    compiled = torch.compile(ops.linear, fullgraph=True)
    torch.testing.assert_close(results(compiled, *given), results(ops.linear, *given), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["tensor", "row", "delayed"])
def test_checkpointed(recipe):
    """Computed again in the backward: the same bits, and the same scales."""
    found = []
    for again in (False, True):
        scaling = ops.DelayedScaling(1)
        chosen = scaling[0] if recipe == "delayed" else recipe
        linear = lambda x, w, chosen=chosen: ops.linear(x, w, chosen)  # noqa: E731
        whole = (lambda x, w, f=linear: checkpoint(f, x, w, use_reentrant=False)) if again else linear
        for _ in range(2):
            bits = results(whole, *operands(SIZES[0], "bf16", "cpu"))
            scaling.update()
        found.append((*bits, scaling.scale))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_change_nothing(device):
    """Views of a wider tensor, of a transposed one, and a gradient that is one number for all."""
    x, weight, dout = operands(SIZES[0], "bf16", device)
    expected = results(ops.linear, x, weight, dout)
    wide = torch.cat((x, x), -1).detach()[..., : x.shape[-1]].requires_grad_()
    turned = weight.detach().t().contiguous().t().requires_grad_()
    apart = torch.stack((dout, dout), -1)[..., 0]
    torch.testing.assert_close(results(ops.linear, wide, turned, apart), expected, rtol=0, atol=0)
    one = torch.full((), 0.5, device=device, dtype=x.dtype).expand(dout.shape)
    torch.testing.assert_close(
        results(ops.linear, x, weight, one), results(ops.linear, x, weight, one.contiguous()), rtol=0, atol=0
    )


@pytest.mark.parametrize("index", [0, 1])
def test_one_gradient_alone(index):
    """Where the other operand wants none: the same one, and the other's is not kept."""
    given = list(operands(SIZES[0], "f32", "cpu"))
    expected = results(ops.linear, *given)[1 + index]
    given[1 - index] = given[1 - index].detach()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (_, alone) = results(ops.linear, *given)
    assert torch.equal(alone, expected)
    assert any(t.shape == given[1].shape for t in kept) == (index == 0)
    assert any(t.itemsize == 1 for t in kept) == (index == 1)


def test_what_is_kept():
    """x in 8 bits, and the weight itself; without gradients nothing."""
    x, weight, _ = operands(SIZES[1], "f32", "cpu")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.linear(x, weight)
        kept, large = [], [t for t in kept if t.numel() > 4]
        with torch.no_grad():
            out = ops.linear(x, weight)
    assert not kept and not out.requires_grad
    assert sorted((t.numel(), t.itemsize) for t in large) == [(x.numel(), 1), (weight.numel(), 4)]
    assert weight.data_ptr() in {t.data_ptr() for t in large}


@pytest.mark.parametrize("device", DEVICES)
def test_without_gradients(device):
    x, weight, _ = operands(SIZES[0], "bf16", device)
    with torch.no_grad():
        bits = ops.linear(x, weight)
    assert torch.equal(bits, ops.linear(x, weight).detach())


@pytest.mark.parametrize("device", DEVICES)
def test_values_beyond_the_largest(device):
    """With the scales of a step before they saturate; NaN stays, in its row alone."""
    scaling = ops.DelayedScaling(1, device=device)
    x, weight = torch.ones(16, 16, device=device), torch.eye(16, device=device)
    ops.linear(x.requires_grad_(), weight, scaling[0])
    scaling.update()
    assert torch.equal(ops.linear(1e6 * x, weight, scaling[0]).detach(), torch.full_like(x, 448 / 256))
    x = x.detach().index_fill(0, torch.tensor([3], device=device), torch.nan)
    rows = ops.linear(x, weight).isnan().all(1)
    assert rows.tolist() == [row == 3 for row in range(16)]


def test_no_rows():
    x, weight = torch.ones(0, 16, requires_grad=True), torch.ones(32, 16, requires_grad=True)
    out = ops.linear(x, weight)
    out.sum().backward()
    assert out.shape == (0, 32) and torch.equal(weight.grad, torch.zeros(32, 16))


def test_autocast():
    x, weight, _ = operands(SIZES[0], "f32", "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ops.linear(x.bfloat16(), weight.bfloat16()))
    assert [g.dtype for g in torch.autograd.grad(out.sum(), (x, weight))] == [torch.float32] * 2


def test_flops_are_counted():
    given = operands(SIZES[1], "bf16", "cpu")
    with FlopCounterMode(display=False) as ours:
        results(ops.linear, *given)
    assert ours.get_total_flops() == 3 * 2 * 64 * 16 * 80


@pytest.mark.parametrize(
    "message, call",
    [
        ("recipe is 'block', expected 'tensor', 'row' or a lay", lambda x, w: ops.linear(x, w, "block")),
        ("gradients is 'f16', expected one of e5m2, e4m3", lambda x, w: ops.linear(x, w, gradients="f16")),
        (
            "gradients is 'e4m3', expected 'e5m2', that of its DelayedScaling",
            lambda x, w: ops.linear(x, w, ops.DelayedScaling(1)[0], "e4m3"),
        ),
        ("x is torch.float64, expected float32 or bf", lambda x, w: ops.linear(x.double(), w.double())),
        ("weight is torch.bfloat16, expected float32", lambda x, w: ops.linear(x, w.bfloat16())),
        ("weight has shape [5, 7], expected [K, 8]", lambda x, w: ops.linear(x, torch.ones(5, 7))),
        ("scale has shape [1, 3], expected [2, 3]", lambda x, w: ops.DelayedScaling(2).load_state_dict(
            {"scale": torch.ones(1, 3)})),
    ],
)  # fmt: skip
def test_what_is_refused(message, call):
    with pytest.raises(ValueError) as error:
        call(torch.ones(3, 8), torch.ones(5, 8))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_second_derivatives_are_refused():
    x, weight, _ = operands(SIZES[0], "f32", "cpu")
    out = ops.linear(x, weight)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(IndexError, match="layer 2, expected one below 2"):
        ops.DelayedScaling(2)[2]


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_shapes_on_a_gpu():
    """Rows that are no multiple of 16 are padded; columns are refused."""
    x, weight, dout = operands(((21,), 48, 32), "bf16", "cuda")
    padded = [torch.nn.functional.pad(t.detach(), (0, 0, 0, 11)) for t in (x, dout)]
    expected = results(ops.linear, padded[0].requires_grad_(), weight, padded[1])
    found = results(ops.linear, x, weight, dout)
    torch.testing.assert_close(found, (expected[0][:21], expected[1][:21], expected[2]), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"weight has shape \[31, 48\], expected multiples of 16"):
        ops.linear(x, weight[:31])


FSDP = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from llamac import ops

dist.init_process_group("gloo")
rank, ranks, recipe = dist.get_rank(), dist.get_world_size(), sys.argv[1]
scaling = ops.DelayedScaling(2)

class Layer(nn.Linear):
    def forward(self, x):
        return ops.linear(x, self.weight, scaling[self.number] if recipe == "delayed" else recipe)

torch.manual_seed(0)
model = nn.Sequential(Layer(32, 48, bias=False), nn.ReLU(), Layer(48, 16, bias=False))
model[0].number, model[2].number = 0, 1
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (model[0], model[2], model):
    fully_shard(module, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(3):
    torch.manual_seed(10 * step + rank)  # each rank its own rows
    x, wanted = torch.randn(16, 32), torch.randn(16, 16)
    loss = (model(x.bfloat16()).float() - wanted).square().mean()
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    scaling.update()
dist.all_reduce(loss)
weight = model[2].weight.full_tensor()
if rank == 0:
    torch.save({"loss": loss / ranks, "weight": weight.detach(), "scale": scaling.scale}, sys.argv[2])
dist.barrier()
dist.destroy_process_group()
"""


def whole_model(recipe: str) -> dict[str, torch.Tensor]:
    """What the two ranks of FSDP compute, rank by rank, with rounded weights, in one process."""
    scaling = ops.DelayedScaling(2)
    recipes = [scaling[0], scaling[1]] if recipe == "delayed" else [recipe] * 2
    torch.manual_seed(0)
    weights = [torch.nn.Linear(n, k, bias=False).weight.detach() for n, k in ((32, 48), (48, 16))]
    for step in range(3):
        losses, sums = [], []
        for rank in range(2):
            torch.manual_seed(10 * step + rank)
            x, wanted = torch.randn(16, 32), torch.randn(16, 16)
            narrow = [w.bfloat16().requires_grad_() for w in weights]
            hidden = ops.linear(x.bfloat16(), narrow[0], recipes[0]).relu()
            loss = (ops.linear(hidden, narrow[1], recipes[1]).float() - wanted).square().mean()
            sums.append([g.float() for g in torch.autograd.grad(loss, narrow)])
            losses.append(loss.detach())
        weights = [w - 0.5 * (a + b) / 2 for w, a, b in zip(weights, *sums, strict=True)]
        scaling.update()
    return {"loss": torch.stack(losses).mean(), "weight": weights[1], "scale": scaling.scale}


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks want two GPUs")
@pytest.mark.parametrize("recipe", [pytest.param("tensor", marks=pytest.mark.slow), "delayed"])
def test_sharded_by_fsdp(recipe, tmp_path):
    """Two processes: weights, loss and the scales of both are those of one process."""
    ended = as_ranks([sys.executable, "-c", FSDP, recipe, str(tmp_path / "found")])
    assert [code for code, _ in ended] == [0, 0], ended
    found, expected = torch.load(tmp_path / "found"), whole_model(recipe)
    assert torch.equal(found["scale"], expected["scale"])
    for name in ("loss", "weight"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
