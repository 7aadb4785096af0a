"""Every described operation as PyTorch computes it: its case by name, inputs for it, shapes to try. The
formulas are the reference's; what has none there is one call of PyTorch's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from llamac import reference
from llamac.base import random, registry
from llamac.base.dtypes import TABLE, torch_dtypes
from llamac.training.trace import explicit_attention, repeat_kv

DTYPES = torch_dtypes(*TABLE)
OPERATIONS = {op["name"]: op for op in registry.kernels()}
SCALE, EPS, THETA = 0.3, 1e-5, 10000.0
ROTATED = 2  # heads of rope_backward_quantize
DRAWN = (0.02, 42, 4, 2**34 - 32768)  # of fill_normal: deviation, seed, stream, offset
SCALE_LIMIT = 240.0  # of quantize_rows: within all types of fp8
ADAMW = {
    "lr": 1e-2,
    "step": 3,
    "norm": 5.0,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip": 1.0,
}


@dataclass(eq=False)  # each is itself alone
class Case:
    """One operation as PyTorch does it: inputs by operand name -> outputs by operand name, in their type."""

    torch: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    shapes: list[dict[str, int]]
    scalars: tuple = ()
    backward: bool = False
    absent: tuple[str, ...] = ()  # operands that are left out
    mask: dict = field(default_factory=dict)  # of attention: causal and window


def gradients(function: Callable, inputs: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, dout))


# A function per operation, from inputs by name to outputs by name.


def embedding_forward(i):
    row, position = F.embedding(i["tokens"].long(), i["weight"]), i["place"].long()
    return {"out": row + F.embedding(position, i["positions"])}


def embedding_backward(i):
    dout = i["dout"]
    dweight = torch.zeros(i["V"], dout.shape[1], dtype=dout.dtype)
    return {"dweight": dweight.index_add(0, i["tokens"].long(), dout)}


def rmsnorm_forward(i):
    return {"out": reference.rmsnorm(i["x"], i["weight"], EPS), "rstd": reference.rstd(i["x"], EPS)}


def residual_rmsnorm_forward(i):
    total, out = reference.residual_rmsnorm(i["x"], i["residual"], i["weight"], EPS)
    return {"sum": total, "out": out, "rstd": reference.rstd(total, EPS)}


def rmsnorm_backward(i):
    norm = partial(reference.rmsnorm, eps=EPS)
    dx, dweight = gradients(norm, [i["x"], i["weight"]], i["dout"])
    return {"dx": dx + i["dresidual"], "dweight": dweight, "out": norm(i["x"], i["weight"])}


def layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def layernorm_statistics(x):
    wide = reference.at_least_fp32(x)
    return {"mean": wide.mean(-1), "rstd": (wide.var(-1, correction=0) + EPS).rsqrt()}


def layernorm_forward(i):
    return {"out": layernorm(i["x"], i["weight"], i["bias"])} | layernorm_statistics(i["x"])


def residual_layernorm_forward(i):
    total = i["x"] + i["residual"]
    return {"sum": total} | layernorm_forward(i | {"x": total})


def layernorm_backward(i):
    inputs = [i["x"], i["weight"], i["bias"]]
    dx, dweight, dbias = gradients(layernorm, inputs, i["dout"])
    return {"dx": dx + i["dresidual"], "dweight": dweight, "dbias": dbias, "out": layernorm(*inputs)}


def precompute_cis(i):
    angle = torch.outer(torch.arange(i["T"]).to(i["stat"]), i["frequency"].to(i["stat"]))
    return {"cis": torch.stack((angle.cos(), angle.sin()), -1)}


def token_positions(i):
    zero = torch.zeros((), dtype=torch.int32)
    begin, first, end = (i.get(name, zero) for name in ("begin", "first", "end"))
    at = torch.arange(i["T"]) + end - (begin[:, None] if begin.ndim else begin) - first
    return {"out": at.expand(i["B"], i["T"]).int()}


def pair(cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cis [T,HD/2,2] as the reference has it: cos and sin [T,1,HD/2]."""
    return tuple(part[:, None] for part in cis.unbind(-1))


def rope_forward(i, interleaved=False):
    return {"out": reference.rope(i["x"], pair(i["cis"]), interleaved)}


def rope_backward(i, interleaved=False):
    rope = partial(reference.rope, cis=pair(i["cis"]), interleaved=interleaved)
    (dx,) = gradients(rope, [torch.zeros_like(i["dout"])], i["dout"])
    return {"dx": dx}


def qk_norm_rope(x, weight, cis):
    normalised = reference.rmsnorm(x, weight, EPS)
    return normalised if cis is None else reference.rope(normalised, pair(cis))


def qk_norm_rope_forward(i):
    return {"out": qk_norm_rope(i["x"], i["weight"], i["cis"]), "rstd": reference.rstd(i["x"], EPS)}


def qk_norm_rope_backward(i):
    dx, dweight = gradients(partial(qk_norm_rope, cis=i["cis"]), [i["x"], i["weight"]], i["dout"])
    return {"dx": dx, "dweight": dweight}


def repeat_kv_forward(i):
    return {"out": repeat_kv(i["x"], i["NH"])}


def repeat_kv_backward(i):
    dout = i["dout"]
    x = torch.zeros(*dout.shape[:2], i["NKV"], dout.shape[3], dtype=dout.dtype)
    (dx,) = gradients(partial(repeat_kv, NH=i["NH"]), [x], dout)
    return {"dx": dx}


def visible(i, causal, window):
    """Which keys a query sees [B or 1,1,T,S]; None: all up to its own, of as many keys as queries."""
    (T, S), first, end = (i[name].shape[1] for name in "qk"), i.get("first"), i.get("end")
    if causal and not window and first is None and end is None and T == S:
        return None
    own, key = torch.arange(S - T, S)[:, None], torch.arange(S)
    seen = key <= own if causal else torch.ones(T, S, dtype=torch.bool)
    seen = seen & (key > own - window) if window else seen
    seen = seen if first is None else seen & (key >= first[:, :, None])
    seen = seen if end is None else seen & (key < end[:, :, None])
    return seen.expand(-1 if seen.dim() == 3 else 1, T, S)[:, None]


def attention(q, k, v, seen=None):
    if seen is None:
        return reference.attention(q, k, v, SCALE)
    options = {"attn_mask": seen, "scale": SCALE, "enable_gqa": True}
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2)


def log_sum_exp(q, k, seen):
    if seen is None:
        seen = reference.seen(q.shape[1], None, None, True, q.device)
    return explicit_attention(q, k, k, seen, SCALE)[1]


def attention_forward(i, causal=True, window=0):
    seen = visible(i, causal, window)
    return {"out": attention(i["q"], i["k"], i["v"], seen), "lse": log_sum_exp(i["q"], i["k"], seen)}


def saved_results(name, i, **mask):
    """Inputs of operation `name` that are results of other inputs, saved by the forward pass: in f64."""
    if name != "attention_backward":
        return {}
    return attention_forward({n: i[n].double() for n in "qkv"} | {n: i[n] for n in ("first", "end")}, **mask)


def attention_backward(i, causal=True, window=0):
    attend = partial(attention, seen=visible(i, causal, window))
    return dict(zip(("dq", "dk", "dv"), gradients(attend, [i["q"], i["k"], i["v"]], i["dout"])))


def attention_decode(i):
    """One sequence after the other, its keys and values by the reference's formulas."""
    keys, values, end = i["keys"].clone(), i["values"].clone(), int(i["end"][0])
    outs = []
    for b, first in enumerate(i["begin"].tolist()):
        begin = min(first, end)
        cis = pair(i["cis"][end - begin][None])
        # Keys are rounded to the storage type; queries, in the arithmetic's type, are not.
        wide = i["q"][b][None, None].to(i["cis"].dtype)
        q, k = reference.rope(wide, cis, False), reference.rope(i["k"][b][None, None], cis, False)
        keys[b, end], values[b, end] = k[0, 0], i["v"][b]
        seen = torch.ones(1, 1, 1, end + 1 - begin, dtype=torch.bool)
        k, v = (x[b : b + 1, begin : end + 1].to(q.dtype) for x in (keys, values))
        outs.append(attention(q, k, v, seen)[0, 0].to(keys.dtype))
    return {"out": torch.stack(outs), "keys": keys, "values": values}


def argmax(i):
    return {"out": i["x"].argmax(-1).int()}


def swiglu_forward(i):
    return {"out": reference.swiglu(i["gate_up"])}


def swiglu_backward(i):
    (dgate_up,) = gradients(reference.swiglu, [i["gate_up"]], i["dout"])
    return {"dgate_up": dgate_up, "out": reference.swiglu(i["gate_up"])}


def gelu(x, bias, tanh):
    return F.gelu(x + bias, approximate="tanh" if tanh else "none")


def gelu_forward(i, tanh=False):
    return {"out": gelu(i["x"], i["bias"], tanh)}


def gelu_backward(i, tanh=False):
    (dx,) = gradients(partial(gelu, bias=i["bias"], tanh=tanh), [i["x"]], i["dout"])
    return {"dx": dx, "out": gelu(i["x"], i["bias"], tanh)}


def matmul_forward(i):
    return {"out": i["x"] @ i["weight"].T + i["residual"] + i["bias"]}


def bias_forward(i):
    return {"out": i["x"] + i["bias"]}


def bias_backward(i):
    return {"dbias": i["dout"].sum(0)}


def matmul_backward_input(i):
    return {"dx": i["dout"] @ i["weight"]}


def matmul_backward_weight(i):
    return {"dweight": i["dout"].T @ i["x"]}


def cross_entropy(i):
    logits = i["logits"].detach().clone().requires_grad_()
    losses = reference.cross_entropy(logits, i["targets"].long())
    (dlogits,) = torch.autograd.grad((losses * i["dlosses"]).sum() * SCALE, logits)
    mean = mean_loss({"losses": losses.detach(), "targets": i["targets"]})
    return {"losses": losses.detach(), "dlogits": dlogits} | mean


def vocabulary_ids(i, first=3, count=5, other=7):
    ids = i["ids"] - first
    return {"out": torch.where((ids >= 0) & (ids < count), ids, other).int()}


def softmax_parts(i):
    x = i["logits"]
    largest = x.max(-1, keepdim=True)[0]
    at_target = x.gather(-1, i["targets"].long()[:, None])
    return {"out": torch.cat((largest, (x - largest).exp().sum(-1, keepdim=True), at_target), -1)}


def cross_entropy_parts(i):
    largest = i["parts"][..., 0].max(0)[0]
    total = (i["parts"][..., 1] * (i["parts"][..., 0] - largest).exp()).sum(0)
    counts = i["targets"] != -100
    losses = torch.where(counts, total.log() + largest - i["parts"][..., 2].sum(0), 0)
    dlogits = (i["logits"] - largest[:, None]).exp() / total[:, None]
    dlogits = dlogits - torch.nn.functional.one_hot(i["targets"].long().clamp(0), i["V"])
    return {"losses": losses, "dlogits": dlogits * (counts * i["dlosses"] * SCALE)[:, None]}


def mean_loss(i):
    mean, count = reference.mean_loss(reference.at_least_fp32(i["losses"]), i["targets"])
    return {"mean": mean, "num_valid": count}


def global_norm(i):
    return {"squares": reference.at_least_fp32(i["x"]).square().sum().reshape(1)}


def _fold(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint64(32))


def hash_halves(x: np.ndarray) -> np.ndarray:
    """float64[2]: the lower and the upper 32 bits of the hash (csrc/ops/hash.hip) of an array's memory."""
    memory = np.ascontiguousarray(x).tobytes()
    words = np.frombuffer(memory + bytes(-len(memory) % 16), np.uint64)
    with np.errstate(over="ignore"):
        position = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        terms = _fold(_fold(words + position) * np.uint64(0xBF58476D1CE4E5B9))
        total = int(_fold(terms * np.uint64(0x94D049BB133111EB)).sum(dtype=np.uint64))
    return np.array([total & 0xFFFFFFFF, total >> 32], np.float64)


def hash_bits(i):
    return {"sum": torch.from_numpy(hash_halves(i["x"].bfloat16().view(torch.uint8).numpy()))}


def convert(i):
    return {"out": i["x"]}


def scale_rows(i):
    return {"out": SCALE * i["row_scale"][:, None] * i["x"].to(i["row_scale"].dtype)}


def quantize(i):
    values = i["x"] * i["scale"]
    largest = torch.maximum(i["amax"], i["x"].abs().max().to(i["amax"].dtype))
    return {"out": values, "transposed": values.T, "amax": largest, "saturated": i["saturated"]}


def quantize_rows(i):
    limit = SCALE_LIMIT

    def scale(largest):
        (m_limit, e_limit), (m, e) = torch.frexp(torch.full_like(largest, limit)), torch.frexp(largest)
        return torch.ldexp(torch.ones_like(largest), e_limit - e - (m > m_limit).int())

    x = reference.at_least_fp32(i["x"])
    row, column = scale(x.abs().amax(1)), scale(x.abs().amax(0))
    codes = {"out": x * row[:, None], "transposed": (x * column).T}
    return codes | {"inverse": 1 / row, "inverse_transposed": 1 / column, "saturated": i["saturated"]}


def quantized(i, values):
    """quantize of what another operation gives, which would be stored as the inputs are."""
    return quantize(i | {"x": values})


def swiglu_forward_quantize(i):
    return quantized(i, swiglu_forward(i)["out"])


def swiglu_backward_quantize(i):
    return quantized(i, swiglu_backward(i)["dgate_up"])


def rope_backward_quantize(i):
    """Two of the heads are turned."""
    dout, cis = i["dout"], i["cis"]
    N, heads, HD = dout.shape
    first = {"dout": dout[:, :ROTATED].reshape(N // cis.shape[0], cis.shape[0], -1, HD), "cis": cis}
    turned = rope_backward(first)["dx"].reshape(N, -1, HD).to(dout.dtype)
    codes = quantized(i, torch.cat((turned, dout[:, ROTATED:]), 1).flatten(1))
    shapes = {"out": (N, heads, HD), "transposed": (heads, HD, N)}
    return codes | {name: codes[name].reshape(shape) for name, shape in shapes.items()}


def update_scales(i):
    (m_limit, e_limit), (m_amax, e_amax) = (torch.frexp(i[name]) for name in ("limit", "amax"))
    scale = torch.ldexp(torch.ones_like(i["scale"]), e_limit - e_amax - (m_amax > m_limit).int())
    inverse = torch.cat((1 / scale[:, None], i["inverse"][:, 1:]), 1)
    unit = 1.0 if i["unit"] is None else i["unit"]
    largest = {} if i["largest"] is None else {"largest": i["amax"] / unit}
    return {"scale": scale, "inverse": inverse, "amax": torch.zeros_like(i["amax"])} | largest


def scaled_matmul(i):
    a, b = (i[name] if i[name].dtype == torch.float64 else i[name].float() for name in "ab")
    product = (a @ b.T) * (i["a_scale"] * i["b_scale"])
    return {"out": (product + i["residual"]).to(i["residual"].dtype)}


def scaled_matmul_rows(i):
    return scaled_matmul(i | {"a_scale": i["a_scale"][:, None]})


def fill_normal(i):
    """Rounded to f32, then to the type of storage."""
    deviation, seed, stream, offset = DRAWN
    values = np.float32(deviation) * random.normal(seed, 0, stream, i["P"], offset)
    return {"out": torch.from_numpy(values).to(i["stat"])}


def adamw(i):
    """A step in the middle of a run."""
    a, stored = ADAMW, i["weight"] if i["master"] is None else i["master"]
    p, m, v = (reference.at_least_fp32(x).clone() for x in (stored, i["m"], i["v"]))
    scale = i["squares"].sqrt().item() / a["norm"] if "squares" in i else 1.0
    g = reference.at_least_fp32(i["grad"]) / scale * min(1.0, a["clip"] / (a["norm"] + 1e-6))
    bias1, bias2 = (1 - beta ** a["step"] for beta in a["betas"])
    reference.adamw_update(p, g, m, v, a["lr"], bias1, bias2, *a["betas"], a["eps"], a["weight_decay"])
    out = {"weight": p.to(i["weight"].dtype), "m": m, "v": v}
    return out | ({} if i["master"] is None else {"master": p})


def scale_loss(i):
    return {"out": i["dloss"] * i["scale"]}


def update_loss_scale(i, interval=2):
    """torch.amp.GradScaler's rule."""
    overflow = (i["squares"] + i["guard"]).isinf().float()
    scale, counts = i["scale"].float().clone(), i["counts"].clone()
    for one, count, found in zip(scale.split(1), counts, overflow):
        torch._amp_update_scale_(one, count[:1], found, 2.0, 0.5, interval)
    counts[:, 1] += 1 - overflow.int()
    return {"scale": scale, "counts": counts}


def adamw_quantize(i):
    updated = adamw(i)
    return updated | quantized(i, updated["weight"])


ROWS = [{"N": n, "C": c} for n, c in ((1, 1), (7, 63), (3, 64), (2, 65), (33, 129), (1, 1031), (5, 4096))]
BIASED = [{"N": r["N"], "K": r["C"]} for r in ROWS]
HEADS = [
    {"B": b, "T": t, "S": t, "NH": h, "NKV": kv, "HD": d}
    for b, t, h, kv, d in (
        (1, 1, 1, 1, 2),
        (2, 7, 3, 1, 8),
        (1, 63, 4, 2, 16),
        (1, 64, 2, 2, 64),
        (2, 65, 8, 1, 20),
        (1, 129, 4, 4, 128),
        (1, 300, 3, 3, 32),
    )
]
CACHED = [size | {"S": size["T"] + more} for size, more in zip(HEADS, (0, 130, 1, 64, 0, 38, 7))]
DECODE = [
    {"B": b, "NH": h, "NKV": n, "HD": d, "M": m}
    for b, h, n, d, m in (
        (1, 1, 1, 2, 1),
        (2, 6, 2, 8, 7),
        (3, 4, 1, 64, 130),
        (1, 8, 8, 20, 65),
        (2, 4, 2, 128, 300),
    )
]
FEED = [{"N": n, "F": f} for n, f in ((1, 1), (7, 63), (3, 64), (2, 65), (5, 1031))]
# A long sum has many results: few of them PyTorch (MKL) computes by dot products on some CPUs, whose
# errors are half of its matrix products'.
PRODUCTS = [
    {"N": n, "C": c, "K": k}
    for n, c, k in (
        *((1, 1, 1), (7, 63, 65), (64, 64, 64), (33, 129, 31), (66, 1031, 67), (257, 96, 320)),
        (1, 24, 517),  # one row, which a variant is for
    )
]
TILES = [{"N": n, "C": c} for n, c in ((1, 1), (7, 63), (16, 16), (160, 144), (33, 272), (130, 65))]
FEED_TILES = [{"N": t["N"], "F": t["C"]} for t in TILES]
HEAD_TILES = [
    {"N": n, "T": t, "NH": h, "HD": d}
    for n, t, h, d in (
        (1, 1, 1, 2),
        (6, 3, 3, 10),
        (16, 16, 2, 16),
        (160, 80, 3, 48),
        (32, 16, 4, 128),
        (130, 65, 1, 20),
    )
]
MATRICES = [{"K": t["N"], "C": t["C"]} for t in TILES]
CLASSES = [
    {"N": n, "V": v} for n, v in ((1, 1), (7, 2), (3, 63), (2, 65), (5, 4096), (3, 50257), (2, 128256))
]
ANGLES = [{"T": t, "HD": d} for t, d in ((1, 2), (7, 6), (65, 64), (1031, 128), (70001, 2))]
ELEMENTS = [{"P": p} for p in (1, 7, 63, 64, 65, 1031, 100003)]
WORDS = [
    {"N": n, "C": c, "V": v, "M": m}
    for n, c, v, m in ((1, 1, 1, 1), (7, 63, 5, 3), (65, 64, 1031, 40), (130, 33, 2, 65))
]

ADAMW_SCALARS = (*ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"], ADAMW["clip"], 42, 0, 0)
CASES = {
    "embedding_forward": Case(embedding_forward, WORDS),
    "embedding_backward": Case(embedding_backward, WORDS, (False,), backward=True),
    "rmsnorm_forward": Case(rmsnorm_forward, ROWS, (EPS,)),
    "residual_rmsnorm_forward": Case(residual_rmsnorm_forward, ROWS, (EPS,)),
    "rmsnorm_backward": Case(rmsnorm_backward, ROWS, (False,), backward=True),
    "layernorm_forward": Case(layernorm_forward, ROWS, (EPS,)),
    "residual_layernorm_forward": Case(residual_layernorm_forward, ROWS, (EPS,)),
    # Of one column, PyTorch's gradients are rounding errors, ours 0.
    "layernorm_backward": Case(layernorm_backward, ROWS[1:], (False,), backward=True),
    "precompute_cis": Case(precompute_cis, ANGLES),
    "token_positions": Case(token_positions, [{"B": 3, "T": 8}, {"B": 2, "T": 5}], (0,)),
    "rope_forward": Case(rope_forward, HEADS, (False,)),
    "rope_backward": Case(rope_backward, HEADS, (False,), backward=True),
    "qk_norm_rope_forward": Case(qk_norm_rope_forward, HEADS, (EPS,)),
    "qk_norm_rope_backward": Case(qk_norm_rope_backward, HEADS, (False,), backward=True),
    "repeat_kv_forward": Case(repeat_kv_forward, HEADS),
    "repeat_kv_backward": Case(repeat_kv_backward, HEADS, backward=True),
    "attention_forward": Case(attention_forward, HEADS, (SCALE,), absent=("first", "end")),
    "attention_backward": Case(attention_backward, HEADS, (SCALE,), backward=True, absent=("first", "end")),
    "attention_decode": Case(attention_decode, DECODE, (SCALE,)),
    "argmax": Case(argmax, CLASSES),
    "swiglu_forward": Case(swiglu_forward, FEED),
    "swiglu_backward": Case(swiglu_backward, FEED, backward=True),
    "gelu_forward": Case(gelu_forward, FEED, (False,)),
    "gelu_backward": Case(gelu_backward, FEED, (False,), backward=True),
    "bias_forward": Case(bias_forward, BIASED),
    "bias_backward": Case(bias_backward, BIASED, (False,), backward=True),
    "matmul_forward": Case(matmul_forward, PRODUCTS),
    "matmul_backward_input": Case(matmul_backward_input, PRODUCTS, (False,), backward=True),
    "matmul_backward_weight": Case(matmul_backward_weight, PRODUCTS, (False,), backward=True),
    "cross_entropy": Case(cross_entropy, CLASSES, (SCALE, -100)),
    "vocabulary_ids": Case(vocabulary_ids, [{"N": n} for n in (1, 7, 1031)], (3, 5, 7)),
    "softmax_parts": Case(softmax_parts, CLASSES),
    "cross_entropy_parts": Case(cross_entropy_parts, [{"R": 2} | each for each in CLASSES], (SCALE, -100)),
    "mean_loss": Case(mean_loss, [{"N": n} for n in (1, 7, 65, 1031, 100003)], (-100,)),
    "global_norm": Case(global_norm, ELEMENTS, (False,)),
    "hash": Case(hash_bits, ELEMENTS),
    "convert": Case(convert, ELEMENTS, (False,)),
    "fill_normal": Case(fill_normal, ELEMENTS, DRAWN),
    "adamw": Case(adamw, ELEMENTS, (*ADAMW_SCALARS, 0, 0, 0)),
    "scale_rows": Case(scale_rows, [{"K": t["N"], "C": t["C"]} for t in TILES], (SCALE, False)),
    "scale_loss": Case(scale_loss, ELEMENTS),
    "update_loss_scale": Case(update_loss_scale, ELEMENTS, (2,)),
    "quantize": Case(quantize, TILES),
    "quantize_rows": Case(quantize_rows, TILES, (SCALE_LIMIT,)),
    "swiglu_forward_quantize": Case(swiglu_forward_quantize, FEED_TILES),
    "swiglu_backward_quantize": Case(swiglu_backward_quantize, FEED_TILES, backward=True),
    "rope_backward_quantize": Case(rope_backward_quantize, HEAD_TILES, (ROTATED,), backward=True),
    "adamw_quantize": Case(adamw_quantize, MATRICES, ADAMW_SCALARS),
    "update_scales": Case(update_scales, ELEMENTS),
    "scaled_matmul": Case(scaled_matmul, PRODUCTS, (False, 0)),
    "scaled_matmul_rows": Case(scaled_matmul_rows, PRODUCTS, (False, 0)),
}


def shape_of(operand: dict, sizes: dict[str, int]) -> list[int]:
    return [
        factor * (sizes[symbol] if symbol else 1) // divisor for symbol, factor, divisor in operand["shape"]
    ]


def begins(shape: list[int], keys: int, generator: torch.Generator) -> torch.Tensor:
    """The first key of each query's document [B,T], about four per sequence, anywhere before the query."""
    own = torch.arange(shape[1]) + max(0, keys - shape[1])
    given = (torch.rand(shape, generator=generator) * (own + 1)).long().minimum(own)
    begin = torch.rand(shape, generator=generator) < 4 / shape[1]
    return given.where(begin, torch.zeros_like(given)).cummax(1).values.int()


def make_inputs(
    op: dict, types: list[str], sizes: dict[str, int], seed: int, absent: tuple[str, ...] = (), **mask
) -> dict[str, torch.Tensor]:
    """Random normal values for all that the operation reads; values that belong together do."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for operand, dtype in zip(op["operands"], types):
        if operand["output"] and not operand["in_place"]:
            continue
        shape = shape_of(operand, sizes)
        if operand["bound"]:
            value = torch.randint(sizes[operand["bound"]], shape, generator=generator, dtype=torch.int32)
        elif operand["begins"]:
            value = begins(shape, sizes[operand["begins"]], generator)
        elif operand["ends"]:  # those of the documents from the back
            behind = begins(shape, shape[1], generator).flip(1)
            value = (sizes[operand["ends"]] - behind).clamp(min=1)
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
        values[operand["name"]] = value.abs() if operand["positive"] else value
    if op["name"] in ("adamw", "adamw_quantize"):
        for name, value in (("lr", ADAMW["lr"]), ("step", ADAMW["step"]), ("squares", ADAMW["norm"] ** 2)):
            values[name].fill_(value)
        if values["weight"].itemsize == 2:
            values["master"] = values["weight"].float()
    if op["name"] == "update_loss_scale":
        values["squares"][::3] = torch.inf
        values["guard"][::4] = torch.inf
    if op["name"] in ("cross_entropy", "cross_entropy_parts", "mean_loss") and sizes["N"] > 2:
        values["targets"][1] = -100
    if op["name"].endswith("quantize"):
        values["scale"].fill_(16)  # a power of two; nothing is beyond the largest value
    if "layernorm" in op["name"]:
        values["x"] += 1  # beside a mean near 0, every rounding error is large
    if op["name"] in ("rmsnorm_backward", "qk_norm_rope_backward"):
        values["rstd"] = reference.rstd(values["x"], EPS)
    if op["name"] == "layernorm_backward":
        values |= layernorm_statistics(values["x"])
    values |= dict.fromkeys(absent)
    for name, value in saved_results(op["name"], values, **mask).items():
        values[name] = value.to(values[name].dtype)
    if op["name"] in ("adamw", "adamw_quantize"):
        values["guard"] = None
        values["master"] = values["master"] if values["weight"].itemsize == 2 else None
    if op["name"] == "adamw":
        scaled = values["weight"].dtype == torch.float16
        values["scale"] = values["scale"].fill_(1024) if scaled else None
        values["squares"] *= 1024**2 if scaled else 1
    return values


def as_type(values: dict, storage: torch.dtype | None) -> dict:
    """The same values; where storage is given, all floats in that type."""
    return {
        name: value.to(storage) if value is not None and storage and value.is_floating_point() else value
        for name, value in values.items()
    }
