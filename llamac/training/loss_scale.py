"""Loss scaling of the reference's fp16 training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llamac.training.options import Options


@dataclass
class LossScale:
    """Dynamic loss scaling of fp16 gradients (Micikevicius et al., "Mixed Precision Training", 2018)."""

    scale: float = 65536.0  # a power of two
    fixed: bool = False
    good: int = 0  # steps since it changed

    def update(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if self.fixed:
            return
        if not finite:
            self.scale /= 2
        if self.good == 2000:
            self.scale, self.good = self.scale * 2, 0

    @classmethod
    def of(cls, o: Options) -> "LossScale | None":
        """That of a run; None: its gradients need none."""
        return cls(o.loss_scale or cls.scale, o.loss_scale > 0) if o.dtype == "fp16" else None

    def unscale(self, grads: list[Tensor], result: Tensor) -> bool:
        """Divides the gradients by the scale, which then follows from the result: whether it is finite."""
        finite = bool(torch.isfinite(result))
        torch._foreach_div_(grads, self.scale)
        self.update(finite)
        return finite
