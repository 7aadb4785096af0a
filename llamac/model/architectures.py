"""Written twice on purpose: csrc/checkpoint/config_json.cpp has the same; test_agreement.py::test_models.

The architectures: a row per model_type of config.json. In the code, fields and parameters have Llama's names;
a row says what differs in files.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from llamac.model.block import BERT_BLOCK, BLOCK, GPT2_BLOCK, OLMO2_BLOCK, PHI3_BLOCK, Linear

_NONE: Mapping[str, Any] = MappingProxyType({})
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


class ModelType(NamedTuple):
    """A model_type of config.json."""

    architecture: str  # the class in transformers
    missing: Mapping[str, Any] = _NONE  # for absent fields, where they are not Llama's
    can_slide: bool = False  # whether layers may have a sliding window
    chooses_window: bool = False  # whether use_sliding_window and max_window_layers say which layers have it
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head's queries and keys, before RoPE
    joint_qk_norm: bool = False  # with qk_norm: of the queries, and of the keys, of all heads together
    output_norm: bool = False  # norms of the outputs of attention and feed-forward, which are then added
    rope_types: tuple[str, ...] = ROPE_TYPES[:-1]
    encoder: bool = False  # as BERT: no causal mask, norms behind the sums, types of tokens, a deeper head
    feed_forward: int | None = None  # intermediate_size / hidden_size, where the file has none
    block: tuple[Linear, ...] = BLOCK
    words: Mapping[str, tuple[str, ...]] = _NONE  # as WORDS, where they are not Llama's
    flags: Mapping[str, bool] = _NONE  # as FLAGS, likewise
    unwritten: tuple[str, ...] = ()  # Llama's fields that config.json must not have
    written: Mapping[str, Any] = _NONE  # constants in a config.json that is written
    fields: Mapping[str, str] = _NONE  # {Llama's name: own name} of config.json's fields
    names: Mapping[str, str] = _NONE  # {Llama's: own} of the parts between the dots of a parameter's name
    turned: tuple[str, ...] = ()  # modules whose weight is [in,out] in files: transformers' Conv1D

    def file_name(self, name: str) -> str:
        """The name in files of a parameter, by its name in the reference model, which is Llama's."""
        return ".".join(own for part in name.split(".") if (own := self.names.get(part, part)))


_QWENS: dict[str, Any] = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_QWENS |= {"bos_token_id": None, "eos_token_id": None}
_MISTRALS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_GPT2_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
_PHI3 = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_PHI3 |= {"eos_token_id": 32000, "pad_token_id": 32000}
_OLMO2 = {"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279, "pad_token_id": 1}
# Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
_GPT2 = ModelType(
    "GPT2LMHeadModel",
    {"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    | {"bos_token_id": 50256, "eos_token_id": 50256}
    | _GPT2_DROPOUT,
    feed_forward=4,
    block=GPT2_BLOCK,
    words={
        "hidden_act": ("gelu_new", "gelu", "gelu_pytorch_tanh"),
        "normalization_function": ("layernorm",),
        "position_embedding_type": ("learned",),
    },
    flags={"attention_bias": True, "mlp_bias": True, "scale_attn_weights": True}
    | {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    unwritten=(
        *("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "layer_types"),
        *("attention_bias", "mlp_bias", "normalization_function", "position_embedding_type"),
    ),
    written=dict.fromkeys(_GPT2_DROPOUT, 0.0),
    fields={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    names={
        **{
            "model": "transformer",
            "embed_tokens": "wte",
            "embed_positions": "wpe",
            "layers": "h",
            "norm": "ln_f",
        },
        **{"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn"},
        **{"qkv_proj": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"},
    },
    turned=("c_attn", "c_proj", "c_fc"),
)
# Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2018.
_BERT_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1)
_BERT = ModelType(
    "BertForMaskedLM",
    {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    | {"intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "rms_norm_eps": 1e-12}
    | {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    | _BERT_DROPOUT,
    encoder=True,
    block=BERT_BLOCK,
    words={
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "normalization_function": ("layernorm",),
        "position_embedding_type": ("absolute",),
    },
    flags={"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    | {"is_decoder": False, "add_cross_attention": False},
    unwritten=tuple(name for name in _GPT2.unwritten if name != "position_embedding_type"),
    written=dict.fromkeys(_BERT_DROPOUT, 0.0),
    fields={"rms_norm_eps": "layer_norm_eps"},
    names={
        "model": "bert",
        "embed_tokens": "embeddings.word_embeddings",
        "embed_positions": "embeddings.position_embeddings",
        "embed_types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "layers": "encoder.layer",
        **{"self_attn": "attention", "q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value"},
        **{"o_proj": "output.dense", "post_attention_layernorm": "attention.output.LayerNorm"},
        **{"mlp": "", "up_proj": "intermediate.dense", "down_proj": "output.dense"},
        **{"output_layernorm": "output.LayerNorm", "lm_head": "cls.predictions"},
        **{"transform": "transform.dense", "transform_norm": "transform.LayerNorm"},
    },
)
MODEL_TYPES = {
    "llama": ModelType("LlamaForCausalLM"),
    "mistral": ModelType("MistralForCausalLM", _MISTRALS, can_slide=True),
    "qwen2": ModelType("Qwen2ForCausalLM", _QWENS, True, True, qkv_bias=True),
    "qwen3": ModelType("Qwen3ForCausalLM", _QWENS | {"head_dim": 128}, True, True, qk_norm=True),
    "phi3": ModelType(
        "Phi3ForCausalLM",
        _PHI3,
        can_slide=True,
        rope_types=("default", "longrope"),
        block=PHI3_BLOCK,
        unwritten=("layer_types",),
    ),
    "olmo2": ModelType(
        "Olmo2ForCausalLM",
        _OLMO2,
        qk_norm=True,
        joint_qk_norm=True,
        output_norm=True,
        block=OLMO2_BLOCK,
    ),
    "gpt2": _GPT2,
    "bert": _BERT,
}
# Fields that choose an architecture, with the values that are computed, the default first.
WORDS: dict[str, tuple[str, ...]] = {
    "model_type": tuple(MODEL_TYPES),
    "hidden_act": ("silu",),
    "normalization_function": ("rmsnorm",),
    "position_embedding_type": ("rope",),
}
FLAGS = {"attention_bias": False, "mlp_bias": False, "use_qk_norm": False}  # the only values
# Fields of Config that Llama's config.json has not.
NOT_LLAMAS = (
    "use_qk_norm",
    "sliding_window",
    "layer_types",
    "normalization_function",
    "position_embedding_type",
)
ALIASES = {"gelu_pytorch_tanh": "gelu_new"}  # words of hidden_act with the same meaning
# Of any architecture: the probabilities of dropout, which is not applied.
DROPOUTS = ("attention_dropout", *_GPT2_DROPOUT, *_BERT_DROPOUT)
