"""`llamac model --depth 12 --tokenizer DATA --out DIR` writes the config.json of a new model.

One dial, --depth, sets all sizes: 64 channels per layer, heads of 64 channels (of 128 from 2,048 channels on,
with a quarter of the heads for keys and values), a feed-forward width of 8/3 of the channels, rounded up to a
multiple of 256. --like takes the sizes and the other fields of a preset or a directory instead. Flags for
single sizes win over both. The vocabulary and the ids of special tokens are the tokenizer's.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser
from llamac.base.errors import InputError, printable
from llamac.base.files import write_text
from llamac.data import tokenizer
from llamac.model.architectures import MODEL_TYPES
from llamac.model.config import Config, load_config, own_fields, read_config

VOCABULARY_MULTIPLE = 64  # matrix products over the vocabulary are slow for sizes without a power of two


def round_up(value: float, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def feed_forward(channels: int) -> int:
    """The width of SwiGLU with the parameters of a plain MLP of 4·channels (Shazeer 2020)."""
    return round_up(8 * channels / 3, 256)


def of_depth(layers: int, channels: int | None = None) -> dict[str, Any]:
    """Fields of a model with so many layers; channels: 64 per layer by default."""
    C = channels or 64 * layers
    wide = C >= 2048
    head_dim = 128 if wide else 64
    if C % head_dim:
        raise InputError(f"--channels: expected a multiple of {head_dim}, found {C}")
    heads = C // head_dim
    return {
        "num_hidden_layers": layers,
        "hidden_size": C,
        "intermediate_size": feed_forward(C),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if wide and heads % 4 == 0 else heads,
        "head_dim": head_dim,
    }


def of_tokenizer(own: Any) -> dict[str, Any]:
    """Fields that follow from a tokenizer (data.tokenizer.load)."""
    ids = {"bos_token_id": own.bos, "eos_token_id": own.bos if own.eos is None else own.eos}
    return {"vocab_size": round_up(own.vocab_size, VOCABULARY_MULTIPLE), "pad_token_id": own.pad} | ids


def make(own: Any, like: str | None = None, **given: Any) -> Config:
    """The configuration of a new model. own: its tokenizer; given: fields that win, None for those not given.
    Without `like` they have num_hidden_layers. Raises InputError where they do not fit together."""
    values = {name: value for name, value in given.items() if value is not None}
    if like:
        other = load_config(like)
        base = asdict(other) | other.derived_fields()
        for name in sorted(values.keys() & MODEL_TYPES[other.model_type].unwritten):
            raise InputError(f"--like {like}: a model of type {other.model_type} has no {name}")
        if "hidden_size" in values and values["hidden_size"] != base["hidden_size"]:
            # The ratios of the other model.
            scale = values["hidden_size"] / base["hidden_size"]
            base["intermediate_size"] = round_up(base["intermediate_size"] * scale, 256)
            heads = values["hidden_size"] // base["head_dim"]
            group = base["num_attention_heads"] // base["num_key_value_heads"]
            base |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // group)}
        layers = values.get("num_hidden_layers", base["num_hidden_layers"])
        if base["layer_types"] and layers != base["num_hidden_layers"]:
            expected = f"{base['num_hidden_layers']}, as layer_types of --like {like} has one for each layer"
            raise InputError(f"--depth: expected {expected}, found {layers}")
        values = own_fields(base | of_tokenizer(own) | values)
    else:
        dial = of_depth(values["num_hidden_layers"], values.get("hidden_size"))
        values = dial | of_tokenizer(own) | {"rms_norm_eps": 1e-5} | values
    return read_config(values, "the new model")


def main() -> None:
    parser = Parser("model", __doc__)
    add = parser.add_argument
    add("--depth", "--layers", dest="num_hidden_layers", metavar="L", type=int, help="number of layers")
    add("--channels", dest="hidden_size", metavar="C", type=int, help="width of the residual stream")
    add("--heads", dest="num_attention_heads", metavar="N", type=int, help="heads of the queries")
    add("--kv-heads", dest="num_key_value_heads", metavar="N", type=int, help="heads of keys and values")
    add("--head-size", dest="head_dim", metavar="N", type=int, help="channels per head")
    add("--ffn", dest="intermediate_size", metavar="F", type=int, help="width of the feed-forward part")
    add("--context", dest="max_position_embeddings", metavar="T", type=int, help="longest sequence (2048)")
    add("--theta", dest="rope_theta", metavar="X", type=float, help="base of RoPE's frequencies (10000)")
    add("--tied", dest="tie_word_embeddings", action="store_true", default=None, help="head = embedding")
    add("--like", metavar="MODEL", help="preset or directory whose sizes and fields are the defaults")
    add("--tokenizer", metavar="DATA", required=True, help="folder of token files, or a tokenizer's file")
    add("--out", metavar="DIR", type=Path, required=True, help="new folder for config.json")
    arguments = vars(parser.parse_args())
    out, like, own = arguments.pop("out"), arguments.pop("like"), arguments.pop("tokenizer")
    if not like and arguments["num_hidden_layers"] is None:
        raise InputError("llamac model: expected --depth or --like, found neither")
    path: Path = out / "config.json"
    if path.exists():
        raise InputError(f"{path}: exists; expected a new folder for --out")
    loaded = tokenizer.load(own)
    config = make(loaded, like, **arguments)
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(config.to_dict("bfloat16"), indent=2) + "\n")
    for line in description(config, loaded, own, out):
        print(printable(line))


def description(config: Config, own: Any, source: str, out: Path) -> list[str]:
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    total = config.num_parameters()
    heads = f"{config.num_attention_heads}/{config.num_key_value_heads} heads of {config.head_dim}"
    unused = config.vocab_size - own.vocab_size
    return [
        f"{out / 'config.json'}: {total:,} parameters, {embedding:,} of them of the vocabulary",
        f"  {config.num_hidden_layers} layers, {config.hidden_size} channels, {heads}, "
        f"feed-forward {config.intermediate_size}, context {config.max_position_embeddings}",
        f"  vocabulary {own.vocab_size:,} of {source}"
        + (f" and {unused} unused ids, for a multiple of {VOCABULARY_MULTIPLE}" if unused else ""),
        f"20 tokens per parameter are {20 * total:,}. Next: ./train_llama3 --model {out} --dry-run",
    ]
