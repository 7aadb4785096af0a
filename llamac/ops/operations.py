"""llamac's differentiable operations for PyTorch models, on CPU, CUDA and ROCm tensors.

B batch, T time, C channels, NH query heads, NKV key/value heads, HD head size, F feed-forward width, V
vocabulary; `...` any number of dimensions. Storage is float32, bfloat16 or float64 (CPU only; for checks),
the same for all operands of a call. Arithmetic is float32 (float64 for float64) for every storage type. No
function waits for the device.

Under autocast, the operations follow similar ones of PyTorch: attention, linear and linear_cross_entropy cast
their operands to autocast's type, which must be bfloat16; the norms cast theirs to the widest type among
them; all others do not cast.

ValueError names, in one line, the operation, the operand, what was expected and what was found. It is raised
for wrong shapes or types and, on the CPU, for targets out of range. On a GPU, such targets access foreign
memory.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llamac.base import extension
from llamac.model.config import RopeScaling, rope_frequencies
from llamac.ops import fp8
from llamac.ops.fp8 import DelayedScaling

extension.load()
_ops = torch.ops.llamac
# By their overloads: a name with several looks for the one that fits, in each call.
_rmsnorm_forward = _ops.rmsnorm_forward.default
_residual_rmsnorm_forward = _ops.residual_rmsnorm_forward.default
_layernorm_forward = _ops.layernorm_forward.default
_residual_layernorm_forward = _ops.residual_layernorm_forward.default
_precompute_cis = _ops.precompute_cis.out
_rope_forward = _ops.rope_forward.default
_qk_norm_rope_forward = _ops.qk_norm_rope_forward.default
_repeat_kv_forward = _ops.repeat_kv_forward.default
_attention_forward = _ops.attention_forward.default
_swiglu_forward = _ops.swiglu_forward.default
_gelu_forward = _ops.gelu_forward.default
_cross_entropy_forward = _ops.cross_entropy.default
_cross_entropy_out = _ops.cross_entropy.out
_linear_cross_entropy_forward = _ops.linear_cross_entropy.default
_linear_cross_entropy_gradients = _ops.linear_cross_entropy.gradients

# Of logits, in linear_cross_entropy: what it needs beside the gradients stays below 1 GiB; in bfloat16, of
# more than 8 chunks, the weight's gradient in float32 comes to it. Fewer chunks are faster: each reads and
# writes the weight's whole gradient.
CHUNK_BYTES = 1008 << 20


def _autocasting(x: Tensor) -> bool:
    # By is_cuda: a device's type makes a string for each call.
    return torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") and not x.is_meta


def _widest(*tensors: Tensor) -> Sequence[Tensor]:
    """All in the type that PyTorch would promote them to."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return [t.to(dtype) for t in tensors]


def _autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Under autocast, all in its type."""
    if not _autocasting(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, "Root Mean Square Layer
    Normalization", 2019).

    x [..., C], weight [C] -> [..., C].
    """
    if _autocasting(x):
        x, weight = _widest(x, weight)
    return _rmsnorm_forward(x, weight, eps)[0]


def residual_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """x + residual, and its rmsnorm, in one pass over memory.

    x, residual [..., C], weight [C] -> (sum, normalized), both [..., C].
    """
    if _autocasting(x):
        x, residual, weight = _widest(x, residual, weight)
    return _residual_rmsnorm_forward(x, residual, weight, eps)[:2]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (Ba et al., "Layer
    Normalization", 2016).

    x [..., C], weight and bias [C] -> [..., C].
    """
    if _autocasting(x):
        x, weight, bias = _widest(x, weight, bias)
    return _layernorm_forward(x, weight, bias, eps)[0]


def residual_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """x + residual, and its layernorm, in one pass over memory.

    x, residual [..., C], weight and bias [C] -> (sum, normalized), both [..., C].
    """
    if _autocasting(x):
        x, residual, weight, bias = _widest(x, residual, weight, bias)
    return _residual_layernorm_forward(x, residual, weight, bias, eps)[:2]


def precompute_cis(
    seq_len: int,
    head_dim: int,
    theta: float = 500000.0,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_context: float = 8192.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Cosine and sine of every position's angles, for rope: angle[t, j] = t * theta^(-2j / HD) (Su et al.,
    "RoFormer", 2021), low frequencies divided by factor as Llama 3.1 does; factor 1: none is.

    -> [seq_len, head_dim / 2, 2], float32 (float64 if that is the dtype), on the device (None: torch's
    default).
    """
    scaling = RopeScaling(factor, low_freq_factor, high_freq_factor, int(original_context))
    frequencies = rope_frequencies(head_dim, theta, scaling if factor != 1 else None)
    table = torch.tensor(frequencies, dtype=torch.float64, device=device)
    return cis_of_frequencies(seq_len, table, dtype=dtype)


def cis_of_frequencies(
    seq_len: int, frequency: Tensor, attention_factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """precompute_cis() of any frequencies, float64 [HD / 2] in radians per position; attention_factor: of
    cosines and sines, YaRN's (Peng et al., 2023).
    """
    cis = torch.empty(seq_len, len(frequency), 2, dtype=dtype, device=frequency.device)
    _precompute_cis(frequency, attention_factor, cis=cis)
    return cis


def rope(x: Tensor, cis: Tensor, interleaved: bool = False) -> Tensor:
    """Turns every pair of a head's channels by its position's angle (Su et al., "RoFormer", 2021).

    x [B, T, NH, HD], any strides but the last dimension's; cis [T or more, HD / 2, 2] from precompute_cis ->
    [B, T, NH, HD]. Pairs are channels j and j + HD / 2, as in Hugging Face's weights; interleaved: 2j and 2j
    + 1, as in Meta's. cis gets no gradient.
    """
    return _rope_forward(x, cis[: x.shape[1]], interleaved)


def qk_norm_rope(x: Tensor, weight: Tensor, eps: float = 1e-6, cis: Tensor | None = None) -> Tensor:
    """rmsnorm of every head, then rope, in one pass over memory: of queries or keys, as Qwen 3 has it.

    x [B, T, NH, HD], any strides but the last dimension's; weight [HD]; cis as for rope, None: no rotation ->
    [B, T, NH, HD].
    """
    if cis is None:
        return rmsnorm(x, weight, eps)
    if _autocasting(x):
        x, weight = _widest(x, weight)
    return _qk_norm_rope_forward(x, weight, cis[: x.shape[1]], eps)[0]


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Every key/value head heads / NKV times, for attention that does not know groups; attention() does.

    x [B, T, NKV, HD], any strides but the last dimension's; heads a multiple of NKV -> [B, T, heads, HD].
    """
    return _repeat_kv_forward(x, heads)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    first: Tensor | None = None,
    end: Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """softmax(scale * q k^T) v over the keys that each query sees, by tiles that never leave the chip (Dao,
    "FlashAttention-2", 2023), NH / NKV query heads sharing a key/value head (Ainslie et al., "GQA", 2023).

    q [B, T, NH, HD], k and v [B, S, NKV, HD], any strides but the last dimension's -> [B, T, NH, HD].
    The queries are the last T of S positions, as with keys that a cache keeps: query t stands at S - T + t.
    It sees no later key (causal, where T is at most S), none before first[b, t] or from end[b, t] on, and the
    last `window` keys alone, its own among them, as Mistral's sliding_window.
    first: int32 [B, T], the first position of each query's document: it never decreases along a sequence, and
    is at most the query's own position. end: int32 [B, T], behind each query's document: it never decreases
    either, and is more than the query's own position; for encoders, as causal attention sees nothing there.
    In a device's memory their values are not checked.
    scale: None for 1 / sqrt(HD).
    """
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}, expected 1 or more, or None for none")
    q, k, v = _autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first, end = (None if x is None else x.int() for x in (first, end))
    return _attention_forward(q, k, v, first, end, scale, causal, window or 0)[0]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020), gate and up from one product.

    gate_up [..., 2 F]: gate, then up -> [..., F].
    """
    return _swiglu_forward(gate_up)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """GELU of x + bias (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): by the error function, or
    with approximate="tanh" by its approximation.

    x [..., F], bias [F] -> [..., F].
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}, expected 'none' or 'tanh'")
    if bias is not None and _autocasting(x):
        x, bias = _widest(x, bias)
    return _gelu_forward(x, bias, approximate == "tanh")


def linear(
    x: Tensor, weight: Tensor, recipe: str | fp8.Delayed = "tensor", gradients: str | None = None
) -> Tensor:
    """x @ weight.T with operands of 8 bits, and so both products of its backward (Micikevicius et al., "FP8
    Formats for Deep Learning", 2022): x and weight in e4m3, the gradient of the result in e5m2 or e4m3, each
    times a power of two of its own. docs/fp8.md says what that is.

    x [..., C], weight [K, C], float32 or bfloat16 -> [..., K] and gradients of that type. On a GPU C and K
    are multiples of 16; where rows are not, the backward's are padded with zeros, which costs a copy.
    recipe: where scales come from. "tensor": each tensor's own largest value, a pass over it more; no state.
    "row": likewise, one per row, and one per column for products that sum over rows.
    DelayedScaling(layers)[k]: those of the step before.
    gradients: "e5m2" (None) or "e4m3"; with DelayedScaling, its own.

    For the backward it keeps x in 8 bits, and the weight itself. A value beyond the largest becomes the
    largest; NaN stays NaN. ValueError also for a device without fp8 units.
    """
    scaling = None
    if isinstance(recipe, fp8.Delayed):
        scaling, layer = recipe
    elif recipe not in ("tensor", "row"):
        expected = "'tensor', 'row' or a layer of DelayedScaling"
        raise ValueError(f"linear: recipe is {recipe!r}, expected {expected}")
    own = scaling.gradients if scaling else "e5m2"
    if scaling and gradients not in (None, own):
        raise ValueError(f"linear: gradients is {gradients!r}, expected {own!r}, that of its DelayedScaling")
    x, weight = _autocast(x, weight)
    check_linear(x, weight)
    types = fp8.types(_index(x), gradients or own)
    rows = x.reshape(-1, x.shape[-1])
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not rows.shape[0]:
        return F.linear(x, weight)
    if padding := -rows.shape[0] % fp8.MULTIPLE if x.is_cuda and wanted else 0:
        rows = F.pad(rows, (0, 0, 0, padding))
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if scaling and scaling.calibrated:
        scales = scaling.scale[layer], scaling.inverse[layer]
    if wanted:
        amax = scaling.amax[layer] if scaling else None
        out = _Linear.apply(rows, weight, types, recipe == "row", *scales, amax)
    else:
        out = _linear(rows, weight, types[0], recipe == "row", *scales, None)[0]
    out = out[: out.shape[0] - padding] if padding else out
    return out.view(*x.shape[:-1], weight.shape[0])


def check_linear(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError where linear() would refuse them."""
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in (torch.float32, torch.bfloat16) or t.dtype != x.dtype:
            expected = "float32 or bfloat16, both the same"
            raise ValueError(f"linear: {name} is {t.dtype}, expected {expected}")
        if t.dim() < 1 or (name == "weight" and t.shape[1:] != x.shape[-1:]):
            expected = "[..., C]" if name == "x" else f"[K, {x.shape[-1]}]"
            raise ValueError(f"linear: {name} has shape {list(t.shape)}, expected {expected}")
        if t.is_cuda and (t.shape[-1] % fp8.MULTIPLE or (name == "weight" and t.shape[0] % fp8.MULTIPLE)):
            expected = f"multiples of {fp8.MULTIPLE}, which fp8 on a GPU needs"
            raise ValueError(f"linear: {name} has shape {list(t.shape)}, expected {expected}")
    fp8.types(_index(weight), "e5m2")


def _index(x: Tensor) -> int | None:
    """Of x's GPU."""
    return x.device.index if x.is_cuda else None


def _linear(x, weight, values, by_row, scale, inverse, amax, keep=False):
    """The product, and x and weight as they are quantized; x transposed where it is kept."""
    x8 = fp8.quantize(x, values, 0, scale, inverse, amax, transposed=keep, by_row=by_row)
    w8 = fp8.quantize(weight, values, 1, scale, inverse, amax, transposed=False, by_row=by_row)
    return fp8.product(x8.codes, x8.inverse, w8.codes, w8.inverse, x.dtype, fast=True), x8, w8


class _Linear(torch.autograd.Function):
    """The weight is quantized again in the backward: its codes transposed would take memory until then."""

    @staticmethod
    def forward(ctx, x, weight, types, by_row, scale, inverse, amax):
        keep = ctx.needs_input_grad[1]
        out, x8, w8 = _linear(x, weight, types[0], by_row, scale, inverse, amax, keep)
        kept = weight if ctx.needs_input_grad[0] else None
        inverses = x8.inverse_transposed, w8.inverse
        ctx.save_for_backward(x8.transposed, kept, w8.scale, *inverses, scale, inverse)
        ctx.types, ctx.by_row, ctx.dtype, ctx.amax = types, by_row, x.dtype, amax
        return out

    @staticmethod
    def backward(ctx, dout):
        _refuse_second("linear")
        x_turned, weight, w_scale, x_inverse, w_inverse, scale, inverse = ctx.saved_tensors
        wanted, (values, of_gradients) = ctx.needs_input_grad, ctx.types
        own = of_gradients, 2, scale, inverse, ctx.amax
        d8 = fp8.quantize(dout, *own, rows=wanted[0], transposed=wanted[1], by_row=ctx.by_row)
        dx = dweight = None
        if wanted[0]:
            if ctx.by_row:
                _, w_turned, _, _, w_inverse = fp8.quantize_by_row(weight, values, rows=False)
            else:
                _, w_turned = fp8.codes(weight, values, w_scale, False, True, None)
            dx = fp8.product(d8.codes, d8.inverse, w_turned, w_inverse, ctx.dtype)
        if wanted[1]:
            dweight = fp8.product(d8.transposed, d8.inverse_transposed, x_turned, x_inverse, ctx.dtype)
        return dx, dweight, None, None, None, None, None


def _check_reduction(operation: str, reduction: str, known: tuple[str, ...]) -> None:
    if reduction not in known:
        raise ValueError(f"{operation}: reduction is {reduction!r}, expected one of {', '.join(known)}")


def _refuse_second(operation: str) -> None:
    """In a backward, whose results have no history for create_graph."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"llamac.ops.{operation} has no second derivative (create_graph=True)")


def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """logsumexp(logits) - logits[target] for every row.

    logits [..., V]; targets [...], any integer type but uint64, from 0 to V - 1 or ignore_index (of 32 bits),
    whose rows count for nothing. -> float32 (float64 for float64): the mean over rows that count (NaN where
    none does), the "sum", or with "none" all of them, [...].
    """
    _check_reduction("cross_entropy", reduction, ("mean", "sum", "none"))
    ids = _ids("cross_entropy", targets)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(logits, ids, ignore_index, reduction)
    return _cross_entropy(logits, ids, ignore_index, reduction)[0]


def _ids(operation: str, targets: Tensor) -> Tensor:
    """For the operations, which read int32, and of an int64 its lower halves where they are."""
    if targets.dtype in (torch.int64, torch.int32):
        return targets
    if targets.dtype not in (torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32):
        raise ValueError(f"{operation}: targets is {targets.dtype}, expected an integer type but uint64")
    return targets.to(torch.int64)


def _cross_entropy(
    logits: Tensor, ids: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor | None]:
    """The reduced losses, and for a mean also the number of rows in it."""
    if reduction == "mean":
        _, mean, num_valid = _cross_entropy_forward(logits, ids, None, 1.0, ignore_index)
        return mean, num_valid
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = torch.empty_like(ids, dtype=dtype, memory_format=torch.contiguous_format)
    _write_cross_entropy(logits, ids, None, ignore_index, losses, None)
    return losses.sum() if reduction == "sum" else losses, None


def _write_cross_entropy(logits, ids, dlosses, ignore_index, losses, dlogits) -> None:
    _cross_entropy_out(
        logits, ids, dlosses, 1.0, ignore_index, losses=losses, dlogits=dlogits, mean=None, num_valid=None
    )


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made from the logits again: keeping it would take as much memory, and a pass more."""

    @staticmethod
    def forward(ctx, logits, ids, ignore_index, reduction):
        loss, num_valid = _cross_entropy(logits, ids, ignore_index, reduction)
        ctx.save_for_backward(logits, ids, num_valid)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx, dloss):
        _refuse_second("cross_entropy")
        logits, ids, num_valid = ctx.saved_tensors
        dlosses = (dloss if num_valid is None else dloss / num_valid).expand(ids.shape)
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        losses = torch.empty_like(ids, dtype=dlosses.dtype, memory_format=torch.contiguous_format)
        _write_cross_entropy(logits, ids, dlosses, ctx.ignore_index, losses, dlogits)
        return dlogits, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """cross_entropy(hidden @ weight.T, targets) by chunks of rows: logits exist for one chunk at a time, and
    hold their own gradient right after (Hsu et al., "Liger Kernel", 2024; Wijmans et al., "Cut Your Losses",
    2024).

    hidden [..., C], weight [V, C], targets [...] -> float32 (float64 for float64), the "mean" over rows that
    count or the "sum". The gradients that are wanted are computed with the loss, and exist once, unless
    retain_graph keeps them for a second backward.
    """
    _check_reduction("linear_cross_entropy", reduction, ("mean", "sum"))
    hidden, weight = _autocast(hidden, weight)
    ids = _ids("linear_cross_entropy", targets)
    arguments = hidden, weight, ids, ignore_index, reduction == "mean", CHUNK_BYTES
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(*arguments)
    return _linear_cross_entropy_forward(*arguments)


class _LinearCrossEntropy(torch.autograd.Function):
    """Its gradients are no results of it, so that the backward may change them."""

    @staticmethod
    def forward(ctx, *arguments):
        loss, *saved = _linear_cross_entropy_gradients(*arguments, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        _refuse_second("linear_cross_entropy")
        scale, *gradients = ctx.saved_tensors
        # scale has one dimension: a number without any would be rounded to the gradients' type first.
        factor = scale * dloss
        # In place unless the graph is kept: a second copy of dweight would be the memory that this operation
        # saves. A compiler plans memory itself.
        keep = (
            torch.compiler.is_compiling()
            or type(scale) is not Tensor
            or torch._C._autograd._get_current_graph_task_keep_graph()
        )
        scaled = (
            torch.mul(d, factor, out=torch.empty_like(d) if keep else d) if wanted else None
            for d, wanted in zip(gradients, ctx.needs_input_grad)
        )
        return *scaled, None, None, None, None


# For torch.utils.flop_counter, which knows PyTorch's products alone; counted as it counts them, attention in
# whole squares. Operands are given as their shapes.


def _attention_flops(q: torch.Size, k: torch.Size, products: int) -> int:
    B, T, NH, HD = q
    return products * 2 * B * NH * T * k[1] * HD


@register_flop_formula(_ops.attention_forward)
def _(q, k, *_, **__):
    return _attention_flops(q, k, 2)


@register_flop_formula(_ops.attention_backward)
def _(dout, out, lse, q, k, *_, **__):
    return _attention_flops(q, k, 5)


@register_flop_formula(_ops.linear_cross_entropy)
def _(hidden, weight, targets, ignore_index, mean, chunk_bytes, *wanted, **__):
    return (1 + sum(wanted)) * 2 * hidden.numel() * weight[0]


for _name in ("matmul_forward", "scaled_matmul", "scaled_matmul_rows"):
    register_flop_formula(getattr(_ops, _name))(lambda x, weight, *_, **__: 2 * x.numel() * weight[0])
for _name in ("matmul_backward_input", "matmul_backward_weight"):
    register_flop_formula(getattr(_ops, _name))(lambda dout, other, *_, **__: 2 * dout.numel() * other[-1])


__all__ = [
    "DelayedScaling",
    "attention",
    "cross_entropy",
    "gelu",
    "layernorm",
    "linear",
    "linear_cross_entropy",
    "precompute_cis",
    "qk_norm_rope",
    "repeat_kv",
    "residual_layernorm",
    "residual_rmsnorm",
    "rmsnorm",
    "rope",
    "swiglu",
]
