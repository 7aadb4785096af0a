"""Blocks of documents, the units that workers encode, and the values of their lines or rows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamac.base.errors import InputError


@dataclass
class Piece:
    """A document or a part of one: its text, or what stands where a text should be; whether the document
    begins and ends here; its split, None: by the hash of the text; where it comes from, with its line or row
    from 1.
    """

    text: Any
    path: str
    line: int = 0
    begins: bool = True
    ends: bool = True
    split: str | None = None


@dataclass
class Ids:
    """Token ids [n] of documents; where each document ends in them; `head`: the beginning of the first one
    where it is in an earlier block; whether the last one ends here.
    """

    ids: np.ndarray
    ends: np.ndarray
    head: np.ndarray | None
    is_whole: bool


@dataclass
class Block:
    """Content by kind: pieces: of Piece; jsonl: bytes of whole lines, of JSON lines or of the items of an
    array; arrow: bytes in Arrow's stream format, of one column or of all; ids: Ids. `first`: the line, item,
    row or document that it begins with, from 1. `read`: bytes of the file so far, as it lies on disk.
    `skipped`: (path, line, reason) of documents that are left out already. `after`: [index of the file, place
    in it], where the place is a byte, an item, a row, a number of pieces, a document and a token, or, of a
    stream, its number of rows and its state.
    """

    kind: str
    path: str
    content: Any
    after: list[Any]
    first: int = 1
    read: int = 0
    skipped: list[tuple[str, int, str]] = field(default_factory=list)


def json_values(block: Block) -> Iterator[tuple[int, Any, str]]:
    """(line, value, "" or why there is none) of each line that is not blank."""
    for number, line in enumerate(block.content.split(b"\n"), block.first):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line), ""
        except (ValueError, RecursionError):
            yield number, None, "broken JSON"


def field_names(block: Block) -> list[str]:
    """The fields of its rows; of JSON lines, in the order in which they are met."""
    if block.kind == "arrow":
        import pyarrow

        return pyarrow.ipc.open_stream(block.content).schema.names
    return list(
        dict.fromkeys(key for _, row, _ in json_values(block) if isinstance(row, dict) for key in row)
    )


def _table_values(block: Block, name: str | None) -> Iterator[tuple[int, Any, str]]:
    import pyarrow

    table = pyarrow.ipc.open_stream(block.content).read_all()
    rows = table.to_struct_array() if name is None else table.column(0)
    for number, row in enumerate(rows, block.first):
        try:
            yield number, row.as_py() if name else _without_nulls(row.as_py()), ""
        except UnicodeDecodeError:
            yield number, None, "not UTF-8"


def _without_nulls(value: Any) -> Any:
    """Of a row: where objects of a list have other keys, a table gives all of them the keys of each."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def values(block: Block, name: str | None) -> Iterator[tuple[int, Any, str]]:
    """(line or row, value of the field or the whole row, "" or the reason for none) of each document."""
    if block.kind == "ids":
        raise InputError(f"{block.path}: expected text, found token ids of Megatron")
    if block.kind == "arrow":
        yield from _table_values(block, name)
        return
    for number, found, broken in json_values(block):
        if name is None:
            yield number, found, broken
        elif not isinstance(found, dict):
            yield number, None, broken or "no JSON object"
        elif name not in found:
            yield number, None, f"no field {name!r}"
        else:
            yield number, found[name], ""
