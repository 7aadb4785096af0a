"""Written twice on purpose: csrc/train/evaluation.cpp has the same; test_evaluation.py::test_both_programs.

Multiple-choice questions, answered while a run trains.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamac.data.tokens import IGNORED
from llamac.eval.questions import Pair, Questions
from llamac.training.ranks import everybodys, rank, world


def batches(pairs: list[Pair], B: int, T: int) -> Iterator[list[int]]:
    """Numbers of pairs that a pass reads, the longest first, as many as B rows of T tokens have room for."""
    lengths = [min(len(context) + len(continuation) - 1, T) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -lengths[i])
    at = 0
    while at < len(order):
        count = B * T // lengths[order[at]]
        yield order[at : at + count]
        at += count


def likelihoods(
    logits_of: Callable[[Tensor], Tensor],
    asked: Questions,
    B: int,
    T: int,
    device: str,
    between: Callable[[], None],
) -> np.ndarray:
    """ln of the likelihood of each choice's continuation. A pair longer than T + 1 ids loses its context's
    begin. Ranks take turns with the passes; where they do not divide, some compute the last one for nothing:
    all are needed to gather the weights. logits_of: tokens [B,T]."""
    pairs = [pair for question in asked.questions for pair in question.pairs]
    passes = list(batches(pairs, B, T))
    own = np.zeros(len(pairs))
    for number in range(rank(), -(-len(passes) // world()) * world(), world()):
        batch = passes[min(number, len(passes) - 1)]
        rows = [[*pairs[i][0], *pairs[i][1]][-(T + 1) :] for i in batch]
        longest = len(rows[0]) - 1
        tokens = np.zeros((len(rows), longest), np.int64)
        targets = np.full(tokens.shape, IGNORED)
        for b, (i, ids) in enumerate(zip(batch, rows)):
            length = len(ids) - 1
            counted = min(len(pairs[i][1]), length)
            tokens[b, :length] = ids[:-1]
            targets[b, length - counted : length] = ids[-counted:]
        logits = logits_of(torch.tensor(tokens, device=device)).float().flatten(0, 1)
        losses = F.cross_entropy(
            logits, torch.tensor(targets, device=device).flatten(), reduction="none", ignore_index=IGNORED
        )
        sums = losses.view(tokens.shape).double().sum(1).tolist()
        if number < len(passes):
            own[batch] = [-value for value in sums]
        between()
    return np.sum(everybodys(own), axis=0)


def score(asked: Questions, logs: np.ndarray) -> dict:
    """Shares of the questions that are answered right: by the likelihood, and by its logarithm divided by the
    choice's length, None where the task has no lengths."""
    right, normed, at = 0, 0, 0
    with_lengths = asked.questions[0].lengths is not None
    for question in asked.questions:
        of = logs[at : at + len(question.pairs)]
        at += len(of)
        right += int(np.argmax(of)) == question.gold
        if question.lengths:
            normed += int(np.argmax(of / np.array(question.lengths, float))) == question.gold
    n = len(asked.questions)
    return {"accuracy": right / n, "accuracy_norm": normed / n if with_lengths else None, "questions": n}
