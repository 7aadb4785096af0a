"""Written twice on purpose: csrc/train/questions.cpp has the same; test_readers.py::test_c_and_python_agree.

A file of multiple-choice questions in token ids, NAME.questions, for the evaluations of a training run.
docs/training.md, "The file of questions", has the format.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llamac.errors import InputError
from llamac.files import read_bytes

SUFFIX = ".questions"
MAGIC, VERSION = 20261125, 1
HEADER_BYTES = 64
WITH_LENGTHS = 1  # flag: choices have lengths
_WORDS = HEADER_BYTES // 4
_LARGEST = 2**31 - 1

Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation behind it


@dataclass(frozen=True)
class Asked:
    """A question: pairs of its choices, which of them is right, and their lengths in characters, or None."""

    pairs: list[Pair]
    gold: int
    lengths: list[int] | None


@dataclass(frozen=True)
class Questions:
    """vocab_size: ids are below it. hash: XXH3_64 of the tokenizer's file, as the shards record it. Either
    all questions have lengths or none has."""

    questions: list[Asked]
    vocab_size: int
    hash: int


def write(path: str | Path, found: Questions) -> None:
    """Write the file, renamed into place when whole."""
    path = Path(path)
    choices, ids, every = [], [], []
    for question in found.questions:
        every += [len(question.pairs), question.gold]
        for i, (context, continuation) in enumerate(question.pairs):
            length = question.lengths[i] if question.lengths else 0
            choices += [len(context), len(continuation), length]
            ids += [*context, *continuation]
    payload = np.array([*every, *choices, *ids], "<u4").tobytes()
    checksum = xxhash.xxh3_64_intdigest(payload)
    header = np.zeros(_WORDS, "<u4")
    header[:6] = MAGIC, VERSION, found.vocab_size, len(every) // 2, len(choices) // 3, len(ids)
    header[6:10] = [half for word in (found.hash, checksum) for half in (word & 0xFFFFFFFF, word >> 32)]
    header[10] = WITH_LENGTHS if found.questions[0].lengths else 0
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(header.tobytes() + payload)
    os.replace(temporary, path)


def read(path: str | Path) -> Questions:
    """Open such a file. Raises InputError."""
    path = str(path)
    content = read_bytes(path)
    header = _header(path, content)
    vocab_size, n, n_choices, n_ids = header[2:6]
    payload = content[HEADER_BYTES:]
    stored, computed = header[8] | header[9] << 32, xxhash.xxh3_64_intdigest(payload)
    if stored != computed:
        raise InputError(f"{path}: checksum: expected {stored:016x}, found {computed:016x}: it is damaged")
    words = np.frombuffer(payload, "<u4")
    every = words[: 2 * n].reshape(n, 2).tolist()
    choices = words[2 * n : 2 * n + 3 * n_choices].reshape(n_choices, 3).tolist()
    ids = words[2 * n + 3 * n_choices :]
    left = n_choices
    for i, (count, right) in enumerate(every):
        if right >= count or count > left:
            expected = f"a right choice among its own, of {left} that are left"
            raise InputError(f"{path}: question {i}: expected {expected}, found {right} of {count}")
        left -= count
    if left:
        raise InputError(f"{path}: expected {n_choices} choices in all questions, found {n_choices - left}")
    pairs, at = [], 0
    for i, (context, continuation, length) in enumerate(choices):
        if not context or not continuation or context + continuation > n_ids - at:
            expected = f"a context and a continuation of 1 to {n_ids - at} ids together"
            raise InputError(f"{path}: choice {i}: expected {expected}, found {context} and {continuation}")
        if (length > 0) != (header[10] == WITH_LENGTHS):
            expected = "a length from 1 on" if header[10] else "no length"
            raise InputError(f"{path}: choice {i}: expected {expected}, found {length}")
        middle, end = at + context, at + context + continuation
        pairs.append((ids[at:middle].tolist(), ids[middle:end].tolist()))
        at = end
    if at != n_ids:
        raise InputError(f"{path}: expected {n_ids} ids in all choices, found {at}")
    if (wrong := ids >= vocab_size).any():
        i = int(np.argmax(wrong))
        expected = f"one below the vocabulary's {vocab_size}"
        raise InputError(f"{path}: id {i}: expected {expected}, found {ids[i]}")
    questions, at = [], 0
    for count, right in every:
        lengths = [length for _, _, length in choices[at : at + count]] if header[10] else None
        questions.append(Asked(pairs[at : at + count], right, lengths))
        at += count
    return Questions(questions, vocab_size, header[6] | header[7] << 32)


def _header(path: str, content: bytes) -> Sequence[int]:
    """Its words, checked."""
    if len(content) < HEADER_BYTES:
        raise InputError(f"{path}: header: expected {HEADER_BYTES} bytes, found {len(content)}")
    header = np.frombuffer(content[:HEADER_BYTES], "<u4").tolist()
    if header[:2] != [MAGIC, VERSION]:
        found = f"{header[0]} version {header[1]}"
        raise InputError(f"{path}: header: expected magic {MAGIC} version {VERSION}, found {found}")
    vocab_size, n, n_choices, n_ids = header[2:6]
    if not 1 <= vocab_size <= _LARGEST:
        expected = f"a vocabulary of 1 to {_LARGEST} ids"
        raise InputError(f"{path}: header: expected {expected}, found {vocab_size}")
    if n < 1:
        raise InputError(f"{path}: header: expected questions, found none")
    if header[10] > WITH_LENGTHS:
        raise InputError(f"{path}: header word 10: expected flags up to {WITH_LENGTHS}, found {header[10]}")
    for word in range(11, _WORDS):
        if header[word] != 0:
            raise InputError(f"{path}: header word {word}: expected 0, found {header[word]}")
    size = HEADER_BYTES + 8 * n + 12 * n_choices + 4 * n_ids
    if len(content) != size:
        raise InputError(f"{path}: size: expected {size} bytes, found {len(content)}")
    return header
