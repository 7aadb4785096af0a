"""Written twice on purpose: csrc/checkpoint/config_json.cpp reads the same; test_agreement.py::test_models.

The model's configuration, read from and written to Hugging Face's config.json.

Every size that follows from another one is computed here and nowhere else. Dimensions: C hidden_size, NH
query heads, NKV key/value heads, HD head size, F intermediate_size, V vocab_size, L layers, T time.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamac.base.errors import InputError
from llamac.base.files import excerpt, read_json
from llamac.base.folders import CONFIGS, how_to_fetch
from llamac.model.architectures import ALIASES, DROPOUTS, FLAGS, MODEL_TYPES, NOT_LLAMAS, WORDS, ModelType
from llamac.model.block import Linear

# The largest sizes; csrc/checkpoint/config_json.cpp has the same.
WIDEST, DEEPEST, LONGEST, MOST_PARAMETERS = 2**24, 2**16, 2**31 - 1, 2**48
ORIGINAL = "original_max_position_embeddings"
LONGROPES = ("short_factor", "long_factor")
LLAMA3S, YARNS = ("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary frequencies from the context of the first training to a longer one: linear, or by the
    turns that a pair of channels makes within the original context. Pairs that turn less than low_freq_factor
    are slowed down by `factor`, those that turn more than high_freq_factor stay. YaRN calls these beta_slow
    and beta_fast.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    rope_type: str = "llama3"  # or "linear", "yarn" or "longrope"
    attention_factor: float = 1.0  # of cosines and sines: YaRN's and LongRoPE's
    truncate: bool = True  # YaRN's bounds are whole pairs
    # LongRoPE's divisors of each pair's frequency, within the original context and beyond it.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def to_dict(self, longest: int) -> dict:
        """As config.json has it; longest: max_position_embeddings."""
        if self.rope_type == "longrope":
            # transformers 4 takes these three fields alone; both versions derive the factor from the lengths.
            fields = {"type": "longrope"} | {name: list(getattr(self, name)) for name in LONGROPES}
            context = self.original_max_position_embeddings
            derived = longrope_attention(longest / context, context) == self.attention_factor
            return fields if derived else fields | {"attention_factor": self.attention_factor}
        values = {"rope_type": self.rope_type, "factor": self.factor}
        if self.rope_type == "linear":
            return values
        low, high = LLAMA3S if self.rope_type == "llama3" else YARNS
        values |= {low: self.low_freq_factor, high: self.high_freq_factor}
        values["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.rope_type == "yarn":
            values |= {"attention_factor": self.attention_factor, "truncate": self.truncate}
        return values


def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope_attention(factor: float, context: int) -> float:
    """LongRoPE's factor of cosines and sines (Ding et al. 2024), by the original context."""
    return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(context))


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, T: int = 0) -> list[float]:
    """Radians per position of each pair of a head's channels, [HD/2]: theta^(-2j/HD) (Su et al. 2021), slowed
    down as Llama 3.1 does it or YaRN (Peng et al. 2023). Between its two bounds the slowdown is blended:
    Llama's by turns, YaRN's by the number of the pair. LongRoPE (Ding et al. 2024) has a divisor of each,
    which depends on the length T of the longest sequence.
    """
    half, first, last = head_dim // 2, 0.0, 0.0
    if scaling and scaling.rope_type == "longrope":
        is_long = scaling.original_max_position_embeddings < T
        divisors = scaling.long_factor if is_long else scaling.short_factor
        return [theta ** (-j / half) / divisor for j, divisor in enumerate(divisors)]
    if scaling and scaling.rope_type == "yarn":
        context = scaling.original_max_position_embeddings

        def pair_of(turns: float) -> float:
            return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_of(scaling.high_freq_factor), pair_of(scaling.low_freq_factor)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, head_dim - 1.0)
        last += 0.001 if first == last else 0.0

    def kept(j: int, frequency: float) -> float:
        if scaling is None or scaling.rope_type == "linear":
            return 1.0 if scaling is None else 0.0
        if scaling.rope_type == "yarn":
            return min(max((last - j) / (last - first), 0.0), 1.0)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        return min(max((turns - low) / (high - low), 0.0), 1.0)

    factor, frequencies = scaling.factor if scaling else 1.0, []
    for j in range(half):
        frequency = theta ** (-j / half)
        keep = kept(j, frequency)
        frequencies.append((1 - keep) * frequency / factor + keep * frequency)
    return frequencies


@dataclass(frozen=True)
class Config:
    """The shape of a model, under Hugging Face's names. load_config() makes one and checks that it
    adds up.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    model_type: str = "llama"
    pad_token_id: int | None = None  # carried along where config.json has it, as it is
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # which layers have the window; None: all
    normalization_function: str = "rmsnorm"
    position_embedding_type: str = "rope"
    partial_rotary_factor: float = 1.0  # of the channels of a head: RoPE turns the first of them
    type_vocab_size: int = 0  # rows of the table of token types; 0: there is none

    @property
    def block(self) -> tuple[Linear, ...]:
        """The linears of a block."""
        return MODEL_TYPES[self.model_type].block

    @property
    def norm_weights(self) -> tuple[str, ...]:
        """The parameters of a norm over the channels."""
        return ("weight", "bias") if self.normalization_function == "layernorm" else ("weight",)

    @property
    def has_positions(self) -> bool:
        """Whether positions are learned vectors that are added to the embedding."""
        return self.position_embedding_type in ("learned", "absolute")

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see those after them, too, and the model predicts masked ones (BERT)."""
        return MODEL_TYPES[self.model_type].encoder

    @property
    def q_size(self) -> int:
        """NH·HD: width of the queries and of the attention's output."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """NKV·HD: width of the keys, and of the values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qkv_size(self) -> int:
        """Width of the queries, keys and values."""
        return self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        """Width of the feed-forward gate and up projections together."""
        return 2 * self.intermediate_size

    @property
    def qkv_bias(self) -> bool:
        """Whether the product that makes queries, keys and values has a bias."""
        return self.attention_bias or MODEL_TYPES[self.model_type].qkv_bias

    @property
    def qk_norm(self) -> bool:
        """Whether the queries and keys have norms."""
        return MODEL_TYPES[self.model_type].qk_norm

    @property
    def qk_norm_sizes(self) -> dict[str, int]:
        """{module: the width of what it norms}: a head, or those of all queries, or keys, together."""
        joint = MODEL_TYPES[self.model_type].joint_qk_norm
        q, k = (self.q_size, self.kv_size) if joint else (self.head_dim, self.head_dim)
        return {"q_norm": q, "k_norm": k}

    @property
    def output_norm(self) -> bool:
        """Whether norms are of what the halves of a block add to the residual (OLMo 2)."""
        return MODEL_TYPES[self.model_type].output_norm

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias

    def windows(self) -> list[int | None]:
        """By layer, how many tokens its attention sees, its own among them. None: all."""
        types = self.layer_types or ["sliding_attention"] * self.num_hidden_layers
        return [self.sliding_window if kind == "sliding_attention" else None for kind in types]

    def is_turned(self, name: str) -> bool:
        """Whether files hold a weight, by its name there, as [in,out]."""
        *_, module, kind = name.split(".")
        return kind == "weight" and module in MODEL_TYPES[self.model_type].turned

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name in files, shape) of each parameter, in the order of files and random streams; matrices
        [out,in]."""
        C, V = self.hidden_size, self.vocab_size
        block = [parameter for row in self.block for parameter in row.parameters(self)]
        table: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (V, C))]
        if self.has_positions:
            table.append(("model.embed_positions.weight", (self.max_position_embeddings, C)))
        if self.type_vocab_size:
            table.append(("model.embed_types.weight", (self.type_vocab_size, C)))
        norm = [(name, (C,)) for name in self.norm_weights]
        if self.is_encoder:
            table += [(f"model.embed_norm.{name}", shape) for name, shape in norm]
        for layer in range(self.num_hidden_layers):
            table += [(f"model.layers.{layer}.{name}", shape) for name, shape in block]
        if self.is_encoder:
            table += [("lm_head.transform.weight", (C, C)), ("lm_head.transform.bias", (C,))]
        last = "lm_head.transform_norm" if self.is_encoder else "model.norm"
        table += [(f"{last}.{name}", shape) for name, shape in norm]
        if not self.tie_word_embeddings:
            table.append(("lm_head.weight", (V, C)))
        if self.is_encoder:
            table.append(("lm_head.bias", (V,)))
        own = MODEL_TYPES[self.model_type]
        return [(own.file_name(name), shape) for name, shape in table]

    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape in files} of each parameter, in the order of parameters()."""
        return {name: shape[:: -1 if self.is_turned(name) else 1] for name, shape in self.parameters()}

    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """FLOPs of a token, forward and backward: 6·(parameters in a matmul) + 6·L·NH·HD·T.

        Tables that are looked up do not count: positions, and the embedding, unless it is the head, too. Of
        attention the causal half counts, in an encoder all, and of that what the window leaves.
        """
        matrices = sum(math.prod(shape) for _, shape in self.parameters() if len(shape) == 2)
        if not self.tie_word_embeddings:
            matrices -= self.vocab_size * self.hidden_size
        if self.has_positions:
            matrices -= (self.max_position_embeddings + self.type_vocab_size) * self.hidden_size
        seen = [min(window or T, T) for window in self.windows()]
        pairs = sum(W * (2 * T - W) // T for W in seen) * (2 if self.is_encoder else 1)
        return 6 * matrices + 6 * self.q_size * pairs

    def derived_fields(self) -> dict[str, Any]:
        """Those of config.json that choose the sliding window and scale rotary frequencies."""
        chooses = MODEL_TYPES[self.model_type].chooses_window
        values: dict[str, Any] = {"use_sliding_window": self.sliding_window is not None} if chooses else {}
        scaling = self.rope_scaling
        if scaling is None:
            return values | {"rope_scaling": None}
        outer = {ORIGINAL: scaling.original_max_position_embeddings} if scaling.long_factor else {}
        return values | {"rope_scaling": scaling.to_dict(self.max_position_embeddings), **outer}

    def to_dict(self, torch_dtype: str) -> dict:
        """The content of config.json; torch_dtype is the dtype of the weights: "float32" or "bfloat16"."""
        own = MODEL_TYPES[self.model_type]
        values = {"architectures": [own.architecture], "model_type": ""} | asdict(self)
        values |= self.derived_fields()
        if self.pad_token_id is None and "pad_token_id" not in own.missing:
            del values["pad_token_id"]
        if self.partial_rotary_factor == 1:
            del values["partial_rotary_factor"]
        if not self.type_vocab_size:
            del values["type_vocab_size"]
        for name in NOT_LLAMAS:
            kept = name == "sliding_window" and own.can_slide
            if not kept and (name != "layer_types" or self.layer_types is None):
                del values[name]
        return own_fields(values) | {**own.written, "torch_dtype": torch_dtype}


def own_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of Config, by the names that their model_type has in config.json."""
    own = MODEL_TYPES[values["model_type"]]
    return {own.fields.get(key, key): x for key, x in values.items() if key not in own.unwritten}


def presets() -> dict[str, Path]:
    """Name and file of every preset."""
    return {file.stem: file for file in sorted((CONFIGS / "models").glob("*.json"))}


WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FORMATS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".h5", ".msgpack")
_NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args", "tokenizer")


def _is_of_weights(name: str) -> bool:
    """By its name; core/safetensors.cpp has the same. Files of an optimizer, of tokens and of a tokenizer are
    no weights."""
    if name.startswith(_NO_WEIGHTS):
        return False
    named = name.endswith(".bin") and ("model" in name or "weights" in name)
    return named or name.startswith("consolidated.") or name.endswith(_FORMATS)


def find_weights(directory: str | Path) -> str:
    """The name of a file in a directory that has weights, in a format that can be read or not, the readable
    one first; "" where there is none."""
    for name in (*WEIGHTS, *PICKLED):
        # os.path, not Path: what cannot be looked at, as with a name that is too long, is not there.
        if os.path.exists(Path(directory) / name):
            return name
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return min(filter(_is_of_weights, names), default="")


def load_config(model: str | Path) -> Config:
    """Configuration of a preset's name, a Hugging Face directory or a config.json. Raises InputError."""
    path = _config_file(model)
    return read_config(read_json(path, {}), str(path))


def dropouts(model: str | Path) -> str:
    """The dropout that the model's config.json asks for, which is not applied; "" for none."""
    values = read_json(_config_file(model), {})
    given = {key: x for key, x in values.items() if x is not None}
    values = {**MODEL_TYPES[given.get("model_type", "llama")].missing, **given}
    return ", ".join(f"{key} {excerpt(values[key])}" for key in DROPOUTS if values.get(key))


def _config_file(model: str | Path) -> Path:
    path = Path(model)
    if os.path.isdir(path):
        path = path / "config.json"
    elif path.suffix != ".json":
        if str(model) not in presets():
            names = ", ".join(sorted(presets()))
            expected = f"expected a directory with config.json or a preset ({names})"
            raise InputError(f"model {model}: {expected}{how_to_fetch(str(model))}")
        path = presets()[str(model)]
    return path


def read_config(values: dict, where: str) -> Config:
    """Configuration of a config.json's fields; `where` names them in errors. Raises InputError."""
    return _Reader(where, values).config()


@dataclass(frozen=True)
class _Reader:
    """One config.json on its way into a Config; `file` names it in the errors."""

    file: str
    values: dict

    def fail(self, key: str, expected: str) -> InputError:
        key = self.own_name(key)
        found = excerpt(self.values[key]) if key in self.values else "nothing"
        return InputError(f"{self.file}: {key}: expected {expected}, found {found}")

    def get(self, key: str, default):
        """The value of key; a default stands in for a missing key and for null."""
        value = self.values.get(self.own_name(key))
        return default if value is None else value

    def own_name(self, key: str) -> str:
        """The name in this file of Llama's field."""
        return self.model_type().fields.get(key, key)

    def size(self, key: str, default: int | None = None, most: int = WIDEST, least: int = 1) -> int:
        value = self.get(key, self.default(key, default))
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a positive number")
        return float(value)

    def option(self, key: str, default: float) -> float:
        """One of YaRN's, where 0 is none."""
        value = self.get(key, 0)
        if type(value) not in (int, float) or not (value == 0 or 1e-9 <= value <= 1e9):
            raise self.fail(key, "a number from 1e-9 to 1e9")
        return float(value or default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def architecture(self) -> dict[str, Any]:
        """The fields that choose one. Raises InputError for what is not computed."""
        own = self.model_type()
        for key in (*own.fields, *own.unwritten):
            if (value := self.values.get(key)) is not None:
                expected = f"none in a model of type {self.values['model_type']}"
                raise InputError(f"{self.file}: {key}: expected {expected}, found {excerpt(value)}")
        words, flags = {**WORDS, **own.words}, {**FLAGS, **own.flags}
        values = {key: self.get(key, choices[0]) for key, choices in words.items()}
        values |= {key: self.flag(key, only) for key, only in flags.items()}
        window = self.window()
        accepted = words | {key: (only,) for key, only in flags.items()}
        for key, value in values.items():
            if value not in accepted[key]:
                raise self.fail(key, " or ".join(map(json.dumps, accepted[key])))
        if window is not None and not MODEL_TYPES[values["model_type"]].can_slide:
            raise self.fail("sliding_window", "null")
        values["hidden_act"] = ALIASES.get(values["hidden_act"], values["hidden_act"])
        return {key: values[key] for key in (*WORDS, *FLAGS)} | {"sliding_window": window}

    def default(self, key: str, llamas: Any = None) -> Any:
        """The value for an absent field, or for null."""
        return self.model_type().missing.get(key, llamas)

    def missing(self, key: str, default: Any) -> Any:
        """The value for an absent key; null is Llama's default, except for the context."""
        absent = self.own_name(key) not in self.values or key == "max_position_embeddings"
        return self.model_type().missing.get(key, default) if absent else default

    def model_type(self) -> ModelType:
        return MODEL_TYPES.get(str(self.values.get("model_type")), MODEL_TYPES["llama"])

    def window(self) -> int | None:
        if self.model_type().chooses_window and not self.flag("use_sliding_window"):
            return None
        window = self.get("sliding_window", self.missing("sliding_window", None))
        return None if window is None else self.size("sliding_window", window, LONGEST)

    def token(self, key: str, default: int, several: bool = False) -> Any:
        """A token id, null for none; instruction-tuned models list several ends of text."""
        value = self.values.get(key, self.missing(key, default))
        ids = value if several and type(value) is list and value else [value]
        if value is not None and not all(type(x) is int and 0 <= x < 2**31 for x in ids):
            raise self.fail(key, "a token id")
        return value

    def layer_types(self, layers: int, window: int | None) -> list[str] | None:
        """With them, transformers computes Mistral as Ministral: a window for the layers that slide."""
        types = self.get("layer_types", None)
        if types is None and self.model_type().chooses_window and window is not None:
            begin = self.size("max_window_layers", 28, DEEPEST, least=0)
            return [LAYER_TYPES[layer >= begin] for layer in range(layers)]
        if types is None:
            return None
        if type(types) is not list or len(types) != layers:
            raise self.fail("layer_types", f"a list of num_hidden_layers = {layers} types")
        for kind in types:
            expected = " or ".join(map(json.dumps, LAYER_TYPES))
            if kind == "sliding_attention" and window is None:
                kind, expected = "sliding_attention", '"full_attention" without sliding_window'
            elif kind in LAYER_TYPES:
                continue
            raise InputError(f"{self.file}: layer_types: expected {expected}, found {excerpt(kind)}")
        return types

    def divisors(self, key: str, pairs: int) -> tuple[float, ...]:
        """LongRoPE's of the frequencies."""
        found: Any = self.values.get(key)
        right = type(found) is list and len(found) == pairs
        if not right or any(type(x) not in (int, float) or not 1e-9 <= x <= 1e9 for x in found):
            expected = f"a list, for the pairs of a head's channels, of {pairs} numbers from 1e-9 to 1e9"
            raise self.fail(key, expected)
        return tuple(map(float, found))

    def rotary_factor(self, missing: float, head_dim: int, partial: bool) -> float:
        """Of the channels of a head, those that RoPE turns."""
        factor = self.get(key := "partial_rotary_factor", missing)
        size = head_dim * factor if type(factor) in (int, float) else 0
        if not partial and (factor is True or factor != 1):
            raise self.fail(key, "1: all channels of a head are turned")
        if not (size >= 2 and factor <= 1) or int(size) % 2:
            raise self.fail(key, "the part, up to 1, of a head's channels that is an even number")
        return float(factor)

    def rope(self, head_dim: int) -> tuple[float, RopeScaling | None, float]:
        """theta, scaling and rotary factor: `rope_parameters` (transformers 5), or `rope_theta` and
        `rope_scaling`. Where a file has both, both versions take rope_scaling.
        """
        older = self.get("rope_scaling", {})
        key = "rope_scaling" if older not in ({}, []) else "rope_parameters"
        scaling = self.get(key, {})
        theta = self.number("rope_theta", 10000.0)
        if type(scaling) is not dict:
            raise self.fail(key, "an object or null")
        inner = _Reader(f"{self.file}: {key}", scaling)
        partial, part = "longrope" in self.model_type().rope_types, 1.0
        for reader in (self, inner):
            part = reader.rotary_factor(part, head_dim, partial)
        for kind in LAYER_TYPES:
            if inner.get(kind, None) is not None:
                expected = "none, as all layers have the same rotary positions"
                raise InputError(f"{inner.file}: {kind}: expected {expected}, found an object")
        theta = inner.number("rope_theta", theta)
        name = "rope_type" if inner.get("rope_type", None) is not None else "type"
        kind = inner.get(name, "default")
        if kind not in (kinds := self.model_type().rope_types):
            raise inner.fail(name, " or ".join(map(json.dumps, kinds)))
        if kind == "default":
            return theta, None, part
        if kind == "linear":
            return theta, RopeScaling(inner.number("factor"), rope_type=kind), part
        longest = self.size("max_position_embeddings", self.missing("max_position_embeddings", 2048), LONGEST)
        # The order and the default are transformers'.
        where = inner if self.get(ORIGINAL, self.default(ORIGINAL)) is None else self
        context = where.size(ORIGINAL, longest, LONGEST, least=2 if kind == "longrope" else 1)
        if kind == "llama3":
            factor, low, high = (inner.number(f) for f in ("factor", *LLAMA3S))
            if low >= high:
                raise inner.fail(
                    "low_freq_factor", f"less than high_freq_factor {excerpt(scaling[LLAMA3S[1]])}"
                )
            return theta, RopeScaling(factor, low, high, context), part
        factor = inner.number("factor", longest / context)
        if kind == "longrope":
            short, long = (inner.divisors(name, int(head_dim * part) // 2) for name in LONGROPES)
            attention = inner.option("attention_factor", longrope_attention(factor, context))
            factor = longest / context
            return theta, RopeScaling(factor, 1, 4, context, kind, attention, True, short, long), part
        low, high = inner.option("beta_slow", 1.0), inner.option("beta_fast", 32.0)
        truncate, attention = inner.flag("truncate", True), inner.attention_factor(factor)
        if theta <= 1:
            raise InputError(f"{self.file}: rope_theta: expected more than 1, found {theta!r}")
        return theta, RopeScaling(factor, low, high, context, kind, attention, truncate), part

    def attention_factor(self, factor: float) -> float:
        """YaRN's: that of the file, or by two scales as DeepSeek has them, or the paper's."""
        names = ("attention_factor", "mscale", "mscale_all_dim")
        own, some, every = (self.option(name, 0.0) for name in names)
        ratio = yarn_attention(factor, some) / yarn_attention(factor, every) if some and every else 0.0
        return own or ratio or yarn_attention(factor)

    def pad(self) -> int | None:
        pad = self.values.get("pad_token_id", self.model_type().missing.get("pad_token_id"))
        return pad if type(pad) is int and pad < 2**63 else None

    def types(self) -> int:
        own = self.model_type().missing.get("type_vocab_size")
        return self.size("type_vocab_size", own) if own else 0

    def config(self) -> Config:
        architecture = self.architecture()
        if self.get("quantization_config", None) is not None:
            raise self.fail(
                "quantization_config", "none, as quantized weights cannot be trained; use the original"
            )
        C, NH = self.size("hidden_size"), self.size("num_attention_heads")
        NKV = self.size("num_key_value_heads", self.missing("num_key_value_heads", NH))
        if NH % NKV != 0:
            raise self.fail("num_key_value_heads", f"a divisor of num_attention_heads {NH}")
        HD = self.get("head_dim", self.missing("head_dim", None))
        if HD is None and C % NH != 0:
            raise self.fail("hidden_size", f"a multiple of {self.own_name('num_attention_heads')} {NH}")
        HD = self.size("head_dim", C // NH if HD is None else HD)
        if HD % 2 != 0:
            raise InputError(f"{self.file}: head_dim: expected an even number, found {HD}")
        if (width := (NH + 2 * NKV) * HD) > WIDEST:
            expected = f"queries, keys and values of together at most {WIDEST}"
            raise InputError(f"{self.file}: head_dim: expected {expected}, found {width}")
        turns = architecture["position_embedding_type"] == "rope"
        theta, scaling, part = self.rope(HD) if turns else (10000.0, None, 1.0)
        ratio = self.model_type().feed_forward
        layers = self.size("num_hidden_layers", most=DEEPEST)
        config = Config(
            vocab_size=self.size("vocab_size"),
            hidden_size=C,
            intermediate_size=self.size("intermediate_size", ratio and ratio * C),
            num_hidden_layers=layers,
            layer_types=self.layer_types(layers, architecture["sliding_window"]),
            num_attention_heads=NH,
            num_key_value_heads=NKV,
            head_dim=HD,
            max_position_embeddings=self.size(
                "max_position_embeddings", self.missing("max_position_embeddings", 2048), LONGEST
            ),
            rms_norm_eps=self.number("rms_norm_eps", self.default("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            partial_rotary_factor=part,
            tie_word_embeddings=self.flag("tie_word_embeddings", self.default("tie_word_embeddings", False)),
            initializer_range=self.number("initializer_range", 0.02),
            type_vocab_size=self.types(),
            bos_token_id=self.token("bos_token_id", 1),
            eos_token_id=self.token("eos_token_id", 2, several=True),
            pad_token_id=self.pad(),
            **architecture,
        )
        block = sum(math.prod(shape) for row in config.block for shape in row.shapes(config).values())
        tables = 2 * config.vocab_size + config.has_positions * config.max_position_embeddings
        tables += config.type_vocab_size
        if config.num_hidden_layers * block + tables * C > MOST_PARAMETERS:
            raise InputError(f"{self.file}: expected fewer than 2^48 parameters")
        return config
