"""torch.ops.llamac.* and llamac.ops on CPU tensors, and on the GPU's where the extension is built for one:
what torch asks of an operation (opcheck, gradcheck, fullgraph), agreement with PyTorch within the
tolerance, and errors.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import described
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from llamac import extension, ops, reference
from llamac.registry import kernels
from llamac.tolerance import BACKWARD, FORWARD, violation

OPERATIONS = {op["name"]: op for op in kernels()}
# By name, ".out" behind those that write into given tensors.
SCHEMAS = {
    schema.name.removeprefix("llamac::") + f".{schema.overload_name}".rstrip("."): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.removeprefix("llamac::") in OPERATIONS
}
DEVICES = ["cpu"] + [device for device in [extension.device()] if device != "cpu"]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
SIZES = {"B": 2, "T": 5, "C": 24, "NH": 4, "NKV": 2, "HD": 16, "F": 20, "V": 33, "N": 7, "K": 9, "P": 130}
EPS, SCALE, IGNORED = described.EPS, described.SCALE, reference.IGNORED


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
    return reference.rope(x, described.pair(angles(x)), interleaved)


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
    "rope": Case(lambda x: ops.rope(x, angles(x)), rope, (randn(2, 7, 4, 16),)),
    "rope-interleaved": Case(
        lambda x: ops.rope(x, angles(x), interleaved=True), lambda x: rope(x, True), (randn(2, 7, 4, 16),)
    ),
    "repeat_kv": Case(lambda x: ops.repeat_kv(x, 6), lambda x: reference.repeat_kv(x, 6), HEADS[1:2]),
    "attention": Case(lambda *x: ops.attention(*x, scale=SCALE), described.attention, HEADS),
    "swiglu": Case(ops.swiglu, reference.swiglu, (randn(2, 5, 62),)),
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_agreement(name, dtype, device):
    assert not differences(CASES[name], dtype, device)


def test_a_wrong_gradient_is_seen():
    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            out = function(*arguments, **(keywords or {}))
            if function is torch.ops.llamac.rmsnorm_backward.default:
                return out[0] * (1 + 1e-4), out[1]
            return out

    with Wrong():
        (message,) = differences(CASES["rmsnorm"], "f32")
    assert message.startswith("gradient 0")


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    case = CASES[name]
    function = lambda *x: case.call(case.ours, list(x))  # noqa: E731
    torch.autograd.gradcheck(function, case.arguments(torch.float64), fast_mode=True)


def arguments_of(name: str, device: str) -> tuple[list, dict]:
    """An operation's arguments in torch, in the order of its schema."""
    schema = SCHEMAS[name]
    op = OPERATIONS[schema.name.removeprefix("llamac::")]
    types = [o["type"] if o["type"] in ("i32", "f64") else "f32" for o in op["operands"]]
    values = described.make_inputs(op, types, SIZES, seed=0)
    scalars = dict(zip((name for name, _ in op["scalars"]), described.CASES[op["name"]].scalars))
    for o in op["operands"]:
        dtype = torch.float64 if o["type"] == "f64" else torch.float32
        values.setdefault(o["name"], torch.zeros(described.shape_of(o, SIZES), dtype=dtype))
    derived = name.endswith("_forward")
    values = {
        n: x if x is None else x.to(device).requires_grad_(derived and x.is_floating_point() and n != "cis")
        for n, x in values.items()
    }
    known = SIZES | scalars | {"dtype": torch.float32, "device": torch.device(device)} | values
    positional = [known[a.name] for a in schema.arguments if not a.kwarg_only]
    return positional, {a.name: known[a.name] for a in schema.arguments if a.kwarg_only}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name, device):
    packet, _, overload = name.partition(".")
    torch.library.opcheck(
        getattr(getattr(torch.ops.llamac, packet), overload or "default"), *arguments_of(name, device)
    )


def rows_of(name: str) -> set[str]:
    """Operands whose first dimension are rows."""
    op = OPERATIONS[SCHEMAS[name].name.removeprefix("llamac::")]
    return {o["name"] for o in op["operands"] if o["shape"] and o["shape"][0][0] == "N"}


@pytest.mark.parametrize("shape", [(1, SIZES["N"], 1), ()])
@pytest.mark.parametrize("name", [name for name in SCHEMAS if rows_of(name)])
def test_rows_of_any_dimensions(name, shape):
    """The same numbers, () being one row; what has rows has their dimensions."""
    rows = math.prod(shape)

    def split(tensors: dict) -> dict:
        """Copies."""
        copies = {n: x.clone() if torch.is_tensor(x) else x for n, x in tensors.items()}
        for n in rows_of(name) & {n for n, x in copies.items() if x is not None}:
            copies[n] = copies[n].reshape((*shape, *copies[n].shape[1:]))
        return copies

    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.llamac, packet), overload or "default")
    positional, keywords = arguments_of(name, "cpu")
    inputs = {
        a.name: x.detach() if torch.is_tensor(x) else x for a, x in zip(SCHEMAS[name].arguments, positional)
    }
    inputs |= {n: x[:rows] for n, x in inputs.items() if n in rows_of(name) and x is not None}
    outputs = {n: x[:rows] if n in rows_of(name) else x for n, x in keywords.items()}

    def results(given: dict, into: dict) -> dict:
        if overload:
            operation(*given.values(), **into)
            return into
        found, names = operation(*given.values()), [r.name for r in SCHEMAS[name].returns]
        return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))

    torch.library.opcheck(operation, tuple(split(inputs).values()), split(outputs) if overload else {})
    found = results(split(inputs), split(outputs))
    for n, expected in results(inputs, outputs).items():
        like = split({n: expected})[n]
        assert found[n].shape == like.shape and torch.equal(found[n], like), n


@pytest.mark.parametrize("wanted", [(), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("mean", [False, True])
def test_opcheck_linear_cross_entropy(wanted, mean):
    hidden, weight = (x.float() for x in CASES["linear_cross_entropy-mean"].inputs)
    arguments = (hidden, weight, targets(65, 3, 11), IGNORED, mean, 65 * 4 * 10)  # chunks of 9 rows
    overload = "gradients" if wanted else "default"
    torch.library.opcheck(getattr(torch.ops.llamac.linear_cross_entropy, overload), arguments + wanted)


def test_every_operation_is_there():
    out = {
        name
        for name, op in OPERATIONS.items()
        if not all(o["in_place"] for o in op["operands"] if o["output"])
    }
    assert set(SCHEMAS) == set(OPERATIONS) | {f"{name}.out" for name in out}


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    """One graph of all functions, for every size: values and gradients are eager's."""
    width, heads = 32, (4, 8)

    def block(x, norms, mixed, gate_up, ids):
        y = ops.rmsnorm(x, norms[0])
        qkv = (y @ mixed).unflatten(-1, (-1, heads[1]))
        cis = ops.precompute_cis(x.shape[1], heads[1], device=x.device)
        q, k, v = ops.rope(qkv[:, :, :4], cis), ops.rope(qkv[:, :, 4:6], cis), qkv[:, :, 6:]
        y = ops.attention(q, ops.repeat_kv(k, 4), ops.repeat_kv(v, 4)).flatten(2)
        total, y = ops.residual_rmsnorm(y, x, norms[1])
        y = ops.swiglu(y @ gate_up) + total
        return ops.linear_cross_entropy(y, mixed.T, ids) + ops.cross_entropy(y @ mixed, ids)

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, time in ((3, 6), (5, 9)):
        inputs = [
            randn(batch, time, width),
            randn(2, width),
            randn(width, 64) / 6,
            randn(width, 2 * width) / 6,
        ]
        ids, results = targets(64, batch, time).to(device), []
        for function in (block, compiled):
            leaves = [x.to(device, torch.float32).requires_grad_() for x in inputs]
            loss = function(*leaves, ids)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["attention", "rope", "repeat_kv", "rmsnorm", "swiglu"])
def test_strides_change_nothing(name, device):
    """Views of a wider tensor, of a transposed one, and one repeated along a dimension."""
    case = CASES[name]
    views = (
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
        lambda x: x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 1 else x,
        lambda x: torch.stack((x, x), -1)[..., 0],
    )
    expected = case.results(case.ours, case.arguments(torch.float32, device))
    for view in views:
        arguments = [view(x.detach()).requires_grad_() for x in case.arguments(torch.float32, device)]
        torch.testing.assert_close(case.results(case.ours, arguments), expected, rtol=0, atol=0)


@pytest.mark.parametrize("wide", [False, True], ids=["own type", "float32"])
def test_chunks_of_linear_cross_entropy(wide, monkeypatch):
    case, vocabulary, height = CASES["linear_cross_entropy-mean"], 65, 2 if wide else 5
    monkeypatch.setattr(ops, "CHUNK_BYTES", vocabulary * 2 * height)
    assert not differences(case, "bf16")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        case.results(case.ours, case.arguments(torch.bfloat16))
    names = [event.name for event in profiled.events()]
    heights = [e.input_shapes[0][0] for e in profiled.events() if e.name == "llamac::cross_entropy"]
    assert max(heights) == height and sum(heights) == case.ids.numel()
    assert ("llamac::matmul_backward_weight" in names) == (len(heights) > 8) == wide


LOSSES = [name for name in CASES if "cross_entropy" in name]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_a_gradient(name):
    """The same bits, by a shorter way."""
    case = CASES[name]
    arguments = case.arguments(torch.float32)
    (wanted,) = case.call(case.ours, arguments)
    with torch.no_grad():
        (found,) = case.call(case.ours, arguments)
    assert not found.requires_grad and torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(1, 0), (0, 11), (2, 0), (1, 11)])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_rows_that_do_not_count(name, device, shape):
    """No rows, and rows that are all ignored: a mean is NaN, gradients are 0, as PyTorch's."""
    case = CASES[name]
    logits, *weight = case.arguments(torch.float32, device)
    arguments = [logits[: shape[0], : shape[1]], *weight]
    ids = torch.full(shape, IGNORED, device=device)
    ours, theirs = (f(*arguments, ids) for f in (case.ours, case.torch))
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    gradients = (torch.autograd.grad(loss.sum(), [logits, *weight]) for loss in (ours, theirs))
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(case.ours(*arguments, ids), ours, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LOSSES)
def test_targets_of_any_integers_and_strides(name):
    """The same bits as of int32 side by side."""
    case = CASES[name]
    arguments = case.arguments(torch.float32)
    ids = torch.arange(33).view(3, 11).int()
    ids[1, 3] = IGNORED
    gaps = torch.full((3, 22), 1 << 40)
    gaps[:, ::2] = ids
    flat = torch.full((66,), 1 << 40)
    flat[::2] = ids.flatten()
    forms = [ids.long(), ids.short(), ids.long().T.contiguous().T, gaps[:, ::2]]
    expected = case.ours(*arguments, ids)
    for form in forms:
        assert torch.equal(case.ours(*arguments, form), expected)
    wide, *weight = (x.flatten(0, 1) if x.dim() == 3 else x for x in arguments)
    assert torch.equal(case.ours(wide, *weight, flat[::2]).flatten(), expected.flatten())
    with torch.no_grad():
        assert torch.equal(case.ours(wide, *weight, flat[::2]).flatten(), expected.flatten())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_as_many_rows_as_the_data_says(name):
    """Compiled without a guard on their number."""
    case = CASES[name]
    arguments, ids = case.arguments(torch.float32), case.ids.flatten()

    def picked(x, *rest):
        return case.ours(x.flatten(0, 1)[ids >= 0], *rest, ids[ids >= 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(picked, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), picked(*arguments))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_changed_in_place(name):
    """As trainers do that take the mean over ranks or micro-batches: *=, before the backward."""
    case = CASES[name]
    losses, _ = case.results(case.ours, case.arguments(torch.float32))
    arguments = case.arguments(torch.float32)
    (loss,) = case.call(case.ours, arguments)
    loss *= 2
    torch.testing.assert_close(loss, 2 * losses[0])
    again = torch.autograd.grad((loss * torch.ones_like(loss)).sum(), arguments)
    (plain,) = case.call(case.ours, arguments)
    torch.testing.assert_close(again, torch.autograd.grad(2 * plain.sum(), arguments))


class Computing(TorchDispatchMode):
    """Lists what is called but for views and empty tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not str(func).startswith(
            ("aten.new_empty", "aten.empty_like", "aten._unsafe_view")
        ):
            self.calls.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_mean_without_gradient_is_one_call(name):
    """Calls are what it costs the host: targets are not converted, the mean is the same call's."""
    case = CASES[name + "-mean"]
    arguments, ids = case.arguments(torch.float32), targets(65, 3, 11)
    with Computing() as computing, torch.no_grad():
        case.ours(*arguments, ids)
    assert computing.calls == [f"llamac.{name}.default"]


def test_gradients_of_linear_cross_entropy_exist_once():
    """The memory that the forward filled is what the backward gives, unless the graph is kept."""
    case = CASES["linear_cross_entropy-mean"]
    arguments = case.arguments(torch.float32)
    (loss,) = case.call(case.ours, arguments)
    _, _, dweight = loss.grad_fn.saved_tensors
    address = dweight.data_ptr()
    del dweight
    kept = torch.autograd.grad(loss, arguments, retain_graph=True)
    given = torch.autograd.grad(loss, arguments)
    torch.testing.assert_close(kept, given, rtol=0, atol=0)
    assert given[1].data_ptr() == address != kept[1].data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_checkpointed(name):
    """Computed again in the backward: the same bits."""
    case = CASES[name]
    arguments = case.arguments(torch.float32)
    again = case.results(lambda *x: checkpoint(case.ours, *x, use_reentrant=False), arguments)
    torch.testing.assert_close(again, case.results(case.ours, arguments), rtol=0, atol=0)


def test_autocast():
    """Types as PyTorch's like operations have them, gradients in the parameters' type."""
    x, weight = (t.float().requires_grad_() for t in (randn(2, 5, 96), randn(96)))
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.rmsnorm(x.bfloat16(), weight).dtype == torch.float32
        assert {t.dtype for t in ops.residual_rmsnorm(x, x.bfloat16(), weight)} == {torch.float32}
        case = CASES["attention"]
        assert case.call(case.ours, case.arguments(torch.float32))[0].dtype == torch.bfloat16
        case = CASES["linear_cross_entropy-mean"]
        loss, gradients = case.results(case.ours, case.arguments(torch.float32))
        assert loss[0].dtype == torch.float32
        assert [g.dtype for g in gradients] == [torch.float32] * 2
        assert ops.attention(*HEADS).dtype == torch.float64  # as torch's own
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="q is Half"):
        ops.attention(*(x.float() for x in HEADS))


ERRORS = {
    "rmsnorm_forward: weight has shape [7], expected [C] with dimension 0 = 8": lambda: ops.rmsnorm(
        torch.ones(3, 8), torch.ones(7)
    ),
    "rmsnorm_forward: weight is bf16, expected f32": lambda: ops.rmsnorm(
        torch.ones(3, 8), torch.ones(8).bfloat16()
    ),
    "rmsnorm_forward: x is Half, expected f32, bf16, f64 or i32": lambda: ops.rmsnorm(
        torch.ones(3, 8).half(), torch.ones(8)
    ),
    "rope_forward: x has shape [3, 8], expected [B,T,NH,HD]": lambda: ops.rope(
        torch.ones(3, 8), torch.ones(9, 4, 2)
    ),
    "rope_forward: cis has shape [2, 4, 2], expected [T,HD/2,2] with dimension 0 = 3": lambda: ops.rope(
        torch.ones(1, 3, 2, 8), torch.ones(2, 4, 2)
    ),
    "swiglu_forward: gate_up has shape [3, 7], expected [N,2F] with dimension 1 = 6": lambda: ops.swiglu(
        torch.ones(3, 7)
    ),
    "repeat_kv_forward: NH = 3, expected a multiple of NKV = 2": lambda: ops.repeat_kv(
        torch.ones(1, 3, 2, 8), 3
    ),
    "rmsnorm_forward: weight is on meta, expected cpu": lambda: ops.rmsnorm(
        torch.ones(3, 8), torch.ones(8, device="meta")
    ),
    "residual_rmsnorm_forward: residual has shape [8, 8], expected rows [2, 4]": lambda: ops.residual_rmsnorm(
        torch.ones(2, 4, 8), torch.ones(8, 8), torch.ones(8)
    ),
    "cross_entropy: targets has shape [3, 2], expected rows [2, 3]": lambda: ops.cross_entropy(
        torch.ones(2, 3, 8), torch.zeros(3, 2).long()
    ),
    "linear_cross_entropy: targets has shape [3, 2], expected [2, 3]": lambda: ops.linear_cross_entropy(
        torch.ones(2, 3, 8), torch.ones(5, 8), torch.zeros(3, 2).long()
    ),
    "linear_cross_entropy: weight has shape [5, 7], expected [V,C] with dimension 1 = 8": lambda: (
        ops.linear_cross_entropy(torch.ones(3, 8), torch.ones(5, 7), torch.zeros(3).int())
    ),
    "linear_cross_entropy: weight is BFloat16, expected Float": lambda: ops.linear_cross_entropy(
        torch.ones(3, 8), torch.ones(5, 8).bfloat16(), torch.zeros(3).int()
    ),
    "linear_cross_entropy: hidden is Half, expected f32, bf16 or f64": lambda: ops.linear_cross_entropy(
        torch.ones(3, 8).half(), torch.ones(5, 8).half(), torch.zeros(3).int()
    ),
    "linear_cross_entropy: chunk_bytes is 0, expected at least 1": lambda: (
        torch.ops.llamac.linear_cross_entropy(
            torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3).int(), IGNORED, True, 0
        )
    ),
    "linear_cross_entropy: targets is torch.float32, expected an integer type but uint64": lambda: (
        ops.linear_cross_entropy(torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3))
    ),
    "cross_entropy: ignore_index is 4294967196, expected one of 32 bits": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.zeros(3).long(), ignore_index=2**32 - 100
    ),
    "linear_cross_entropy: targets is on meta, expected cpu": lambda: ops.linear_cross_entropy(
        torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3, dtype=torch.int32, device="meta")
    ),
    "cross_entropy: targets is torch.float32, expected an integer type but uint64": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.zeros(3)
    ),
    "cross_entropy: targets is torch.bool, expected an integer type but uint64": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.zeros(3).bool()
    ),
    "cross_entropy: targets holds 4294967196, expected values from 0 to 7": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.tensor([0, 4294967196, 1], dtype=torch.uint32)
    ),
    "cross_entropy: targets holds 8, expected values from 0 to 7": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.tensor([0, 8, 1])
    ),
    "cross_entropy: targets holds 4294967297, expected values from 0 to 7": lambda: ops.cross_entropy(
        torch.ones(3, 8), torch.tensor([0, 1 + (1 << 32), 1])
    ),
    "linear_cross_entropy: reduction is 'none', expected one of mean, sum": lambda: ops.linear_cross_entropy(
        torch.ones(3, 8), torch.ones(5, 8), torch.zeros(3).int(), reduction="none"
    ),
    "rmsnorm_forward: out must be contiguous": lambda: torch.ops.llamac.rmsnorm_forward.out(
        torch.ones(3, 8), torch.ones(8), EPS, out=torch.ones(8, 3).T, rstd=torch.ones(3)
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_are_one_line(message):
    with pytest.raises(ValueError) as error:
        ERRORS[message]()
    assert str(error.value) == message


def test_fakes_refuse_what_kernels_refuse():
    with torch.device("meta"):
        x, weight = torch.ones(3, 8), torch.ones(8)
        for message, arguments in {
            "weight has shape": (x, torch.ones(7)),
            "x is Half": (x.half(), weight.half()),
            "weight is bf16, expected f32": (x, weight.bfloat16()),
        }.items():
            with pytest.raises(ValueError, match=message):
                ops.rmsnorm(*arguments)
        targets = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(ValueError, match="ignore_index is 1099511627776, expected one of 32 bits"):
            ops.linear_cross_entropy(x, torch.ones(5, 8), targets, ignore_index=1 << 40)


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_counted(device):
    """As PyTorch counts its own products; attention's backward as it counts flash attention's."""
    q, k, v = (torch.randn(2, 5, heads, 8, device=device, requires_grad=True) for heads in (6, 2, 2))
    hidden, weight = (torch.randn(n, 16, device=device, requires_grad=True) for n in (10, 24))
    targets = torch.randint(24, (10,), device=device)
    dout = torch.randn(10, 24, device=device)
    with FlopCounterMode(display=False) as ours:
        ops.attention(q, k, v).sum().backward()
        ops.linear_cross_entropy(hidden, weight, targets).backward()
        x, w = hidden.detach(), weight.detach()
        for name, operands in (("forward", (x, w, None)), ("backward_input", (dout, w))):
            getattr(torch.ops.llamac, f"matmul_{name}")(*operands)
        torch.ops.llamac.matmul_backward_weight.out(dout, x, False, dweight=torch.empty_like(w))
    with FlopCounterMode(display=False) as theirs:
        F.cross_entropy(F.linear(hidden, weight), targets).backward()
        F.linear(x, w), dout @ w, dout.T @ x
    heads = q.transpose(1, 2).shape  # PyTorch 2.11 counts no groups; each query head has its products
    attention = sdpa_flop_count(heads, heads, heads) + sdpa_backward_flop_count(heads, heads, heads, heads)
    assert ours.get_total_flops() == theirs.get_total_flops() + attention


def test_no_rows():
    x, weight = torch.ones(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    ops.rmsnorm(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8)) and x.grad.shape == (0, 8)


def test_out_accumulates_and_is_noticed():
    dout, x = randn(7, 9).float(), randn(7, 24).float()
    dweight = torch.ones(9, 24)
    version = dweight._version
    torch.ops.llamac.matmul_backward_weight.out(dout, x, True, dweight=dweight)
    torch.testing.assert_close(dweight, 1 + dout.T @ x)
    assert dweight._version > version
    version = dweight._version
    with pytest.raises(ValueError, match="x is Half"):
        torch.ops.llamac.matmul_backward_weight.out(dout, x.half(), True, dweight=dweight)
    assert dweight._version == version


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.inputs) > 1])
def test_one_gradient_alone(name):
    """Where the other arguments want none: the same one."""
    case = CASES[name]
    _, expected = case.results(case.ours, case.arguments(torch.float32))
    for index, gradient in enumerate(expected):
        arguments = [x.detach() for x in case.arguments(torch.float32)]
        arguments[index].requires_grad_()
        _, (alone,) = case.results(case.ours, arguments)
        torch.testing.assert_close(alone, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_products_that_nobody_wants_are_not_made(frozen):
    """As of a head that an adapter leaves alone."""
    case = CASES["linear_cross_entropy-mean"]
    arguments = case.arguments(torch.float32)
    for index in frozen:
        arguments[index].requires_grad_(False)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        case.call(case.ours, arguments)
    assert sum(event.name == "aten::mm" for event in profiled.events()) == 3 - len(frozen)


def test_gradients_of_operations_that_no_function_has():
    residual, x, weight = (randn(*shape).requires_grad_() for shape in ((3, 5), (3, 4), (5, 4)))
    product = torch.ops.llamac.matmul_forward
    for given in (residual, None):
        torch.autograd.gradcheck(lambda x, w, r=given: product(x, w, r), (x, weight))
    torch.autograd.gradcheck(lambda r: product(x.detach(), weight.detach(), r), (residual,))
    tokens = torch.tensor([1, 0, 1, 2], dtype=torch.int32)
    torch.autograd.gradcheck(lambda w: torch.ops.llamac.embedding_forward(tokens, w), (weight,))


def test_what_only_the_backward_reads_has_no_derivative():
    x, weight = randn(2, 96).requires_grad_(), randn(96)
    out, rstd = torch.ops.llamac.rmsnorm_forward(x, weight, EPS)
    assert out.requires_grad and not rstd.requires_grad
    q, k = (randn(1, 3, heads, 16).requires_grad_() for heads in (4, 2))
    out, lse = torch.ops.llamac.attention_forward(q, k, k, SCALE)
    assert out.requires_grad and not lse.requires_grad


def test_operations_without_a_derivative_say_so():
    x, weight = torch.ones(5, 8, requires_grad=True), torch.ones(8)
    loss = torch.ops.llamac.linear_cross_entropy
    arguments = x, torch.ones(7, 8), torch.zeros(5, dtype=torch.int64), IGNORED, True, 1 << 20
    for result in (
        torch.ops.llamac.global_norm(x.view(-1)),
        loss.default(*arguments),
        loss.gradients(*arguments, True, False)[0],
    ):
        with pytest.raises(RuntimeError, match=r"derivative for llamac::\w+ is not implemented"):
            result.sum().backward()
    out = torch.ops.llamac.rmsnorm_forward.out
    with pytest.raises(NotImplementedError, match=r"rmsnorm_forward has no derivative, which x asks for"):
        out(x, weight, EPS, out=torch.empty(5, 8), rstd=torch.empty(5))
    with torch.no_grad():
        out(x, weight, EPS, out=torch.empty(5, 8), rstd=torch.empty(5))


def test_a_loss_as_a_metric():
    """Beside what torch.func differentiates."""

    def both(x):
        loss = torch.ops.llamac.linear_cross_entropy(x, weight, targets(7, 5), IGNORED, True, 1 << 20)
        return x.square().sum(), loss

    x, weight = randn(5, 8).float(), randn(7, 8).float()
    gradient, loss = torch.func.grad(both, has_aux=True)(x)
    torch.testing.assert_close(gradient, 2 * x)
    torch.testing.assert_close(loss, ops.linear_cross_entropy(x, weight, targets(7, 5), IGNORED))


@pytest.mark.parametrize("name", ["cross_entropy-mean", "linear_cross_entropy-mean", "rmsnorm"])
def test_no_second_derivative(name):
    """Said, where another term's would hide that it is missing."""
    case = CASES[name]
    arguments = case.arguments(torch.float32)
    with pytest.raises(RuntimeError, match=r"has no second derivative|derivative for .* is not implemented"):
        (gradient,) = torch.autograd.grad(
            case.call(case.ours, arguments)[0].sum(), arguments[0], create_graph=True
        )
        torch.autograd.grad((gradient * arguments[0]).sum(), arguments[0])


def test_another_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ImportError, match=r"was built for torch .* this is torch 2\.99\.0"):
        extension.load.__wrapped__()


@pytest.mark.skipif(torch.cuda.is_available() <= ("cuda" in DEVICES), reason="needs a GPU without kernels")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_without_kernels_for_it(name):
    """One line says what is missing and how to build with it."""
    case = CASES[name]
    ids = None if case.ids is None else case.ids.cuda()
    with pytest.raises(
        ValueError, match=r"is on cuda:0, but llamac has kernels for the CPU only, because"
    ) as e:
        case = Case(case.ours, case.torch, case.inputs, ids)
        case.results(case.ours, case.arguments(torch.float32, "cuda"))
    assert str(e.value).endswith(extension.without_gpu()) and "\n" not in str(e.value)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_captured_in_a_graph_without_waiting(name):
    """Replayed on new values; nothing between waits for the device."""
    case = CASES[name]
    arguments = case.arguments(torch.float32, "cuda")
    ids = None if case.ids is None else case.ids.cuda()
    case = Case(case.ours, case.torch, case.inputs, ids)
    case.results(case.ours, arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = case.results(case.ours, arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for x in arguments:
            x.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(outs, case.results(case.ours, arguments), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_no_forward_derivative(name):
    """Said, not left out: by dual numbers and by torch.func."""
    case = CASES[name]
    x, *rest = (t.detach() for t in case.arguments(torch.float32))

    def ours(x):
        return case.call(case.ours, [x, *rest])[0]

    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=r"forward (derivative|AD)"):
        ours(fwAD.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match=r"forward (derivative|AD)"):
        torch.func.jvp(ours, (x,), (x,))
