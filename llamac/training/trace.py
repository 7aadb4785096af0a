"""Records calls of operations with their gradients, from which a debug state is made; masks of attention."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llamac.model.block import ACTIVATIONS, Linear
from llamac.model.config import Config
from llamac.training.rounding import at_least_fp32
from llamac.training.weights import parts


def rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) of every row: [..., C] -> [...]."""
    return torch.rsqrt(at_least_fp32(x).square().mean(-1) + eps)


def rstd_mean(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """1 / sqrt(variance + eps) and the mean of every row: [..., C] -> [...] each."""
    variance, mean = torch.var_mean(at_least_fp32(x), -1, correction=0)
    return torch.rsqrt(variance + eps), mean


def repeat_kv(x: Tensor, NH: int) -> Tensor:
    """Each key/value head NH/NKV times: x [B,T,NKV,HD] -> [B,T,NH,HD]."""
    return x.repeat_interleave(NH // x.shape[2], dim=2)


def seen(T: int, first: Tensor | None, window: int | None, causal: bool, device) -> Tensor:
    """Whether position t sees s, [B or 1,1,T,T]: of those up to itself the ones from first[b,t] on, where its
    document begins, and the last `window`; None: all. Not causal, also those that see it. RoPE, which turns
    q·k by the distance alone, needs no positions within a document.
    """
    s, t = torch.arange(T, device=device), torch.arange(T, device=device)[:, None]
    near = ((s <= t) & (s > t - (window or T)))[None, None]
    near = near if first is None else near & (s >= first[:, None, :, None])
    return near if causal else near | near.mT


def explicit_attention(q, k, v, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The reference's attention() by its definition, with the scores in memory: its output [B,T,NH·HD], and
    the log-sum-exp of every row of scores [B,NH,T], which a fused kernel keeps for its backward.
    """
    NH, HD = q.shape[2:]
    q, k, v = (at_least_fp32(repeat_kv(x, NH)) for x in (q, k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / (math.sqrt(HD) if scale is None else 1 / scale)
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2), scores.logsumexp(-1)


class Call(NamedTuple):
    """The tensors that go into an operation, except weights, and come out of it; with gradients."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def sources(self) -> tuple[Tensor, ...]:
        """The inputs of the last output: of residual_rmsnorm the sum, which is its first output."""
        return self.outputs[:-1] or self.inputs


def traced(operations: SimpleNamespace, config: Config) -> tuple[SimpleNamespace, list[Call]]:
    """The operations with norms, attention and activation recorded, and their calls in order."""
    calls: list[Call] = []
    norm = config.normalization_function
    norms = norm, f"{'added' if config.output_norm else 'residual'}_{norm}"
    names = *norms, "attention", ACTIVATIONS[config.hidden_act]

    def recorded(name: str) -> Callable:
        def call(*args: Any, **others: Any) -> Any:
            result = getattr(operations, name)(*args, **others)
            inputs = tuple(x for x in args if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))
            outputs = result if isinstance(result, tuple) else (result,)
            for x in (*inputs, *outputs):
                x.retain_grad()
            calls.append(Call(inputs, outputs))
            return result

        return call

    return SimpleNamespace(**vars(operations) | {name: recorded(name) for name in names}), calls


def model_tensors(
    model: Any,
    calls: list[Call],
    logits: Tensor,
    losses: Tensor,
    loss: Tensor,
    norm: Callable,
    mask: Callable,
) -> dict[str, Tensor]:
    """The debug state of a forward and its backward, in the order of computation: activations (act.), then
    gradients of activations (dact.) and of parameters (grad.), last to first. norm(x, eps) is what
    norms keep for their backward, mask(window) which positions are seen.
    """
    config = model.config
    last = calls[len(config.block) * config.num_hidden_layers :]  # the final norm, and an encoder's head
    # With output_norm, what a block begins with is added to the norm of its second call's input.
    inputs = [calls[i * len(config.block) + 1].inputs[1:] for i in range(config.num_hidden_layers)]
    embedding = inputs[0][0] if config.output_norm else calls[0].inputs[0]
    final = {"final_norm": last[0].outputs[-1]}
    for activation, head_norm in zip(last[1::2], last[2::2]):
        final |= {"transform": activation.inputs[0], "transform_gelu": activation.outputs[0]}
        final["transform_norm"] = head_norm.outputs[0]
    wide = torch.promote_types(logits.dtype, torch.float32)
    state = {"act.embedding": embedding}
    grads = {f"grad.{part.name}": part.of(part.parameter.grad).to(wide) for part in parts(model)}
    grads["dact.embedding"] = embedding.grad
    for i, window in enumerate(config.windows()):
        kept: dict[str, Callable] = {
            "norm": partial(norm, eps=config.rms_norm_eps),
            "attention": lambda q, k, v, window=window: explicit_attention(q, k, v, mask(window))[1],
        }
        own = calls[i * len(config.block) :]
        own = [Call((), inputs[i]), *own] if config.output_norm else own
        act, dact = _block_tensors(config.block, own, kept)
        state |= {f"act.{i}.{name}": a for name, a in act.items()}
        grads |= {f"dact.{i}.{name}": d for name, d in dact.items()}
    state |= {f"act.{name}": x for name, x in final.items()}
    state |= {"logits": logits, "losses": losses, "loss": loss.view(1)}
    grads |= {f"dact.{name}": x.grad for name, x in final.items()} | {"dact.logits": logits.grad}
    return state | dict(reversed(grads.items()))


def _block_tensors(
    block: tuple[Linear, ...], calls: list[Call], kept: dict[str, Callable]
) -> tuple[dict, dict]:
    """({activation: tensor}, {activation: its gradient}) of a block, in the order of computation. calls: from
    the block's first on. kept: by producer, what norms and attention keep for their backward, of its inputs.
    """
    act, grad = {}, {}
    for row, call, reader in zip(block, calls, calls[1:]):
        x = call.outputs[-1]
        act[row.x.name], grad[row.x.name] = x.flatten(2), x.grad.flatten(2)
        if row.x.statistics:
            own = kept[row.x.producer](*call.sources())
            act |= zip(row.x.statistics, own if isinstance(own, tuple) else (own,))
        sources, statistics = reader.sources(), {}
        if row.norm and len(row.out) > 1:  # with output_norm: the product and the sum
            sources = reader.inputs[0], reader.outputs[0]
            statistics = {f"{row.out[0]}_rstd": kept["norm"](sources[0])}
        for k, name in enumerate(row.out):  # gate_up may be one tensor or two
            parts = sources[k :: len(row.out)]
            act[name], grad[name] = torch.cat(parts, -1), torch.cat([part.grad for part in parts], -1)
        act |= statistics
    return act, grad
