"""The head of an encoder (BERT), and the loss of masked tokens."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, empty, nn

from llamac.data.tokens import IGNORED
from llamac.model.block import ACTIVATIONS
from llamac.model.config import Config


def mean_loss(losses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the losses whose target is not IGNORED, and their number."""
    valid = (targets != IGNORED).to(losses.dtype)
    return (losses * valid).sum() / valid.sum(), valid.sum()


class EncoderHead(nn.Module):
    """The reference's Head of an encoder: a linear, the activation and a norm before the product with the
    embedding, and a bias behind it. cross_entropy: the reference's.
    """

    def __init__(self, config: Config, ops: Any, norm: nn.Module, cross_entropy: Callable):
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation, self.transform_norm = getattr(ops, ACTIVATIONS[config.hidden_act]), norm
        self.bias = nn.Parameter(empty(config.vocab_size))
        self.product: Callable = F.linear
        self.cross_entropy = cross_entropy

    def forward(self, hidden: Tensor, targets: Tensor | None, tied: Tensor) -> Tensor:
        """Logits [B,T,V], or with targets [B,T] the mean loss over all tokens: 0 where they are IGNORED."""
        hidden = self.transform_norm(self.activation(self.transform(hidden)))
        logits = self.product(hidden, tied) + self.bias
        return logits if targets is None else self.cross_entropy(logits, targets).mean()
