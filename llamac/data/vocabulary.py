"""Written twice on purpose: csrc/data/vocabulary.cpp has the same; test_readers.py::test_c_and_python_agree.

The vocabulary file, tokenizer.vocab: the bytes of each token id, with which a program decodes the ids of any
tokenizer. docs/training.md, "The vocabulary file", has the format.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.errors import InputError
from llamac.base.files import read_bytes

FILE_NAME = "tokenizer.vocab"
MAGIC, VERSION = 20241124, 1
HEADER_BYTES = 64
MOST_TOKENS = 1 << 22
NONE = 0xFFFFFFFF  # of an id: there is none
# What decoding leaves out: a text's first space; all spaces that the first token begins with.
DROP_SPACE, DROP_FIRST = 1, 2
_WORDS = HEADER_BYTES // 4


@dataclass(frozen=True)
class Vocabulary:
    """tokens [n]: bytes of each id, special tokens by their names, empty where there is none. bos, eos, pad:
    ids or None. hash: XXH3_64 of the tokenizer's file, as the shards record it. drops: 0, DROP_SPACE or
    DROP_FIRST.
    """

    tokens: list[bytes]
    hash: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    drops: int = 0

    def decode(self, ids) -> bytes:
        """Bytes, not always UTF-8; ids past the vocabulary become 0xFF, which never is."""
        n = len(self.tokens)
        found = [self.tokens[i] if 0 <= i < n else b"\xff" for i in map(int, ids)]
        if self.drops == DROP_FIRST:
            found[:1] = [token.lstrip(b" ") for token in found[:1]]
        text = b"".join(found)
        return text[1:] if self.drops == DROP_SPACE and text[:1] == b" " else text


def write(path: str | Path, vocabulary: Vocabulary) -> None:
    """Write the file, renamed into place when whole."""
    path = Path(path)
    ends = np.cumsum([len(token) for token in vocabulary.tokens], dtype="<u4")
    payload = ends.tobytes() + b"".join(vocabulary.tokens)
    checksum = xxhash.xxh3_64_intdigest(payload)
    header = np.zeros(_WORDS, "<u4")
    header[:3] = MAGIC, VERSION, len(vocabulary.tokens)
    header[3:6] = [NONE if id is None else id for id in (vocabulary.bos, vocabulary.eos, vocabulary.pad)]
    header[6:8] = vocabulary.hash & 0xFFFFFFFF, vocabulary.hash >> 32
    header[8:10] = checksum & 0xFFFFFFFF, checksum >> 32
    header[10] = vocabulary.drops
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(header.tobytes() + payload)
    os.replace(temporary, path)


def read(path: str | Path) -> Vocabulary:
    """Open a vocabulary file. Raises InputError."""
    path = str(path)
    content = read_bytes(path)
    if len(content) < HEADER_BYTES:
        raise InputError(f"{path}: header: expected {HEADER_BYTES} bytes, found {len(content)}")
    header = np.frombuffer(content[:HEADER_BYTES], "<u4").tolist()
    if header[:2] != [MAGIC, VERSION]:
        found = f"{header[0]} version {header[1]}"
        raise InputError(f"{path}: header: expected magic {MAGIC} version {VERSION}, found {found}")
    n = header[2]
    if not 1 <= n <= MOST_TOKENS:
        raise InputError(f"{path}: header: expected 1 to {MOST_TOKENS} tokens, found {n}")
    if header[10] > DROP_FIRST:
        raise InputError(f"{path}: header word 10: expected a number up to {DROP_FIRST}, found {header[10]}")
    for word in range(11, _WORDS):
        if header[word] != 0:
            raise InputError(f"{path}: header word {word}: expected 0, found {header[word]}")
    for name, id in zip(("bos", "eos", "pad"), header[3:6]):
        if id != NONE and id >= n:
            raise InputError(f"{path}: {name}: expected an id below {n}, found {id}")
    payload = content[HEADER_BYTES:]
    if len(payload) < 4 * n:
        raise InputError(f"{path}: size: expected {HEADER_BYTES + 4 * n} bytes or more, found {len(content)}")
    ends = np.frombuffer(payload[: 4 * n], "<u4").astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    if (starts > ends).any():
        at = int(np.argmax(starts > ends))
        raise InputError(f"{path}: token {at}: expected an end of at least {starts[at]}, found {ends[at]}")
    if len(payload) != 4 * n + ends[-1]:
        expected = HEADER_BYTES + 4 * n + int(ends[-1])
        raise InputError(f"{path}: size: expected {expected} bytes, found {len(content)}")
    stored, found_sum = header[8] | header[9] << 32, xxhash.xxh3_64_intdigest(payload)
    if stored != found_sum:
        raise InputError(f"{path}: checksum: expected {stored:016x}, found {found_sum:016x}: it is damaged")
    text = payload[4 * n :]
    tokens = [text[a:b] for a, b in zip(starts.tolist(), ends.tolist())]
    bos, eos, pad = (None if id == NONE else id for id in header[3:6])
    return Vocabulary(tokens, header[6] | header[7] << 32, bos, eos, pad, header[10])
