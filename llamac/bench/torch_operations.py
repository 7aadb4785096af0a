"""Every operation as users of PyTorch write it, with inputs: the baselines of our operations.

The formulas are the reference's (train_llama3.py). The formulas of derivatives are here: the reference leaves
them to autograd, and torch.compile optimizes some of them better as separate functions. Inputs and outputs
have the names of the operation's description (--list-kernels).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from llamac import reference
from llamac.base.dtypes import torch_dtypes
from llamac.ops import fp8
from llamac.training import fp8_reference

DTYPES = torch_dtypes("f32", "bf16")
EPS = 1e-5
THETA = 500000.0
LOWER = 0xFFFFFFFF  # 32 bits
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # as torch.optim names them
STEP = 3
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}  # named ones, for attention

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What a microbenchmark's line says of its call."""

    operation: str
    size: dict[str, int]  # by dimension letter
    dtype: dict[str, torch.dtype]  # by the description's type letter; T's where it names no other
    absent: frozenset[str]  # operands that are left out
    device: str

    @staticmethod
    def of(line: dict, device: str) -> "Case":
        """Reads the label of types: "bf16", "T=bf16 G=f32 M=f32, no master", or "" where all are f32."""
        types, *absent = line["dtype"].split(", ")
        letters = dict(word.split("=") for word in types.split()) if "=" in types else {"T": types or "f32"}
        dtype = {letter: DTYPES[name] for letter, name in letters.items()}
        names = frozenset(name.removeprefix("no ") for name in absent)
        return Case(line["operation"], line["shape"], dtype, names, device)

    def shape(self, dimensions: tuple[str | int, ...]) -> list[int]:
        return [self.size[d] if isinstance(d, str) else d for d in dimensions]

    def randn(self, *dimensions: str | int, letter: str = "T") -> torch.Tensor:
        return torch.randn(self.shape(dimensions), dtype=self.type_of(letter), device=self.device)

    def type_of(self, letter: str) -> torch.dtype:
        return self.dtype.get(letter, self.dtype["T"])

    def randint(self, below: str, *dimensions: str) -> torch.Tensor:
        return torch.randint(self.size[below], self.shape(dimensions), device=self.device)

    def number(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self.device)


# Inputs: by operand name, as the operation's description calls them.


def embedding_inputs(c: Case) -> Inputs:
    return {"tokens": c.randint("V", "N"), "weight": c.randn("V", "C")}


def embedding_backward_inputs(c: Case) -> Inputs:
    weight = c.randn("V", "C", letter="G")
    return {"tokens": c.randint("V", "N"), "weight": weight, "dout": c.randn("N", "C")}


def rmsnorm_inputs(c: Case) -> Inputs:
    return {"x": c.randn("N", "C"), "weight": c.randn("C")}


def residual_rmsnorm_inputs(c: Case) -> Inputs:
    return rmsnorm_inputs(c) | {"residual": c.randn("N", "C")}


def rmsnorm_backward_inputs(c: Case) -> Inputs:
    inputs = rmsnorm_inputs(c) | {"dout": c.randn("N", "C")}
    if "dresidual" not in c.absent:
        inputs["dresidual"] = c.randn("N", "C")
    rstd = torch.rsqrt(inputs["x"].float().square().mean(-1) + EPS)
    return inputs | {"rstd": rstd, "dweight_like": torch.empty(0, dtype=c.type_of("G"), device=c.device)}


def precompute_cis_inputs(c: Case) -> Inputs:
    return {"position": torch.arange(c.size["T"], device=c.device).float(), "frequency": frequencies(c)}


def frequencies(c: Case) -> torch.Tensor:
    return THETA ** (-torch.arange(0, c.size["HD"], 2, device=c.device).double() / c.size["HD"])


def rope_inputs(c: Case) -> Inputs:
    cis = precompute_cis(*precompute_cis_inputs(c).values())
    cos, sin = (part.contiguous() for part in cis[:, None].unbind(-1))
    x, dout = (c.randn("B", "T", "NH", "HD") for _ in range(2))
    return {"x": x, "dout": dout, "cis": cis, "cos": cos, "sin": sin}


def repeat_kv_inputs(c: Case) -> Inputs:
    return {"x": c.randn("B", "T", "NKV", "HD"), "dout": c.randn("B", "T", "NH", "HD")}


def attention_inputs(c: Case) -> Inputs:
    q, dout = (c.randn("B", "T", "NH", "HD") for _ in range(2))
    k, v = (c.randn("B", "T", "NKV", "HD") for _ in range(2))
    return {"q": q, "k": k, "v": v, "dout": dout}


def attention_decode_inputs(c: Case) -> Inputs:
    """A cache that is full but for its last position."""
    cis = precompute_cis(torch.arange(c.size["M"], device=c.device).float(), frequencies(c))
    cos, sin = (part.contiguous() for part in cis.unbind(-1))
    inputs = {name: c.randn("B", "M", "NKV", "HD") for name in ("keys", "values")}
    inputs |= {"q": c.randn("B", "NH", "HD"), "k": c.randn("B", "NKV", "HD"), "v": c.randn("B", "NKV", "HD")}
    begin = torch.zeros(c.size["B"], dtype=torch.int64, device=c.device)
    end = torch.full((1,), c.size["M"] - 1, device=c.device)
    return inputs | {"cis": cis, "cos": cos, "sin": sin, "begin": begin, "end": end}


def argmax_inputs(c: Case) -> Inputs:
    return {"x": c.randn("N", "V")}


def swiglu_inputs(c: Case) -> Inputs:
    return {"gate_up": c.randn("N", 2 * c.size["F"]), "dout": c.randn("N", "F")}


def matmul_inputs(c: Case) -> Inputs:
    inputs = {"x": c.randn("N", "C"), "weight": c.randn("K", "C")}
    if c.operation != "matmul_forward":
        dweight_like = torch.empty(0, dtype=c.type_of("G"), device=c.device)
        return inputs | {"dout": c.randn("N", "K"), "dweight_like": dweight_like}
    return inputs | ({} if "residual" in c.absent else {"residual": c.randn("N", "K")})


def cross_entropy_inputs(c: Case) -> Inputs:
    dlosses = torch.ones(c.size["N"], device=c.device)
    return {"logits": c.randn("N", "V"), "targets": c.randint("V", "N"), "dlosses": dlosses}


def linear_inputs(c: Case) -> Inputs:
    return {"x": c.randn("N", "C"), "weight": c.randn("F", "C") * c.size["C"] ** -0.5}


def linear_cross_entropy_inputs(c: Case) -> Inputs:
    hidden, weight = c.randn("N", "C"), c.randn("V", "C") * c.size["C"] ** -0.5  # logits of variance 1
    return {"hidden": hidden, "weight": weight, "targets": c.randint("V", "N")}


def mean_loss_inputs(c: Case) -> Inputs:
    losses = torch.randn(c.size["N"], device=c.device)
    return {"losses": losses, "targets": torch.randint(1, 10, losses.shape, device=c.device)}


def global_norm_inputs(c: Case) -> Inputs:
    return {"x": c.randn("P")}


def convert_inputs(c: Case) -> Inputs:
    return {
        "out": torch.empty(c.size["P"], dtype=c.type_of("T"), device=c.device),
        "x": c.randn("P", letter="G"),
    }


def hash_inputs(c: Case) -> Inputs:
    return {"x": c.randn("P").bfloat16()}  # the type of 2 bytes, of whatever they are a part


def adamw_inputs(c: Case) -> Inputs:
    inputs = {
        "weight": c.randn("P"),
        "m": c.randn("P", letter="M"),
        "v": c.randn("P", letter="M").abs(),
        "grad": c.randn("P", letter="G"),
        "scale": c.number(1.0),
        "lr": c.number(ADAMW["lr"]),
    }
    for name, beta in zip(("correction1", "correction2"), ADAMW["betas"]):
        inputs[name] = c.number(1 - beta**STEP)
    if "master" not in c.absent:
        inputs["master"] = inputs["weight"].to(torch.float32, copy=True)
    return inputs


# Functions: parameters are inputs by name; results are the operation's outputs, as Baseline names them.

rmsnorm = partial(reference.rmsnorm, eps=EPS)
residual_rmsnorm = partial(reference.residual_rmsnorm, eps=EPS)
attention = reference.attention
cross_entropy_losses = reference.cross_entropy
linear_cross_entropy = reference.linear_cross_entropy
mean_loss = reference.mean_loss


class ScaledLinear(torch.autograd.Function):
    """ops.linear's recipe by PyTorch's own product of fp8, which wants both operands along the sum."""

    @staticmethod
    def forward(ctx, x, weight, values, gradients):
        (a, a_inverse), (b, b_inverse) = quantized(x, values), quantized(weight, values)
        ctx.save_for_backward(a, b, a_inverse, b_inverse)
        ctx.dtype, ctx.gradients = x.dtype, gradients
        return torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx, dout):
        a, b, a_inverse, b_inverse = ctx.saved_tensors
        d, inverse = quantized(dout, ctx.gradients)
        b, a, d_turned = (t.t().contiguous().t() for t in (b, a, d))
        dx = torch._scaled_mm(d, b, inverse, b_inverse, out_dtype=ctx.dtype)
        return dx, torch._scaled_mm(d_turned.t(), a, inverse, a_inverse, out_dtype=ctx.dtype), None, None


def quantized(x, dtype):
    """Codes, and 1 / scale."""
    limit, one = torch.finfo(dtype).max, torch.ones((), device=x.device)
    scale = fp8_reference.power_of_two(fp8_reference.largest(x), limit, one)
    return fp8_reference.quantize(x, scale, dtype), 1 / scale


def linear(x, weight):
    """In fp8, recipe "tensor": by torch._scaled_mm on a GPU, else by the reference, which knows float64."""
    if x.is_cuda and x.dtype != torch.float64:
        return ScaledLinear.apply(x, weight, *fp8.types(x.device.index, "e5m2"))
    scales = fp8_reference.Scales(["x", "weight", "d"], "tensor", device=str(x.device))
    return fp8_reference.linear(x, weight, scales, ("x", "weight", "d"))


def embedding(tokens, weight):
    return F.embedding(tokens, weight)


def embedding_as(tokens, weight, dout):
    return F.embedding(tokens, weight).to(dout.dtype)


def rmsnorm_backward(dout, x, weight, rstd, dweight_like, dresidual=None):
    rstd = rstd[:, None]
    g, xhat = dout.float() * weight.float(), x.float() * rstd
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    return dx.to(x.dtype), (dout.float() * xhat).sum(0).to(dweight_like.dtype)


def precompute_cis(position, frequency):
    angle = torch.outer(position, frequency.to(position.dtype))
    return torch.stack((angle.cos(), angle.sin()), -1)


def rope(x, cos, sin):
    return reference.rope(x, (cos, sin))


def rope_backward(dout, cos, sin):
    return rope(dout, cos, -sin)


def repeat_kv(x, dout):
    return reference.repeat_kv(x, dout.shape[2])


def repeat_kv_backward(x, dout):
    return dout.unflatten(2, (x.shape[2], -1)).sum(3)


def attention_decode(q, k, v, keys, values, cos, sin, end):
    """All positions are seen: no mask."""
    angles = cos[end], sin[end]
    keys.index_copy_(1, end, rope(k[:, None], *angles))
    values.index_copy_(1, end, v[:, None])
    heads = (x.transpose(1, 2) for x in (rope(q[:, None], *angles), keys, values))
    return F.scaled_dot_product_attention(*heads, enable_gqa=True)[:, :, 0], keys, values


def argmax(x):
    return x.argmax(-1)


def swiglu(gate_up):
    return reference.swiglu(gate_up)


def swiglu_backward(dout, gate_up):
    dout, (gate, up) = dout.float(), gate_up.float().chunk(2, -1)
    s = torch.sigmoid(gate)
    dgate = dout * up * s * (1 + gate * (1 - s))
    return torch.cat((dgate, dout * gate * s), -1).to(gate_up.dtype)


def matmul(x, weight, residual=None):
    return x @ weight.T if residual is None else x @ weight.T + residual


def matmul_backward_input(dout, weight):
    return dout @ weight


def matmul_backward_weight(dout, x, dweight_like):
    if dweight_like.dtype == x.dtype:
        return dout.T @ x
    return torch.mm(dout.T, x, out_dtype=dweight_like.dtype)


def mean_cross_entropy(logits, targets):
    return reference.cross_entropy(logits, targets).mean()


def cross_entropy(logits, targets, dlosses):
    """Losses and dlogits in one function."""
    x = logits.float()
    log_sum = x.logsumexp(-1, keepdim=True)
    hit = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    losses = log_sum[:, 0] - x.gather(1, targets[:, None])[:, 0]
    return losses, (dlosses[:, None] * ((x - log_sum).exp() - hit.float())).to(logits.dtype)


def global_norm(x):
    return torch.linalg.vector_norm(x, dtype=torch.float32).square().reshape(1)


def convert(out, x):
    return out.copy_(x)


def hash_bits(x):
    """The operation's formula; int64 wraps around as it wants, and `& LOWER` makes a shift logical."""

    def fold(x):
        return x ^ (x >> 32 & LOWER)

    words = F.pad(x.view(torch.uint8), (0, -x.nbytes % 16)).view(torch.int64)
    position = torch.arange(1, words.numel() + 1, device=x.device) * (0x9E3779B97F4A7C15 - 2**64)
    terms = fold(words + position) * (0xBF58476D1CE4E5B9 - 2**64)
    total = fold(fold(terms) * (0x94D049BB133111EB - 2**64)).sum()
    return torch.stack((total & LOWER, total >> 32 & LOWER)).double()


def adamw(weight, m, v, grad, scale, lr, correction1, correction2, master=None):
    """scale: the clipping factor; correction1, correction2: 1 - beta^step; f32[] on the device, as lr is.
    Rounds to nearest what is not f32.
    """
    stored = [weight if master is None else master, m, v]
    exact = [reference.at_least_fp32(x) for x in stored]
    g = reference.at_least_fp32(grad) * scale
    constants = *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"]
    reference.adamw_update(exact[0], g, *exact[1:], lr, correction1, correction2, *constants)
    for low, high in zip(stored, exact):
        if low.dtype != high.dtype:
            low.copy_(high)
    if master is not None:
        weight.copy_(master)
    return weight, m, v
