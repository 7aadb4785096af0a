"""`llamac export gguf DIR FILE.gguf` writes a model for llama.cpp; `llamac export hf|merge DIR OUT`:
export_hf.py.

DIR is a checkpoint, a run's output folder with one, or any Hugging Face directory of such a model, with its
tokenizer: byte-level BPE, or sentencepiece's BPE, as Llama 2 has it. Needs the package gguf.
"""

import argparse
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.arguments import Parser
from llamac.base.errors import InputError, requires
from llamac.base.folders import how_to_fetch
from llamac.data import chat, tokenizer
from llamac.data.bpe import GPT2_SPLIT, LLAMA3_SPLIT
from llamac.data.tokenizer_json import QWEN2_SPLIT, JsonTokenizer, split_pattern
from llamac.inference.export_hf import write_hf, write_merged
from llamac.model import hf
from llamac.model.architectures import MODEL_TYPES
from llamac.model.checkpoint import find_model
from llamac.model.config import Config, RopeScaling, rope_frequencies, yarn_attention

# llama.cpp's names of the patterns by which texts are split.
SPLITS = {LLAMA3_SPLIT: "llama-bpe", QWEN2_SPLIT: "qwen2", GPT2_SPLIT: "gpt-2"}
# llama.cpp's architecture, by model_type. Others are llama there, whose rotary pairs are neighbors.
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "olmo2": "olmo2", "gpt2": "gpt2"}


POSITIONS = {own.file_name("model.embed_positions.weight") for own in MODEL_TYPES.values()}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in GGUF's order: there the two channels that RoPE turns together are
    neighbors, in Hugging Face's they lie half a head apart."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def rope_factors(config: Config, scaling: RopeScaling) -> np.ndarray:
    """f32 [HD/2]: Llama 3.1's divisor of each frequency."""
    plain, scaled = (rope_frequencies(config.head_dim, config.rope_theta, s) for s in (None, scaling))
    return (np.array(plain) / np.array(scaled)).astype(np.float32)


def write_gguf(directory: str | Path, path: str | Path, dtype: str = "auto") -> None:
    """Write the model of a directory, renamed into place when whole. dtype: of matrices, f32, f16 or bf16;
    auto: the files'. Vectors are f32, as llama.cpp wants them. Raises InputError."""
    gguf = requires("gguf", "llamac export")
    folder, path = find_model(directory), Path(path)
    if not folder.is_dir():
        fetched = how_to_fetch(str(directory))
        raise InputError(f"{directory}: expected a directory with config.json and weights{fetched}")
    config = hf.load_config_of_weights(folder)
    if config.is_encoder:
        raise InputError(f"{directory}: expected a causal model, found one of type {config.model_type}")
    architecture = ARCHITECTURES.get(config.model_type, "llama")
    if config.sliding_window and config.sliding_window < config.max_position_embeddings:
        window = f"the window of {config.sliding_window} tokens: longer contexts are computed without it"
        unread = f"llama.cpp's architecture {architecture} does not read {window}"
        warnings.warn(f"{directory}: {unread}", stacklevel=2)
    own = tokenizer.load(folder)
    temporary = path.with_name(path.name + ".tmp")
    writer = gguf.GGUFWriter(temporary, architecture)
    _add_settings(writer, config, folder)
    _add_tokenizer(writer, config, own, folder)
    try:
        kinds = _add_tensors(writer, architecture, config, folder, dtype)
        names = [name for name in ("BF16", "F16") if gguf.GGMLQuantizationType[name] in kinds]
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{names[0]}" if names else "ALL_F32"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _add_settings(writer: Any, c: Config, folder: Path) -> None:
    writer.add_name(folder.resolve().name)
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    if c.has_positions:
        writer.add_layer_norm_eps(c.rms_norm_eps)
        return
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.rotary_size)
    writer.add_rope_freq_base(c.rope_theta)
    scaling = c.rope_scaling
    if scaling and scaling.rope_type == "longrope":  # tensors have its divisors
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)
    elif scaling and scaling.rope_type != "llama3":  # a tensor has Llama 3.1's
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.rope_type))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.rope_type == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
            if scaling.attention_factor != yarn_attention(scaling.factor):
                writer.add_rope_scaling_yarn_attn_factor(scaling.attention_factor)
            writer.add_rope_scaling_yarn_beta_fast(scaling.high_freq_factor)
            writer.add_rope_scaling_yarn_beta_slow(scaling.low_freq_factor)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    if c.sliding_window:
        writer.add_sliding_window(c.sliding_window)
    if c.layer_types:
        writer.add_sliding_window_pattern([window is not None for window in c.windows()])


def _add_tokenizer(writer: Any, c: Config, own: Any, folder: Path) -> None:
    if not isinstance(own, JsonTokenizer):
        own = _exported(own)
    content, model = own.model, own.model.get("model", {})
    split, first_space = SPLITS.get(split_pattern(content) or ""), _first_space(content)
    merges = model.get("merges")
    if (split is None and first_space is None) or not isinstance(merges, list):
        raise InputError(
            f"{own.path}: expected a byte-level BPE tokenizer that splits text as GPT-2, Llama 3 or Qwen 2 "
            "do, or sentencepiece's BPE, found another, which the export does not support"
        )
    added = own.backend.get_added_tokens_decoder()
    tokens, types = [], []
    for id in range(c.vocab_size):
        name = added[id].content if id in added else own.backend.id_to_token(id)
        tokens.append(f"[PAD{id}]" if name is None else name)
        special = id in added and added[id].special
        types.append(5 if name is None else 3 if special else 4 if id in added else 1)  # gguf.TokenType
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    if split is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)
    else:
        for id, name in enumerate(tokens):
            if name == model.get("unk_token"):
                types[id] = 2
                writer.add_unk_token_id(id)
            elif re.fullmatch("<0x[0-9A-F]{2}>", name):
                types[id] = 6
        # llama.cpp joins the neighbors whose token has the largest score: that of the earliest merge.
        order = {merge.replace(" ", ""): -at for at, merge in reversed(list(enumerate(merges)))}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([float(order.get(name, -len(merges))) for name in tokens])
        writer.add_add_space_prefix(first_space)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for role, id in (("bos", own.bos), ("eos", own.end), ("pad", own.pad)):
        if id is not None:
            getattr(writer, f"add_{role}_token_id")(id)
    import gguf

    adds = {"bos": own.bos is not None}  # of a rank file
    if own.path.parent == folder:  # else as llama.cpp's own converter reads the files
        adds = gguf.SpecialVocab(folder).add_special_token
    for role, value in adds.items():
        if role in ("bos", "eos"):
            getattr(writer, f"add_add_{role}_token")(value)
    with suppress(InputError):  # it needs none
        writer.add_chat_template(chat.load(folder).source)


def _first_space(content: dict) -> bool | None:
    """Whether sentencepiece's BPE puts a space before a text; None where a tokenizer is no such BPE."""
    model = content.get("model", {})
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        return None
    normalizer, split = content.get("normalizer"), content.get("pre_tokenizer")
    if split is None:
        steps = (normalizer or {}).get("normalizers", [normalizer])
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prefix = {"type": "Prepend", "prepend": "▁"}
        return steps == [prefix, spaces] if steps in ([prefix, spaces], [spaces]) else None
    plain = normalizer is None and split.get("type") == "Metaspace" and split.get("replacement") == "▁"
    return split.get("prepend_scheme") != "never" if plain and not split.get("split", True) else None


def _exported(own: Any) -> JsonTokenizer:
    """A rank file's tokenizer as that of a tokenizer.json."""
    import tempfile

    from llamac.data import tokenizer_json

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.export(folder, own)
        return tokenizer_json.load(Path(folder))


def _add_tensors(writer: Any, architecture: str, c: Config, folder: Path, dtype: str) -> set:
    import gguf

    types = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.num_hidden_layers)
    narrow, kinds = {"BF16": types.BF16, "F16": types.F16}, set()
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    for name, row, stored in hf.read_arrays(folder, c.file_shapes()):
        wanted = row.safetensors if dtype == "auto" else dtype.upper()
        values = np.ascontiguousarray(stored.T) if c.is_turned(name) else stored
        # llama.cpp adds positions, as it does vectors, in f32 alone.
        kind = types.F32 if values.ndim < 2 or name in POSITIONS else narrow.get(wanted, types.F32)
        role = name.split(".")[-2]
        if architecture == "llama" and role in heads:
            values = interleaved(values, heads[role])
        kinds.add(kind)
        with np.errstate(over="ignore"):  # infinite, as in PyTorch
            array = gguf.quants.quantize(values, kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array, raw_dtype=kind)
    factors: dict[str, Any] = {}
    if (scaling := c.rope_scaling) and scaling.rope_type == "llama3":
        factors["freqs"] = rope_factors(c, scaling)
    elif scaling and scaling.rope_type == "longrope":
        factors = {"factors_short": scaling.short_factor, "factors_long": scaling.long_factor}
    for name, values in factors.items():
        writer.add_tensor(f"rope_{name}.weight", np.array(values, np.float32), raw_dtype=types.F32)
    return kinds


def main() -> None:
    parser = Parser(
        "export", "Export a model for other programs. DIR: a checkpoint or another Hugging Face directory."
    )
    formats = parser.add_subparsers(
        dest="format", required=True, metavar="gguf|hf|merge", parser_class=argparse.ArgumentParser
    )
    gguf = formats.add_parser("gguf", help="write FILE for llama.cpp")
    known = ["auto", "f32", "f16", "bf16"]
    gguf.add_argument("--dtype", default="auto", choices=known, help="type of the matrices")
    folder = formats.add_parser("hf", help="copy the model without its training state, with a model card")
    merged = formats.add_parser("merge", help="add the adapters of --lora, or of PEFT, to their model")
    for each, name, what in (
        (gguf, "FILE", "file to write"),
        (folder, "OUT", "new folder"),
        (merged, "OUT", "new folder"),
    ):
        help = "config.json, weights, tokenizer; or a run's output folder"
        each.add_argument("directory", metavar="DIR", help=help)
        each.add_argument("file", metavar=name, help=what)
    args = parser.parse_args()
    if args.format != "gguf":
        (write_hf if args.format == "hf" else write_merged)(args.directory, args.file)
        size = sum(path.stat().st_size for path in Path(args.file).iterdir())
    else:
        write_gguf(args.directory, args.file, args.dtype)
        size = os.path.getsize(args.file)
    print(f"{args.file}: {size / 2**20:.1f} MiB")
