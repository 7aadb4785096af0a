"""--matmul-dtype fp8 in train_llama3.py: the products of the blocks, and with --fp8-head on also of the head,
with llamac.training.fp8_reference or, with --ops llamac, with llamac.ops.linear. The C program uses
csrc/model/fp8.cpp.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llamac.base.errors import InputError
from llamac.model.block import BLOCK
from llamac.model.config import Config
from llamac.training import fp8_reference
from llamac.training.options import Options
from llamac.training.ranks import world

PER_BLOCK = len(BLOCK)


class ReferenceProducts:
    """Products by plain PyTorch."""

    def __init__(self, config: Config, recipe: str, gradients: str, device: str, head: bool = False):
        of_gradients, self.rows = fp8_reference.FP8[gradients], config.block
        slots = fp8_reference.slot_names(config.num_hidden_layers, head, config.block)
        self.scales = fp8_reference.Scales(slots, recipe, gradients=of_gradients, device=device)

    def linear(self, block: int, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        """x, weight -> x · weightᵀ, of a layer by its number in Config.block."""
        return partial(fp8_reference.linear, scales=self.scales, slots=self.rows[layer].slots(block))

    def head(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(fp8_reference.linear, scales=self.scales, slots=fp8_reference.HEAD)

    @staticmethod
    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, -2), targets.flatten())

    def update(self) -> None:
        """The next step's scales, from what all ranks have measured."""
        if world() > 1:
            dist.all_reduce(self.scales.amax, dist.ReduceOp.MAX)
        self.scales.update()


class LlamacProducts:
    """Products by llamac's kernels."""

    def __init__(self, config: Config, recipe: str, gradients: str, device: str, head: bool = False):
        from llamac import ops

        self.function, self.mean_loss = ops.linear, ops.cross_entropy
        self.gradients, self.recipe, self.blocks = gradients, recipe, config.num_hidden_layers
        self.scaling = None
        if recipe == "delayed":
            self.scaling = ops.DelayedScaling(self.blocks * PER_BLOCK + head, gradients, device)

    def linear(self, block: int, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        recipe = self.scaling[block * PER_BLOCK + layer] if self.scaling else self.recipe
        return partial(self.function, recipe=recipe, gradients=self.gradients)

    def head(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.linear(self.blocks, 0)  # behind the blocks' layers

    def update(self) -> None:
        if self.scaling:
            self.scaling.update()


Products = ReferenceProducts | LlamacProducts


def blocks_in_fp8(o: Options, config: Config) -> range:
    """Those whose products are in fp8. Raises InputError."""
    blocks = range(o.fp8_keep_first, config.num_hidden_layers - o.fp8_keep_last)
    if not blocks:
        kept = f"--fp8-keep-first {o.fp8_keep_first} --fp8-keep-last {o.fp8_keep_last}"
        found = f"the model has {config.num_hidden_layers} blocks"
        raise InputError(f"{kept}: {found}, expected at least one with products in fp8")
    return blocks


def _head_forward(products: Products) -> Callable:
    """The reference's Head.forward, by a product of fp8."""
    linear = products.head()

    def forward(head: Any, hidden: Tensor, targets: Tensor | None, tied: Tensor | None) -> Tensor:
        logits = linear(hidden, head.weight if tied is None else tied)
        return logits if targets is None else products.mean_loss(logits, targets)

    return forward


def _linear_forward(product: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    """nn.Linear's forward, by that product of x and the weight."""

    def forward(module: Any, x: Tensor) -> Tensor:
        out = product(x, module.weight)
        return out if module.bias is None else out + module.bias

    return forward


def use_products(model: Any, o: Options, device: str = "cpu") -> None:
    """Compute the blocks' products in fp8, after fuse_products(): one scale per fused product. InputError."""
    kind = LlamacProducts if o.ops == "llamac" else ReferenceProducts
    head = o.fp8_head == "on"
    products = kind(model.config, o.fp8_recipe, o.fp8_gradients, device, head)
    model.fp8 = products
    if head:
        if model.config.is_encoder:
            model.lm_head.product = products.head()
        else:
            model.lm_head.forward = MethodType(_head_forward(products), model.lm_head)
    for i in blocks_in_fp8(o, model.config):
        for layer, row in enumerate(model.config.block):
            half, linear = getattr(model.model.layers[i], row.half), products.linear(i, layer)
            (module,) = map(half.get_submodule, half.modules_of[row.name])
            module.forward = MethodType(_linear_forward(linear), module)
