"""--ops llamac: the model's operations and AdamW on llamac's kernels, with the reference's signatures."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamac.base.errors import InputError
from llamac.model.config import Config, rope_frequencies
from llamac.training.rounding import upload


def llamac_operations(reference: Iterable[str]) -> dict[str, Callable]:
    """Those of the reference's Operations, by their names, that llamac.ops has, with precompute_cis for any
    model. Raises InputError where the extension is missing.
    """
    try:
        from llamac import ops
    except ImportError as error:
        raise InputError(f"--ops llamac: {error}") from None

    def precompute_cis(config: Config, T: int, device="cpu", dtype=torch.float32) -> Tensor:
        frequencies = rope_frequencies(
            config.rotary_size, config.rope_theta, scaling := config.rope_scaling, T
        )
        factor = scaling.attention_factor if scaling else 1.0
        table = torch.tensor(frequencies, dtype=torch.float64, device=device)
        return ops.cis_of_frequencies(T, table, factor, dtype)

    def attention(q, k, v, scale=None, *, first=None, window=None, causal=True) -> Tensor:
        end = None if causal or first is None else document_ends(first)
        return ops.attention(q, k, v, scale, first=first, end=end, window=window, causal=causal)

    def rope(x: Tensor, cis: Tensor) -> Tensor:
        turned = 2 * cis.shape[-2]
        if turned == x.shape[-1]:
            return ops.rope(x, cis)
        return torch.cat((ops.rope(x[..., :turned], cis), x[..., turned:]), -1)

    def added_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return residual + ops.rmsnorm(x, weight, eps)

    found = {name: getattr(ops, name) for name in reference if hasattr(ops, name)}
    return found | {
        "precompute_cis": precompute_cis,
        "rope": rope,
        "attention": attention,
        "added_rmsnorm": added_rmsnorm,
        "gelu_tanh": partial(ops.gelu, approximate="tanh"),
    }


def document_ends(first: Tensor) -> Tensor:
    """Behind the document of each token, by where it begins: int[B,T] each."""
    T, t = first.shape[1], torch.arange(1, first.shape[1] + 1, device=first.device)
    is_last = F.pad(first[:, 1:] != first[:, :-1], (0, 1), value=True)
    return t.where(is_last, T).flip(1).cummin(1).values.flip(1)


def adamw_step(optimizer: Any, grads: list[Tensor], lr: float, norm: Tensor | None, grad_clip: float) -> None:
    """The step of the reference's AdamW by llamac's operation. Its bits are the C program's everywhere."""
    o = optimizer
    exact = torch.promote_types(o.weights[0].dtype, torch.float32)
    rate = upload(np.array([lr]), o.device).to(exact)
    step = upload(np.array([o.steps], np.int32), o.device)
    squares = torch.zeros(1, dtype=torch.float64, device=o.device)
    if norm is not None:
        squares = norm.view(1).double().square()
    for k, (part, weight, g) in enumerate(zip(o.parts, o.weights, grads, strict=True)):
        master = None if o.master[k].dtype == weight.dtype else o.master[k].view(-1)
        tensors = weight.view(-1), master, o.m[k].view(-1), o.v[k].view(-1), g.reshape(-1)
        decay = o.weight_decay if part.is_matrix() else 0.0
        scalars = *o.constants.values(), decay, grad_clip, o.seed, 4 * part.index
        torch.ops.llamac.adamw(*tensors, squares, rate, step, None, None, *scalars)
