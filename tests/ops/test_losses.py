"""llamac.ops.cross_entropy and linear_cross_entropy: chunks, targets, means, what is computed and kept."""

import pytest
import torch
from function_cases import CASES, DEVICES, IGNORED, differences, randn, targets
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from llamac import ops

LOSSES = [name for name in CASES if "cross_entropy" in name]


@pytest.mark.parametrize("wide", [False, True], ids=["own type", "float32"])
def test_chunks_of_linear_cross_entropy(wide, monkeypatch):
    case, vocabulary, height = CASES["linear_cross_entropy-mean"], 65, 2 if wide else 5
    monkeypatch.setattr("llamac.ops.operations.CHUNK_BYTES", vocabulary * 2 * height)
    assert not differences(case, "bf16")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        case.results(case.ours, case.arguments(torch.bfloat16))
    names = [event.name for event in profiled.events()]
    heights = [e.input_shapes[0][0] for e in profiled.events() if e.name == "llamac::cross_entropy"]
    assert max(heights) == height and sum(heights) == case.ids.numel()
    assert ("llamac::matmul_backward_weight" in names) == (len(heights) > 8) == wide


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
        free = ("aten.new_empty", "aten.empty_like", "aten._unsafe_view")
        if not func.is_view and not str(func).startswith(free):
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


@pytest.mark.parametrize("wanted", [(), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("mean", [False, True])
def test_opcheck_linear_cross_entropy(wanted, mean):
    hidden, weight = (x.float() for x in CASES["linear_cross_entropy-mean"].inputs)
    arguments = (hidden, weight, targets(65, 3, 11), IGNORED, mean, 65 * 4 * 10)  # chunks of 9 rows
    overload = "gradients" if wanted else "default"
    torch.library.opcheck(getattr(torch.ops.llamac.linear_cross_entropy, overload), arguments + wanted)


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


def test_a_loss_as_a_metric():
    """Beside what torch.func differentiates."""

    def both(x):
        loss = torch.ops.llamac.linear_cross_entropy(x, weight, targets(7, 5), IGNORED, True, 1 << 20)
        return x.square().sum(), loss

    x, weight = randn(5, 8).float(), randn(7, 8).float()
    gradient, loss = torch.func.grad(both, has_aux=True)(x)
    torch.testing.assert_close(gradient, 2 * x)
    torch.testing.assert_close(loss, ops.linear_cross_entropy(x, weight, targets(7, 5), IGNORED))
