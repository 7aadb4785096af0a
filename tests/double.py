"""transformers in double throughout: the truth that models and formulas are compared with."""

import torch


class DoubleTorch:
    """torch, except that fp32 is double: transformers computes norms, softmax and RoPE in fp32 whatever the
    model's dtype, and would not reach float64's truth.
    """

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)
