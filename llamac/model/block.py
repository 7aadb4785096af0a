"""The transformer block as data: its linears in the order of the forward pass, as in csrc/model/block.h.

The reference model, the names and shapes of weights, fp8's scales and the debug state follow from this table.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Input(NamedTuple):
    """The input x of a linear."""

    producer: str  # what computes it: norm, attention or activation
    name: str  # in the debug state, and among fp8's scales
    size: str  # Config's field
    statistics: tuple[str, ...] = ()  # in the debug state: what the producer keeps for its backward
    norm: str = ""  # the module that is the producer


class Linear(NamedTuple):
    """out = x · weightᵀ (+ bias). Modules have Llama's names; sizes and flags are fields of Config."""

    name: str  # among fp8's scales, and of the module where its weights are fused
    x: Input
    half: str  # the module of the block with those of the weights
    weights: dict[str, str]  # {module: number of outputs}
    bias: str  # flag
    out: tuple[str, ...]  # in the debug state; before a norm, it is the sum with the residual
    head_norms: tuple[str, ...] = ()  # modules of the norms of its first outputs, with qk_norm
    # The module of the norm behind the last sum of a block, which computes the next one's input; or, with
    # output_norm, of the norm of its output, before the sum.
    norm: str = ""

    def shapes(self, config: Any) -> dict[str, tuple[int, int]]:
        """{module: shape of its weight, [out,in]}."""
        columns = getattr(config, self.x.size)
        return {name: (getattr(config, rows), columns) for name, rows in self.weights.items()}

    def parameters(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of its norms' and its own, in the order of files."""

        def of_norm(module: str) -> list[tuple[str, tuple[int, ...]]]:
            names = config.norm_weights if module else ()
            return [(f"{module}.{name}", (config.hidden_size,)) for name in names]

        yield from of_norm(self.x.norm)
        shapes = self.shapes(config)
        yield from ((f"{self.half}.{name}.weight", shape) for name, shape in shapes.items())
        if getattr(config, self.bias):
            yield from ((f"{self.half}.{name}.bias", shape[:1]) for name, shape in shapes.items())
        if config.qk_norm:
            sizes = config.qk_norm_sizes.items()
            yield from ((f"{self.half}.{name}.weight", (size,)) for name, size in sizes if self.head_norms)
        yield from of_norm(self.norm)

    def slots(self, block: object) -> tuple[str, str, str]:
        """fp8's scales in a block: of x, of the weight, of the gradient of out."""
        return f"{block}.{self.x.name}", f"{block}.{self.name}.weight", f"{block}.d.{self.name}"


BLOCK = (
    Linear(
        "qkv",
        Input("norm", "input_norm", "hidden_size", ("input_rstd",), "input_layernorm"),
        "self_attn",
        {"q_proj": "q_size", "k_proj": "kv_size", "v_proj": "kv_size"},
        "qkv_bias",
        ("q", "k", "v"),
        ("q_norm", "k_norm"),
    ),
    Linear(
        "o",
        Input("attention", "attention", "q_size", ("attention_lse",)),
        "self_attn",
        {"o_proj": "hidden_size"},
        "output_bias",
        ("residual_mid",),
    ),
    Linear(
        "gate_up",
        Input("norm", "post_norm", "hidden_size", ("post_rstd",), "post_attention_layernorm"),
        "mlp",
        {"gate_proj": "intermediate_size", "up_proj": "intermediate_size"},
        "mlp_bias",
        ("gate_up",),
    ),
    Linear(
        "down",
        Input("activation", "swiglu", "intermediate_size"),
        "mlp",
        {"down_proj": "hidden_size"},
        "mlp_bias",
        ("residual_out",),
    ),
)
_QKV, _OUTPUT, _UP, _DOWN = BLOCK
# Phi-3's: q, k and v are one weight, and gate and up are one.
PHI3_BLOCK = (
    _QKV._replace(weights={"qkv_proj": "qkv_size"}, head_norms=()),
    _OUTPUT,
    _UP._replace(weights={"gate_up_proj": "gate_up_size"}),
    _DOWN,
)
# OLMo 2's: the norms are of what the halves add to the residual.
OLMO2_BLOCK = (
    _QKV._replace(x=Input("norm", "attention_input", "hidden_size")),
    _OUTPUT._replace(out=("attention_out", "residual_mid"), norm="post_attention_layernorm"),
    _UP._replace(x=Input("norm", "mlp_input", "hidden_size")),
    _DOWN._replace(out=("mlp_out", "residual_out"), norm="post_feedforward_layernorm"),
)
# GPT-2's: q, k and v are one weight, the activation has no gate, a layer norm also keeps the mean.
GPT2_BLOCK = (
    _QKV._replace(
        x=_QKV.x._replace(statistics=("input_rstd", "input_mean")),
        weights={"qkv_proj": "qkv_size"},
        head_norms=(),
    ),
    _OUTPUT,
    _UP._replace(
        x=_UP.x._replace(statistics=("post_rstd", "post_mean")), weights={"up_proj": "intermediate_size"}
    ),
    _DOWN._replace(x=_DOWN.x._replace(name="gelu")),
)
# BERT's: the norm of a sum computes both the next linear's input and the next sum's residual.
BERT_BLOCK = (
    GPT2_BLOCK[0]._replace(x=GPT2_BLOCK[0].x._replace(norm=""), weights=_QKV.weights),
    *GPT2_BLOCK[1:3],
    GPT2_BLOCK[3]._replace(norm="output_layernorm"),
)
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}  # the operation, by Config.hidden_act
