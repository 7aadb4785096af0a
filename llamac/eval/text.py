"""Bits per byte and perplexity of texts and of token files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from typing import Any

import numpy as np

from llamac.base.errors import InputError
from llamac.base.files import read_text
from llamac.data.tokenizer import data_hash
from llamac.data.tokens import read_bin
from llamac.eval.likelihood import Scorer

AT_ONCE = 1 << 10  # windows that are scored together
IDS_AT_ONCE = 1 << 20


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


# Of the number of windows: called with the number of each batch.
Progress = Callable[[int], Callable[[int], object]]


def of_files(scorer: Scorer, paths: Sequence[str], progress: Progress | None = None) -> Total:
    """Of text files, a document each, in UTF-8."""
    documents, total = [], Total()
    for path in paths:
        text = read_text(path)
        if not text:
            continue
        total.bytes += len(text.encode())
        documents.append(scorer.model.encode(text, bos=False))
    if not documents:
        raise InputError(f"{', '.join(paths)[:200]}: expected text, found none")
    _add(scorer, total, documents, progress)
    return total


def of_shards(scorer: Scorer, pattern: str, progress: Progress | None = None) -> Total:
    """Of token files, each as one text. bytes: 0 unless the directory's tokenizer made them."""
    paths = sorted(glob(pattern))
    if not paths:
        raise InputError(f"{pattern}: expected token files, found none")
    total, V = Total(), scorer.model.config.vocab_size
    try:
        own = scorer.model.tokenizer
    except InputError:  # tokens need none
        own = None
    documents = []
    for path in paths:
        shard = read_bin(path)
        if shard.packed:
            raise InputError(f"{path}: expected plain tokens, found packed conversations")
        ids = shard.tokens
        if ids.size and int(ids.max()) >= V:
            raise InputError(f"{path}: expected ids below the model's {V}, found {int(ids.max())}")
        is_own = own is not None and shard.tokenizer_hash in (own.hash, own.rank_hash)
        if own and shard.tokenizer_hash != 0 and not is_own:
            raise InputError(
                f"{path}: expected tokens of the model's tokenizer (XXH3_64 {data_hash(own):016x}), found "
                f"{shard.tokenizer_hash:016x}"
            )
        if is_own:
            total.bytes += _bytes(own, ids)
        documents.append(ids)
    if not any(ids.size for ids in documents):
        raise InputError(f"{pattern}: expected tokens, found none")
    _add(scorer, total, documents, progress)
    return total


def _bytes(own: Any, ids: np.ndarray) -> int:
    """Of the text of ids. A shard may be larger than the memory: it is read in parts."""
    lengths = np.array([len(token) for token in own.tokens] + [0])
    parts = (ids[at : at + IDS_AT_ONCE] for at in range(0, len(ids), IDS_AT_ONCE))
    return sum(int(lengths[np.minimum(part, len(lengths) - 1)].sum()) for part in parts)


def _add(
    scorer: Scorer, total: Total, documents: Sequence[Sequence[int] | np.ndarray], progress: Progress | None
) -> None:
    done = progress(sum(-(-len(ids) // scorer.context) for ids in documents)) if progress else None
    windows = (window for ids in documents if len(ids) for window in scorer.windows(ids))
    while batch := list(islice(windows, AT_ONCE)):
        for found in scorer.of_ids(batch, done):
            total.nll -= found.log
            total.tokens += found.tokens
