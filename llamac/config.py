"""Written twice on purpose: csrc/model/config.cpp reads the same; test_agreement.py::test_models.

The model's configuration, read from and written to Hugging Face's config.json.

Every size that follows from another one is computed here and nowhere else. Dimensions: C hidden_size, NH
query heads, NKV key/value heads, HD head size, F intermediate_size, V vocab_size, L layers, T time.
"""

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamac.errors import InputError
from llamac.files import excerpt, read_json
from llamac.folders import CONFIGS

# The largest sizes; csrc/model/config.cpp has the same.
WIDEST, DEEPEST, LONGEST, MOST_PARAMETERS = 2**24, 2**16, 2**31 - 1, 2**48
# Fields that choose an architecture, with the values that are computed, the default first.
WORDS: dict[str, tuple[str, ...]] = {
    "model_type": ("llama", "mistral"),  # Mistral's is Llama's with a sliding window
    "hidden_act": ("silu",),
    "normalization_function": ("rmsnorm",),
    "position_embedding_type": ("rope",),
}
FLAGS = ("attention_bias", "mlp_bias", "use_qk_norm")  # false alone
# What transformers takes where Mistral's config.json lacks it.
MISTRALS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
# Those that other architectures' config.json has and Llama's has not.
NOT_LLAMAS = ("use_qk_norm", "sliding_window", "normalization_function", "position_embedding_type")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: wavelengths beyond the original context are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Config:
    """The shape of Llama or Mistral, under Hugging Face's names. load_config() makes one and checks that it
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
    normalization_function: str = "rmsnorm"
    position_embedding_type: str = "rope"

    @property
    def q_size(self) -> int:
        """NH·HD: width of the queries and of the attention's output."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """NKV·HD: width of the keys, and of the values."""
        return self.num_key_value_heads * self.head_dim

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each parameter, in the order of files and random streams; matrices [out,in]."""
        C, F, V = self.hidden_size, self.intermediate_size, self.vocab_size
        block = [
            ("input_layernorm.weight", (C,)),
            ("self_attn.q_proj.weight", (self.q_size, C)),
            ("self_attn.k_proj.weight", (self.kv_size, C)),
            ("self_attn.v_proj.weight", (self.kv_size, C)),
            ("self_attn.o_proj.weight", (C, self.q_size)),
            ("post_attention_layernorm.weight", (C,)),
            ("mlp.gate_proj.weight", (F, C)),
            ("mlp.up_proj.weight", (F, C)),
            ("mlp.down_proj.weight", (C, F)),
        ]
        table: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (V, C))]
        for layer in range(self.num_hidden_layers):
            table += [(f"model.layers.{layer}.{name}", shape) for name, shape in block]
        table.append(("model.norm.weight", (C,)))
        if not self.tie_word_embeddings:
            table.append(("lm_head.weight", (V, C)))
        return table

    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters())

    def flops_per_token(self, T: int) -> int:
        """FLOPs of a token, forward and backward: 6·(parameters in a matmul) + 6·L·NH·HD·T.

        An untied input embedding is a table look-up and does not count; of attention the causal half counts,
        and of that what the window leaves.
        """
        matrices = sum(math.prod(shape) for _, shape in self.parameters() if len(shape) == 2)
        if not self.tie_word_embeddings:
            matrices -= self.vocab_size * self.hidden_size
        W = min(self.sliding_window or T, T)
        return 6 * matrices + 6 * self.num_hidden_layers * self.q_size * (W * (2 * T - W) // T)

    def to_dict(self, torch_dtype: str) -> dict:
        """The content of config.json; torch_dtype is the dtype of the weights: "float32" or "bfloat16"."""
        architecture = self.model_type.capitalize() + "ForCausalLM"
        values = {"architectures": [architecture], "model_type": ""} | asdict(self)
        if self.rope_scaling is not None:
            values["rope_scaling"] = {"rope_type": "llama3", **values["rope_scaling"]}
        if self.pad_token_id is None:
            del values["pad_token_id"]
        for name in NOT_LLAMAS:
            if name != "sliding_window" or self.model_type == "llama":
                del values[name]
        return values | {"torch_dtype": torch_dtype}


def presets() -> dict[str, Path]:
    """Name and file of every preset."""
    return {file.stem: file for file in sorted((CONFIGS / "models").glob("*.json"))}


def how_to_fetch(model: str) -> str:
    """How to get it, where the name may be a model's on the Hugging Face hub, "owner/name"; else ""."""
    if not re.fullmatch(r"[^/.~][^/]*/[^/]+", model):
        return ""
    name = model.partition("/")[2]
    command = f"`hf download {model} --local-dir {name}` (pip install huggingface_hub)"
    return f"; a model of the Hugging Face hub is fetched with {command}, then --model {name}"


def has_weights(directory: str | Path) -> bool:
    """Whether a Hugging Face directory has weights, in a format that can be read or not."""
    names = ("model.safetensors", "pytorch_model.bin")
    # os.path, not Path: what cannot be looked at, as with a name that is too long, is not there.
    return any(
        os.path.exists(Path(directory) / f"{name}{end}") for name in names for end in ("", ".index.json")
    )


def load_config(model: str | Path) -> Config:
    """Configuration of a preset's name, a Hugging Face directory or a config.json. Raises InputError."""
    path = Path(model)
    if os.path.isdir(path):
        path = path / "config.json"
    elif path.suffix != ".json":
        if str(model) not in presets():
            names = ", ".join(sorted(presets()))
            expected = f"expected a directory with config.json or a preset ({names})"
            raise InputError(f"model {model}: {expected}{how_to_fetch(str(model))}")
        path = presets()[str(model)]
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return _Reader(str(path), values).config()


@dataclass(frozen=True)
class _Reader:
    """One config.json on its way into a Config; `file` names it in the errors."""

    file: str
    values: dict

    def fail(self, key: str, expected: str) -> InputError:
        found = excerpt(self.values[key]) if key in self.values else "nothing"
        return InputError(f"{self.file}: {key}: expected {expected}, found {found}")

    def get(self, key: str, default):
        """The value of key; a default stands in for a missing key and for null."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, most: int = WIDEST) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value <= most:
            raise self.fail(key, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def architecture(self) -> dict[str, Any]:
        """The fields that choose one. Raises InputError for what is not computed."""
        values = {key: self.get(key, words[0]) for key, words in WORDS.items()}
        values |= {key: self.flag(key) for key in FLAGS}
        window = self.window()
        accepted = WORDS | dict.fromkeys(FLAGS, (False,))
        for key, value in values.items():
            if value not in accepted[key]:
                raise self.fail(key, " or ".join(map(json.dumps, accepted[key])))
        if window is not None and values["model_type"] == "llama":
            raise self.fail("sliding_window", "null")
        return values | {"sliding_window": window}

    def missing(self, key: str, default: Any) -> Any:
        """What stands in for a missing key; null is Llama's default, but for the context."""
        absent = key not in self.values or key == "max_position_embeddings"
        return MISTRALS[key] if absent and self.values.get("model_type") == "mistral" else default

    def window(self) -> int | None:
        window = self.get("sliding_window", self.missing("sliding_window", None))
        return None if window is None else self.size("sliding_window", window, LONGEST)

    def token(self, key: str, default: int, several: bool = False) -> Any:
        """A token id, null for none; instruction-tuned models list several ends of text."""
        value = self.values.get(key, default)
        ids = value if several and type(value) is list and value else [value]
        if value is not None and not all(type(x) is int and 0 <= x < 2**31 for x in ids):
            raise self.fail(key, "a token id")
        return value

    def rope(self) -> tuple[float, RopeScaling | None]:
        """theta and scaling: `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling`."""
        key = "rope_parameters" if self.get("rope_parameters", None) is not None else "rope_scaling"
        scaling = self.get(key, {})
        if type(scaling) is not dict:
            raise self.fail(key, "an object or null")
        inner = _Reader(f"{self.file}: {key}", scaling)
        theta = inner.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            expected = '"llama3" or "default"'
            raise InputError(f"{inner.file}: rope_type: expected {expected}, found {excerpt(kind)}")
        longest = self.size("max_position_embeddings", self.missing("max_position_embeddings", 2048), LONGEST)
        # The default is transformers'.
        original = inner.size("original_max_position_embeddings", longest, LONGEST)
        factor, low, high = (inner.number(f) for f in ("factor", "low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise inner.fail("low_freq_factor", f"less than high_freq_factor {high:g}")
        return theta, RopeScaling(factor, low, high, original)

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
        if self.get("head_dim", None) is None and C % NH != 0:
            raise self.fail("hidden_size", f"a multiple of num_attention_heads {NH} without head_dim")
        HD = self.size("head_dim", C // NH)
        if HD % 2 != 0:
            raise InputError(f"{self.file}: head_dim: expected an even number, found {HD}")
        if (width := (NH + 2 * NKV) * HD) > WIDEST:
            expected = f"queries, keys and values of together at most {WIDEST}"
            raise InputError(f"{self.file}: head_dim: expected {expected}, found {width}")
        theta, scaling = self.rope()
        config = Config(
            vocab_size=self.size("vocab_size"),
            hidden_size=C,
            intermediate_size=self.size("intermediate_size"),
            num_hidden_layers=self.size("num_hidden_layers", most=DEEPEST),
            num_attention_heads=NH,
            num_key_value_heads=NKV,
            head_dim=HD,
            max_position_embeddings=self.size(
                "max_position_embeddings", self.missing("max_position_embeddings", 2048), LONGEST
            ),
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            initializer_range=self.number("initializer_range", 0.02),
            bos_token_id=self.token("bos_token_id", 1),
            eos_token_id=self.token("eos_token_id", 2, several=True),
            pad_token_id=pad if type(pad := self.get("pad_token_id", None)) is int and pad < 2**63 else None,
            **architecture,
        )
        block = C * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
        if config.num_hidden_layers * block + 2 * config.vocab_size * C > MOST_PARAMETERS:
            raise InputError(f"{self.file}: expected fewer than 2^48 parameters")
        return config
