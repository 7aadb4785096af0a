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

    def forward(self, x: Tensor, cis: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attention(rope(q, cis), rope(k, cis), v))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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


@torch.no_grad()
def init_weights(model: Llama, seed: int) -> None:
    """Matrices and the embedding: normal with standard deviation initializer_range; norms: 1. Parameter k
    draws from the random stream 4k, so that the C program starts from the same weights.
    """
    for k, weight in enumerate(model.parameters()):
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            values = torch.from_numpy(llamac.random.normal(seed, 0, 4 * k, weight.numel()))
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


def adamw_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update t = 1, 2, … of one parameter p with gradient g, in place (Loshchilov & Hutter 2019):

        p -= lr · (m̂ / (√v̂ + eps) + weight_decay · p)

    where m̂ and v̂ are the moments m and v corrected for their start at zero.
    """
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v / (1 - beta2**t)).sqrt_().add_(eps)
    change = (m / denominator).div_(1 - beta1**t).add_(p, alpha=weight_decay)
    # Not p.addcdiv_(..., value=-lr): compiled by torch 2.13, that goes on with the first update's lr.
    p.sub_(change.mul_(lr))


def stochastic_round(x: Tensor, words: np.ndarray) -> Tensor:
    """x, fp32, to bf16: away from zero with the probability that the cut-off bits stand for.

    words: uint32[n], random; their upper halves are added below bf16's last bit.
    """
    noise = torch.from_numpy((words >> 16).astype(np.int32)).to(x.device).view_as(x)
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()


class AdamW:
    """AdamW on a list of parameters; only matrices decay.

    bf16 weights are updated through fp32 master copies, or, without those, rounded stochastically: rounding
    to nearest would lose every update below half a bf16 step. Moments are fp32, or bf16 rounded
    stochastically.
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
    ):
        self.params = list(params)
        self.beta1, self.beta2, self.weight_decay, self.eps, self.seed = beta1, beta2, weight_decay, eps, seed
        weights = [p.detach() for p in self.params]
        self.master = [at_least_fp32(w) for w in weights] if master_weights else weights
        self.m = [torch.zeros_like(w, dtype=state_dtype) for w in weights]
        self.v = [torch.zeros_like(w, dtype=state_dtype) for w in weights]
        self.steps = 0
        self.update = adamw_update

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float) -> None:
        """One update with the gradients of `params`, in their order."""
        self.steps += 1
        for k, (weight, g) in enumerate(zip(self.params, grads, strict=True)):
            stored = (self.master[k], self.m[k], self.v[k])
            p, m, v = exact = [at_least_fp32(x) for x in stored]  # no copy, so in place, where fp32 is stored
            decay = self.weight_decay if weight.dim() == 2 else 0.0
            self.update(p, at_least_fp32(g), m, v, self.steps, lr, self.beta1, self.beta2, self.eps, decay)
            for stream, (low, high) in enumerate(zip(stored, exact, strict=True), start=4 * k):
                if low.dtype != high.dtype:
                    words = llamac.random.words(self.seed, self.steps, stream, low.numel())
                    low.copy_(stochastic_round(high, words))
            if self.master[k].dtype != weight.dtype:
                weight.copy_(self.master[k])


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
    if grad_clip > 0:
        torch._foreach_mul_(grads, (grad_clip / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step(grads, lr)
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

SAMPLING_STREAM = 0xFFFFFFFF  # of the random numbers; the parameters have the lower ones


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


def start(o: Options) -> Run:
    """Open the data, make the model and its optimizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    )
    forward = model
    if o.compile:
        forward, optimizer.update = torch.compile(model), torch.compile(adamw_update, dynamic=True)
    log = Log(o.out, steps=o.steps, tokens=B * T * micro_steps, flops_per_token=config.flops_per_token(T))
    log.print(f"PyTorch {torch.__version__} on {device}, {o.model}: {config.num_parameters():,} parameters")
    log.print(f"{micro_steps} x {B} x {T} tokens an update, {data.tokens:,} to train on")
    log.start(o.to_dict())
    cis = precompute_cis(config, T, device)
    return Run(o, device, model, forward, cis, optimizer, data, val_data, tokenizer, log)


def to_device(batch: tuple[np.ndarray, np.ndarray], device: str) -> tuple[Tensor, Tensor]:
    """tokens and targets, int32[B,T] -> int64[B,T] on the device."""
    tokens, targets = (torch.from_numpy(x).to(device, torch.int64) for x in batch)
    return tokens, targets


def update(r: Run, step: int) -> None:
    """Update `step` = 1, 2, … of the run, and its line in the log."""
    o, started = r.options, time.perf_counter()
    schedule = {"min_lr_frac": o.min_lr_frac, "warmup_steps": o.warmup_steps, "schedule": o.schedule}
    lr = learning_rate(step, lr=o.lr, steps=o.steps, **schedule)
    batches = [to_device(r.data.micro_batch(step - 1, micro), r.device) for micro in range(r.data.accum)]
    result = train_step(r.forward, batches, r.cis, r.optimizer, lr, o.grad_clip, DTYPES[o.grad_dtype])
    loss, norm = result.tolist()  # the one place in a step that waits for the device
    gpu_mem = torch.cuda.max_memory_allocated() / 2**30 if r.device == "cuda" else 0.0
    r.log.step(step, loss, norm, lr, (time.perf_counter() - started) * 1e3, gpu_mem)


@torch.no_grad()
def validate(r: Run) -> float:
    """Mean loss over --val-steps batches, in nats a token."""
    batches = (to_device(batch, r.device) for batch in r.val_data.validation(r.options.val_steps))
    return torch.stack([r.model(tokens, r.cis, targets) for tokens, targets in batches]).mean().item()


@torch.no_grad()
def sample(r: Run, step: int) -> str:
    """--sample-tokens tokens behind an end-of-text token, as text where there is a tokenizer. Every token
    costs a forward over the last --seq-len: a cache of keys and values is more code than a sample now and
    then is worth.
    """
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
        if due(step, o.checkpoint_every):
            save_checkpoint(r, step)
    r.log.close()
    result = f"done: model {r.checkpoints[-1]}, log {o.out}/log.jsonl"
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
