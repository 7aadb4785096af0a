"""Log-likelihoods of texts under a model, in batches of similar length."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llamac.base.errors import InputError
from llamac.data import tokenizer
from llamac.data.tokens import IGNORED
from llamac.inference.model import Inference, encode, load_tokenizer
from llamac.model.checkpoint import find_model
from llamac.model.config import load_config

BATCH_TOKENS = 4096  # of a pass, padding included


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation: the sum of ln p over its tokens, and whether each of them is the likeliest."""

    log: float
    is_greedy: bool
    tokens: int


class PairEncoder:
    """Texts to ids, as lm-eval makes them. directory: of a model; or a tokenizer's file, without a model."""

    def __init__(self, directory: str | os.PathLike):
        self.directory = find_model(directory)
        is_model = (self.directory / "config.json").exists()
        self.config = load_config(str(self.directory)) if is_model else None

    @cached_property
    def tokenizer(self) -> Any:
        if self.config is None:
            return tokenizer.load(self.directory)
        return load_tokenizer(self.directory, self.config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """As transformers' tokenizer of the directory, with what it sets before a text."""
        return self.tokenizer.encode_framed(text)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Spaces at the context's end belong to the continuation, whose ids are what the whole text has more
        than the context. Without a context, the token that begins a document is it."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return [self.prefix()], encode(self.tokenizer, continuation, bos=False)
        before = self.encode(context)
        return before, self.encode(context + continuation)[len(before) :]

    def prefix(self) -> int:
        """The token that stands before a text without a context."""
        own = self.tokenizer
        for id in (own.bos, own.eos, self.config.bos_token_id if self.config else None):
            if id is not None:
                return id
        raise InputError(f"{self.directory}: expected a token that begins or ends a text, found neither")


class Scorer(PairEncoder):
    """A model with memory for batches. context: tokens of a sequence at most (None: the model's longest, up
    to batch_tokens). batch_tokens: of a pass, padding included. likeliest: whether is_greedy is wanted, which
    costs a look at all logits; otherwise it is False."""

    def __init__(
        self,
        directory: str | os.PathLike,
        dtype: str = "auto",
        context: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        likeliest: bool = False,
        kernels: Sequence[str] = (),
    ):
        if batch_tokens < 1:
            raise InputError(f"batch_tokens: expected a number from 1 on, found {batch_tokens}")
        super().__init__(directory)
        longest = load_config(str(self.directory)).max_position_embeddings
        self.context = context or min(longest, batch_tokens)
        self.batch_tokens, self.likeliest = max(batch_tokens, self.context), likeliest
        self.model = Inference(
            self.directory, dtype, self.context, batch_tokens=self.batch_tokens, kernels=kernels
        )

    @cached_property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def of_ids(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        done: Callable[[int], object] | None = None,
    ) -> list[Likelihood]:
        """Of each continuation behind its context, ids both. A pair longer than the model's context loses the
        context's first tokens. done: called with the number of pairs of each batch."""
        rows = [self._row(context, continuation) for context, continuation in pairs]
        found: list[Likelihood | None] = [None] * len(rows)
        # The longest first: if the memory does not last, that shows at once.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for batch in self._batches(order, [len(row[0]) for row in rows]):
            T = len(rows[batch[0]][0])
            tokens = np.zeros((len(batch), T), np.int32)
            targets = np.full((len(batch), T), IGNORED, np.int32)
            for b, i in enumerate(batch):
                ids, count = rows[i]
                tokens[b, : len(ids)] = ids
                targets[b, len(ids) - count : len(ids)] = pairs[i][1][-count:]
            losses, likeliest = self.model.score(tokens, targets, self.likeliest)
            for b, i in enumerate(batch):
                counts = targets[b] != IGNORED
                log = -math.fsum(losses[b][counts].astype(np.float64))
                is_greedy = likeliest is not None and bool(likeliest[b][counts].all())
                found[i] = Likelihood(log, is_greedy, int(counts.sum()))
            if done:
                done(len(batch))
        return found  # type: ignore[return-value]

    def of_texts(self, pairs: Sequence[tuple[str, str]], done=None) -> list[Likelihood]:
        """The same of texts."""
        return self.of_ids([self.encode_pair(*pair) for pair in pairs], done)

    def windows(self, ids: Sequence[int] | np.ndarray) -> Iterator[tuple[list[int], list[int]]]:
        """Pairs whose continuations are all of `ids`: the first after prefix(), others after what fits."""
        most = self.context
        yield [self.prefix()], list(map(int, ids[:most]))
        for begin in range(most, len(ids), most):
            end = min(begin + most, len(ids))
            yield list(map(int, ids[end - most - 1 : begin])), list(map(int, ids[begin:end]))

    def _row(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], int]:
        """The tokens that the model reads, and for how many of the last ones the next ones count."""
        if not context or not continuation:
            raise InputError("likelihood: expected a context and a continuation of at least one token each")
        whole = [*context, *continuation][-(self.context + 1) :]
        return whole[:-1], min(len(continuation), len(whole) - 1)

    def _batches(self, order: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """Rows of falling lengths: as many as the memory takes at the first one's length."""
        at = 0
        while at < len(order):
            count = max(1, self.batch_tokens // self.context * self.context // lengths[order[at]])
            yield order[at : at + count]
            at += count
