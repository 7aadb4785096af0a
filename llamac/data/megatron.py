"""Reads the data sets of Megatron-LM: token ids in PREFIX.bin, and in PREFIX.idx where documents begin.

An index is little-endian: magic, version (u64), code of the ids' type (u8), n (u64), m (u64); the number of
tokens of each of the n sequences (i32); the first byte of each in the .bin (i64); m document boundaries
(i64): document d has the sequences boundary[d] to boundary[d + 1] - 1. Multimodal data has n more bytes.
"""

import os
import re
import struct
from collections.abc import Iterator

import numpy as np

from llamac.base.errors import InputError
from llamac.base.files import open_file
from llamac.data.block import Block, Ids

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}
_CHUNK, _SOME = 1 << 16, 1 << 12  # entries of the index that are checked, or read, at a time


def find(name: str) -> str:
    """The .bin of a data set named by its prefix, .bin or .idx. Raises InputError if it is damaged."""
    prefix = re.sub(r"\.(bin|idx)$", "", name)
    pair = [prefix + ".bin", prefix + ".idx"]
    if (found := [path for path in pair if os.path.exists(path)]) != pair:
        there = found[0] if found else "neither"
        raise InputError(f"{name}: expected Megatron's {' and '.join(pair)}, found {there}")
    Index(pair[0]).check()
    return pair[0]


class Index:
    """The index of a .bin. Raises InputError where its header and the size of the file contradict it."""

    def __init__(self, path: str):
        self.path, self.name = path, index_path(path)
        with open_file(self.name) as file:
            header, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
        if len(header) < _HEADER.size:
            raise self._wrong("header", f"{_HEADER.size} bytes", len(header))
        magic, version, code, n, m = _HEADER.unpack(header)
        if (magic, version) != (_MAGIC, _VERSION):
            expected = f"magic {_MAGIC!r} version {_VERSION}"
            raise self._wrong("header", expected, f"{magic!r} version {version}")
        if code not in _TYPES:
            raise self._wrong("type of the tokens", "integers", _FLOATS.get(code, f"the code {code}"))
        places, bounds = _HEADER.size + 4 * n, _HEADER.size + 12 * n
        if n and size == bounds + 8 * m + n:
            raise self._wrong("content", "a data set of text", "a multimodal one")
        if size != bounds + 8 * m or not m:
            expected = f"{bounds + 8 * max(m, 1)} bytes for {n} sequences and {max(m, 1)} document boundaries"
            raise self._wrong("size", expected, size)
        self._parts = {"sizes": ("<i4", _HEADER.size, n), "places": ("<i8", places, n)}
        self._parts["bounds"] = ("<i8", bounds, m)
        self.type, self.sequences, self.documents = np.dtype(_TYPES[code]), n, m - 1
        self.tokens = os.path.getsize(path) // self.type.itemsize

    def _map(self, part: str) -> np.ndarray:
        """Mapped for each use, so that memory does not grow with the part that was read."""
        dtype, begin, count = self._parts[part]
        try:
            return np.memmap(self.name, dtype, "r", begin, (count,)) if count else np.empty(0, dtype)
        except (OSError, ValueError) as error:
            raise self._wrong("content", "no change while it is read", error) from None

    def check(self) -> None:
        """Raises InputError unless the sequences fill the .bin in order, and all belong to documents."""
        n, width, at, end = self.sequences, self.type.itemsize, 0, 0
        if n:
            end = int(self._map("places")[-1]) + int(self._map("sizes")[-1]) * width
        if end != (found := os.path.getsize(self.path)):
            expected = f"{end} bytes, the sequences of {self.name}"
            raise InputError(f"{self.path}: size: expected {expected}, found {found}")
        for first in range(0, n, _CHUNK):
            sizes = self._map("sizes")[first : first + _CHUNK].astype(np.int64)
            places = self._map("places")[first : first + _CHUNK]
            right = at + (np.cumsum(sizes) - sizes) * width
            for i in np.flatnonzero((sizes < 0) | (places != right))[:1]:
                expected = f"{right[i]} as first byte and a size of at least 0"
                raise self._wrong(f"sequence {first + i}", expected, f"{places[i]} and {sizes[i]}")
            at = int(right[-1] + sizes[-1] * width)
        before = 0
        for first in range(0, self.documents + 1, _CHUNK):
            bounds = np.append(before, self._map("bounds")[first : first + _CHUNK])
            before = int(bounds[-1])
            if (np.diff(bounds) < 0).any() or (first == 0 and bounds[1] != 0):
                raise self._wrong("document boundaries", f"numbers that rise from 0 to {n}", "others")
        if before != n:
            raise self._wrong("document boundaries", f"the last to be {n}, after all sequences", before)

    def starts(self, document: int) -> np.ndarray:
        """The first tokens of some documents from this one on, and the end of the last."""
        bounds = self._map("bounds")[document : document + _SOME + 1]
        starts = np.full(len(bounds), self.tokens)
        inside = bounds < self.sequences
        starts[inside] = self._map("places")[bounds[inside]] // self.type.itemsize
        return starts

    def _wrong(self, what: str, expected: str, found: object) -> InputError:
        return InputError(f"{self.name}: {what}: expected {expected}, found {found}")


def index_path(path: str) -> str:
    return path.removesuffix(".bin") + ".idx"


def blocks(path: str, most: int, document: int = 0, token: int = 0) -> Iterator[Block]:
    """Blocks of at most `most` tokens of a .bin from a token of a document on: of whole documents, or of a
    part of a longer one.
    """
    index = Index(path)
    with open_file(path) as file:

        def read(begin: int, end: int) -> np.ndarray:
            size = index.type.itemsize
            raw = os.pread(file.fileno(), (end - begin) * size, begin * size)
            if len(raw) < (end - begin) * size:
                expected = f"{index.tokens * size} bytes, as when it was opened"
                raise InputError(f"{path}: expected {expected}, found fewer")
            return np.frombuffer(raw, index.type)

        while document < index.documents:
            begin, *_ = starts = index.starts(document)
            count = int(np.searchsorted(starts[1:], token + most, "right"))
            end = int(starts[count]) if count else token + most
            ends = (starts[1 : count + 1] if count else np.array([end])) - token
            head = read(begin, begin + most) if token > begin else None
            content = Ids(read(token, end), ends, head, bool(count))
            after = [document + count, end]
            yield Block("ids", path, content, after, document + 1, end * index.type.itemsize)
            document, token = after


def first_document(path: str) -> np.ndarray:
    """The ids of the first document, at most _CHUNK of them; none of an empty one."""
    content = next((block.content for block in blocks(path, _CHUNK)), None)
    return content.ids[: content.ends[0]] if content and content.is_whole else np.empty(0, int)
