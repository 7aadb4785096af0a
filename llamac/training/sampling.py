"""Written twice on purpose: csrc/train/sample.cpp has the same rule; test_program.py::test_the_same_losses.

The choice of a sample's next token.
"""

import torch
from torch import Tensor

SAMPLING_STREAM = 0xFFFFFFFF  # of random numbers


def sample_token(logits: Tensor, temperature: float, top_k: int, u: float) -> int:
    """The token at u in (0,1) of the cumulative distribution softmax(logits / temperature) over the top_k
    likeliest (0: all), the likeliest first, equals by their id. logits [V]; temperature 0: the likeliest.
    """
    values, ids = logits.double().sort(descending=True, stable=True)
    if temperature == 0:
        return int(ids[0])
    values = values[: top_k or len(values)]
    cumulative = ((values - values[0]) / temperature).exp().cumsum(0)
    return int(ids[torch.searchsorted(cumulative[:-1], u * cumulative[-1])])
