"""Every operation as PyTorch's users write it, and inputs for it: what ours is compared with.

Inputs and outputs have the names of the operation's description (--list-kernels).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
THETA = 500000.0
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 3
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}  # named ones, for attention

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What a microbenchmark's line says of its call."""

    operation: str
    size: dict[str, int]  # by dimension letter
    dtype: dict[str, torch.dtype]  # by type letter: T storage, G gradient, M moment
    absent: frozenset[str]  # operands that are left out
    device: str

    @staticmethod
    def of(line: dict, device: str) -> "Case":
        """Reads the label of types: "bf16", "T=bf16 G=f32 M=f32, no master", or "" where all are f32."""
        types, *absent = line["dtype"].split(", ")
        letters = dict(word.split("=") for word in types.split()) if "=" in types else {"T": types or "f32"}
        dtype = {letter: DTYPES[letters.get(letter, letters["T"])] for letter in "TGM"}
        names = frozenset(name.removeprefix("no ") for name in absent)
        return Case(line["operation"], line["shape"], dtype, names, device)

    def shape(self, dimensions: tuple[str | int, ...]) -> list[int]:
        return [self.size[d] if isinstance(d, str) else d for d in dimensions]

    def randn(self, *dimensions: str | int, letter: str = "T") -> torch.Tensor:
        return torch.randn(self.shape(dimensions), dtype=self.dtype[letter], device=self.device)

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
    return inputs | {"rstd": rstd, "dweight_like": torch.empty(0, dtype=c.dtype["G"], device=c.device)}


def precompute_cis_inputs(c: Case) -> Inputs:
    return {"position": torch.arange(c.size["T"], device=c.device).float(), "pair": pairs(c)}


def pairs(c: Case) -> torch.Tensor:
    return torch.arange(0, c.size["HD"], 2, device=c.device).float() / c.size["HD"]


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


def swiglu_inputs(c: Case) -> Inputs:
    return {"gate_up": c.randn("N", 2 * c.size["F"]), "dout": c.randn("N", "F")}


def matmul_inputs(c: Case) -> Inputs:
    inputs = {"x": c.randn("N", "C"), "weight": c.randn("K", "C")}
    if c.operation != "matmul_forward":
        dweight_like = torch.empty(0, dtype=c.dtype["G"], device=c.device)
        return inputs | {"dout": c.randn("N", "K"), "dweight_like": dweight_like}
    return inputs | ({} if "residual" in c.absent else {"residual": c.randn("N", "K")})


def cross_entropy_inputs(c: Case) -> Inputs:
    dlosses = torch.ones(c.size["N"], device=c.device)
    return {"logits": c.randn("N", "V"), "targets": c.randint("V", "N"), "dlosses": dlosses}


def linear_cross_entropy_inputs(c: Case) -> Inputs:
    hidden, weight = c.randn("N", "C"), c.randn("V", "C") * c.size["C"] ** -0.5  # logits of variance 1
    return {"hidden": hidden, "weight": weight, "targets": c.randint("V", "N")}


def mean_loss_inputs(c: Case) -> Inputs:
    losses = torch.randn(c.size["N"], device=c.device)
    return {"losses": losses, "targets": torch.randint(1, 10, losses.shape, device=c.device)}


def global_norm_inputs(c: Case) -> Inputs:
    return {"x": c.randn("P")}


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


# Functions: parameters are inputs by name; results are the operation's outputs, as Peer names them.


def embedding(tokens, weight):
    return F.embedding(tokens, weight)


def embedding_as(tokens, weight, dout):
    return F.embedding(tokens, weight).to(dout.dtype)


def rmsnorm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def residual_rmsnorm(x, residual, weight):
    total = x + residual
    return total, rmsnorm(total, weight)


def rmsnorm_backward(dout, x, weight, rstd, dweight_like, dresidual=None):
    rstd = rstd[:, None]
    g, xhat = dout.float() * weight.float(), x.float() * rstd
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    return dx.to(x.dtype), (dout.float() * xhat).sum(0).to(dweight_like.dtype)


def precompute_cis(position, pair):
    angle = torch.outer(position, THETA**-pair)
    return torch.stack((angle.cos(), angle.sin()), -1)


def wide(x):
    """The type that arithmetic on x is done in."""
    return x if x.dtype == torch.float64 else x.float()


def rope(x, cos, sin):
    x1, x2 = wide(x).chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


def rope_backward(dout, cos, sin):
    return rope(dout, cos, -sin)


def repeat_kv(x, dout):
    b, t, nkv, hd = x.shape
    return x[:, :, :, None].expand(b, t, nkv, dout.shape[2] // nkv, hd).reshape(dout.shape)


def repeat_kv_backward(x, dout):
    return dout.unflatten(2, (x.shape[2], -1)).sum(3)


def attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


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


def cross_entropy_losses(logits, targets):
    return F.cross_entropy(wide(logits), targets, reduction="none")


def mean_cross_entropy(logits, targets):
    return F.cross_entropy(wide(logits), targets)


def linear_cross_entropy(hidden, weight, targets):
    return mean_cross_entropy(hidden @ weight.T, targets)


def cross_entropy(logits, targets, dlosses):
    """Losses and dlogits in one function."""
    x = logits.float()
    log_sum = x.logsumexp(-1, keepdim=True)
    hit = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    losses = log_sum[:, 0] - x.gather(1, targets[:, None])[:, 0]
    return losses, (dlosses[:, None] * ((x - log_sum).exp() - hit.float())).to(logits.dtype)


def mean_loss(losses, targets):
    counted = targets != -100
    count = counted.sum(dtype=torch.float32)
    return (losses * counted).sum() / count, count


def global_norm(x):
    return torch.linalg.vector_norm(x, dtype=torch.float32).reshape(1)


def adamw(weight, m, v, grad, scale, lr, correction1, correction2, master=None):
    """scale: the clipping factor; correction1, correction2: 1 - beta^step; f32[] on the device, as lr is."""
    source = weight if master is None else master
    beta1, beta2 = ADAMW["betas"]
    g = grad.float() * scale
    new_m = beta1 * m.float() + (1 - beta1) * g
    new_v = beta2 * v.float() + (1 - beta2) * g * g
    step = (new_m / correction1) / ((new_v / correction2).sqrt() + ADAMW["eps"])
    new_weight = source.float() * (1 - lr * ADAMW["weight_decay"]) - lr * step
    m.copy_(new_m)
    v.copy_(new_v)
    weight.copy_(new_weight)
    if master is not None:
        master.copy_(new_weight)
    return weight, m, v
