"""PyTorch's product of fp8 on a GPU in the place of the reference's: matrix units sum codes with fewer bits
than fp32 has, in llamac's library, too.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F

from llamac.training import fp8_reference


def scaled_mm(a, a_inverse, b, b_inverse, dtype, fast=False) -> torch.Tensor:
    """fp8_reference.product, computed on the GPU. fast: fast accumulation, with fewer bits still."""
    pad = 0, -a.shape[1] % 16  # it sums a multiple of 16 products
    one = torch.ones((), device="cuda")
    x, y = (F.pad(t.contiguous().view(torch.uint8), pad).view(t.dtype).cuda() for t in (a, b))
    out = torch._scaled_mm(x, y.T, one, one, out_dtype=torch.float32, use_fast_accum=fast).to(a.device)
    return fp8_reference.scaled(out, a_inverse, b_inverse.flatten()).to(dtype)


def library_products(gpu: bool, fast: bool) -> AbstractContextManager:
    """On a GPU, fp8_reference multiplies with scaled_mm. llamac's forward products are fast ones."""
    return patch.object(fp8_reference, "product", partial(scaled_mm, fast=fast)) if gpu else nullcontext()
