"""Derivatives of torch.ops.llamac.*: one operation's backward is another operation.

Outputs beside the result (rstd, lse, dlogits) are there for the backward and have no derivative of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llamac import extension

extension.load()
_ops = torch.ops.llamac

Gradients = tuple[Tensor | None, ...]


def _formula(name: str, results: int, save: Callable[[tuple, tuple], tuple], backward: Callable) -> None:
    """results: outputs that have a derivative, the first ones. save: from inputs and outputs, what backward
    gets as ctx.saved_tensors; ctx.inputs has the inputs that are no tensors, None in the others' places.
    """

    def setup(ctx: Any, inputs: tuple, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[results:])
        ctx.save_for_backward(*save(inputs, outputs))
        ctx.inputs = tuple(None if isinstance(x, Tensor) else x for x in inputs)

    def called(ctx: Any, *gradients: Tensor | None) -> Gradients:
        if all(g is None for g in gradients):
            return (None,) * len(ctx.inputs)
        return backward(ctx, *gradients)

    torch.library.register_autograd(f"llamac::{name}", called, setup_context=setup)


def _embedding(ctx: Any, dout: Tensor) -> Gradients:
    (tokens, weight) = ctx.saved_tensors
    return None, _ops.embedding_backward(dout, tokens, weight.shape[0])


def _rmsnorm(ctx: Any, dout: Tensor, _: None) -> Gradients:
    x, weight, rstd = ctx.saved_tensors
    return *_ops.rmsnorm_backward(dout, x, weight, rstd, None), None


def _residual_rmsnorm(ctx: Any, dsum: Tensor | None, dout: Tensor | None, _: None) -> Gradients:
    total, weight, rstd = ctx.saved_tensors
    if dout is None:
        return dsum, dsum, None, None
    dx, dweight = _ops.rmsnorm_backward(dout, total, weight, rstd, dsum)
    return dx, dx, dweight, None


def _rope(ctx: Any, dout: Tensor) -> Gradients:
    (cis,) = ctx.saved_tensors
    return _ops.rope_backward(dout, cis, ctx.inputs[2]), None, None


def _repeat_kv(ctx: Any, dout: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return _ops.repeat_kv_backward(dout, x.shape[2]), None


def _attention(ctx: Any, dout: Tensor, _: None) -> Gradients:
    return *_ops.attention_backward(dout, *ctx.saved_tensors, ctx.inputs[3]), None


def _swiglu(ctx: Any, dout: Tensor) -> Gradients:
    return (_ops.swiglu_backward(dout, *ctx.saved_tensors),)


def _matmul(ctx: Any, dout: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    dx = _ops.matmul_backward_input(dout, weight) if ctx.needs_input_grad[0] else None
    dweight = _ops.matmul_backward_weight(dout, x) if ctx.needs_input_grad[1] else None
    return dx, dweight, dout if ctx.needs_input_grad[2] else None


def _cross_entropy(ctx: Any, dlosses: Tensor, _: None) -> Gradients:
    (dlogits,) = ctx.saved_tensors
    factor = (dlosses / ctx.inputs[2])[:, None]
    # out: in one pass, in the factor's precision, without a copy of the logits in it.
    return torch.mul(dlogits, factor, out=torch.empty_like(dlogits)), None, None, None


def refuse_derivative(name: str) -> None:
    """Says so in the backward, where torch would go on without."""

    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(f"torch.ops.llamac.{name} has no derivative")

    torch.library.register_autograd(f"llamac::{name}", backward)


_FORMULAS = {
    "embedding_forward": (1, lambda i, o: (i[0], i[1]), _embedding),
    "rmsnorm_forward": (1, lambda i, o: (i[0], i[1], o[1]), _rmsnorm),
    "residual_rmsnorm_forward": (2, lambda i, o: (o[0], i[2], o[2]), _residual_rmsnorm),
    "rope_forward": (1, lambda i, o: (i[1],), _rope),
    "repeat_kv_forward": (1, lambda i, o: (i[0],), _repeat_kv),
    "attention_forward": (1, lambda i, o: (o[0], o[1], *i[:3]), _attention),
    "swiglu_forward": (1, lambda i, o: (i[0],), _swiglu),
    "matmul_forward": (1, lambda i, o: (i[0], i[1]), _matmul),
    "cross_entropy": (1, lambda i, o: (o[1],), _cross_entropy),
}


# The described operations' schemas by name, ".out" behind those that write into given tensors.
SCHEMAS = {
    schema.name.removeprefix("llamac::") + f".{schema.overload_name}".rstrip("."): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("llamac::")
}


def _register() -> None:
    for name, schema in SCHEMAS.items():
        if name in _FORMULAS:
            _formula(name, *_FORMULAS[name])
        elif not schema.is_mutable and any(isinstance(a.type, torch.TensorType) for a in schema.arguments):
            refuse_derivative(name)


_register()
