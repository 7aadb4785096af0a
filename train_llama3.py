"""Llama 3 in plain PyTorch: the model, its training, and the reference that the C program is checked against.

    python train_llama3.py              write the reference tensors of the test models to data/reference/
    python train_llama3.py --train ...  train, with the C program's flags and data order (add --help)
    torchrun --nproc-per-node N train_llama3.py --train ...     the same on N devices, by FSDP2

The file reads top to bottom: the operations, the model (Dubey et al., "The Llama 3 Herd of Models", 2024),
its weights, AdamW, the reference tensors, several devices, training. Shapes: B batch, T time, C channels, NH
query heads, NKV key/value heads, HD head size, F feed-forward width, V vocabulary. Parameters have Hugging
Face's names, weight matrices are [out, in].
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import llamac.options
import llamac.plot
import llamac.profile
import llamac.random
import llamac.tokenizer
from llamac import hf
from llamac.carried_files import read_carried_files
from llamac.config import Config, load_config
from llamac.data import Loader, check_same_tokenizer
from llamac.errors import InputError, run
from llamac.log import Log, set_aside
from llamac.options import Options, prompt_ids, recompute_parts
from llamac.peak import peak_tflops
from llamac.run_warnings import run_warnings
from llamac.schedule import learning_rate
from llamac.torch_profile import Profiler

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# Libraries that compute attention, the fastest first: each takes what those before it do not.
ATTENTION = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]


# The operations =============================================================================================


def at_least_fp32(x: Tensor) -> Tensor:
    """x in the precision of arithmetic: bf16 becomes fp32; fp32 and double stay, without a copy."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · weight / sqrt(mean(x²) + eps) over the C channels (Zhang & Sennrich 2019): x [..., C], weight [C].

    The arithmetic is fp32 also where x is bf16, and is rounded once.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def residual_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its rmsnorm."""
    x = residual + x
    return x, rmsnorm(x, weight, eps)


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
    cos, sin = (part[: x.shape[1]] for part in cis)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√HD)·v, each position over itself and those before it. NH/NKV query heads share a
    key/value head (grouped queries: Ainslie et al. 2023). q [B,T,NH,HD], k and v [B,T,NKV,HD] -> [B,T,NH,HD].
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """attention() by its definition, with the scores in memory: its output [B,T,NH·HD], and the
    log-sum-exp of every row of scores [B,NH,T], which a fused kernel keeps for its backward.
    """
    T, NH, HD = q.shape[1:]
    q, k, v = (at_least_fp32(x.repeat_interleave(NH // x.shape[2], dim=2)) for x in (q, k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(HD)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2), scores.logsumexp(-1)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up (Shazeer 2020): both [..., F], or side by side in one tensor [..., 2F] -> [..., F]."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of every token: logits [B,T,V], targets [B,T] -> [B,T], fp32."""
    losses = F.cross_entropy(at_least_fp32(logits).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross_entropy of hidden [B,T,C] · weightᵀ [C,V]."""
    return cross_entropy(F.linear(hidden, weight), targets).mean()


@dataclass
class Operations:
    """What the model is made of, besides matrix products: --ops. All have the shapes of those above."""

    precompute_cis: Callable = precompute_cis
    rmsnorm: Callable = rmsnorm
    residual_rmsnorm: Callable = residual_rmsnorm
    rope: Callable = rope
    attention: Callable = attention
    swiglu: Callable = swiglu
    linear_cross_entropy: Callable = linear_cross_entropy


TORCH = Operations()


def llamac_operations() -> Operations:
    """llamac's own, as fused kernels. Raises InputError where the extension is not there."""
    try:
        from llamac import ops
    except ImportError as error:
        raise InputError(f"--ops llamac: {error}") from None

    def cis(config: Config, T: int, device="cpu", dtype=torch.float32) -> Tensor:
        s = config.rope_scaling
        scaling = (s.factor, s.low_freq_factor, s.high_freq_factor) if s else ()
        context = (float(s.original_max_position_embeddings),) if s else ()
        where = {"dtype": dtype, "device": device}
        return ops.precompute_cis(T, config.head_dim, config.rope_theta, *scaling, *context, **where)

    names = ("rmsnorm", "residual_rmsnorm", "rope", "attention", "swiglu", "linear_cross_entropy")
    return Operations(cis, *(getattr(ops, name) for name in names))


# The model ==================================================================================================


class RMSNorm(nn.Module):
    """rmsnorm() with a weight; with a residual (residual + x, the norm of that)."""

    def __init__(self, C: int, eps: float, ops: Operations):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.eps, self.ops = eps, ops

    def rstd(self, x: Tensor) -> Tensor:
        """[..., C] -> [...]"""
        return torch.rsqrt(at_least_fp32(x).square().mean(-1) + self.eps)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.ops.rmsnorm(x, self.weight, self.eps)
        return self.ops.residual_rmsnorm(x, residual, self.weight, self.eps)


class CausalAttention(nn.Module):
    """attention() with the heads side by side: q [B,T,NH,HD], k and v [B,T,NKV,HD] -> [B,T,NH·HD]."""

    def __init__(self, ops: Operations = TORCH):
        super().__init__()
        self.ops = ops

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.ops.attention(q, k, v).flatten(2)


class Joinable(nn.Module):
    """Has layers of the same input. After join_weights() they are one product with one parameter, `joined`:
    their weights one below the other.
    """

    PARALLEL: tuple[str, ...]

    def __init__(self):
        super().__init__()
        self.register_parameter("joined", None)

    def parallel(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in self.PARALLEL]

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        """The layers' outputs: each, or after join_weights() one tensor that has them side by side."""
        if self.joined is None:
            return tuple(layer(x) for layer in self.parallel())
        return (F.linear(x, self.joined),)


class SelfAttention(Joinable):
    """Projections to queries, keys and values, RoPE, attention, projection back to C channels."""

    PARALLEL = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        self.head_dim, self.ops = config.head_dim, ops
        self.q_proj = nn.Linear(config.hidden_size, config.q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)
        self.attention = CausalAttention(ops)

    def forward(self, x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.products(x)
        if len(heads) == 1:
            heads = heads[0].split([layer.out_features for layer in self.parallel()], -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in heads)
        return self.o_proj(self.attention(self.ops.rope(q, cis), self.ops.rope(k, cis), v))


class MLP(Joinable):
    """down(swiglu(gate(x), up(x)))."""

    PARALLEL = ("gate_proj", "up_proj")

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        self.ops = ops
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.swiglu(*self.products(x)))


class Block(nn.Module):
    """Attention, then the feed-forward network, each on the normalised residual stream and added to it."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = SelfAttention(config, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)

    def forward(self, x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        x, y = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cis), residual=x)
        return x + self.mlp(y)


class Decoder(nn.Module):
    """Embedding, L blocks, final norm: tokens [B,T] -> [B,T,C]."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, ops) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.recompute_every = 0  # k > 0: the backward computes every k-th block again instead of keeping it

    def forward(self, tokens: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        x = self.embed_tokens(tokens)
        for i, block in enumerate(self.layers):
            if self.recompute_every and i % self.recompute_every == 0:
                x = checkpoint(block, x, cis, use_reentrant=False)
            else:
                x = block(x, cis)
        return self.norm(x)


class Head(nn.Linear):
    """Logits, or with targets the mean loss. A module, so that its weight can be gathered for its call."""

    def __init__(self, config: Config, ops: Operations):
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.ops = ops

    def forward(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        return head(hidden, self.weight, targets, self.ops)


def head(hidden: Tensor, weight: Tensor, targets: Tensor | None, ops: Operations) -> Tensor:
    """Logits [B,T,V] of hidden [B,T,C], or with targets [B,T] the mean loss."""
    if targets is None:
        return F.linear(hidden, weight)
    return ops.linear_cross_entropy(hidden, weight, targets)


class Llama(nn.Module):
    """Llama 3. cis = ops.precompute_cis(config, T or more) is computed once and passed to every call."""

    def __init__(self, config: Config, ops: Operations = TORCH):
        super().__init__()
        self.config, self.ops = config, ops
        self.model = Decoder(config, ops)
        self.lm_head = None if config.tie_word_embeddings else Head(config, ops)

    def forward(self, tokens: Tensor, cis: tuple[Tensor, Tensor], targets: Tensor | None = None) -> Tensor:
        """Logits [B,T,V] of tokens [B,T]; with targets [B,T] the mean loss, in nats a token."""
        hidden = self.model(tokens, cis)
        if self.lm_head is None:
            return head(hidden, self.model.embed_tokens.weight, targets, self.ops)
        return self.lm_head(hidden, targets)


# Weights ====================================================================================================


def empty_model(config: Config, dtype: torch.dtype, device: str = "cpu", ops: Operations = TORCH) -> Llama:
    """A model whose weights have no values yet: PyTorch's own initialisation takes minutes at 8B."""
    with torch.device("meta"):
        model = Llama(config, ops)
    return model.to(dtype).to_empty(device=device)


def join_weights(model: Llama) -> None:
    """Make q, k, v one product, and gate, up, each with one parameter. parts() still knows them apart."""
    for block in model.model.layers:
        for module in (block.self_attn, block.mlp):
            module.joined = nn.Parameter(torch.cat([layer.weight.detach() for layer in module.parallel()]))
            for layer in module.parallel():
                layer.weight = None


def local(x: Tensor) -> Tensor:
    """What of x lies in this process."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class Part:
    """Those rows of one weight that this process holds, and where: all of them, but for sharded models."""

    name: str  # Hugging Face's
    index: int  # among all weights
    shape: tuple[int, ...]  # of the whole weight
    first: int  # its first row here
    parameter: nn.Parameter  # the module's, perhaps joined from several weights
    rows: slice  # of the parameter's local tensor

    def of(self, x: Tensor) -> Tensor:
        """The part's rows of the parameter or of its gradient."""
        return local(x)[self.rows]

    def weight(self) -> Tensor:
        return self.of(self.parameter.detach())

    def start(self) -> int:
        """The first element here, among the whole weight's."""
        return self.first * math.prod(self.shape[1:])


def weight_names(model: Llama) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter, and Hugging Face's names of the weights that it holds one below the other."""
    found = []
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        joined = model.get_submodule(owner).PARALLEL if name == "joined" else ()
        found.append(([f"{owner}.{layer}.weight" for layer in joined] or [path], parameter))
    return found


def parts(model: Llama) -> list[Part]:
    """What this process holds of every weight, in the order of files and random streams."""
    shapes, found = dict(model.config.parameters()), []
    index = {name: k for k, name in enumerate(shapes)}
    for names, parameter in weight_names(model):
        begin, at = 0, 0
        if isinstance(parameter, DTensor):  # as torch.chunk cuts it
            begin = dist.get_rank() * -(-len(parameter) // dist.get_world_size())
        end = begin + len(local(parameter))
        for name in names:
            low, high = max(begin, at), min(end, at + shapes[name][0])
            if low < high:
                rows = slice(low - begin, high - begin)
                found.append(Part(name, index[name], shapes[name], low - at, parameter, rows))
            at += shapes[name][0]
    return found


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Matrices and the embedding: normal with standard deviation initializer_range; norms: 1. Weight k draws
    from the random stream 4k, so that the C program, and any number of devices, start from the same ones.
    """
    for part in parts(model):
        weight = part.weight()
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        where = seed, 0, 4 * part.index, weight.numel(), part.start()
        if weight.is_cuda:
            values = llamac.random.normal_on(weight.device, *where)
        else:
            values = torch.from_numpy(llamac.random.normal(*where))
        weight.copy_(values.mul_(model.config.initializer_range).view_as(weight))


@torch.no_grad()
def load_weights(model: Llama, directory: str | Path) -> None:
    """Fill the model from a Hugging Face directory, rounding to the model's dtype. Raises InputError."""
    held = {part.name: part for part in parts(model)}
    for name, values in hf.read_weights(directory, dict(model.config.parameters())):
        if part := held.get(name):
            weight = part.weight()
            weight.copy_(values[part.first : part.first + len(weight)])


@torch.no_grad()
def whole_weights(model: Llama, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, weight on the host) of every weight, one at a time, on rank 0; the others help to gather."""
    shapes = dict(model.config.parameters())
    for module in model.modules():  # what the last forward, without a backward, has left gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    for names, parameter in weight_names(model):
        weight = parameter.detach().to(dtype)
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if rank() == 0:
            yield from zip(names, weight.cpu().split([shapes[name][0] for name in names]), strict=True)


def save_model(
    model: Llama, directory: str | Path, dtype: torch.dtype, files: dict[str, bytes] | None = None
) -> None:
    """Write a Hugging Face directory, and files {name: content} into it; transformers opens it as it is. Rank
    0 writes, all ranks call.
    """
    weights = whole_weights(model, dtype)
    if rank() == 0:
        hf.write_directory(directory, model.config, dtype, weights, files)
    for _ in weights:
        pass


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


def moment_words(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of random uint32[n] that round a weight, those that round m and v: a byte each, centred."""
    return tuple((word >> shift & 0xFF) << 24 | 0x80_0000 for shift in (8, 0))


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
    """AdamW on parts of a model's weights; only matrices decay.

    bf16 weights are updated through fp32 master copies, or, without those, rounded stochastically: rounding
    to nearest would lose every update below half a bf16 step. Moments are fp32, or bf16 rounded
    stochastically. On the CPU the random bits are the C program's; on a GPU the kernel that uses them makes
    them, by a hash, because Philox's would take longer than the update. Either way an element's bits do not
    depend on which process holds it.

    fused: by llamac's operation, whose bits are the C program's everywhere.
    """

    def __init__(
        self,
        parts: list[Part],
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float = 1e-8,
        master_weights: bool = True,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        compiled: bool = False,
        fused: bool = False,
    ):
        self.parts = parts
        self.weight_decay, self.seed, self.steps = weight_decay, seed, 0
        self.constants = {"beta1": beta1, "beta2": beta2, "eps": eps}
        self.weights = [part.weight() for part in parts]
        self.master = [at_least_fp32(w) for w in self.weights] if master_weights else self.weights
        self.m = [torch.zeros_like(w, dtype=state_dtype) for w in self.weights]
        self.v = [torch.zeros_like(w, dtype=state_dtype) for w in self.weights]
        self.update = torch.compile(update_stored, dynamic=False) if compiled else update_stored
        self.device = self.weights[0].device
        self.hashed, self.fused = self.device.type != "cpu", fused

    def words(self, stream: int, n: int, start: int = 0) -> np.ndarray:
        """Random uint32[n] of this update."""
        return llamac.random.words(self.seed, self.steps, stream, n, start)

    def hash_seeds(self) -> Tensor:
        """int32[parts,4] of this update: what hashed_words starts from, so that element 0 is the part's."""
        indices = [part.index for part in self.parts]
        words = self.words(ROUNDING_STREAM, 4 * (1 + max(indices))).reshape(-1, 4)[indices]
        ahead = np.array([part.start() * 0x9E3779B9 & 0xFFFFFFFF for part in self.parts], np.uint32)
        return upload((words + ahead[:, None]).view(np.int32), self.device)

    def philox_words(self, part: Part, stored: list[Tensor]) -> list[Tensor | None]:
        """The C program's, int32[n], for those of p, m and v that are bf16."""
        narrow = [x.dtype == torch.bfloat16 for x in stored]
        if not any(narrow):
            return [None] * 3
        word = self.words(4 * part.index, len(stored[0]), part.start())
        words = zip((word, *moment_words(word)), narrow, strict=True)
        return [upload(x.view(np.int32), self.device) if wanted else None for x, wanted in words]

    @torch.no_grad()
    def step(
        self, grads: list[Tensor], lr: float, norm: Tensor | None = None, grad_clip: float = 0.0
    ) -> None:
        """One update with the gradients of `parts`, in their order. With a grad_clip above 0 they are scaled
        down to it where their norm is larger.
        """
        self.steps += 1
        if self.fused:
            return self.fused_step(grads, lr, norm, grad_clip)
        clip = (grad_clip / (norm + 1e-6)).clamp(max=1.0) if grad_clip > 0 else None
        bias1, bias2 = (1 - self.constants[beta] ** self.steps for beta in ("beta1", "beta2"))
        scalars = upload(np.array([lr, bias1, bias2]), self.device)
        seeds = self.hash_seeds() if self.hashed else None
        for k, (part, weight, g) in enumerate(zip(self.parts, self.weights, grads, strict=True)):
            stored = [x.view(-1) for x in (self.master[k], self.m[k], self.v[k])]
            copy = None if self.master[k].dtype == weight.dtype else weight.view(-1)
            words = self.philox_words(part, stored) if seeds is None else seeds[k]
            constants = self.constants | {"weight_decay": self.decay(weight)}
            self.update(copy, stored, g.reshape(-1), clip, scalars, words, constants)

    def decay(self, weight: Tensor) -> float:
        return self.weight_decay if weight.dim() == 2 else 0.0

    def fused_step(self, grads: list[Tensor], lr: float, norm: Tensor | None, grad_clip: float) -> None:
        exact = torch.promote_types(self.weights[0].dtype, torch.float32)
        rate = upload(np.array([lr]), self.device).to(exact)
        step = upload(np.array([self.steps], np.int32), self.device)
        norm = torch.zeros_like(rate) if norm is None else norm.view(1)
        for k, (part, weight, g) in enumerate(zip(self.parts, self.weights, grads, strict=True)):
            master = None if self.master[k].dtype == weight.dtype else self.master[k].view(-1)
            tensors = weight.view(-1), master, self.m[k].view(-1), self.v[k].view(-1), g.reshape(-1)
            scalars = *self.constants.values(), self.decay(weight), grad_clip, self.seed, 4 * part.index
            torch.ops.llamac.adamw(*tensors, norm, rate, step, *scalars)


def train_step(
    model: Callable,
    batches: list[tuple[Tensor, Tensor]],
    cis: tuple[Tensor, Tensor],
    optimizer: AdamW,
    lr: float,
    grad_clip: float,
    grad_dtype: torch.dtype,
) -> Tensor:
    """One update on the mean loss of the micro-batches (tokens, targets) of all ranks, their gradients summed
    in grad_dtype and clipped as torch's clip_grad_norm_ does. Returns [loss, gradient norm before clipping],
    on the device.
    """
    sharded = isinstance(model, FSDPModule)
    losses, grads = [], None
    for micro, (tokens, targets) in enumerate(batches, 1):
        if sharded:  # which sums the gradients itself, and over the ranks once
            model.set_requires_gradient_sync(micro == len(batches))
        loss = model(tokens, cis, targets) / len(batches)
        loss.backward()
        losses.append(loss.detach())
        if sharded and micro < len(batches):
            continue
        fresh = [part.of(part.parameter.grad) for part in optimizer.parts]
        if not sharded:
            fresh = [g.to(grad_dtype) for g in fresh]
        for part in optimizer.parts:
            part.parameter.grad = None
        if grads is None:
            grads = fresh
        else:
            torch._foreach_add_(grads, fresh)
    loss = torch.stack(losses).sum()
    # In double: torch's fp32 norm of a million numbers was seen to be off by 4e-5 on the CPU.
    norm = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).norm()
    if sharded:
        sums = torch.stack([loss.double() / dist.get_world_size(), norm.square()])
        dist.all_reduce(sums)
        loss, norm = sums[0].to(loss.dtype), sums[1].sqrt()
    norm = norm.to(loss.dtype)
    optimizer.step(grads, lr, norm, grad_clip)
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

    def watch(module: nn.Module, inputs: list[str], *outputs: str) -> None:
        def hook(_module, args, result):
            results = result if isinstance(result, tuple) else (result,)
            for name, x in [*zip(inputs, args, strict=False), *zip(outputs, results, strict=False)]:
                x.retain_grad()
                seen[name] = x

        module.register_forward_hook(hook)

    watch(model.model.embed_tokens, [], "embedding")
    for i, block in enumerate(model.model.layers):
        watch(block.input_layernorm, [], f"{i}.input_norm")
        watch(block.self_attn.attention, [f"{i}.q", f"{i}.k", f"{i}.v"], f"{i}.attention")
        watch(block.post_attention_layernorm, [], f"{i}.residual_mid", f"{i}.post_norm")
        watch(block.mlp.gate_proj, [], f"{i}.gate")
        watch(block.mlp.up_proj, [], f"{i}.up")
        watch(block.mlp.down_proj, [f"{i}.swiglu"])
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
    optimizer = AdamW(parts(model), **OPTIMIZER, state_dtype=precision)
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
    save_model(model, directory, dtype)
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


# Several devices ============================================================================================


def rank() -> int:
    """This process's number among those that torchrun started."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_ranks(device: str) -> None:
    """Meet the other processes, if there are any."""
    if world() == 1:
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")


def tell_launcher(error: Exception) -> None:
    """Put the error into the report with which torchrun ends: a page that ours would be lost before."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        what = {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": what}), encoding="utf-8")


def leave() -> None:
    """End this process, if it is one of several, without the libraries' own endings: with gloo (torch 2.13)
    one in 25 runs was seen to abort in them, all work done, and torchrun to end the other ranks for it.
    """
    if world() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def shard(model: Llama, o: Options, device: str) -> None:
    """Spread the parameters over the ranks (FSDP2: Zhao et al., "PyTorch FSDP", 2023). Each block, the
    embedding and the head gather theirs in --dtype for the time they need them, and the next one's
    meanwhile; gradients are averaged over the ranks in --grad-dtype.
    """
    dtypes = {"param_dtype": DTYPES[o.dtype], "reduce_dtype": DTYPES[o.grad_dtype]}
    how = {
        "mesh": init_device_mesh(device, (world(),)),
        "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False),  # cis stays fp32
    }
    blocks = list(model.model.layers)
    for block in blocks:
        if o.compile:  # without the hooks that gather, which no compiler follows
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        fully_shard(block, **how)
    order = blocks
    if model.lm_head is not None:  # else the embedding is the head's as well, and stays with the model
        fully_shard(model.model.embed_tokens, **how)
        fully_shard([model.model.norm, model.lm_head], **how, reshard_after_forward=False)
        order = [model.model.embed_tokens, *blocks, model.model.norm]
    fully_shard(model, **how)
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


# Training ===================================================================================================

SAMPLING_STREAM = 0xFFFFFFFF  # of random numbers


def check_supported(o: Options) -> None:
    """Refuse what the C program does and this one does not."""
    if o.resume != "none":
        raise InputError("--resume: only the C program resumes; --model DIR takes its weights")
    if o.kernel:
        raise InputError("--kernel: only the C program has it")
    if not o.train_data:
        raise InputError("--train-data: expected a pattern of files, found none")
    if parts := recompute_parts(o.recompute).keys() - {"block"}:
        raise InputError(f"--recompute: expected none, block or block:K, found {min(parts)} (C program only)")


def make_model(o: Options, config: Config, device: str, ops: Operations) -> Llama:
    """The model to train, with its first weights."""
    if o.init == "load" and not Path(o.model).is_dir():
        raise InputError(f"--init load: expected a directory as --model, found {o.model}")
    if o.seq_len > (longest := config.max_position_embeddings):
        raise InputError(f"--seq-len: expected at most max_position_embeddings {longest}, found {o.seq_len}")
    dtype = DTYPES[o.dtype]
    # What is sharded are the master weights: gathering them rounds.
    stored = torch.float32 if world() > 1 and o.master_weights == "on" else dtype
    model = empty_model(config, stored, "meta", ops)
    model.model.recompute_every = recompute_parts(o.recompute).get("block", 0)
    join_weights(model)
    if world() > 1:
        shard(model, o, device)
    model.to_empty(device=device)
    if o.init == "load":
        load_weights(model, o.model)
    else:
        init_weights(model, o.seed)
    if stored != dtype:  # as they start on one device
        for part in parts(model):
            part.weight().copy_(part.weight().to(dtype))
    torch.cuda.empty_cache()  # of random numbers
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


Moment = torch.cuda.Event | float


def moment(device: str) -> Moment:
    """Now; on a GPU, when it has done what is queued. By the host's clock it would be when the host hears of
    that, which is late where it waits for room in the queue.
    """
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Moment, end: Moment) -> float:
    """Between them; waits for the later one."""
    if isinstance(end, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


@dataclass
class Update:
    """An update that the device may still be computing."""

    step: int
    lr: float
    result: Tensor  # loss and gradient norm, on the host once `done`
    done: Moment


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
    profiler: Profiler | None
    carried: dict[str, bytes]  # files into every checkpoint: {name: content}
    checkpoints: list[Path] = field(default_factory=list)  # written by this run, oldest first
    running: list[Update] = field(default_factory=list)  # begun and not yet logged, oldest first
    begun: Moment = 0.0  # when the time of the next one to be logged began


def start(o: Options) -> Run:
    """Open the data, make the model and its optimizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    ops = llamac_operations() if o.ops == "llamac" else Operations()
    config, T, B, micro_steps = load_config(o.model), o.seq_len, o.batch_size, o.micro_steps(world())
    data = Loader(o.train_data, T, config.vocab_size, B, micro_steps, rank(), world(), o.seed)
    val_data = Loader(o.val_data, T, config.vocab_size, B, 1, rank(), world()) if o.val_data else None
    if val_data:
        check_same_tokenizer(data.shards, val_data.shards)
    tokenizer = llamac.tokenizer.find(o.tokenizer, data.shards)
    carried = read_carried_files(o.model, tokenizer.path if tokenizer else None)
    if o.sample_every:
        sample_prompt(o, tokenizer, config)  # refused now, not after the first hour
    join_ranks(device)
    if o.compile and world() > 1:
        ops.linear_cross_entropy = torch.compile(ops.linear_cross_entropy, fullgraph=True, dynamic=False)
    model = make_model(o, config, device, ops)
    rounds = o.optimizer_state == "bf16" or (o.dtype == "bf16" and o.master_weights == "off")
    optimizer = AdamW(
        parts(model),
        o.beta1,
        o.beta2,
        o.weight_decay,
        master_weights=o.master_weights == "on",
        state_dtype=DTYPES[o.optimizer_state],
        seed=o.seed,
        compiled=o.compile or device == "cuda",
        # It does not know that a tensor is a weight's rows from some row on, which rounding has to.
        fused=o.ops == "llamac" and not (rounds and world() > 1),
    )
    forward = torch.compile(model, dynamic=False) if o.compile and world() == 1 else model
    tokens = B * T * micro_steps * world()
    out = o.out if rank() == 0 else None
    peak = peak_tflops(device, DTYPES[o.dtype])
    rates = {"flops_per_token": config.flops_per_token(T), "peak_tflops": peak * world() if peak else None}
    previous = set_aside(out) if out else None
    log = Log(out, steps=o.steps, tokens=tokens, every=o.log_every, **rates)
    for line in run_warnings(o, config, data, world()):
        log.print(line)
    if previous:
        log.print(f"an earlier run's log and checkpoints are now in {previous}")
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    log.print(f"PyTorch {torch.__version__} on {name}, {o.model}: {config.num_parameters():,} parameters")
    ranks = f"{world()} devices x " if world() > 1 else ""
    log.print(f"{ranks}{micro_steps} x {B} x {T} tokens an update, {data.tokens:,} to train on")
    log.run(name, config.num_parameters())
    log.start(o.to_dict())
    cis = ops.precompute_cis(config, T, device)
    profiler = Profiler(out, o.profile, o.steps, device, DTYPES[o.dtype]) if out and o.profile else None
    return Run(o, device, model, forward, cis, optimizer, data, val_data, tokenizer, log, profiler, carried)


def sample_prompt(o: Options, tokenizer: llamac.tokenizer.Tokenizer | None, config: Config) -> list[int]:
    """What samples begin with: --sample-prompt-ids, else the token before a document. Raises InputError where
    the model has no such token.
    """
    tokens = prompt_ids(o.sample_prompt_ids) or [tokenizer.bos if tokenizer else config.bos_token_id or 0]
    for token in tokens:
        if token >= config.vocab_size:
            which = "--sample-prompt-ids" if o.sample_prompt_ids else "the token that begins a sample"
            raise InputError(
                f"{which}: expected one below the vocabulary's {config.vocab_size}, found {token}"
            )
    return tokens


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
        r.begun = moment(r.device)
    schedule = {"min_lr_frac": o.min_lr_frac, "warmup_steps": o.warmup_steps, "schedule": o.schedule}
    lr = learning_rate(step, lr=o.lr, steps=o.steps, **schedule)
    profiled = r.profiler.step(step) if r.profiler else nullcontext()
    with profiled, sdpa_kernel(ATTENTION, set_priority=True):
        batches = [to_device(r.data.micro_batch(step - 1, micro), r.device) for micro in range(r.data.accum)]
        result = train_step(r.forward, batches, r.cis, r.optimizer, lr, o.grad_clip, DTYPES[o.grad_dtype])
    r.running.append(Update(step, lr, result.to("cpu", non_blocking=True), moment(r.device)))
    finish(r, late=0 if r.device == "cpu" else 1)


def busy_percent() -> float | None:
    """How long of its last sample period the GPU had a kernel; None where its library does not say."""
    try:
        return float(torch.cuda.utilization())
    except Exception:  # the vendors' modules have their own kinds
        return None


def finish(r: Run, late: int = 0) -> None:
    """Wait for the updates begun, but for the last `late`, and log them. An update's time is from the end of
    the one before, or from its begin where none was running.
    """
    while len(r.running) > late:
        u = r.running.pop(0)
        ms = milliseconds(r.begun, u.done)
        r.begun = u.done
        loss, norm = u.result.tolist()
        gpu = (torch.cuda.max_memory_allocated() / 2**30, busy_percent()) if r.device == "cuda" else ()
        r.log.step(u.step, loss, norm, u.lr, ms, *gpu)
        # Every weight is as bad from here on, and the next checkpoints would replace the good ones.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            last = (
                f"the last checkpoint is {r.checkpoints[-1]}" if r.checkpoints else "there is no checkpoint"
            )
            expected = "expected a finite loss and gradient norm"
            raise InputError(f"update {u.step}: {expected}, found {loss} and {norm}; {last}")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def validate(r: Run) -> float:
    """Mean loss over --val-steps batches, in nats a token. Ranks take turns with them; one that has none left
    computes any batch without counting it: all of them are needed to gather the weights.
    """
    finish(r)
    data = r.val_data
    count = data.validation_batches(r.options.val_steps)
    none = np.zeros((2, data.batch_size, data.seq_len), np.int32)
    own, losses = data.validation(r.options.val_steps), []
    for batch in range(rank(), -(-count // world()) * world(), world()):
        tokens, targets = to_device(next(own, none), r.device)
        losses.append(r.model(tokens, r.cis, targets).double() * (batch < count))
    total = torch.stack(losses).sum() / count
    if world() > 1:
        dist.all_reduce(total)
    return total.item()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def sample(r: Run, step: int) -> str:
    """--sample-tokens tokens behind the one that begins a text, as text where there is a tokenizer. Each
    costs a forward over the last --seq-len: a cache of keys and values is more code than a sample now and
    then is worth.
    """
    finish(r)
    o = r.options
    tokens = sample_prompt(o, r.tokenizer, r.model.config)
    shown = 0 if o.sample_prompt_ids else len(tokens)
    for i in range(o.sample_tokens):
        context = torch.tensor([tokens[-o.seq_len :]], device=r.device)
        logits = r.model(context, r.cis)[0, -1]
        u = llamac.random.uniform(o.seed, step, SAMPLING_STREAM, 1, start=i).item()
        tokens.append(sample_token(logits, o.sample_temperature, o.sample_top_k, u))
    return r.tokenizer.decode(tokens[shown:]) if r.tokenizer else " ".join(map(str, tokens[shown:]))


def save_checkpoint(r: Run, step: int) -> None:
    """Write OUT/step_NNNNNN and remove the oldest of this run beyond --keep-checkpoints."""
    finish(r)
    path = Path(r.options.out) / f"step_{step:06d}"
    save_model(r.model, path, DTYPES[r.options.dtype], r.carried)
    r.log.checkpoint(step, path)
    r.checkpoints.append(path)
    while len(r.checkpoints) > r.options.keep_checkpoints:
        oldest = r.checkpoints.pop(0)
        if rank() == 0:
            shutil.rmtree(oldest)


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
        if r.profiler and r.profiler.is_complete(step):
            finish(r)
            r.log.print(llamac.profile.report(llamac.profile.read(r.profiler.finish())))
        if r.val_data and due(step, o.val_every):
            r.log.val(step, validate(r))
        if o.sample_every and due(step, o.sample_every):
            r.log.sample(step, sample(r, step))
        if o.checkpoint_every >= 0 and due(step, o.checkpoint_every):
            save_checkpoint(r, step)
    finish(r)
    r.log.print_usage()
    r.log.close()
    if world() > 1:
        dist.destroy_process_group()
    if rank() == 0:
        conclude(r)


def conclude(r: Run) -> None:
    """Say where everything is."""
    out = Path(r.options.out)
    model = f"model {r.checkpoints[-1]}" if r.checkpoints else "no model"
    result = f"done: {model}, log {out}/log.jsonl"
    if not r.options.steps:
        return print(f"{result}, no loss plot (there was no step)")
    try:
        llamac.plot.draw(llamac.plot.read_log(out / "log.jsonl"), out / "loss.png")
        result += f", loss plot {out}/loss.png"
    except ImportError:
        result += " (no loss plot: matplotlib is not there)"
    print(result)


def main() -> None:
    argv = sys.argv[1:]
    if not argv:
        write_references(ROOT / "data" / "reference")
    elif "--train" in argv:
        try:
            options = llamac.options.parse([arg for arg in argv if arg != "--train"])
            print(options.to_toml(), end="") if options.print_config else train(options)
            leave()
        except (InputError, OSError) as error:
            tell_launcher(error)
            if rank() == 0:
                raise
            if not dist.is_initialized():  # found in flags and files, which are the same for all
                time.sleep(60)  # rank 0 says it, and its end is the others'
                os._exit(2)
            time.sleep(5)  # as above, where all find the same
            raise InputError(f"rank {rank()}: {error}") from None
    elif argv[0] in ("-h", "--help"):
        print(f"{__doc__}\nWith --train:\n")
        llamac.options.parse(["--help"])
    else:
        raise InputError(f"expected --train, or nothing (reference tensors), found {' '.join(argv)}")


if __name__ == "__main__":
    run(main)
