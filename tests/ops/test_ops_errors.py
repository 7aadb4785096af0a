"""What torch.ops.llamac.* and llamac.ops refuse, and how they say it: one line."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from function_cases import CASES, DEVICES, EPS, IGNORED, Case

from llamac import _native, ops
from llamac.base import extension


def listed(names: list[str]) -> str:
    """ "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]])


STORED = [row["name"] for row in _native.dtypes()]
FLOATS = [row["name"] for row in _native.dtypes() if row["is_float"]]
ones, zeros = torch.ones, torch.zeros
ERRORS = {
    "rmsnorm_forward: weight has shape [7], expected [C] with dimension 0 = 8": lambda: ops.rmsnorm(
        ones(3, 8), ones(7)
    ),
    "rmsnorm_forward: weight is bf16, expected f32": lambda: ops.rmsnorm(ones(3, 8), ones(8).bfloat16()),
    f"rmsnorm_forward: x is Short, expected {listed(STORED)}": lambda: ops.rmsnorm(
        ones(3, 8).short(), ones(8)
    ),
    "rope_forward: x has shape [3, 8], expected [B,T,NH,HD]": lambda: ops.rope(ones(3, 8), ones(9, 4, 2)),
    "rope_forward: cis has shape [2, 4, 2], expected [T,HD/2,2] with dimension 0 = 3": lambda: ops.rope(
        ones(1, 3, 2, 8), ones(2, 4, 2)
    ),
    "swiglu_forward: gate_up has shape [3, 7], expected [N,2F] with dimension 1 = 6": lambda: ops.swiglu(
        ones(3, 7)
    ),
    "repeat_kv_forward: NH = 3, expected a multiple of NKV = 2": lambda: ops.repeat_kv(ones(1, 3, 2, 8), 3),
    "rmsnorm_forward: weight is on meta, expected cpu": lambda: ops.rmsnorm(
        ones(3, 8), ones(8, device="meta")
    ),
    "residual_rmsnorm_forward: residual has shape [8, 8], expected rows [2, 4]": lambda: ops.residual_rmsnorm(
        ones(2, 4, 8), ones(8, 8), ones(8)
    ),
    "cross_entropy: targets has shape [3, 2], expected rows [2, 3]": lambda: ops.cross_entropy(
        ones(2, 3, 8), zeros(3, 2).long()
    ),
    "linear_cross_entropy: targets has shape [3, 2], expected [2, 3]": lambda: ops.linear_cross_entropy(
        ones(2, 3, 8), ones(5, 8), zeros(3, 2).long()
    ),
    "linear_cross_entropy: weight has shape [5, 7], expected [V,C] with dimension 1 = 8": lambda: (
        ops.linear_cross_entropy(ones(3, 8), ones(5, 7), zeros(3).int())
    ),
    "linear_cross_entropy: weight is BFloat16, expected Float": lambda: ops.linear_cross_entropy(
        ones(3, 8), ones(5, 8).bfloat16(), zeros(3).int()
    ),
    f"linear_cross_entropy: hidden is Short, expected {listed(FLOATS)}": lambda: ops.linear_cross_entropy(
        ones(3, 8).short(), ones(5, 8).short(), zeros(3).int()
    ),
    "linear_cross_entropy: chunk_bytes is 0, expected at least 1": lambda: (
        torch.ops.llamac.linear_cross_entropy(ones(3, 8), ones(5, 8), zeros(3).int(), IGNORED, True, 0)
    ),
    "linear_cross_entropy: targets is torch.float32, expected an integer type but uint64": lambda: (
        ops.linear_cross_entropy(ones(3, 8), ones(5, 8), zeros(3))
    ),
    "cross_entropy: ignore_index is 4294967196, expected one of 32 bits": lambda: ops.cross_entropy(
        ones(3, 8), zeros(3).long(), ignore_index=2**32 - 100
    ),
    "linear_cross_entropy: targets is on meta, expected cpu": lambda: ops.linear_cross_entropy(
        ones(3, 8), ones(5, 8), zeros(3, dtype=torch.int32, device="meta")
    ),
    "cross_entropy: targets is torch.float32, expected an integer type but uint64": lambda: ops.cross_entropy(
        ones(3, 8), zeros(3)
    ),
    "cross_entropy: targets is torch.bool, expected an integer type but uint64": lambda: ops.cross_entropy(
        ones(3, 8), zeros(3).bool()
    ),
    "cross_entropy: targets holds 4294967196, expected values from 0 to 7": lambda: ops.cross_entropy(
        ones(3, 8), torch.tensor([0, 4294967196, 1], dtype=torch.uint32)
    ),
    "cross_entropy: targets holds 8, expected values from 0 to 7": lambda: ops.cross_entropy(
        ones(3, 8), torch.tensor([0, 8, 1])
    ),
    "cross_entropy: targets holds 4294967297, expected values from 0 to 7": lambda: ops.cross_entropy(
        ones(3, 8), torch.tensor([0, 1 + (1 << 32), 1])
    ),
    "linear_cross_entropy: reduction is 'none', expected one of mean, sum": lambda: ops.linear_cross_entropy(
        ones(3, 8), ones(5, 8), zeros(3).int(), reduction="none"
    ),
    "swiglu_forward: out must be contiguous": lambda: torch.ops.llamac.swiglu_forward.out(
        ones(3, 16), out=ones(8, 3).T
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
            "x is Short": (x.short(), weight.short()),
            "weight is bf16, expected f32": (x, weight.bfloat16()),
        }.items():
            with pytest.raises(ValueError, match=message):
                ops.rmsnorm(*arguments)
        targets = torch.zeros(3, dtype=torch.int64)
        with pytest.raises(ValueError, match="ignore_index is 1099511627776, expected one of 32 bits"):
            ops.linear_cross_entropy(x, torch.ones(5, 8), targets, ignore_index=1 << 40)


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


@pytest.mark.parametrize("name", ["cross_entropy-mean", "linear_cross_entropy-mean", "rmsnorm"])
def test_no_second_derivative(name):
    """Said, where another term's would hide that it is missing."""
    case = CASES[name]
    arguments = case.arguments(torch.float32)
    with pytest.raises(RuntimeError, match=r"has no second derivative|derivative for .* is not implemented"):
        total = case.call(case.ours, arguments)[0].sum()
        (gradient,) = torch.autograd.grad(total, arguments[0], create_graph=True)
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
