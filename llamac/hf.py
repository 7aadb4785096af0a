"""Hugging Face model directories (config.json; model.safetensors or shards under an index) and safetensors
files.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from llamac.config import Config
from llamac.dtypes import dtype_row
from llamac.errors import InputError
from llamac.output import remove


def weight_files(directory: str | Path) -> list[Path]:
    """model.safetensors, or else the shards that model.safetensors.index.json names. Raises InputError."""
    single = Path(directory) / "model.safetensors"
    index = Path(directory) / "model.safetensors.index.json"
    if not single.exists() and not index.exists():
        _refuse_pickled(directory)
    if single.exists() or not index.exists():
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{index}: expected JSON with an object weight_map of file names") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{index}: weight_map: expected the name of a file in this directory, found {name!r}"
            )
    return [Path(directory) / name for name in names]


def _refuse_pickled(directory: str | Path) -> None:
    """Raise InputError where the weights are in PyTorch's own format, which is a program more than data."""
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (Path(directory) / name).exists():
            convert = f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}')"
            raise InputError(
                f"{directory}: expected model.safetensors, found {name} alone; convert it: python -c "
                f'"from transformers import AutoModelForCausalLM as M; {convert}"'
            )


def read_weights(
    directory: str | Path, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight in `shapes`, one at a time, file by file; others in the files are left
    alone. Raises InputError where one is missing or has another shape.
    """
    missing = dict(shapes)
    for file in weight_files(directory):
        try:
            with safe_open(file, "pt") as tensors:
                for name in sorted(missing.keys() & set(tensors.keys())):
                    tensor, shape = tensors.get_tensor(name), missing.pop(name)
                    if tensor.shape != shape:
                        raise InputError(
                            f"{file}: {name}: expected shape {list(shape)}, found {list(tensor.shape)}"
                        )
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: {error}") from None
    if missing:
        raise InputError(f"{directory}: expected a tensor {next(iter(missing))}, found none")


def write_directory(
    directory: str | Path,
    config: Config,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, torch.Tensor]],
    files: dict[str, bytes] | None = None,
) -> None:
    """Write config.json, model.safetensors and files {name: content}. They are made under a temporary
    name: what stands at `directory` is replaced only by a whole one. weights: (name, tensor on the host)
    of config.parameters(), in their order, all of the dtype, f32 or bf16; none is kept.
    """
    directory = Path(directory)
    temporary = directory.with_name(f".{directory.name}.tmp")
    remove(temporary)
    temporary.mkdir(parents=True)
    (temporary / "config.json").write_text(
        json.dumps(config.to_dict(dtype_row(dtype).torch), indent=2) + "\n", encoding="utf-8"
    )
    for name, content in (files or {}).items():
        (temporary / name).write_bytes(content)
    entries = [(name, dtype, shape) for name, shape in config.parameters()]
    _write_safetensors(temporary / "model.safetensors", entries, weights, {"format": "pt"})
    remove(directory)
    os.replace(temporary, directory)


def write_ordered(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file whose tensors keep the order of `tensors`; the library's own writer sorts them."""
    entries = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
    _write_safetensors(path, entries, tensors.items(), metadata)


def _write_safetensors(
    path: str | Path,
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, str],
) -> None:
    """The file of these tensors (name, dtype, shape), which come one at a time: the library wants all."""
    header: dict = {"__metadata__": metadata}
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
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, (name, x) in zip(entries, tensors, strict=True):
            if (name, x.dtype, tuple(x.shape)) != entry:
                raise ValueError(f"{path}: expected {entry}, found {name}, {x.dtype}, {tuple(x.shape)}")
            file.write(x.contiguous().flatten().view(torch.uint8).numpy())
