"""transformers in double throughout: the truth that models and formulas are compared with."""

from types import ModuleType

import pytest
import torch


class DoubleTorch:
    """torch, except that fp32 is double."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def compute_in_double(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """transformers' modules compute norms, softmax and RoPE in fp32 whatever the model's dtype; with this, in
    float64. What an input is converted by differs between versions: an argument of torch's or a method.
    """
    for module in modules:
        patch.setattr(module, "torch", DoubleTorch())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
