"""Written twice on purpose: csrc/data/tokens.cpp has the same; test_agreement.py::test_order_of_the_data.

Token files (.bin), the order in which training visits them, and writing them.

A .bin is llm.c's: int32[256] little-endian header, then tokens. Header words: [0] magic, [1] version, [2],[5]
low and high half of the number of tokens; and ours, zero where unknown: [3] vocabulary size, [6],[7] low and
high half of XXH3_64 of the tokenizer's rank file.

Header word [4], of uint32 tokens only: the length T of the sequences that whole documents were packed into;
0: the file is plain. The upper two bits of a packed file's tokens are marks.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamac.base import random
from llamac.base.errors import InputError
from llamac.base.files import open_file

HEADER_BYTES = 1024
# Marks of a token in a packed file: it does not count as a target; a document begins with it.
NO_TARGET, BEGINS_DOCUMENT = 1 << 31, 1 << 30
IGNORED = -100  # a target that does not count: PyTorch's ignore_index
# (magic, version) -> token
_FORMATS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    """One .bin: memory-mapped tokens [n], what its header says (0 = unknown), and the open file. packed:
    header word 4; unless it is 0, tokens have marks."""

    path: str
    file: BinaryIO
    tokens: np.ndarray
    vocab_size: int
    tokenizer_hash: int
    packed: int = 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start+count-1, with their marks. Raises InputError if the file was cut."""
        # Not by the map: in that of a file that was cut, the process would end by SIGBUS.
        size = self.tokens.dtype.itemsize
        raw = os.pread(self.file.fileno(), count * size, HEADER_BYTES + start * size)
        if len(raw) < count * size:
            expected = f"{HEADER_BYTES + len(self.tokens) * size} bytes, as when it was opened"
            found = os.fstat(self.file.fileno()).st_size
            cut = "something has cut the file while it was in use"
            raise InputError(f"{self.path}: expected {expected}, found {found}: {cut}")
        return np.frombuffer(raw, self.tokens.dtype)


def read_bin(path: str | Path) -> Shard:
    """Open a .bin, check header and size. Raises InputError. Token ids are checked where they are used."""
    path = str(path)
    file = open_file(path)
    size = os.fstat(file.fileno()).st_size
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise InputError(f"{path}: header: expected {HEADER_BYTES} bytes, found {len(raw)}")
    header = np.frombuffer(raw, "<u4").tolist()
    dtype = _FORMATS.get((header[0], header[1]))
    if dtype is None:
        known = " or ".join(f"{magic} version {version}" for magic, version in _FORMATS)
        raise InputError(f"{path}: header: expected magic {known}, found {header[0]} version {header[1]}")
    narrow = dtype.itemsize == 2
    for word in (*([4] if narrow else []), *range(8, len(header))):
        if header[word] != 0:
            raise InputError(f"{path}: header word {word}: expected 0, found {header[word]}")
    n = header[2] | header[5] << 32
    if size != HEADER_BYTES + n * dtype.itemsize:
        expected = f"{HEADER_BYTES} + {n}·{dtype.itemsize} = {HEADER_BYTES + n * dtype.itemsize} bytes"
        raise InputError(f"{path}: size: expected {expected} for the header's {n} tokens, found {size}")
    tokens = np.memmap(file, dtype, "r", HEADER_BYTES, (n,)) if n else np.empty(0, dtype)
    return Shard(path, file, tokens, header[3], header[6] | header[7] << 32, header[4])


def token_dtype(vocab_size: int, packed: int = 0) -> np.dtype:
    """16 bits per token if the vocabulary fits and the file is not packed, else 32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 and not packed else np.dtype("<u4")


def bin_header(tokens: int, vocab_size: int, tokenizer_hash: int, packed: int = 0) -> np.ndarray:
    """The header of a .bin with so many tokens of token_dtype(vocab_size, packed)."""
    dtype = token_dtype(vocab_size, packed)
    header = np.zeros(HEADER_BYTES // 4, "<u4")
    header[:2] = next(key for key, held in _FORMATS.items() if held == dtype)
    header[2:5] = tokens & 0xFFFFFFFF, vocab_size, packed
    header[5:8] = tokens >> 32, tokenizer_hash & 0xFFFFFFFF, tokenizer_hash >> 32
    return header


def write_bin(
    path: str | Path, tokens: np.ndarray, vocab_size: int, tokenizer_hash: int = 0, packed: int = 0
) -> None:
    """Write tokens [n] as a .bin, renamed into place when whole; 16 bits a token if the vocabulary fits.
    packed: header word 4, of tokens with marks. Raises InputError for what these cannot hold.
    """
    dtype = token_dtype(vocab_size, packed)
    header = bin_header(len(tokens), vocab_size, tokenizer_hash, packed)
    path = Path(path)
    if np.ndim(tokens) != 1:
        raise InputError(f"{path}: expected tokens of one dimension, found {np.ndim(tokens)}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= np.iinfo(dtype).max:
        found = f"{tokens.min()} to {tokens.max()}"
        raise InputError(f"{path}: expected token ids from 0 to {np.iinfo(dtype).max}, found {found}")
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(header.tobytes())
        for start in range(0, len(tokens), 1 << 24):
            file.write(tokens[start : start + (1 << 24)].astype(dtype).tobytes())
    os.replace(temporary, path)


def check_tokens(shard: Shard, tokens: np.ndarray, start: int, vocab_size: int) -> None:
    """Raise InputError if one of these tokens, at index `start` of the shard, is no id of the vocabulary."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        where = f"{shard.path}: token {start + at}"
        raise InputError(f"{where}: expected an id below {vocab_size}, found {tokens[at]}")


def as_ids(ids: Any, what: str, vocab_size: int, rank: int = 1, none: int | None = None) -> np.ndarray:
    """int32 [rank dimensions], contiguous: ids of the vocabulary, or `none`. Raises InputError for others."""
    try:
        array = np.asarray(ids)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{what}: expected an array of integers: {error}") from None
    if array.ndim != rank or not array.size:
        expected = f"{rank} dimensions that are not empty"
        raise InputError(f"{what}: expected {expected}, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InputError(f"{what}: expected integers, found {array.dtype}")
    wrong = (array < 0) | (array >= vocab_size)
    if none is not None:
        wrong &= array != none
    if wrong.any():
        raise InputError(f"{what}: expected ids from 0 to {vocab_size - 1}, found {array[wrong][0]}")
    return np.ascontiguousarray(array, dtype=np.int32)


def find_documents(tokens: np.ndarray, marks: tuple[int | None, int | None]) -> np.ndarray:
    """For each of the tokens [rows,T] the position, in its row, at which its document begins, int32 [rows,T]:
    where the first of the marks stands, or behind the second, or else at 0. None: no document has such a
    mark.
    """
    begin, end = marks
    begins = np.zeros(tokens.shape, bool) if begin is None else tokens == begin
    if end is not None:
        begins[:, 1:] |= tokens[:, :-1] == end
    return np.maximum.accumulate(np.where(begins, np.arange(tokens.shape[1], dtype=np.int32), 0), axis=1)


def splitmix64(x: np.ndarray | np.uint64) -> Any:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014) on uint64, modulo 2^64."""
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def permute(index: np.ndarray | list[int], size: int, seed: int, epoch: int) -> np.ndarray:
    """Where each index in 0 .. size-1 goes in this epoch: a bijection of 0 .. size-1, uint64 in and out.

    A six-round Feistel network over the smallest 4^h >= size, repeated until the value falls below size
    (cycle walking; Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    with np.errstate(over="ignore"):
        base = splitmix64(np.uint64(seed) ^ splitmix64(np.uint64(epoch)))
        keys = splitmix64(base + np.arange(6, dtype=np.uint64))
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    half_bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    x = np.array(index, dtype=np.uint64, ndmin=1)
    todo = np.arange(len(x))
    while todo.size:
        left, right = x[todo] >> half_bits, x[todo] & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & mask)
        x[todo] = (left << half_bits) | right
        todo = todo[x[todo] >= size]
    return x


# Which have no text; csrc/train/run_data.cpp has the same.
BERT_SPECIAL = (b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", b"[MASK]")
MASKING_STREAM = 0xFFFFFFFE


@dataclass(frozen=True)
class Masking:
    """Which tokens an encoder predicts (Devlin et al., "BERT", 2018): each with a probability; of these, 80%
    are replaced by `token`, 10% by a random one, and 10% stay. Random numbers are of the token's place in
    the data's order. special: bool [V], tokens that are neither predicted nor drawn. continues: bool [V],
    tokens that are predicted where the token before is, as parts of its word; None: none.
    """

    probability: float
    token: int
    special: np.ndarray
    seed: int
    continues: np.ndarray | None = None

    def apply(self, place: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of the tokens [T] of sequence `place`."""
        T, V = len(tokens), len(self.special)
        words = (
            random.bits(self.seed, 0, MASKING_STREAM, 4 * T, 4 * place * T).reshape(T, 4).astype(np.uint64)
        )
        predicted, kind = (words[:, :2].T + 0.5) * 2.0**-32
        if self.continues is not None:  # the number of a word's first token is that of all
            begins = ~self.continues[tokens] | np.append(True, self.special[tokens[:-1]])
            predicted = predicted[np.maximum.accumulate(np.where(begins, np.arange(T), 0))]
        is_predicted = (predicted < self.probability) & ~self.special[tokens]
        drawn = (words[:, 2] * V >> 32).astype(np.int32)
        masked = np.where(kind < 0.8, self.token, tokens)
        masked = np.where((kind >= 0.8) & (kind < 0.9) & ~self.special[drawn], drawn, masked)
        return np.where(is_predicted, masked, tokens), np.where(is_predicted, tokens, IGNORED)


def how_to_make(pattern: str) -> str:
    """The command that makes such files: the project's texts have names, and folders of their own."""
    folder = os.path.dirname(pattern) or "."
    if folder in ("data/stdlib", "data/tinyshakespeare"):
        return f"python -m llamac data {os.path.basename(folder)}"
    return f"python -m llamac data TEXT --tokenizer FILE --out {folder}"


class Loader:
    """Sequences of T = seq_len tokens out of all shards that match a glob, for one of `world` ranks.

    `sequences` is their number S over all shards, `tokens` the number of tokens in the shards.
    """

    def __init__(
        self,
        pattern: str,
        seq_len: int,
        vocab_size: int,
        batch_size: int,
        accum: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        masking: Masking | None = None,
    ):
        self.masking = masking
        paths = sorted(glob.glob(pattern), key=os.fsencode)
        if not paths:
            raise InputError(f"{pattern}: no such file; `{how_to_make(pattern)}` makes token files there")
        self.shards = [read_bin(path) for path in paths]
        self.seq_len, self.vocab_size, self.batch_size, self.accum = seq_len, vocab_size, batch_size, accum
        self.rank, self.world, self.seed = rank, world, seed
        for shard in self.shards:
            if shard.vocab_size > vocab_size:
                expected = f"at most the model's {vocab_size}, found {shard.vocab_size}"
                raise InputError(f"{shard.path}: vocabulary size: expected {expected}")
            if shard.packed:
                only = "only ./train_llama3 and llamac.Trainer train on them"
                raise InputError(f"{shard.path}: packed documents: {only}")
        counts = [max(0, len(shard.tokens) - 1) // seq_len for shard in self.shards]
        self.ends = np.cumsum(counts)  # [shards]: sequences up to and including each shard
        self.sequences = int(self.ends[-1])
        self.tokens = sum(len(shard.tokens) for shard in self.shards)
        if self.sequences == 0:
            expected = f"at least seq-len + 1 = {seq_len + 1} tokens in a file"
            raise InputError(f"{pattern}: expected {expected}, found {self.tokens} in {len(paths)}")

    def sequence(self, index: int) -> np.ndarray:
        """Sequence `index` of 0 .. sequences-1: [T+1], the inputs and, one later, the targets."""
        which = int(np.searchsorted(self.ends, index, side="right"))
        shard = self.shards[which]
        start = (index - (int(self.ends[which - 1]) if which else 0)) * self.seq_len
        tokens = shard.read(start, self.seq_len + 1)
        check_tokens(shard, tokens, start, self.vocab_size)
        return tokens

    def micro_batch(self, step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), int32[B,T] each, of micro-batch `micro` of step `step`, counted from 0."""
        first, S = (step * self.accum + micro) * self.batch_size, self.sequences
        positions = [(first + row) * self.world + self.rank for row in range(self.batch_size)]
        indices = [int(permute([p % S], S, self.seed, p // S)[0]) for p in positions]
        rows = np.stack([self.sequence(index) for index in indices]).astype(np.int32)
        if self.masking:
            pairs = [self.masking.apply(p, row[:-1]) for p, row in zip(positions, rows)]
            tokens, targets = np.stack(pairs, 1).astype(np.int32)
            return tokens, targets
        return rows[:, :-1].copy(), rows[:, 1:].copy()
