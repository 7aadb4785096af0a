"""llamac.patch makes a transformers Llama, Mistral, Qwen2 or Qwen3 use llamac's operations; llamac.unpatch
undoes it.

Every patched module keeps its identity, parameters, hooks and names. Its class becomes a subclass of its
original class and of a class of this file, whose methods call super() for the calls that they do not support.
B batch, T time, C channels, F feed-forward width, NH query heads, NKV key/value heads, HD head size.
"""

import functools
import inspect
import logging
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from llamac.ops import operations as ops

logger = logging.getLogger(__name__)

FAMILIES = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": name
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
FLASH_HEADS = (64, 128)  # head sizes of the fast attention kernels; others write out all scores
# The name of the cache in the models: past_key_values before transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
SEES = "llamac_sees"  # keyword by which a model tells its attentions what their mask says (_Trunk._sees)


def _fits(*tensors: Tensor) -> bool:
    """Whether the operations take these together: one type, of those that they know on that device, and no
    tensor of a class of its own, as sharded and quantized ones are."""
    dtype, device = tensors[0].dtype, tensors[0].device.type
    known = dtype in (torch.float32, torch.bfloat16) or (dtype == torch.float64 and device == "cpu")
    alike = all(t.dtype == dtype and type(t) in (Tensor, nn.Parameter) for t in tensors)
    return known and alike and device in ("cpu", "cuda")


def _untouched(module: nn.Module) -> bool:
    """Whether a call of the module is nothing but its class's forward."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    )


def _plain(linear: nn.Module) -> bool:
    """Whether a call of it is x @ weight.T: no bias, adapter, quantized, sharded or offloaded weight."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) in (Tensor, nn.Parameter)
        and _untouched(linear)
    )


class _Piece:
    """Mixed into a module's class by _replaced, which also says which class that was."""

    _original: type

    def __reduce_ex__(self, protocol: int) -> tuple:
        # Pickle finds classes by name, and under this one's it finds the original.
        return _blank, (type(self)._mixin, type(self)._original), self.__dict__


class _Norm(_Piece):
    def forward(self, x: Tensor) -> Tensor:
        if not _fits(x, self.weight):
            return super().forward(x)
        return ops.rmsnorm(x, self.weight, self.variance_epsilon)


class _Rotary(_Piece):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin as the model has them, and rope's table of both, [positions, HD / 2, 2], not rounded to
        the model's type: once for all layers."""
        cos, sin = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        half = cos.shape[-1] // 2
        table = torch.stack((cos[..., :half], sin[..., :half]), -1).flatten(0, 1)
        # The bits as integers: FSDP's mixed precision rounds whatever is floating in a layer's arguments.
        bits = table.double().view(torch.int64) if x.dtype == torch.float64 else table.view(torch.int32)
        return cos.to(x.dtype), sin.to(x.dtype), bits


def _turned(x: Tensor, bits: Tensor, norm: nn.Module | None = None) -> Tensor:
    """rope of x [B, T, NH, HD] by the table of _Rotary, which has T positions or B T of them; with a norm of
    its heads, of the norm's output."""
    table = bits.view(torch.float64 if bits.dtype == torch.int64 else torch.float32)
    rows = x if table.shape[0] == x.shape[1] else x.flatten(0, 1)[None]
    if norm is None:
        return ops.rope(rows, table).view(x.shape)
    return ops.qk_norm_rope(rows, norm.weight, norm.variance_epsilon, table).view(x.shape)


class _Attention(_Piece):
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        sees = kwargs.pop(SEES, None)
        cos, sin, *table = position_embeddings
        if not table or self.config._attn_implementation != "sdpa":
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=(cos, sin),
                attention_mask=attention_mask,
                **kwargs,
            )
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (linear(hidden_states).view(heads) for linear in (self.q_proj, self.k_proj, self.v_proj))
        norms = getattr(self, "q_norm", None), getattr(self, "k_norm", None)
        if all(isinstance(norm, _Norm) and _untouched(norm) and _fits(q, k, norm.weight) for norm in norms):
            q, k = (_turned(x, table[0], norm) for x, norm in zip((q, k), norms))
        else:
            q, k = (x if norm is None else norm(x) for x, norm in zip((q, k), norms))
            if _fits(q, k):
                q, k = _turned(q, table[0]), _turned(k, table[0])
            else:
                q, k = self._rotate(q, k, cos, sin, unsqueeze_dim=2)
        cache = kwargs.pop(CACHE, kwargs.pop("past_key_values", None))
        if cache is not None:
            k, v = self._cached(k, v, cache, cos, sin, kwargs)
        q, k, v = ops._autocast(q, k, v)
        if self._takes_all(q, k, v, None if sees else attention_mask, kwargs):
            out, weights = self._attended(q, k, v, sees), None
        else:
            out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](
                self,
                *(x.transpose(1, 2) for x in (q, k, v)),
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    def _cached(self, k, v, cache, cos, sin, kwargs) -> tuple[Tensor, Tensor]:
        """All keys and values, [B, tokens seen, NKV, HD]."""
        # Older versions' caches ask for this, and only their models hand cache_position down.
        old = "cache_position" in kwargs
        extra = ({"sin": sin, "cos": cos, "cache_position": kwargs["cache_position"]},) if old else ()
        k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx, *extra)
        return k.transpose(1, 2), v.transpose(1, 2)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, sees: tuple | None) -> Tensor:
        """Causal attention; with `sees`, over what that and the layer's sliding window leave."""
        if not sees:
            return ops.attention(q, k, v, self.scaling)
        first, padded = sees
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        if window is not None and window >= k.shape[1]:
            window = None
        out = ops.attention(q, k, v, self.scaling, first=first, window=window)
        return out if padded is None else out.masked_fill(padded[:, :, None, None], 0)

    def _takes_all(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict) -> bool:
        """Whether this call is causal attention and, but for `mask`, nothing else. No mask says that to sdpa:
        the model makes none unless there is padding, packing or a window shorter than the sequence."""
        if mask is not None or q.shape[1] != k.shape[1] or (self.training and self.attention_dropout > 0):
            return False
        if any(kwargs.get(n) is not None for n in ("position_bias", "cache", "softcap", "head_mask")):
            return False
        causal = kwargs.get("is_causal")
        causal = self.is_causal and getattr(self.config, "is_causal", True) if causal is None else causal
        if not causal or kwargs.get("output_attentions"):
            return False
        return _fits(q, k, v) and (q.is_cpu or (q.dtype == torch.bfloat16 and self.head_dim in FLASH_HEADS))


class _MLP(_Piece):
    def forward(self, x: Tensor) -> Tensor:
        if _plain(self.gate_proj) and _plain(self.up_proj) and not torch.compiler.is_compiling():
            operands = ops._autocast(x, self.gate_proj.weight, self.up_proj.weight)
            if _fits(*operands):
                return self.down_proj(ops.swiglu(_GateUp.apply(*operands)))
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not _fits(gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(ops.swiglu(torch.cat((gate, up), -1)))


class _GateUp(torch.autograd.Function):
    """x [..., C], two weights [F, C] -> [..., 2 F]: both products land in one buffer, without a copy."""

    @staticmethod
    def forward(ctx, x, gate, up):
        rows, width = x.reshape(-1, x.shape[-1]), gate.shape[0]
        out = x.new_empty(rows.shape[0], width + up.shape[0])
        torch.mm(rows, gate.t(), out=out[:, :width])
        torch.mm(rows, up.t(), out=out[:, width:])
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, gate, up)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, gate, up = ctx.saved_tensors
        rows, width = dout.reshape(-1, dout.shape[-1]), gate.shape[0]
        dgate, dup = rows[:, :width], rows[:, width:]
        dx = dgate_weight = dup_weight = None
        if ctx.needs_input_grad[0]:
            dx = (dgate @ gate).addmm_(dup, up).view(*dout.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            dgate_weight = dgate.t() @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[2]:
            dup_weight = dup.t() @ x.reshape(-1, x.shape[-1])
        return dx, dgate_weight, dup_weight


class _Linear(_Piece):
    """A block's product in fp8: patch(fp8=True)."""

    def forward(self, x: Tensor) -> Tensor:
        out = ops.linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Layer(_Piece):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self.self_attn, _Attention) and "position_embeddings" in kwargs:
            kwargs["position_embeddings"] = kwargs["position_embeddings"][:2]  # an adapter's knows no table
        if args:
            return super().forward(hidden_states, *args, **kwargs)
        x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        # Under autocast what is added is narrower than the stream.
        wide = torch.promote_types(x.dtype, hidden_states.dtype)
        x, residual, norm = x.to(wide), hidden_states.to(wide), self.post_attention_layernorm
        if isinstance(norm, _Norm) and _untouched(norm) and _fits(x, residual, norm.weight):
            residual, x = ops.residual_rmsnorm(x, residual, norm.weight, norm.variance_epsilon)
        else:
            residual = residual + x
            x = norm(residual)
        return residual + self.mlp(x)


class _Trunk(_Piece):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation == "sdpa" and len(args) <= 1:
            kwargs[SEES] = self._sees(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _sees(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None] | None:
        """What the arguments let a token see besides what is before it and in a layer's window: (first, int32
        [B, T], the first position that it sees, or None; padded, bool [B, T], which tokens are no tokens, or
        None). None: what only the mask says that the model makes.

        In compiled or captured code, values cannot be read, and the model always makes a mask; older
        versions always do. Without positions of the caller's there is nothing to look for.
        """
        lengths, cached = (cu_seq_lens_q, cu_seq_lens_k), ("past_key_values", CACHE, "cache_position")
        cached = any(kwargs.get(name) is not None for name in cached)
        if not cached and all(x is None for x in (attention_mask, position_ids, *lengths)):
            return None, None
        x = input_ids if inputs_embeds is None else inputs_embeds
        captured = x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing()
        if x is None or captured or torch.compiler.is_compiling():
            return None
        if any(length is not None for length in lengths):
            return _flattened(x, attention_mask, *lengths)
        if attention_mask is not None:
            return _padded(x, attention_mask)
        makes = self.config.use_cache if use_cache is None else use_cache
        makes = makes and not (self.gradient_checkpointing and self.training and torch.is_grad_enabled())
        # With a cache the model does not look for packed sequences, either.
        return None if cached or makes else _restarted(x, position_ids)


def _latest(begins: Tensor) -> Tensor:
    """The last position at which a row [B, T] had begun anew, at each of its positions."""
    positions = torch.arange(begins.shape[1], device=begins.device)
    return torch.where(begins, positions, 0).cummax(1).values.int()


def _restarted(x: Tensor, position_ids: Any) -> tuple[Tensor | None, None] | None:
    """_Trunk._sees of positions that begin anew where a sequence does, as the model reads them."""
    if position_ids.dim() != 2 or position_ids.shape[1] != x.shape[1]:
        return None
    begins = F.pad(position_ids.diff() != 1, (1, 0)).expand(x.shape[0], -1)
    return (_latest(begins), None) if begins.any() else (None, None)


def _flattened(x: Tensor, mask: Any, lengths: Tensor | None, of_keys: Tensor | None) -> tuple | None:
    """_Trunk._sees of cu_seq_lens_q and cu_seq_lens_k, with which one row has several sequences: where each
    begins, and the end of the last one."""
    if mask is not None or x.shape[0] != 1 or lengths is None or of_keys is None:
        return None
    if lengths is not of_keys and not torch.equal(lengths, of_keys):
        return None
    positions = torch.arange(x.shape[1], device=lengths.device)[None]
    return _latest(torch.isin(positions, lengths).to(x.device)), None


def _padded(x: Tensor, mask: Any) -> tuple[Tensor | None, Tensor | None] | None:
    """_Trunk._sees of a mask with padding on the left, on the right, or both. A padded token sees itself."""
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:2]:
        return None
    real = mask.to(x.device, torch.bool)
    begins = real & ~F.pad(real[:, :-1], (1, 0))
    everything, one_run = torch.stack((real.all(), (begins.sum(1) <= 1).all())).tolist()
    if everything:
        return None, None
    return (_latest(begins | ~real), ~real) if one_run else None


class _CausalLM(_Piece):
    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        # Labels by position, the sixth, are left to the model; the five before them are the base model's.
        if kwargs.get("labels") is None or not self._loss_fits(kwargs):
            return super().forward(*args, **kwargs)
        labels = kwargs.pop("labels")
        kwargs.pop("logits_to_keep", None)
        outputs = self.model(*args, **kwargs)
        return CausalLMOutputWithPast(
            loss=self._loss(outputs.last_hidden_state, labels, **kwargs),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: outputs.get(CACHE)},
        )

    def _loss_fits(self, kwargs: dict) -> bool:
        keep = kwargs.get("logits_to_keep")
        return (
            self.training
            and (keep is None or (isinstance(keep, int) and keep == 0))
            and self.loss_function is ForCausalLMLoss
            and _plain(self.lm_head)
            and _fits(*ops._autocast(self.lm_head.weight[:0]))
        )

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The value of ForCausalLMLoss."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        targets = shift_labels.to(hidden.device).reshape(
            hidden.shape[:-1]
        )  # the model's own takes them flat, too
        loss = ops.linear_cross_entropy(hidden, self.lm_head.weight, targets, ignore_index, reduction)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


PIECES = {
    "RMSNorm": _Norm,
    "RotaryEmbedding": _Rotary,
    "Attention": _Attention,
    "MLP": _MLP,
    "DecoderLayer": _Layer,
    "Model": _Trunk,
    "ForCausalLM": _CausalLM,
}


@functools.cache
def _replaced(mixin: type, original: type) -> type:
    """The original with the piece in front, under its name, which goes into saved configurations."""
    known = _known(original)
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(original, name) for name in names} | {"_mixin": mixin, "_original": original}
    if mixin is _Attention:
        body["_rotate"] = staticmethod(inspect.getmodule(known).apply_rotary_pos_emb)
    if mixin in (_Trunk, _CausalLM):
        # Trainer and generate() read the signature.
        @functools.wraps(original.forward)
        def forward(self, *args, **kwargs):
            return mixin.forward(self, *args, **kwargs)

        body["forward"] = forward
    return type(original.__name__, (mixin, original), body)


def _blank(mixin: type, original: type) -> nn.Module:
    cls = _replaced(mixin, original)
    return cls.__new__(cls)


def _known(cls: type) -> type | None:
    """The class of transformers that it is or inherits from, None where that is none of the families'."""
    return next((c for c in cls.__mro__ if c.__module__ in FAMILIES), None)


def _kind(cls: type) -> str:
    """Of one of the families' modules, the name without the family's."""
    known = _known(cls)
    return known.__name__.removeprefix(FAMILIES[known.__module__]) if known else ""


def _reason(module: nn.Module) -> str:
    """Why a module of a known kind is left as it is; empty where it fits."""
    cls = type(module)
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if inspect.unwrap(cls.forward) is not inspect.unwrap(_known(cls).forward):
        return f"{cls.__name__} has a forward of its own"
    if _kind(cls) == "MLP":
        activation = module.act_fn
        if not isinstance(activation, nn.SiLU) and type(activation).__name__ != "SiLUActivation":
            return f"its activation is {type(activation).__name__}, not SiLU"
    return ""


def _reasons(model: nn.Module) -> dict[nn.Module, str]:
    """_reason of every module of a known kind."""
    known = [m for m in model.modules() if _kind(type(m)) in PIECES]
    reasons = {m: "" if isinstance(m, _Piece) else _reason(m) for m in known}
    if any(reason and _kind(type(m)) == "Attention" for m, reason in reasons.items()):
        for m in known:  # what ours returns is for our attentions
            if _kind(type(m)) == "RotaryEmbedding" and not isinstance(m, _Piece):
                reasons[m] = "an attention of the model is left"
    return reasons


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The blocks' products with a weight, with their names."""
    blocks = ((n, m) for n, m in model.named_modules() if _kind(type(m)) in ("Attention", "MLP"))
    children = ((f"{n}.{name}", child) for n, m in blocks for name, child in m.named_children())
    return [(name, child) for name, child in children if isinstance(child, nn.Linear)]


def _reason_in_fp8(linear: nn.Linear) -> str:
    """Why patch(fp8=True) leaves a product as it is; empty where it fits."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}"
    return "its forward was replaced" if "forward" in linear.__dict__ else ""


def _replace_linears(model: nn.Module) -> None:
    """Raises ValueError, before anything is replaced, where a call would for the weight's sake."""
    found = [(n, m) for n, m in _linears(model) if not isinstance(m, _Piece) and not _reason_in_fp8(m)]
    for name, linear in found:
        try:
            ops.check_linear(linear.weight[:0], linear.weight)
        except ValueError as error:
            raise ValueError(f"llamac.patch: fp8: {name}: {str(error).removeprefix('linear: ')}") from None
    for _, linear in found:
        linear.__class__ = _replaced(_Linear, type(linear))


def patch(model: PreTrainedModel, logits: bool = False, fp8: bool = False) -> PreTrainedModel:
    """Let a transformers model of the Llama, Mistral, Qwen2 or Qwen3 family run on llamac's operations;
    unpatch() undoes it. In place; returns the model. A second time changes nothing.

    Parameters, their names, hooks, saved files and configurations stay as they are. Norms, RoPE, causal
    attention, the residual sum before a norm, the feed-forward's activation and the loss are llamac's; matrix
    products stay PyTorch's. In training mode a call with labels makes the loss by ops.linear_cross_entropy
    and returns no logits (output.logits is None); logits=True leaves that to the model's own code, which
    returns both, as it does in eval mode. fp8=True also computes the blocks' linear layers by ops.linear,
    with scales of their tensors' own; head, embedding and what is stored stay as they are.

    Attention keeps to sequences that are packed into a row (position_ids that restart; cu_seq_lens_q and
    cu_seq_lens_k, which also count where the model's own sdpa ignores them), to sliding windows and to
    padding on either side. Padded tokens come out of attention as zeros, as with flash attention; the model's
    own sdpa lets those on the right see the tokens before them.

    What does not fit is the model's own code: attention in a call with any other mask, dropout or earlier
    tokens in the cache, and, compiled, with padding or packed sequences; attention and RoPE with any other
    implementation of attention than sdpa; everything in float16. Adapters, hooks, and quantized, sharded or
    offloaded weights stay in force: their modules are called. report() lists what is patched and why a module
    is not, which is also logged, at level info. Patch before fully_shard, or whatever else wraps modules.

    TypeError, in one line: not a model of these families, and what is. ValueError: with fp8, weights or a
    device that ops.linear refuses.
    """
    if not isinstance(model, PreTrainedModel) or _known(type(model)) is None:
        raise TypeError(_refusal(model))
    if fp8:
        _replace_linears(model)
    for module, reason in _reasons(model).items():
        kind = _kind(type(module))
        if not reason and not isinstance(module, _Piece) and not (logits and kind == "ForCausalLM"):
            module.__class__ = _replaced(PIECES[kind], type(module))
    for line in report(model):
        logger.info("llamac.patch: %s", line)
    return model


def _refusal(model: Any) -> str:
    families = ", ".join(FAMILIES.values())
    found = f"{type(model).__module__}.{type(model).__qualname__}"
    message = f"llamac.patch: model is {found}, expected a model of transformers of the families {families}"
    if isinstance(model, nn.Module):
        inside = (n for n, m in model.named_modules() if isinstance(m, PreTrainedModel) and _known(type(m)))
        if name := next(inside, ""):
            message += f"; its part {name} is one"
    return message


def unpatch(model: nn.Module) -> nn.Module:
    """Undo patch(): every module has its own class again. Returns the model; without a patch, as it is.

    TypeError, in one line: something else changed a module's class or its forward after patch() did, as
    accelerate's mixed precision does.
    """
    patched = {name: module for name, module in model.named_modules() if isinstance(module, _Piece)}
    for name, module in patched.items():
        what = ""
        if "_original" not in type(module).__dict__:
            what = f"{name or 'the model'} became {type(module).__name__}"
        elif "forward" in module.__dict__:
            what = f"the forward of {name or 'the model'} was replaced"
        if what:
            raise TypeError(f"llamac.unpatch: {what} after llamac.patch; undo that first")
    for module in patched.values():
        module.__class__ = type(module)._original
    return model


def report(model: nn.Module) -> list[str]:
    """A line per kind of module: how many run on llamac's operations, and why others do not. Of products in
    fp8 only where there are some."""
    reasons, lines = _reasons(model), []
    for kind in PIECES:
        modules = [m for m in reasons if _kind(type(m)) == kind]
        ours = [m for m in modules if isinstance(m, _Piece)]
        left = Counter(reasons[m] or "not patched" for m in modules if m not in ours)
        left += Counter(filter(None, map(_hindrance, ours)))
        lines += _counted(kind, len(ours), len(modules), left)
    linears = [linear for _, linear in _linears(model)]
    left = Counter(_reason_in_fp8(m) or "not patched" for m in linears if not isinstance(m, _Linear))
    if ours_in_fp8 := len(linears) - left.total():
        lines += _counted("Linear in fp8", ours_in_fp8, len(linears), left)
    return lines


def _counted(kind: str, ours: int, every: int, left: Counter) -> list[str]:
    first = [f"{kind}: {ours} of {every}"] if every else []
    return first + [f"{kind}: {count} of {every}: {reason}" for reason, count in left.items()]


def _hindrance(module: nn.Module) -> str:
    """The reason for which a patched module is not fully used; "" if there is none."""
    if isinstance(module, _Attention) and module.config._attn_implementation != "sdpa":
        return f"left while the attention's implementation is {module.config._attn_implementation}, not sdpa"
    if isinstance(module, _CausalLM) and not _plain(module.lm_head):
        return "loss left: lm_head is more than a product with a weight"
    if not isinstance(module, _MLP) or isinstance(module.gate_proj, _Linear):
        return ""
    if not (_plain(module.gate_proj) and _plain(module.up_proj)):
        return "products copied together: gate_proj or up_proj is more than a product with a weight"
    return ""
