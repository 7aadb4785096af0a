"""torch.ops.llamac.* and llamac.ops on CPU tensors, and on the GPU's where the extension is built for one:
what torch asks of an operation (opcheck, gradcheck, fullgraph), and agreement with PyTorch within the
tolerance.
"""

import math

import op_cases
import pytest
import torch
import torch.nn.functional as F
from function_cases import CASES, DEVICES, EPS, HEADS, SCALE, Case, differences, randn, targets
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from llamac import ops
from llamac.base.registry import kernels

OPERATIONS = {op["name"]: op for op in kernels()}
# By name, ".out" behind those that write into given tensors.
SCHEMAS = {
    schema.name.removeprefix("llamac::") + f".{schema.overload_name}".rstrip("."): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.removeprefix("llamac::") in OPERATIONS
}
SIZES = {
    "B": 2,
    "T": 5,
    "S": 5,
    "M": 5,
    "C": 24,
    "NH": 4,
    "NKV": 2,
    "R": 3,
    "HD": 16,
    "F": 20,
    "V": 33,
    "N": 15,  # a multiple of T
    "K": 9,
    "P": 130,
}


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
    # The first types there that opcheck can compare: f32 where it may be.
    there = op["variants"][-1]["types"]  # of the reference
    if device != "cpu":
        there = [t for v in op["variants"] if v["where"] == "device" for t in v["types"]]
    types = next((t for t in there if all(op_cases.DTYPES[d].itemsize > 1 for d in t)), None)
    if types is None:
        pytest.skip("opcheck cannot compare codes of fp8, and no kernel writes others")
    values = op_cases.make_inputs(op, types, SIZES, seed=0)
    # Those that a case leaves out have their schema's values.
    scalars = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    scalars |= dict(zip((name for name, _ in op["scalars"]), op_cases.CASES[op["name"]].scalars))
    for o, dtype in zip(op["operands"], types):
        zeros = torch.zeros(op_cases.shape_of(o, SIZES), dtype=op_cases.DTYPES[dtype])
        values.setdefault(o["name"], zeros)
    derived = name.endswith("_forward")
    values = {
        n: x if x is None else x.to(device).requires_grad_(derived and x.is_floating_point() and n != "cis")
        for n, x in values.items()
    }
    known = SIZES | scalars | {"dtype": torch.float32, "device": torch.device(device)} | values
    positional = [known[a.name] for a in schema.arguments if not a.kwarg_only]
    return positional, {a.name: known[a.name] for a in schema.arguments if a.kwarg_only}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if i % 2 else ()) for i, name in enumerate(SCHEMAS)]
)
def test_opcheck(name, device):
    packet, _, overload = name.partition(".")
    torch.library.opcheck(
        getattr(getattr(torch.ops.llamac, packet), overload or "default"), *arguments_of(name, device)
    )


def rows_of(name: str) -> set[str]:
    """Operands whose first dimension are rows."""
    op = OPERATIONS[SCHEMAS[name].name.removeprefix("llamac::")]
    if not any(d["rows"] for d in op["dimensions"] if d["name"] == "N"):
        return set()
    return {o["name"] for o in op["operands"] if o["shape"] and o["shape"][0][0] == "N"}


WITH_ROWS = [name for name in SCHEMAS if rows_of(name)]


@pytest.mark.parametrize(
    "name, shape",
    [(name, ((1, SIZES["N"], 1), ())[(i + i // 2) % 2]) for i, name in enumerate(WITH_ROWS)],
)
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


def test_every_operation_is_there():
    outputs = {name: [o for o in op["operands"] if o["output"]] for name, op in OPERATIONS.items()}
    out = {name for name, each in outputs.items() if not all(o["in_place"] for o in each)}
    read = {
        name
        for name, op in OPERATIONS.items()
        if any(not o["output"] or o["in_place"] for o in op["operands"])
    }
    assert set(SCHEMAS) == read | {f"{name}.out" for name in out}


@pytest.mark.more
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
        widths = ((batch, time, width), (2, width), (width, 64), (width, 2 * width))
        inputs = [randn(*shape) / (6 if shape[0] == width else 1) for shape in widths]
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
    with torch.autocast("cpu", torch.float16):
        assert ops.attention(*(x.float() for x in HEADS)).dtype == torch.float16


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
        for name, operands in (("forward", (x, w, None, None)), ("backward_input", (dout, w))):
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
    with pytest.raises(ValueError, match="x is Long"):
        torch.ops.llamac.matmul_backward_weight.out(dout, x.long(), True, dweight=dweight)
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


def test_gradients_of_operations_that_no_function_has():
    shapes = (3, 5), (5,), (3, 4), (5, 4)
    residual, bias, x, weight = (randn(*shape).requires_grad_() for shape in shapes)
    product = torch.ops.llamac.matmul_forward
    for given in ((residual, bias), (None, None)):
        torch.autograd.gradcheck(lambda x, w, g=given: product(x, w, *g), (x, weight))
    torch.autograd.gradcheck(lambda *given: product(x.detach(), weight.detach(), *given), (residual, bias))
    tokens = torch.tensor([1, 0, 1, 2], dtype=torch.int32)
    embedding, place = torch.ops.llamac.embedding_forward, torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    torch.autograd.gradcheck(lambda w: embedding(tokens, w, None, None), (weight,))
    positions = randn(7, 4).requires_grad_()  # another number of rows than weight's
    torch.autograd.gradcheck(lambda w, p: embedding(tokens, w, p, place), (weight, positions))
    with pytest.raises(ValueError, match="positions is missing, expected with place"):
        embedding(tokens, weight, None, place)
    bias, gelu = randn(4).requires_grad_(), torch.ops.llamac.gelu_forward
    for tanh in (True, False):
        torch.autograd.gradcheck(lambda x, b, t=tanh: gelu(x, b, t), (x, bias))
        torch.autograd.gradcheck(lambda b, t=tanh: gelu(x.detach().view(3, 1, 4), b, t), (bias,))
        torch.autograd.gradcheck(lambda x, t=tanh: gelu(x, None, t), (x,))
    scale = randn(4).requires_grad_()
    norm, residual_norm = torch.ops.llamac.layernorm_forward, torch.ops.llamac.residual_layernorm_forward
    torch.autograd.gradcheck(lambda x, w, b: norm(x, w, b, 1e-5)[0], (x, scale, bias))
    residual = randn(3, 4).requires_grad_()
    both = lambda x, r, w, b: residual_norm(x, r, w, b, 1e-5)[:2]  # noqa: E731
    torch.autograd.gradcheck(both, (x, residual, scale, bias))


def test_what_only_the_backward_reads_has_no_derivative():
    x, weight = randn(2, 96).requires_grad_(), randn(96)
    out, rstd = torch.ops.llamac.rmsnorm_forward(x, weight, EPS)
    assert out.requires_grad and not rstd.requires_grad
    q, k = (randn(1, 3, heads, 16).requires_grad_() for heads in (4, 2))
    out, lse = torch.ops.llamac.attention_forward(q, k, k, None, None, SCALE)
    assert out.requires_grad and not lse.requires_grad


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
