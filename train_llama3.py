"""Llama, Mistral, Qwen, Phi-3, OLMo 2, GPT-2 and BERT in plain PyTorch: model, training, reference for C.

    python train_llama3.py              write the reference tensors of the test models to data/reference/
    python train_llama3.py --matmul-dtype fp8   the same in fp8 (llamac/training/fp8_reference.py)
    python train_llama3.py --train ...  train in the C program's data order (--help lists the flags)
    torchrun --nproc-per-node N -- train_llama3.py --train ...  the same on N devices, with FSDP2

It reads top to bottom: operations, model (Dubey et al., "The Llama 3 Herd of Models", 2024), AdamW,
training, reference tensors; the rest of a run is in llamac/training. In the package it is llamac.reference.

Shapes: B batch, T time, C channels, NH query heads, NKV key/value heads, HD head size, F feed-forward width,
V vocabulary. Modules have Hugging Face's names for Llama, weight matrices are [out, in].
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llamac.base.errors import run
from llamac.model.block import ACTIVATIONS
from llamac.model.config import Config, load_config, rope_frequencies
from llamac.training import references
from llamac.training import run as training
from llamac.training.encoder import EncoderHead, mean_loss
from llamac.training.loss_scale import LossScale
from llamac.training.options import Options
from llamac.training.ranks import DTYPES, across_ranks, gradients, world
from llamac.training.rounding import at_least_fp32, random_bits, stochastic_round, upload
from llamac.training.schedule import learning_rate
from llamac.training.trace import model_tensors, rstd, rstd_mean, seen, traced
from llamac.training.weights import Part, parts

Batches = list[tuple[Tensor, ...]]  # of each micro-batch tokens, targets and perhaps `first`, all [B,T]
Cis = tuple[Tensor, Tensor]  # cos and sin of RoPE's angles
IGNORED = -100  # a target that does not count


# The operations =============================================================================================


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · weight / sqrt(mean(x²) + eps) over the C channels (Zhang & Sennrich 2019): x [..., C], weight [C].
    The arithmetic is fp32 also where x is bf16, and is rounded once.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def residual_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its rmsnorm."""
    x = residual + x
    return x, rmsnorm(x, weight, eps)


def added_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + rmsnorm of x."""
    return residual + rmsnorm(x, weight, eps)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the C channels (Ba et al. 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def residual_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float):
    """residual + x, and its layernorm."""
    x = residual + x
    return x, layernorm(x, weight, bias, eps)


def precompute_cis(config: Config, T: int, device="cpu", dtype=torch.float32) -> Cis:
    """cos and sin of RoPE's angles (Su et al. 2021), each [T,1,HD/2]: one per position and pair of channels.

    Pair i turns by theta^(-2i/HD) radians per position, or less in a model that was stretched to a longer
    context (rope_frequencies()). Angles are computed in double: in fp32 they are off by 0.004 radians at
    position 131,071. YaRN also multiplies cos and sin by a factor.
    """
    scaling = config.rope_scaling
    frequencies = rope_frequencies(config.rotary_size, config.rope_theta, scaling, T)
    frequency = torch.tensor(frequencies, dtype=torch.float64, device=device)
    angle = torch.outer(torch.arange(T, device=device).double(), frequency)[:, None, :]
    factor = scaling.attention_factor if scaling else 1.0
    return (factor * angle.cos()).to(dtype), (factor * angle.sin()).to(dtype)


def rope(x: Tensor, cis: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Turn the pairs (x[i], x[i + HD/2]) of every head by their angle: x [B,T,NH,HD] -> the same shape.
    interleaved: the pairs (x[2i], x[2i + 1]), the order of Meta's own files.
    """
    cos, sin = (part[: x.shape[1]] for part in cis)
    if (turned := 2 * cos.shape[-1]) < x.shape[-1]:  # the others stay
        return torch.cat((rope(x[..., :turned], cis, interleaved), x[..., turned:]), -1)
    wide = x.to(cos.dtype)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return (torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)).to(x.dtype)


def qk_norm_rope(x: Tensor, weight: Tensor, eps: float, cis: Cis | None) -> Tensor:
    """rmsnorm() of every head, then, with cis, rope(): x [B,T,NH,HD], weight [HD] -> the shape of x."""
    return rope(rmsnorm(x, weight, eps), cis) if cis else rmsnorm(x, weight, eps)


def attention(q, k, v, scale: float | None = None, *, first=None, window: int | None = None, causal=True):
    """softmax(scale·q·kᵀ)·v, scale 1/√HD by default, each position over those that it has seen(): itself and
    those before it, or all, unless first int[B,T] or window say less. NH/NKV query heads share a key/value
    head (grouped queries: Ainslie et al. 2023). q [B,T,NH,HD], k and v [B,T,NKV,HD] -> [B,T,NH,HD].
    """
    T, device = q.shape[1], q.device
    plain = first is None and (window or T) >= T
    how = {"is_causal": causal} if plain else {"attn_mask": seen(T, first, window, causal, device)}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **how, scale=scale, enable_gqa=True).transpose(1, 2)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up (Shazeer 2020): both [..., F], or side by side in one tensor [..., 2F] -> [..., F]."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x), Φ the normal distribution (Hendrycks & Gimpel 2016)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu() with Φ(x) ≈ (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2."""
    return F.gelu(x, approximate="tanh")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of every token, 0 where it is IGNORED: [..., V], [...] -> [...], fp32."""
    options = {"reduction": "none", "ignore_index": IGNORED}
    losses = F.cross_entropy(at_least_fp32(logits).flatten(0, -2), targets.flatten(), **options)
    return losses.view_as(targets)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross_entropy of hidden [B,T,C] · weightᵀ [C,V]; no target is IGNORED."""
    return cross_entropy(F.linear(hidden, weight), targets).mean()


# What the model is made of, besides matrix products; --ops llamac has others of the same shapes.
Operations = SimpleNamespace
NORMS = rmsnorm, residual_rmsnorm, added_rmsnorm, layernorm, residual_layernorm
OTHERS = precompute_cis, rope, qk_norm_rope, attention, swiglu, gelu, gelu_tanh, linear_cross_entropy
TORCH = Operations(**{operation.__name__: operation for operation in (*NORMS, *OTHERS)})


# The model ==================================================================================================


class Norm(nn.Module):
    """rmsnorm() or layernorm(); with a residual: (residual + x, its norm), or with output_norm their sum."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        kind, self.eps = config.normalization_function, config.rms_norm_eps
        form = "added" if config.output_norm else "residual"
        self.norm, self.residual_norm = getattr(ops, kind), getattr(ops, f"{form}_{kind}")
        for name in config.norm_weights:
            self.register_parameter(name, nn.Parameter(torch.empty(config.hidden_size)))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x, *self.parameters(), self.eps)
        return self.residual_norm(x, residual, *self.parameters(), self.eps)


class Linears(nn.Module):
    """The linears of a half of the block, by the table in llamac/model/block.py."""

    def __init__(self, config: Config, half: str):
        super().__init__()
        own = [row for row in config.block if row.half == half]
        self.modules_of = {row.name: list(row.weights) for row in own}
        for row in own:
            for name, (rows, columns) in row.shapes(config).items():
                self.add_module(name, nn.Linear(columns, rows, getattr(config, row.bias)))

    def products(self, name: str, x: Tensor) -> list[Tensor]:
        """Of a linear, with x: one per weight, or a single one after fuse_products()."""
        return [getattr(self, module)(x) for module in self.modules_of[name]]


class SelfAttention(Linears):
    """Projections to queries, keys and values, perhaps norms per head, RoPE, attention, projection back."""

    def __init__(self, config: Config, window: int | None, ops: Operations):
        super().__init__(config, "self_attn")
        self.config, self.ops = config, ops
        self.attend = partial(ops.attention, window=window, causal=not config.is_encoder)
        self.heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
        for name, size in config.qk_norm_sizes.items() if config.qk_norm else ():
            self.add_module(name, nn.RMSNorm(size, config.rms_norm_eps))

    def forward(self, x: Tensor, cis: Cis, first: Tensor | None = None) -> Tensor:
        qkv = self.products("qkv", x)
        qkv = torch.cat(qkv, -1) if len(qkv) > 1 else qkv[0]
        q, k, v = qkv.unflatten(-1, (-1, self.config.head_dim)).split(self.heads, -2)
        q, k = self.turned(q, "q_norm", cis), self.turned(k, "k_norm", cis)
        return self.o_proj(self.attend(q, k, v, first=first).flatten(2))

    def turned(self, heads: Tensor, name: str, cis: Cis) -> Tensor:
        if self.config.has_positions:
            return heads
        if (norm := getattr(self, name, None)) and len(norm.weight) == heads.shape[-1]:
            return self.ops.qk_norm_rope(heads, norm.weight, norm.eps, cis)
        if norm:  # of all heads together
            joined = heads.flatten(2)[:, :, None]
            heads = self.ops.qk_norm_rope(joined, norm.weight, norm.eps, None).view(heads.shape)
        return self.ops.rope(heads, cis)


class MLP(Linears):
    """down(swiglu(gate(x), up(x))), or down(gelu(up(x)))."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__(config, "mlp")
        self.activation = getattr(ops, ACTIVATIONS[config.hidden_act])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(*self.products("gate_up", x)))


class Block(nn.Module):
    """Attention, then feed-forward, added to the stream; norms are of their inputs, outputs or the sums."""

    def __init__(self, config: Config, window: int | None, ops: Operations):
        super().__init__()
        self.input_layernorm = None if config.is_encoder or config.output_norm else Norm(config, ops)
        self.self_attn = SelfAttention(config, window, ops)
        self.post_attention_layernorm = Norm(config, ops)
        self.mlp = MLP(config, ops)
        self.output_layernorm = Norm(config, ops) if config.is_encoder else None
        self.post_feedforward_layernorm = Norm(config, ops) if config.output_norm else None

    def forward(self, x: Tensor, cis: Cis, first: Tensor | None = None) -> Tensor:
        if self.post_feedforward_layernorm:
            x = self.post_attention_layernorm(self.self_attn(x, cis, first), residual=x)
            return self.post_feedforward_layernorm(self.mlp(x), residual=x)
        y = self.input_layernorm(x) if self.input_layernorm else x
        x, y = self.post_attention_layernorm(self.self_attn(y, cis, first), residual=x)
        return self.output_layernorm(self.mlp(y), residual=y)[1] if self.output_layernorm else x + self.mlp(y)


class Decoder(nn.Module):
    """Embedding, perhaps of positions and types, L blocks, norm, in encoders first: [B,T] -> [B,T,C]."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__()

        def table(rows: int) -> nn.Embedding:  # initialized with all others
            return nn.Embedding.from_pretrained(torch.empty(rows, config.hidden_size), freeze=False)

        self.embed_tokens = table(config.vocab_size)
        self.embed_positions = table(config.max_position_embeddings) if config.has_positions else None
        self.layers = nn.ModuleList(Block(config, window, ops) for window in config.windows())
        self.embed_types = table(config.type_vocab_size) if config.type_vocab_size else None
        self.add_module("embed_norm" if config.is_encoder else "norm", Norm(config, ops))
        self.recompute_every = 0  # k > 0: the backward computes every k-th block again instead of keeping it

    def forward(self, tokens: Tensor, cis: Cis, first: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embed_positions:
            t = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.embed_positions(t if first is None else t - first)  # within the document
        x = x + self.embed_types.weight[0] if self.embed_types else x
        x = self.embed_norm(x) if hasattr(self, "embed_norm") else x
        for i, block in enumerate(self.layers):
            again = self.recompute_every and i % self.recompute_every == 0
            x = checkpoint(block, x, cis, first, use_reentrant=False) if again else block(x, cis, first)
        return self.norm(x) if hasattr(self, "norm") else x


class Head(nn.Module):
    """Logits [B,T,V] of hidden [B,T,C], or with targets [B,T] the mean loss; a tied head has no weight."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        shape = config.vocab_size, config.hidden_size
        self.weight = None if config.tie_word_embeddings else nn.Parameter(torch.empty(shape))
        self.ops = ops

    def forward(self, hidden: Tensor, targets: Tensor | None, tied: Tensor | None) -> Tensor:
        weight = self.weight if tied is None else tied
        if targets is None:
            return F.linear(hidden, weight)
        return self.ops.linear_cross_entropy(hidden, weight, targets)


class Llama(nn.Module):
    """The model. cis = ops.precompute_cis(config, T or more) is computed once and passed to every call."""

    def __init__(self, config: Config, ops: Operations = TORCH):
        super().__init__()
        self.config, self.ops = config, ops
        self.fp8: Any = None  # --matmul-dtype fp8: the blocks' products, set by training/fp8.py
        self.model = Decoder(config, ops)
        self.lm_head: nn.Module = Head(config, ops)
        if config.is_encoder:
            self.lm_head = EncoderHead(config, ops, Norm(config, ops), cross_entropy)

    def forward(self, tokens: Tensor, cis: Cis, targets: Tensor | None = None, first: Tensor | None = None):
        """Logits [B,T,V] of tokens [B,T]; with targets [B,T] the mean loss, in nats per token. first [B,T]:
        where each token's document begins, before which it sees nothing.
        """
        tied = self.model.embed_tokens.weight if self.config.tie_word_embeddings else None
        return self.lm_head(self.model(tokens, cis, first), targets, tied)


def empty_model(config: Config, dtype: torch.dtype, device: str = "cpu", ops: Operations = TORCH) -> Llama:
    """A model whose weights have no values yet: PyTorch's own initialization takes minutes at 8B."""
    with torch.device("meta"):
        return Llama(config, ops).to(dtype).to_empty(device=device)


# AdamW ======================================================================================================


def adamw_update(p, g, m, v, lr, bias1, bias2, beta1: float, beta2: float, eps: float, weight_decay: float):
    """Update t = 1, 2, … of one parameter p with gradient g, in place (Loshchilov & Hutter 2019):

        p -= lr · (m̂ / (√v̂ + eps) + weight_decay · p)

    where m̂ = m / bias1 and v̂ = v / bias2 are the moments corrected for their start at zero, bias = 1 - betaᵗ.
    What changes from update to update is a tensor: compiled code takes a number for a constant.
    """
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v / bias2).sqrt_().add_(eps)
    change = (m / denominator).div_(bias1).add_(p, alpha=weight_decay)
    p.sub_(change.mul_(lr))


def update_stored(weight, stored, g, clip, scalars, bits, constants: dict[str, float]) -> None:
    """adamw_update on the tensors [n] in which p, m and v are stored, each in its type, with `clip` times g;
    `weight` is p's narrow copy, if there is one. Compiled, all of it is one pass over memory.
    """
    p, m, v = exact = [at_least_fp32(x) for x in stored]  # no copy, so in place, where fp32 is stored
    g = at_least_fp32(g)
    lr, bias1, bias2 = scalars
    adamw_update(p, g if clip is None else g * clip, m, v, lr, bias1, bias2, **constants)
    for i, (low, high) in enumerate(zip(stored, exact, strict=True)):
        if low.dtype != high.dtype:
            low.copy_(stochastic_round(high, bits[i]))
    if weight is not None:
        weight.copy_(p)


@dataclass
class AdamW:
    """AdamW on parts of a model's weights; only matrices decay. Narrow weights are updated through fp32
    master copies, or, without those, rounded stochastically to bf16: rounding to nearest would lose every
    update below half a bf16 step. Moments are fp32, or bf16 rounded stochastically
    (llamac/training/rounding.py).
    """

    parts: list[Part]
    beta1: float
    beta2: float
    weight_decay: float
    eps: float = 1e-8
    master_weights: bool = True
    state_dtype: torch.dtype = torch.float32
    seed: int = 0
    compiled: bool = False
    fused: Callable | None = None  # computes a step in the place of update_stored(): --ops llamac

    def __post_init__(self):
        self.steps, self.weights = 0, [part.weight() for part in self.parts]
        self.master = [at_least_fp32(w) for w in self.weights] if self.master_weights else self.weights
        self.m = [torch.zeros_like(w, dtype=self.state_dtype) for w in self.weights]
        self.v = [torch.zeros_like(w, dtype=self.state_dtype) for w in self.weights]
        self.update = torch.compile(update_stored, dynamic=False) if self.compiled else update_stored
        self.device = self.weights[0].device
        self.hashed = self.device.type != "cpu"
        self.constants = {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float, norm: Tensor | None = None, grad_clip=0.0) -> None:
        """One update with the parts' gradients, whose norm is scaled down to a grad_clip above 0."""
        self.steps += 1
        if self.fused:
            return self.fused(self, grads, lr, norm, grad_clip)
        bias1, bias2 = 1 - self.beta1**self.steps, 1 - self.beta2**self.steps
        scalars = upload(np.array([lr, bias1, bias2]), self.device)
        clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip > 0 else None  # type: ignore
        bits = random_bits(self.parts, self.seed, self.steps, self.hashed)
        for k, (part, weight, g) in enumerate(zip(self.parts, self.weights, grads, strict=True)):
            stored = [x.view(-1) for x in (self.master[k], self.m[k], self.v[k])]
            copy = None if self.master[k].dtype == weight.dtype else weight.view(-1)
            constants = self.constants | {"weight_decay": self.weight_decay if part.is_matrix() else 0.0}
            self.update(copy, stored, g.reshape(-1), clip, scalars, bits(k, stored), constants)


# Training ===================================================================================================


def train_step(
    model, batches: Batches, cis: Cis, optimizer: AdamW, lr: float, grad_clip: float, grad_dtype, scaling=None
):
    """One step on the micro-batches of all ranks: [loss, gradient norm before clipping], on the device.
    scaling: a LossScale; a step whose gradients overflow then changes nothing else.
    """
    scale = scaling.scale if scaling else 1
    loss, grads = gradients(model, batches, cis, optimizer.parts, grad_dtype, scale)
    # In double: torch's fp32 norm of a million numbers was seen to be off by 4e-5 on the CPU.
    norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).norm() / scale
    loss, norm = across_ranks(loss, norm)
    norm = norm.to(loss.dtype)
    if not scaling or scaling.unscale(grads, loss + norm):
        optimizer.step(grads, lr, norm, grad_clip)
    if model.fp8:
        model.fp8.update()
    return torch.stack([loss, norm])


def train(o: Options) -> None:
    """The run that the options describe: a line per step on the console and in --log, weights to --save."""
    config, device, batches = training.prepare(o)
    model = empty_model(config, training.stored_dtype(o), "meta", training.operations(o, TORCH))
    training.set_up(model, o, device)
    forward = torch.compile(model, dynamic=False) if o.compile and world() == 1 else model
    optimizer = AdamW(parts(model), **training.adamw_options(o, device))
    cis = model.ops.precompute_cis(config, o.seq_len, device)
    log = training.Log(o, config, device, batches.accumulation * o.batch_size * o.seq_len * world())
    scaling, grad_dtype = LossScale.of(o), DTYPES[o.grad_dtype]
    schedule = {"min_lr_frac": o.min_lr_frac, "warmup_steps": o.warmup_steps, "schedule": o.schedule}
    for step in range(1, o.steps + 1):
        lr = learning_rate(step, lr=o.lr, steps=o.steps, **schedule)
        with log.step(step, lr) as u:
            micro = batches.of_step(step)
            u.loss_scale = scaling.scale if scaling else None
            u.result = train_step(forward, micro, cis, optimizer, lr, o.grad_clip, grad_dtype, scaling)
    log.close()
    if o.save:
        training.save(model, o)


# Reference tensors: every activation, every gradient and ten updates of the test models =====================

ROOT = Path(__file__).resolve().parent
OPTIMIZER: dict = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LR, GRAD_CLIP, UPDATES = 0.001, 1.0, 10


def debug_state(directory: Path, dtype: torch.dtype, batch: Batches, o: Options, scaled: bool = False):
    """The tensors of debug_state.safetensors by name, of the model in a directory and the one micro-batch, in
    the order of computation: the forward's, gradients of activations (dact.) and of parameters (grad.), last
    to first, ten updates. o: the flags of the matrix products. scaled: gradients are the scaled loss's.
    """
    tokens, targets, first, *_ = *batch[0], None
    config, precision = load_config(directory), torch.promote_types(dtype, torch.float32)
    cis = precompute_cis(config, tokens.shape[1], dtype=precision)
    ops, calls = traced(TORCH, config)
    model = references.load(empty_model(config, dtype, ops=ops), directory, o)
    logits = model(tokens, cis, first=first)
    logits.retain_grad()
    losses = cross_entropy(logits, targets)
    loss, _ = mean_loss(losses, targets)
    scaling = LossScale() if scaled else None
    (loss * (scaling.scale if scaling else 1)).backward()

    norm = rstd_mean if config.normalization_function == "layernorm" else rstd
    mask = partial(seen, tokens.shape[1], first, causal=not config.is_encoder, device="cpu")
    state = {name: x.int() for name, x in zip(("tokens", "targets", "first"), batch[0])}
    state |= model_tensors(model, calls, logits, losses, loss, norm, mask)

    model = references.load(empty_model(config, dtype), directory, o)
    optimizer = AdamW(parts(model), **OPTIMIZER, state_dtype=precision)
    step = (model, batch, cis, optimizer, LR, GRAD_CLIP, precision, scaling)
    history = torch.stack([train_step(*step) for _ in range(UPDATES)])
    state["train.losses"], state["train.grad_norms"] = history.T
    return {name: x.detach() for name, x in state.items()}


def write_references(o: Options, root: Path = ROOT / "data" / "reference") -> None:
    """The references of every test model in each dtype, at root/MODEL/DTYPE."""
    settings = {"lr": LR, **OPTIMIZER, "grad_clip": GRAD_CLIP}
    references.write_references(ROOT / "tests" / "models", root, empty_model, debug_state, settings, o)


def main() -> None:
    training.command_line(sys.argv[1:], train, write_references, __doc__)


if __name__ == "__main__":
    run(main)
