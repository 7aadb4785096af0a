"""Llama 3 in plain PyTorch: the model, its training, and the reference that the C program is checked against.

    python train_llama3.py              write the reference tensors of the test models to data/reference/
    python train_llama3.py --train ...  train, with the C program's flags and data order (add --help)

The file reads top to bottom: the model (Dubey et al., "The Llama 3 Herd of Models", 2024), its weights,
AdamW, the reference tensors, training. Shapes: B batch, T time, C channels, NH query heads, NKV key/value
heads, HD head size, F feed-forward width, V vocabulary. Parameters have Hugging Face's names, weight matrices
are [out, in].
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import llamac.options
import llamac.plot
import llamac.random
import llamac.tokenizer
from llamac import hf
from llamac.config import Config, load_config
from llamac.data import Loader
from llamac.errors import InputError, run
from llamac.log import Log
from llamac.options import Options, recompute_parts
from llamac.schedule import learning_rate

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# Libraries that compute attention, the fastest first: each takes what those before it do not.
ATTENTION = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


# The model ==================================================================================================


def at_least_fp32(x: Tensor) -> Tensor:
    """x in the precision of arithmetic: bf16 becomes fp32; fp32 and double stay, without a copy."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """y = weight · x · rstd, rstd = 1 / sqrt(mean(x²) + eps) over the C channels (Zhang & Sennrich 2019).

    The arithmetic is fp32 also where x is bf16, and is rounded once.
    """

    def __init__(self, C: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.eps = eps

    def rstd(self, x: Tensor) -> Tensor:
        """[..., C] -> [...]"""
        return torch.rsqrt(at_least_fp32(x).square().mean(-1) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def precompute_cis(config: Config, T: int, device="cpu", dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE's angles (Su et al. 2021), each [T,1,HD/2]: one a position and pair of channels.

    Pair i turns by theta^(-2i/HD) radians a position. To reach beyond the context that it was first trained
    on, Llama 3.1 slows down, by `factor`, the pairs that make less than low_freq_factor turns within that
    context; those with more than high_freq_factor turns stay, and between the two the slowdown is blended.
    Angles are computed in double: in fp32 they would be off by 0.004 radians at position 131,071.
    """
    frequency = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    if scaling := config.rope_scaling:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scaling.factor)
    angle = torch.outer(torch.arange(T).double(), frequency)[:, None, :]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rope(x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[i], x[i + HD/2]) of every head by their angle: x [B,T,NH,HD] -> the same shape."""
    cos, sin = cis
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def products(x: Tensor, layers: list[nn.Linear], joined: Tensor | None) -> tuple[Tensor, ...]:
    """The layers applied to x: one by one, or, after join_weights(), as one product."""
    if joined is None:
        return tuple(layer(x) for layer in layers)
    return F.linear(x, joined).split([layer.out_features for layer in layers], -1)


class CausalAttention(nn.Module):
    """softmax(q·kᵀ/√HD)·v, each position over itself and those before it. NH/NKV query heads share a
    key/value head (grouped queries: Ainslie et al. 2023). q [B,T,NH,HD], k and v [B,T,NKV,HD] -> [B,T,NH·HD].
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """CausalAttention by its definition, with the scores in memory: its output [B,T,NH·HD], and the
    log-sum-exp of every row of scores [B,NH,T], which a fused kernel keeps for its backward.
    """
    T, NH, HD = q.shape[1:]
    q, k, v = (at_least_fp32(x.repeat_interleave(NH // x.shape[2], dim=2)) for x in (q, k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(HD)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2), scores.logsumexp(-1)


class SelfAttention(nn.Module):
    """Projections to queries, keys and values, RoPE, attention, projection back to C channels."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)
        self.attention = CausalAttention()
        self.joined: Tensor | None = None

    def parallel(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def forward(self, x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        heads = products(x, self.parallel(), self.joined)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in heads)
        return self.o_proj(self.attention(rope(q, cis), rope(k, cis), v))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.joined: Tensor | None = None

    def parallel(self) -> list[nn.Linear]:
        return [self.gate_proj, self.up_proj]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = products(x, self.parallel(), self.joined)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the feed-forward network, each on the normalised residual stream and added to it."""

    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cis)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, L blocks, final norm: tokens [B,T] -> [B,T,C]."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute_every = 0  # k > 0: the backward computes every k-th block again instead of keeping it

    def forward(self, tokens: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        x = self.embed_tokens(tokens)
        for i, block in enumerate(self.layers):
            if self.recompute_every and i % self.recompute_every == 0:
                x = checkpoint(block, x, cis, use_reentrant=False)
            else:
                x = block(x, cis)
        return self.norm(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of every token: logits [B,T,V], targets [B,T] -> [B,T], fp32."""
    losses = F.cross_entropy(at_least_fp32(logits).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


class Llama(nn.Module):
    """Llama 3. cis = precompute_cis(config, T) is computed once and passed to every call."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, cis: tuple[Tensor, Tensor], targets: Tensor | None = None) -> Tensor:
        """Logits [B,T,V] of tokens [B,T]; with targets [B,T] the mean loss, in nats a token."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(self.model(tokens, cis), head.weight)
        return logits if targets is None else cross_entropy(logits, targets).mean()


# Weights ====================================================================================================


def empty_model(config: Config, dtype: torch.dtype, device: str = "cpu") -> Llama:
    """A model whose weights have no values yet: PyTorch's own initialisation takes minutes at 8B."""
    with torch.device("meta"):
        model = Llama(config)
    return model.to(dtype).to_empty(device=device)


def join_weights(model: Llama) -> None:
    """Make q, k, v one product, and gate, up: their weights move into one tensor, of which the parameters
    become views, and whose gradient becomes theirs. Names stay as they are; training is faster by it.
    """

    def join(layers: list[nn.Linear]) -> Tensor:
        rows = [layer.out_features for layer in layers]
        joined = torch.cat([layer.weight.detach() for layer in layers])
        for layer, part in zip(layers, joined.split(rows), strict=True):
            layer.weight = nn.Parameter(part)

        def share_out(joined: Tensor) -> None:
            for layer, part in zip(layers, joined.grad.split(rows), strict=True):
                layer.weight.grad = part if layer.weight.grad is None else layer.weight.grad + part
            joined.grad = None

        joined.requires_grad_().register_post_accumulate_grad_hook(share_out)
        return joined

    for block in model.model.layers:
        for module in (block.self_attn, block.mlp):
            module.joined = join(module.parallel())


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Matrices and the embedding: normal with standard deviation initializer_range; norms: 1. Parameter k
    draws from the random stream 4k, so that the C program starts from the same weights.
    """
    for k, weight in enumerate(model.parameters()):
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        where = seed, 0, 4 * k, weight.numel()
        if weight.is_cuda:
            values = llamac.random.normal_on(weight.device, *where)
        else:
            values = torch.from_numpy(llamac.random.normal(*where))
        weight.copy_(values.mul_(model.config.initializer_range).view_as(weight))


@torch.no_grad()
def load_weights(model: Llama, directory: str | Path) -> None:
    """Fill the model from a Hugging Face directory, rounding to the model's dtype. Raises InputError."""
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name, values in hf.read_weights(directory, shapes):
        weights[name].copy_(values)


def save_model(model: Llama, directory: str | Path) -> None:
    """Write a Hugging Face directory; transformers opens it as it is."""
    weights = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    hf.write_directory(directory, model.config, weights)


# AdamW ======================================================================================================

ROUNDING_STREAM = 0xFFFFFFFE  # of random numbers; the parameters have the lowest ones


def adamw_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update t = 1, 2, … of one parameter p with gradient g, in place (Loshchilov & Hutter 2019):

        p -= lr · (m̂ / (√v̂ + eps) + weight_decay · p)

    where m̂ = m / bias1 and v̂ = v / bias2 are the moments corrected for their start at zero, bias = 1 - betaᵗ.
    What changes from update to update comes as tensors: compiled code would take a number for a constant.
    """
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v / bias2).sqrt_().add_(eps)
    change = (m / denominator).div_(bias1).add_(p, alpha=weight_decay)
    p.sub_(change.mul_(lr))


def hashed_words(seed: Tensor, n: int) -> Tensor:
    """n random words, int32[n]: MurmurHash3's finaliser (Appleby 2011) of seed + index · 2³²/golden ratio."""
    x = torch.arange(n, dtype=torch.int32, device=seed.device) * -0x61C88647 + seed
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        x = (x ^ (x >> shift & (1 << 32 - shift) - 1)) * factor
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(x: Tensor, words: Tensor) -> Tensor:
    """x[n], fp32, to bf16: away from zero with the probability that the cut-off bits stand for.

    words: random int32[n], whose upper halves are added below bf16's last bit; or one word without a
    dimension, from which those are hashed.
    """
    if words.dim() == 0:
        words = hashed_words(words, x.numel())
    return ((x.view(torch.int32) + (words >> 16 & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


def update_stored(
    weight: Tensor | None,
    stored: list[Tensor],
    g: Tensor,
    clip: Tensor | None,
    scalars: Tensor,
    words: list[Tensor | None] | Tensor,
    constants: dict[str, float],
) -> None:
    """adamw_update on the tensors [n] in which p, m and v are stored, each in its type, with `clip` times g;
    `weight` is p's bf16 copy, if there is one. Compiled, all of it is one pass over memory.
    """
    p, m, v = exact = [at_least_fp32(x) for x in stored]  # no copy, so in place, where fp32 is stored
    g = at_least_fp32(g)
    lr, bias1, bias2 = scalars
    adamw_update(p, g if clip is None else g * clip, m, v, lr, bias1, bias2, **constants)
    for i, (low, high) in enumerate(zip(stored, exact, strict=True)):
        if low.dtype != high.dtype:
            low.copy_(stochastic_round(high, words[i]))
    if weight is not None:
        weight.copy_(p)


def upload(x: np.ndarray, device: str | torch.device) -> Tensor:
    """x on the device. The host does not wait for the copy: pinned memory is read while it goes on."""
    tensor = torch.from_numpy(x)
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class AdamW:
    """AdamW on a list of parameters; only matrices decay.

    bf16 weights are updated through fp32 master copies, or, without those, rounded stochastically: rounding
    to nearest would lose every update below half a bf16 step. Moments are fp32, or bf16 rounded
    stochastically. On the CPU the random bits are the C program's; on a GPU the kernel that uses them makes
    them, by a hash, because Philox's would take longer than the update.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float = 1e-8,
        master_weights: bool = True,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        compiled: bool = False,
    ):
        self.params = list(params)
        self.weight_decay, self.seed, self.steps = weight_decay, seed, 0
        self.constants = {"beta1": beta1, "beta2": beta2, "eps": eps}
        weights = [p.detach() for p in self.params]
        self.master = [at_least_fp32(w) for w in weights] if master_weights else weights
        self.m = [torch.zeros_like(w, dtype=state_dtype) for w in weights]
        self.v = [torch.zeros_like(w, dtype=state_dtype) for w in weights]
        self.update = torch.compile(update_stored, dynamic=False) if compiled else update_stored
        self.device = self.params[0].device
        self.hashed = self.device.type != "cpu"

    def words(self, stream: int, n: int) -> Tensor:
        """Random int32[n] of this update."""
        return upload(llamac.random.words(self.seed, self.steps, stream, n).view(np.int32), self.device)

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float, clip: Tensor | None = None) -> None:
        """One update with the gradients of `params`, in their order, times `clip` (no dimensions)."""
        self.steps += 1
        bias1, bias2 = (1 - self.constants[beta] ** self.steps for beta in ("beta1", "beta2"))
        scalars = upload(np.array([lr, bias1, bias2]), self.device)
        seeds = self.words(ROUNDING_STREAM, 4 * len(grads)).view(-1, 4) if self.hashed else None
        for k, (weight, g) in enumerate(zip(self.params, grads, strict=True)):
            stored = [x.view(-1) for x in (self.master[k], self.m[k], self.v[k])]
            copy = None if self.master[k].dtype == weight.dtype else weight.view(-1)
            if seeds is not None:
                words = seeds[k]
            else:
                low = [x.dtype == torch.bfloat16 for x in stored]
                words = [self.words(4 * k + i, len(x)) if low[i] else None for i, x in enumerate(stored)]
            constants = self.constants | {"weight_decay": self.weight_decay if weight.dim() == 2 else 0.0}
            self.update(copy, stored, g.reshape(-1), clip, scalars, words, constants)


def train_step(
    model: Callable,
    batches: list[tuple[Tensor, Tensor]],
    cis: tuple[Tensor, Tensor],
    optimizer: AdamW,
    lr: float,
    grad_clip: float,
    grad_dtype: torch.dtype,
) -> Tensor:
    """One update on the mean loss of the micro-batches (tokens, targets), their gradients summed in
    grad_dtype and clipped as torch's clip_grad_norm_ does. Returns [loss, gradient norm before clipping], on
    the device.
    """
    losses, grads = [], None
    for tokens, targets in batches:
        loss = model(tokens, cis, targets) / len(batches)
        loss.backward()
        losses.append(loss.detach())
        fresh = [p.grad.to(grad_dtype) for p in optimizer.params]
        for p in optimizer.params:
            p.grad = None
        if grads is None:
            grads = fresh
        else:
            torch._foreach_add_(grads, fresh)
    loss = torch.stack(losses).sum()
    # In double: torch's fp32 norm of a million numbers was seen to be off by 4e-5 on the CPU.
    norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).norm().to(loss.dtype)
    clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip > 0 else None
    optimizer.step(grads, lr, clip)
    return torch.stack([loss, norm])


# Reference tensors: every activation, every gradient and ten updates of the test models =====================

ROOT = Path(__file__).resolve().parent
UPDATES = 10
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LR, GRAD_CLIP = 0.001, 1.0
LAYER = ["input_norm", "input_rstd", "q", "k", "v", "attention", "attention_lse", "residual_mid"]
LAYER += ["post_norm", "post_rstd", "gate_up", "swiglu", "residual_out"]


def watch_activations(model: Llama) -> dict[str, Tensor]:
    """Hook the model: its next forward puts the activations into the dict returned here, and its next
    backward their gradients into their .grad.
    """
    seen: dict[str, Tensor] = {}

    def watch(module: nn.Module, inputs: list[str], output: str | None) -> None:
        def hook(_module, args, result):
            for name, x in [*zip(inputs, args, strict=False), (output, result)]:
                if name:
                    x.retain_grad()
                    seen[name] = x

        module.register_forward_hook(hook)

    watch(model.model.embed_tokens, [], "embedding")
    for i, block in enumerate(model.model.layers):
        watch(block.input_layernorm, [], f"{i}.input_norm")
        watch(block.self_attn.attention, [f"{i}.q", f"{i}.k", f"{i}.v"], f"{i}.attention")
        watch(block.post_attention_layernorm, [f"{i}.residual_mid"], f"{i}.post_norm")
        watch(block.mlp.gate_proj, [], f"{i}.gate")
        watch(block.mlp.up_proj, [], f"{i}.up")
        watch(block.mlp.down_proj, [f"{i}.swiglu"], None)
        watch(block, [], f"{i}.residual_out")
    watch(model.model.norm, [], "final_norm")
    watch(model, [], "logits")
    return seen


def layer_tensors(block: Block, x: Tensor, seen: dict[str, Tensor], i: int) -> tuple[dict, dict]:
    """({activation: tensor}, {activation: its gradient}) of block i, whose input is x."""
    act = {name: seen[f"{i}.{name}"] for name in LAYER if f"{i}.{name}" in seen}
    grad = {name: x.grad for name, x in act.items()}
    gate, up = seen[f"{i}.gate"], seen[f"{i}.up"]
    act["gate_up"], grad["gate_up"] = torch.cat((gate, up), -1), torch.cat((gate.grad, up.grad), -1)
    act["input_rstd"] = block.input_layernorm.rstd(x)
    act["post_rstd"] = block.post_attention_layernorm.rstd(act["residual_mid"])
    act["attention_lse"] = explicit_attention(act["q"], act["k"], act["v"])[1]
    return {name: act[name] for name in LAYER}, {name: grad[name] for name in LAYER if name in grad}


def debug_state(model: Llama, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The tensors of debug_state.safetensors in the order of computation: those of the forward, gradients of
    activations (dact.) and of parameters (grad.) from the last to the first, ten updates. Changes the model.
    """
    precision = at_least_fp32(next(model.parameters())).dtype
    cis = precompute_cis(model.config, tokens.shape[1], dtype=precision)
    seen = watch_activations(model)
    losses = cross_entropy(model(tokens, cis), targets)
    losses.mean().backward()

    state = {"tokens": tokens.int(), "targets": targets.int(), "act.embedding": seen["embedding"]}
    grads = {f"grad.{name}": p.grad.to(precision) for name, p in model.named_parameters()}
    grads["dact.embedding"] = seen["embedding"].grad
    x = seen["embedding"]
    for i, block in enumerate(model.model.layers):
        act, dact = layer_tensors(block, x, seen, i)
        state |= {f"act.{i}.{name}": a for name, a in act.items()}
        grads |= {f"dact.{i}.{name}": d for name, d in dact.items()}
        x = act["residual_out"]
    state |= {"act.final_norm": seen["final_norm"], "logits": seen["logits"]}
    state |= {"losses": losses, "loss": losses.mean().view(1)}
    grads |= {"dact.final_norm": seen["final_norm"].grad, "dact.logits": seen["logits"].grad}
    state |= reversed(grads.items())

    model.zero_grad()
    optimizer = AdamW(model.parameters(), **OPTIMIZER, state_dtype=precision)
    batch = [(tokens, targets)]
    history = [train_step(model, batch, cis, optimizer, LR, GRAD_CLIP, precision) for _ in range(UPDATES)]
    state["train.losses"], state["train.grad_norms"] = torch.stack(history).T
    return {name: x.detach() for name, x in state.items()}


def write_reference(config: Config, dtype: torch.dtype, directory: Path, seed: int = 1) -> None:
    """One model's reference: a Hugging Face directory, debug_state.safetensors in dtype, and
    truth.safetensors, the same in double arithmetic from the same, already rounded, weights.
    """
    model = empty_model(config, dtype)
    init_weights(model, seed)
    for k, weight in enumerate(model.parameters()):
        if weight.dim() == 1:  # norm weights other than 1: one that is forgotten or swapped must show
            noise = torch.from_numpy(llamac.random.normal(seed, 0, 4 * k, weight.numel()))
            weight.data += 0.2 * noise
    save_model(model, directory)
    truth = empty_model(config, torch.float64)
    load_weights(truth, directory)
    B, T = 2, 33
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=(2, B, T))
    tokens, targets = torch.from_numpy(ids)
    metadata = {name: repr(x) for name, x in {"lr": LR, **OPTIMIZER, "grad_clip": GRAD_CLIP}.items()}
    hf.write_ordered(directory / "debug_state.safetensors", debug_state(model, tokens, targets), metadata)
    hf.write_ordered(directory / "truth.safetensors", debug_state(truth, tokens, targets), metadata)


def write_references(root: Path) -> None:
    """The references of every test model in both dtypes, at root/MODEL/DTYPE."""
    torch.use_deterministic_algorithms(True)
    for file in sorted((ROOT / "tests" / "models").glob("*.json")):
        for name, dtype in DTYPES.items():
            started = time.perf_counter()
            directory = root / file.stem / name
            write_reference(load_config(file), dtype, directory)
            size = sum(f.stat().st_size for f in directory.iterdir()) / 2**20
            print(f"{directory}  {size:.1f} MiB  {time.perf_counter() - started:.2f} s", flush=True)


# Training ===================================================================================================

SAMPLING_STREAM = 0xFFFFFFFF  # of random numbers


def check_supported(o: Options) -> None:
    """Refuse what the C program does and this one does not."""
    if o.ops == "llamac":
        raise InputError("--ops llamac: expected the extension llamac._C, found none: it is not built")
    if o.resume != "none":
        raise InputError("--resume: only the C program resumes; --model DIR --init load takes the weights")
    if o.kernel or o.profile:
        raise InputError("--kernel, --profile: only the C program has them")
    if parts := recompute_parts(o.recompute).keys() - {"block"}:
        raise InputError(f"--recompute: expected none, block or block:K, found {min(parts)} (C program only)")
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InputError(f"WORLD_SIZE: expected 1, several devices are not supported yet, found {world}")


def make_model(o: Options, config: Config, device: str) -> Llama:
    """The model to train, with its first weights."""
    if o.init == "load" and not Path(o.model).is_dir():
        raise InputError(f"--init load: expected a directory as --model, found {o.model}")
    if o.seq_len > (longest := config.max_position_embeddings):
        raise InputError(f"--seq-len: expected at most max_position_embeddings {longest}, found {o.seq_len}")
    model = empty_model(config, DTYPES[o.dtype], device)
    if o.init == "load":
        load_weights(model, o.model)
    else:
        init_weights(model, o.seed)
    model.model.recompute_every = recompute_parts(o.recompute).get("block", 0)
    join_weights(model)
    torch.cuda.empty_cache()  # of separate weights and random numbers
    return model


def sample_token(logits: Tensor, temperature: float, top_k: int, u: float) -> int:
    """The token at u in (0,1) of the cumulative distribution softmax(logits / temperature) over the top_k
    likeliest (0: all), the likeliest first, equals by their id. logits [V]; temperature 0: the likeliest.
    """
    values, ids = logits.double().sort(descending=True, stable=True)
    if temperature == 0:
        return int(ids[0])
    values = values[: top_k or len(values)]
    cumulative = ((values - values[0]) / temperature).exp().cumsum(0)
    return int(ids[torch.searchsorted(cumulative[:-1], u * cumulative[-1])])


@dataclass
class Update:
    """An update that the device may still be computing."""

    step: int
    lr: float
    result: Tensor  # loss and gradient norm, on the host once `done`
    done: torch.cuda.Event | None


@dataclass
class Run:
    """What a training run consists of."""

    options: Options
    device: str
    model: Llama
    forward: Callable  # the model, compiled or not
    cis: tuple[Tensor, Tensor]
    optimizer: AdamW
    data: Loader
    val_data: Loader | None
    tokenizer: llamac.tokenizer.Tokenizer | None
    log: Log
    checkpoints: list[Path] = field(default_factory=list)  # written by this run, oldest first
    running: list[Update] = field(default_factory=list)  # begun and not yet logged, oldest first
    clock: float = 0.0  # when the last one was logged


def start(o: Options) -> Run:
    """Open the data, make the model and its optimizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    config, T, B, micro_steps = load_config(o.model), o.seq_len, o.batch_size, o.micro_steps()
    data = Loader(o.train_data, T, config.vocab_size, B, micro_steps, seed=o.seed)
    val_data = Loader(o.val_data, T, config.vocab_size, B) if o.val_data else None
    tokenizer = llamac.tokenizer.find(o.tokenizer, data.shards[0])
    model = make_model(o, config, device)
    optimizer = AdamW(
        model.parameters(),
        o.beta1,
        o.beta2,
        o.weight_decay,
        master_weights=o.master_weights == "on",
        state_dtype=DTYPES[o.optimizer_state],
        seed=o.seed,
        compiled=o.compile or device == "cuda",
    )
    forward = torch.compile(model, dynamic=False) if o.compile else model
    log = Log(o.out, steps=o.steps, tokens=B * T * micro_steps, flops_per_token=config.flops_per_token(T))
    log.print(f"PyTorch {torch.__version__} on {name}, {o.model}: {config.num_parameters():,} parameters")
    log.print(f"{micro_steps} x {B} x {T} tokens an update, {data.tokens:,} to train on")
    log.start(o.to_dict())
    cis = precompute_cis(config, T, device)
    return Run(o, device, model, forward, cis, optimizer, data, val_data, tokenizer, log)


def to_device(batch: tuple[np.ndarray, np.ndarray], device: str) -> tuple[Tensor, Tensor]:
    """tokens and targets, int32[B,T] -> int64[B,T] on the device."""
    tokens, targets = (upload(x, device).long() for x in batch)
    return tokens, targets


def update(r: Run, step: int) -> None:
    """Update `step` = 1, 2, … of the run, and its line in the log: on a GPU one update late, so that the host
    has queued the next one before it waits for this one's loss.
    """
    o = r.options
    if not r.running:
        r.clock = time.perf_counter()
    schedule = {"min_lr_frac": o.min_lr_frac, "warmup_steps": o.warmup_steps, "schedule": o.schedule}
    lr = learning_rate(step, lr=o.lr, steps=o.steps, **schedule)
    batches = [to_device(r.data.micro_batch(step - 1, micro), r.device) for micro in range(r.data.accum)]
    with sdpa_kernel(ATTENTION, set_priority=True):
        result = train_step(r.forward, batches, r.cis, r.optimizer, lr, o.grad_clip, DTYPES[o.grad_dtype])
    result, done = result.to("cpu", non_blocking=True), None
    if r.device == "cuda":
        done = torch.cuda.Event()
        done.record()
    r.running.append(Update(step, lr, result, done))
    finish(r, late=1 if done else 0)


def finish(r: Run, late: int = 0) -> None:
    """Wait for the updates begun, but for the last `late`, and log them. An update's time is from the end of
    the one before, or from its begin where none was running.
    """
    while len(r.running) > late:
        u = r.running.pop(0)
        if u.done:
            u.done.synchronize()
        loss, norm = u.result.tolist()
        now = time.perf_counter()
        gpu_mem = torch.cuda.max_memory_allocated() / 2**30 if r.device == "cuda" else 0.0
        r.log.step(u.step, loss, norm, u.lr, (now - r.clock) * 1e3, gpu_mem)
        r.clock = now


@torch.no_grad()
def validate(r: Run) -> float:
    """Mean loss over --val-steps batches, in nats a token."""
    finish(r)
    batches = (to_device(batch, r.device) for batch in r.val_data.validation(r.options.val_steps))
    return torch.stack([r.model(tokens, r.cis, targets) for tokens, targets in batches]).mean().item()


@torch.no_grad()
def sample(r: Run, step: int) -> str:
    """--sample-tokens tokens behind an end-of-text token, as text where there is a tokenizer. Every token
    costs a forward over the last --seq-len: a cache of keys and values is more code than a sample now and
    then is worth.
    """
    finish(r)
    o = r.options
    tokens = [r.tokenizer.eot if r.tokenizer else r.model.config.bos_token_id or 0]
    for i in range(o.sample_tokens):
        context = torch.tensor([tokens[-o.seq_len :]], device=r.device)
        cos, sin = (x[: context.shape[1]] for x in r.cis)
        logits = r.model(context, (cos, sin))[0, -1]
        u = llamac.random.uniform(o.seed, step, SAMPLING_STREAM, 1, start=i).item()
        tokens.append(sample_token(logits, o.sample_temperature, o.sample_top_k, u))
    return r.tokenizer.decode(tokens[1:]) if r.tokenizer else " ".join(map(str, tokens[1:]))


def save_checkpoint(r: Run, step: int) -> None:
    """Write OUT/step_NNNNNN and remove the oldest of this run beyond --keep-checkpoints."""
    finish(r)
    path = Path(r.options.out) / f"step_{step:06d}"
    save_model(r.model, path)
    r.log.checkpoint(step, path)
    r.checkpoints.append(path)
    while len(r.checkpoints) > r.options.keep_checkpoints:
        shutil.rmtree(r.checkpoints.pop(0))


def train(o: Options) -> None:
    """The run that the options describe, into OUT: log.jsonl, loss.png and step_NNNNNN/, the model."""
    check_supported(o)
    r = start(o)

    def due(step: int, every: int) -> bool:
        return step == o.steps or (every > 0 and step % every == 0)

    if r.val_data:
        r.log.val(0, validate(r))
    for step in range(1, o.steps + 1):
        update(r, step)
        if r.val_data and due(step, o.val_every):
            r.log.val(step, validate(r))
        if o.sample_every and due(step, o.sample_every):
            r.log.sample(step, sample(r, step))
        if o.checkpoint_every >= 0 and due(step, o.checkpoint_every):
            save_checkpoint(r, step)
    finish(r)
    r.log.close()
    model = f"model {r.checkpoints[-1]}" if r.checkpoints else "no model"
    result = f"done: {model}, log {o.out}/log.jsonl"
    try:
        llamac.plot.draw(llamac.plot.read_log(Path(o.out) / "log.jsonl"), Path(o.out) / "loss.png")
        result += f", loss plot {o.out}/loss.png"
    except ImportError:
        result += " (no loss plot: matplotlib is not there)"
    print(result)


def main() -> None:
    argv = sys.argv[1:]
    if not argv:
        write_references(ROOT / "data" / "reference")
    elif "--train" in argv:
        options = llamac.options.parse([arg for arg in argv if arg != "--train"])
        print(options.to_toml(), end="") if options.print_config else train(options)
    elif argv[0] in ("-h", "--help"):
        print(__doc__)
    else:
        raise InputError(f"expected --train, or nothing (reference tensors), found {' '.join(argv)}")


if __name__ == "__main__":
    run(main)
