"""Hugging Face model directories (config.json; model.safetensors, or shards with an index) and safetensors
files.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from llamac.base.dtypes import TABLE, DType, dtype_row
from llamac.base.errors import InputError
from llamac.base.files import excerpt, expect, open_file, parse_json, read_json
from llamac.model.architectures import MODEL_TYPES
from llamac.model.config import PICKLED, WEIGHTS, Config, find_weights, load_config

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100_000_000  # bytes: the limit of the format's own library
MAX_RANK = 4
# Types of the format that are no weights; core/safetensors.cpp has the same. torch: one of as many bytes.
_BITS = {8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 16: "I16 U16", 32: "U32", 64: "I64 U64 C64"}
_TYPES = {name: DType(name.lower(), 0, name, f"int{k}") for k in _BITS for name in _BITS[k].split()}
_TYPES |= {row.safetensors: row for row in TABLE.values() if row.in_files}
_SIZE = range(2**63)
_ENTRY = {"dtype": set(_TYPES), "shape": [_SIZE], "data_offsets": [_SIZE]}  # of a tensor
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PREFIXES = {own.file_name("model") for own in MODEL_TYPES.values()}
EMBEDDINGS = {own.file_name(EMBEDDING) for own in MODEL_TYPES.values()}


class Stored(NamedTuple):
    """A tensor of a file; begin: the byte at which its values begin."""

    type: DType
    shape: tuple[int, ...]
    begin: int


Header = dict[str, Stored]


def read_header(path: str | Path) -> Header:
    """What a safetensors file stores, by name. It is checked as the C program checks it
    (core/safetensors.cpp); the format's own library takes more. Raises InputError.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            expected = f"at most {max(0, min(size - 8, MAX_HEADER))}, found {length} in a file of {size}"
            raise InputError(f"{path}: header length: expected {expected} bytes")
        header = parse_json(file.read(length), f"{path}: header", {"__metadata__": ({str: str}, None)})
    header.pop("__metadata__", None)
    found: Header = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        where = f"{path}: {excerpt(name)}"
        row, shape, begin, end = _read_entry(entry, where)
        found[name] = Stored(row, shape, 8 + length + begin)
        ranges.append((begin, end, where))
    at = 0
    for begin, end, where in sorted(ranges):
        if begin != at:
            raise InputError(f"{where}: data_offsets: expected to begin at {at}, found {begin}")
        at = end
    if at != size - 8 - length:
        raise InputError(f"{path}: size: expected {at} bytes after the header, found {size - 8 - length}")
    return found


def _read_entry(entry: Any, where: str) -> tuple[DType, tuple[int, ...], int, int]:
    """Type, shape, begin and end of a tensor of a header."""
    shape, offsets, dtype = (
        expect(entry, _ENTRY, where)[name] for name in ("shape", "data_offsets", "dtype")
    )
    row = _TYPES[dtype]
    width = _bytes_of(row)
    # A size of 0 counts as 1: strides are products without it.
    if len(shape) > MAX_RANK or width * math.prod(max(1, size) for size in shape) >= 2**63:
        expected = f"at most {MAX_RANK} dimensions and less than 2^63 bytes"
        raise InputError(f"{where}: shape: expected {expected}, found {excerpt(shape)}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != width * math.prod(shape):
        expected = f"[begin, end] of {width * math.prod(shape)} bytes"
        raise InputError(f"{where}: data_offsets: expected {expected}, found {excerpt(offsets)}")
    if len(entry) != len(_ENTRY):
        raise InputError(f"{where}: expected {', '.join(_ENTRY)} alone, found {', '.join(entry)}")
    return row, tuple(shape), offsets[0], offsets[1]


def _bytes_of(row: DType) -> int:
    """Of an element: the types of torch that are not numpy's have their bits in their names."""
    return int(re.sub(r".*?(\d+).*", r"\1", row.torch)) // 8


def _is_file_name(name: str) -> bool:
    """Not a path, which might lead out of the directory, and not too long."""
    return "/" not in name and len(name.encode("utf-8", "surrogatepass")) <= 255


def weight_files(directory: str | Path) -> dict[Path, Header]:
    """{file: header of the tensors to take from it}: model.safetensors, or the index's shards. InputError."""
    single, index = (Path(directory) / name for name in WEIGHTS)
    name = find_weights(directory)
    if name not in WEIGHTS and (Path(directory) / ADAPTER_CONFIG).exists():
        merge = f"merge them: llamac export merge {directory} NEW_DIR"
        raise InputError(f"{directory}: expected a model, found adapters of one; {merge}")
    if name and name not in WEIGHTS:
        _refuse_weights(directory, name)
    if name != index.name:
        return {single: read_header(single)}
    weight_map = read_json(index, {"weight_map": {str: str}})["weight_map"]
    headers: dict[Path, dict] = {}
    chosen: dict[Path, dict] = {}
    for name, shard in weight_map.items():
        where = f"{index}: {excerpt(name)}"
        if not _is_file_name(shard):
            raise InputError(f"{where}: expected the name of a file in {directory}, found {excerpt(shard)}")
        file = Path(directory) / shard
        if file not in headers:
            headers[file] = read_header(file)
        if name not in headers[file]:
            raise InputError(f"{where}: expected it in {shard}, found no tensor of this name")
        chosen.setdefault(file, {})[name] = headers[file][name]
    return chosen


def _refuse_weights(directory: str | Path, name: str) -> None:
    """Raise InputError where the weights have another format: PyTorch's own is a program more than data."""
    if name in PICKLED:
        convert = f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}')"
        raise InputError(
            f"{directory}: expected model.safetensors, found {name} alone; convert it: python -c "
            f'"from transformers import AutoModelForCausalLM as M; {convert}"'
        )
    raise InputError(
        f"{directory}: expected model.safetensors, or its shards with {WEIGHTS[1]}, found {excerpt(name)}; "
        "transformers' save_pretrained() writes them"
    )


def _place(places: dict[str, Path], name: str) -> str:
    """The name of a tensor in the files, "" for none. A model saved without its head lacks "model."; norms of
    old files of BERT have gamma and beta."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    for own in (name, old):
        prefix, _, short = own.partition(".")
        if own in places or (prefix in PREFIXES and short in places):
            return own if own in places else short
    return ""


def load_config_of_weights(directory: str | Path) -> Config:
    """load_config() of a directory whose weights are loaded: as in transformers, the model is not tied where
    they have an LM head that is not the embedding, whatever config.json says.
    """
    config = load_config(directory)
    if not config.tie_word_embeddings:
        return config
    places = {name: file for file, header in weight_files(directory).items() for name in header}
    embedding, shape = config.parameters()[0]
    if not _place(places, embedding) or HEAD not in places:
        return config
    untied = replace(config, tie_word_embeddings=False)
    pair = {name: values for name, _, values in read_arrays(directory, {embedding: shape, HEAD: shape})}
    return config if np.array_equal(pair[embedding], pair[HEAD]) else untied


def _find_stored(
    directory: str | Path, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[Path, list[tuple[str, str]], Header]]:
    """(file, [(name, its name there)], header) of every weight in `shapes`, file by file. Others in the files
    are left alone. The embedding of a tied model may have the head's name. Raises InputError where one is
    missing or has another shape.
    """
    headers = weight_files(directory)
    places = {name: file for file, header in headers.items() for name in header}
    own_names = {name: _place(places, name) for name in shapes}
    for embedding in EMBEDDINGS & shapes.keys():
        if HEAD not in shapes and not own_names[embedding] and HEAD in places:
            own_names[embedding] = HEAD
    for file, header in headers.items():
        pairs = [(name, own) for name, own in sorted(own_names.items()) if own and places[own] == file]
        for name, own in pairs:
            row, found, _ = header[own]
            if found != (shape := shapes[name]):
                raise InputError(f"{file}: {own}: expected shape {list(shape)}, found {list(found)}")
            if row.mantissa_bits == 0:
                raise InputError(f"{file}: {own}: dtype: expected floating point, found {row.safetensors}")
        yield file, pairs, header
    if missing := [name for name, own in own_names.items() if not own]:
        some = "".join(f", {excerpt(name)}" for name in sorted(places)[:3])
        expected = f"expected a tensor {missing[0]}, found none among {len(places)}"
        raise InputError(f"{directory}: {expected}" + (f": {some[2:]}, ..." if some else ""))


def read_weights(
    directory: str | Path, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """(name, tensor) of every weight in `shapes`, one at a time. Raises InputError."""
    for file, pairs, _ in _find_stored(directory, shapes):
        try:
            with safe_open(file, "pt") as tensors:
                for name, own in pairs:
                    yield name, tensors.get_tensor(own)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: {error}") from None


def read_arrays(
    directory: str | Path, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, DType, np.ndarray]]:
    """(name, its type in the file, values in f32) of every weight in `shapes`, one at a time, without torch.
    Raises InputError."""
    for file, pairs, header in _find_stored(directory, shapes):
        for name, own in pairs:
            yield name, header[own].type, read_array(file, header[own])


def read_array(file: Path, stored: Stored) -> np.ndarray:
    """Its values in f32."""
    row, shape, begin = stored
    values = np.fromfile(file, _kind(row), math.prod(shape), offset=begin).reshape(shape)
    if row.name == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # of f64
        return values.astype(np.float32, copy=False)


def replace_array(file: Path, stored: Stored, values: np.ndarray) -> None:
    """Write others (f32) in its place, rounded to nearest (even)."""
    row = stored.type
    if row.name == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        values = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    with open(file, "r+b") as target:
        target.seek(stored.begin)
        target.write(values.astype(_kind(row)).tobytes())


def _kind(row: DType) -> str:
    return "<u2" if row.name == "bf16" else f"<f{_bytes_of(row)}"


def remove(path: str | Path) -> None:
    """Remove a file, a link (not what it leads to), or a folder with all that it contains, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def config_json(config: Config, dtype: "torch.dtype") -> bytes:
    """config.json of a model whose weights have this dtype."""
    return (json.dumps(config.to_dict(dtype_row(dtype).torch), indent=2) + "\n").encode()


def write_directory(
    directory: str | Path,
    config: Config,
    dtype: "torch.dtype",
    weights: Iterable[tuple[str, "torch.Tensor"]],
) -> None:
    """Write config.json and model.safetensors. They are made under a temporary name: what stands at
    `directory` is replaced only by a whole one. weights: (name, tensor on the host) of config.parameters(),
    in their order and with their shapes, all of the dtype, f32 or bf16; none is kept.
    """
    directory = Path(directory)
    temporary = directory.with_name(f".{directory.name}.tmp")
    remove(temporary)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_bytes(config_json(config, dtype))
    entries = [(name, dtype, shape) for name, shape in config.file_shapes().items()]
    stored = ((name, x.T if config.is_turned(name) else x) for name, x in weights)
    with open(temporary / "model.safetensors", "wb") as file:
        write_safetensors(file, entries, stored)
    remove(directory)
    os.replace(temporary, directory)


def write_ordered(path: str | Path, tensors: dict[str, "torch.Tensor"], metadata: dict[str, str]) -> None:
    """A safetensors file whose tensors keep the order of `tensors`; the library's own writer sorts them."""
    entries = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
    with open(path, "wb") as file:
        write_safetensors(file, entries, tensors.items(), metadata)


def write_safetensors(
    file: Any,
    entries: list[tuple[str, "torch.dtype", tuple[int, ...]]],
    tensors: Iterable[tuple[str, "torch.Tensor"]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the safetensors file of these tensors (name, dtype, shape), which come one at a time: the
    library wants all. file: has write().
    """
    import torch

    header: dict = {"__metadata__": metadata or {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        if start % dtype.itemsize != 0:
            raise ValueError(f"{name} would not be aligned: a tensor before it has an odd number of elements")
        header[name] = {
            "dtype": dtype_row(dtype).safetensors,
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry, (name, x) in zip(entries, tensors, strict=True):
        if (name, x.dtype, tuple(x.shape)) != entry:
            raise ValueError(f"expected {entry}, found {name}, {x.dtype}, {tuple(x.shape)}")
        file.write(x.contiguous().flatten().view(torch.uint8).numpy())
