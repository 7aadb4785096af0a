"""Writes a file of multiple-choice questions in token ids, NAME.questions, for the evaluations of a training
run (csrc/data/questions.h has the format).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.files import write_whole

SUFFIX = ".questions"
MAGIC, VERSION = 20261125, 1
HEADER_BYTES = 64
WITH_LENGTHS = 1  # flag: choices have lengths
_WORDS = HEADER_BYTES // 4

Pair = tuple[list[int], list[int]]  # ids of a context, and of the continuation behind it


@dataclass(frozen=True)
class Asked:
    """A question: pairs of its choices, which of them is right, and their lengths in characters, or None."""

    pairs: list[Pair]
    gold: int
    lengths: list[int] | None


@dataclass(frozen=True)
class Questions:
    """hash: XXH3_64 of the tokenizer's file, as in shards. Either all questions have lengths or none."""

    questions: list[Asked]
    vocab_size: int
    hash: int


def write(path: str | Path, found: Questions) -> None:
    """Write the file, renamed into place when whole."""
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
    write_whole(path, header.tobytes() + payload)
