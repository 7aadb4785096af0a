"""Bits per byte and perplexity of texts and of token files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path

import numpy as np

from llamac.data.tokens import read_bin
from llamac.errors import InputError
from llamac.eval.likelihood import Scorer
from llamac.files import read_bytes

AT_ONCE = 1 << 10  # windows that are scored together


@dataclass
class Total:
    """nll: -ln of the probability of `tokens` tokens, which stand for `bytes` bytes of text (0: unknown)."""

    nll: float = 0.0
    tokens: int = 0
    bytes: int = 0

    @property
    def perplexity(self) -> float:
        """Of a token. Infinite beyond a double."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nll / math.log(2) / self.bytes if self.bytes else None


def of_files(scorer: Scorer, paths: Sequence[str], done: Callable[[int], None] | None = None) -> Total:
    """Of text files, a document each, in UTF-8. done: called with the number of files of each batch."""
    documents, total = [], Total()
    for path in paths:
        content = read_bytes(Path(path))
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: byte {error.start}: expected UTF-8") from None
        if not text:
            continue
        total.bytes += len(content)
        documents.append(scorer.model.encode(text, bos=False))
    if not documents:
        raise InputError(f"{', '.join(paths)[:200]}: expected text, found none")
    _add(scorer, total, documents, done)
    return total


def of_shards(scorer: Scorer, pattern: str, done: Callable[[int], None] | None = None) -> Total:
    """Of the tokens of .bin files, each file as one text. bytes: of what the directory's tokenizer makes of
    them, where it made them; else 0."""
    paths = sorted(glob(pattern))
    if not paths:
        raise InputError(f"{pattern}: expected token files, found none")
    total, V = Total(), scorer.model.config.vocab_size
    try:
        own = scorer.model.tokenizer
    except InputError:  # tokens need none
        own = None
    for path in paths:
        shard = read_bin(path)
        if shard.packed:
            raise InputError(f"{path}: expected plain tokens, found packed conversations")
        ids = np.asarray(shard.tokens)
        if ids.size and int(ids.max()) >= V:
            raise InputError(f"{path}: expected ids below the model's {V}, found {int(ids.max())}")
        if own and shard.tokenizer_hash not in (0, own.hash):
            raise InputError(
                f"{path}: expected tokens of the model's tokenizer (XXH3_64 {own.hash:016x}), found "
                f"{shard.tokenizer_hash:016x}"
            )
        if own and shard.tokenizer_hash == own.hash:
            total.bytes += len(own.decode(ids.tolist()).encode())
        _add(scorer, total, [ids.tolist()], done)
    if total.tokens == 0:
        raise InputError(f"{pattern}: expected tokens, found none")
    return total


def _add(
    scorer: Scorer, total: Total, documents: list[list[int]], done: Callable[[int], None] | None
) -> None:
    windows = (window for ids in documents if ids for window in scorer.windows(ids))
    while batch := list(islice(windows, AT_ONCE)):
        for found in scorer.of_ids(batch, done):
            total.nll -= found.log
            total.tokens += found.tokens
