"""Encodes the documents of a block to token ids, in a worker."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llamac.base.errors import InputError
from llamac.data.block import Block, Ids, values
from llamac.data.documents import BLOCK_BYTES, MOST_DOCUMENT, TOO_LONG, Reading, cut_text, split_of

_BATCH = 1 << 18  # characters that are encoded together
MOST_NAMED = 20  # documents that are left out, per block


class Encoder(Protocol):
    """The parts of a tokenizer that encode_block() uses."""

    vocab_size: int
    bos: int | None
    eos: int | None
    cuttable: bool

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class UnknownTokenizer:
    """Stands for the tokenizer of given ids of which only the number of ids is known."""

    vocab_size: int
    bos = eos = pad = None
    hash = 0  # in shards: unknown
    cuttable = True

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [np.empty(0, np.int64) for _ in texts]

    def write_beside_tokens(self, folder: Path) -> None: ...


@dataclass
class Encoded:
    """Of a block: ids [n] of all its pieces; per piece where its ids end, whether it is validation, whether
    its document begins and ends with it; bytes of text; what was left out: numbers by reason, and the first
    of them as (path, line, reason).
    """

    ids: np.ndarray
    ends: np.ndarray
    val: np.ndarray
    begins: np.ndarray
    last: np.ndarray
    text_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    named: list[tuple[str, int, str]] = field(default_factory=list)


def _documents(block: Block, how: Reading) -> Iterator[tuple[str, int, Any, str, bool, bool, str | None]]:
    """(path, line, text, reason, begins, ends, split) of each piece."""
    if block.kind == "pieces":
        for piece in block.content:
            yield piece.path, piece.line, piece.text, "", piece.begins, piece.ends, piece.split
    else:
        for line, value, reason in values(block, how.field):
            yield block.path, line, value, reason, True, True, how.split


def _usable(text: Any, is_part: bool) -> tuple[bytes, str]:
    """(UTF-8, "" or why it is left out)."""
    if not isinstance(text, str):
        return b"", "no text" if text is None else f"{type(text).__name__} instead of text"
    if not text and not is_part:
        return b"", "empty"
    try:
        content = text.encode()
    except UnicodeEncodeError:  # half of a pair: JSON has names for it
        return b"", "no Unicode"
    return content, TOO_LONG if len(content) > MOST_DOCUMENT else ""


class _Batch:
    """Texts that are encoded together, each for a document; long ones in parts."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self._texts: list[str] = []
        self._owners: list[int] = []
        self._size = 0
        self.ids: list[list[np.ndarray]] = []

    def add(self, text: str) -> None:
        whole = len(text) <= BLOCK_BYTES or not self.encoder.cuttable
        self.ids.append([])
        for part in [text] if whole else cut_text([text], _BATCH):
            self._texts.append(part)
            self._owners.append(len(self.ids) - 1)
            self._size += len(part)
            if self._size >= _BATCH:
                self.flush()

    def flush(self) -> None:
        for owner, ids in zip(self._owners, self.encoder.encode_arrays(self._texts)):
            self.ids[owner].append(ids)
        self._texts, self._owners, self._size = [], [], 0


def encode_block(block: Block, how: Reading, encoder: Encoder, dtype: np.dtype) -> Encoded:
    """The ids of a block's documents, between `bos` and `eos` where the tokenizer has them; ids that the
    block has already stay as they are.
    """
    if block.kind == "ids":
        return _checked(block, how, encoder.vocab_size, dtype)
    batch = _Batch(encoder)
    kept: list[tuple[bool, bool, bool]] = []  # begins, ends, val
    none = np.empty(0)
    out = Encoded(none, none, none, none, none)
    for path, line, reason in block.skipped:
        _leave_out(out, path, line, reason)
    for path, line, text, reason, begins, ends, split in _documents(block, how):
        content, unusable = (b"", reason) if reason else _usable(text, not (begins and ends))
        if unusable:
            _leave_out(out, path, line, unusable)
            continue
        split = split or split_of(content, how.val_fraction)
        out.text_bytes += len(content)
        kept.append((begins, ends, split == "val"))
        batch.add(text)
    batch.flush()
    bos, eos = ([] if id is None else [np.array([id], dtype)] for id in (encoder.bos, encoder.eos))
    parts = [
        [*(bos if begins else []), *ids, *(eos if ends else [])]
        for ids, (begins, ends, _) in zip(batch.ids, kept)
    ]
    out.ids = np.concatenate(
        [np.empty(0, dtype), *(ids for part in parts for ids in part)], dtype=dtype, casting="unsafe"
    )
    out.ends = np.cumsum([sum(map(len, part)) for part in parts], dtype=np.int64)
    flags = np.array(kept, bool).reshape(-1, 3)
    out.begins, out.last, out.val = flags[:, 0], flags[:, 1], flags[:, 2]
    return out


def _checked(block: Block, how: Reading, vocab_size: int, dtype: np.dtype) -> Encoded:
    """The ids of a block, which has them already. Raises InputError for one that the tokenizer lacks."""
    held: Ids = block.content
    wrong = (held.ids < 0) | (held.ids >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        document = block.first + int(np.searchsorted(held.ends, at, "right"))
        expected = f"ids of the tokenizer, 0 to {vocab_size - 1}"
        raise InputError(f"{block.path}: document {document}: expected {expected}, found {held.ids[at]}")
    words = held.ids.astype("<u4")  # the side of a document does not depend on the type of its ids
    begins = np.concatenate([[0], held.ends[:-1]])
    is_kept = held.ends > begins
    sides = []
    for i in np.flatnonzero(is_kept):
        beginning = words[begins[i] : held.ends[i]] if i or held.head is None else held.head.astype("<u4")
        sides.append(how.split or split_of(beginning.data, how.val_fraction))
    whole = np.ones((2, len(is_kept)), bool)
    whole[0, 0], whole[1, -1] = held.head is None, held.is_whole
    out = Encoded(held.ids.astype(dtype), held.ends[is_kept], np.array(sides) == "val", *whole[:, is_kept])
    for i in np.flatnonzero(~is_kept):
        _leave_out(out, block.path, block.first + int(i), "empty")
    return out


def _leave_out(out: Encoded, path: str, line: int, reason: str) -> None:
    out.left_out[reason] = out.left_out.get(reason, 0) + 1
    if len(out.named) < MOST_NAMED:
        out.named.append((path, line, reason))
