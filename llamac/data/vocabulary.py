"""Writes the vocabulary file, tokenizer.vocab: the bytes of each token id, with which the C program decodes
the ids of any tokenizer (csrc/data/vocabulary.h has the format).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.errors import InputError
from llamac.base.files import read_bytes, write_whole

FILE_NAME = "tokenizer.vocab"
MAGIC, VERSION = 20241124, 1
HEADER_BYTES = 64
MOST_TOKENS = 1 << 22
NONE = 0xFFFFFFFF  # of an id: there is none
# Decoding leaves out: a text's first space; all spaces that the first token begins with.
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
    ends = np.cumsum([len(token) for token in vocabulary.tokens], dtype="<u4")
    payload = ends.tobytes() + b"".join(vocabulary.tokens)
    checksum = xxhash.xxh3_64_intdigest(payload)
    header = np.zeros(_WORDS, "<u4")
    header[:3] = MAGIC, VERSION, len(vocabulary.tokens)
    header[3:6] = [NONE if id is None else id for id in (vocabulary.bos, vocabulary.eos, vocabulary.pad)]
    header[6:8] = vocabulary.hash & 0xFFFFFFFF, vocabulary.hash >> 32
    header[8:10] = checksum & 0xFFFFFFFF, checksum >> 32
    header[10] = vocabulary.drops
    write_whole(path, header.tobytes() + payload)


def tokenizer_hash(path: str | Path) -> int:
    """The hash of the tokenizer that made a vocabulary file. Raises InputError."""
    content = read_bytes(path)
    words = np.frombuffer(content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), "<u4").tolist()
    if words[:2] != [MAGIC, VERSION]:
        found = f"{words[0]} version {words[1]}"
        raise InputError(f"{path}: header: expected magic {MAGIC} version {VERSION}, found {found}")
    return words[6] | words[7] << 32
