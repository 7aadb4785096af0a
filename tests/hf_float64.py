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
    """Let these modules of transformers compute in float64 what they compute in fp32 whatever the model's
    dtype: norms, softmax and RoPE. Some versions name torch.float32 there, others call Tensor.float.
    """
    for module in modules:
        patch.setattr(module, "torch", DoubleTorch())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
