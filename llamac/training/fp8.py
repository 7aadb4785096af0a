"""--matmul-dtype fp8 in train_llama3.py: the blocks' products by llamac.fp8_reference, or with --ops llamac
by llamac.ops.linear. csrc/model/linear.cpp is the C program's.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llamac import fp8_reference
from llamac.config import Config
from llamac.errors import InputError
from llamac.options import Options
from llamac.training.ranks import world

PER_BLOCK = len(fp8_reference.LAYERS)


class ReferenceProducts:
    """Products by plain PyTorch."""

    def __init__(self, blocks: int, recipe: str, gradients: str, device: str):
        of_gradients = fp8_reference.FP8[gradients]
        slots = fp8_reference.slot_names(blocks)
        self.scales = fp8_reference.Scales(slots, recipe, gradients=of_gradients, device=device)

    def linear(self, block: int, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        """x, weight -> x · weightᵀ, of a layer by its number among LAYERS."""
        x, name = fp8_reference.INPUTS[layer], fp8_reference.LAYERS[layer]
        slots = f"{block}.{x}", f"{block}.{name}.weight", f"{block}.d.{name}"
        return partial(fp8_reference.linear, scales=self.scales, slots=slots)

    def update(self) -> None:
        """The next step's scales, from what all ranks have measured."""
        if world() > 1:
            dist.all_reduce(self.scales.amax, dist.ReduceOp.MAX)
        self.scales.update()

    def state(self) -> Tensor | None:
        """fp8.scale of checkpoints, in the order of slot_names; None where the next step needs none."""
        return self.scales.scale if self.scales.recipe == "delayed" else None

    def load(self, scale: Tensor) -> None:
        self.scales.scale.copy_(scale)
        self.scales.calibrated = True


class LlamacProducts:
    """Products by llamac's kernels."""

    def __init__(self, blocks: int, recipe: str, gradients: str, device: str):
        from llamac import ops

        self.function, self.gradients, self.recipe = ops.linear, gradients, recipe
        self.scaling = None
        if recipe == "delayed":
            self.scaling = ops.DelayedScaling(blocks * PER_BLOCK, gradients, device)

    def linear(self, block: int, layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        recipe = self.scaling[block * PER_BLOCK + layer] if self.scaling else self.recipe
        return partial(self.function, recipe=recipe, gradients=self.gradients)

    def update(self) -> None:
        if self.scaling:
            self.scaling.update()

    def state(self) -> Tensor | None:
        if not self.scaling:
            return None
        of_layers = self.scaling.scale.view(-1, PER_BLOCK, 3)  # input, weight, gradient of each
        return torch.cat((of_layers[..., :2].flatten(1), of_layers[..., 2]), 1).flatten()

    def load(self, scale: Tensor) -> None:
        assert self.scaling
        inputs, gradients = scale.view(-1, 3 * PER_BLOCK).split((2 * PER_BLOCK, PER_BLOCK), 1)
        of_layers = torch.cat((inputs.unflatten(1, (PER_BLOCK, 2)), gradients[..., None]), 2)
        self.scaling.load_state_dict({"scale": of_layers.flatten(0, 1).to(self.scaling.scale.device)})


Products = ReferenceProducts | LlamacProducts


def blocks_in_fp8(o: Options, config: Config) -> range:
    """Those whose products are in fp8. Raises InputError."""
    blocks = range(o.fp8_keep_first, config.num_hidden_layers - o.fp8_keep_last)
    if not blocks:
        kept = f"--fp8-keep-first {o.fp8_keep_first} --fp8-keep-last {o.fp8_keep_last}"
        found = f"the model has {config.num_hidden_layers} blocks"
        raise InputError(f"{kept}: {found}, expected at least one with products in fp8")
    return blocks


def use_products(model: Any, o: Options, device: str = "cpu") -> None:
    """Let the blocks' products be in fp8, after fuse_products(): what is fused has one scale. Raises
    InputError.
    """
    kind = LlamacProducts if o.ops == "llamac" else ReferenceProducts
    products = kind(model.config.num_hidden_layers, o.fp8_recipe, o.fp8_gradients, device)
    model.fp8 = products
    for i in blocks_in_fp8(o, model.config):
        attention, mlp = model.model.layers[i].self_attn, model.model.layers[i].mlp
        attention.linear, mlp.linear = products.linear(i, 0), products.linear(i, 2)
        for layer, module in ((1, attention.o_proj), (3, mlp.down_proj)):
            linear = products.linear(i, layer)
            module.forward = MethodType(lambda m, x, linear=linear: linear(x, m.weight), module)
