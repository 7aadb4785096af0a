"""A model's weights as parts: the rows of each weight that this process holds. Also fused products, initial
values and files.

One parameter may hold several weights (fused products), and a process may hold only some rows of a parameter
(sharded models). Random streams, files and AdamW's weight decay are per weight, with Hugging Face's names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import llamac.base.random
from llamac.model import hf
from llamac.model.architectures import MODEL_TYPES
from llamac.model.block import Linear
from llamac.model.config import Config
from llamac.training.ranks import is_sharded, local


@dataclass
class Part:
    """The rows of one weight that this process holds: all of them, unless the model is sharded."""

    name: str  # Hugging Face's
    index: int  # among all weights
    shape: tuple[int, ...]  # of the whole weight
    first: int  # first row of the part
    parameter: nn.Parameter  # the module's; it may hold several weights
    rows: slice  # of the parameter's local tensor

    def of(self, x: Tensor) -> Tensor:
        """The part's rows of the parameter or of its gradient."""
        return local(x)[self.rows]

    def weight(self) -> Tensor:
        return self.of(self.parameter.detach())

    def is_matrix(self) -> bool:
        """Matrices decay and have random values at first."""
        return len(self.shape) == 2

    def start(self) -> int:
        """Number of the part's first element within the whole weight."""
        return self.first * math.prod(self.shape[1:])


# Fused products =============================================================================================


def fused_rows(config: Config) -> list[Linear]:
    """The linears of several weights."""
    return [row for row in config.block if len(row.weights) > 1]


def fuse_products(model: nn.Module) -> None:
    """Make q, k, v one product and gate, up another. parts() still tells the weights apart."""
    for block in model.model.layers:
        for row in fused_rows(model.config):
            half = getattr(block, row.half)
            modules = [half.get_submodule(name) for name in row.weights]
            sizes, columns = [module.out_features for module in modules], modules[0].in_features
            fused = nn.Linear(columns, sum(sizes), modules[0].bias is not None, "meta")
            for name, first in modules[0].named_parameters():
                whole = first.detach().new_empty(sum(sizes), *first.shape[1:])
                for rows, module in zip(whole.split(sizes), modules, strict=True):
                    # torch.cat of meta tensors takes seconds to import torch._dynamo.
                    rows.copy_(module.get_parameter(name).detach())
                fused.register_parameter(name, nn.Parameter(whole))
            half.add_module(row.name, fused)
            half.modules_of[row.name] = [row.name]
            for name in row.weights:
                delattr(half, name)


# Parts ======================================================================================================


def weight_names(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter, with Hugging Face's names of the weights that it holds."""
    found, own = [], MODEL_TYPES[model.config.model_type]
    for path, parameter in model.named_parameters():
        names = [path]
        for row in fused_rows(model.config):
            if f".{row.half}.{row.name}." in path:
                names = [path.replace(f".{row.name}.", f".{name}.") for name in row.weights]
        found.append(([own.file_name(name) for name in names], parameter))
    order = {name: k for k, (name, _) in enumerate(model.config.parameters())}
    return sorted(found, key=lambda entry: order[entry[0][0]])


def parts(model: nn.Module) -> list[Part]:
    """The rows of every weight that this process holds, in the order of files and random streams."""
    shapes, found = dict(model.config.parameters()), []
    index = {name: k for k, name in enumerate(shapes)}
    for names, parameter in weight_names(model):
        begin, at = 0, 0
        if is_sharded(parameter):  # split as torch.chunk splits
            begin = dist.get_rank() * -(-len(parameter) // dist.get_world_size())
        end = begin + len(local(parameter))
        for name in names:
            low, high = max(begin, at), min(end, at + shapes[name][0])
            if low < high:
                rows = slice(low - begin, high - begin)
                found.append(Part(name, index[name], shapes[name], low - at, parameter, rows))
            at += shapes[name][0]
    return found


# Values =====================================================================================================


@torch.no_grad()
def init_weight(weight: Tensor, name: str, index: int, deviation: float, seed: int, start: int = 0) -> None:
    """Matrices and the embedding: normal with this standard deviation; norms: 1; biases: 0. Weight k draws
    from the random stream 4k: the C program, and any number of devices, start from the same weights.
    """
    if weight.dim() == 1:
        weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    where = seed, 0, 4 * index, weight.numel(), start
    if weight.is_cuda:
        values = llamac.base.random.normal_on(weight.device, *where)
    else:
        values = torch.from_numpy(llamac.base.random.normal(*where))
    weight.copy_(values.mul_(deviation).view_as(weight))


def init_weights(model: nn.Module, seed: int) -> None:
    """init_weight() of every weight."""
    for p in parts(model):
        init_weight(p.weight(), p.name, p.index, model.config.initializer_range, seed, p.start())


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Fill the model from a Hugging Face directory, rounding to the model's dtype. Raises InputError."""
    held = {part.name: part for part in parts(model)}
    for name, stored in hf.read_weights(directory, model.config.file_shapes()):
        if part := held.get(name):
            weight, values = part.weight(), stored.T if model.config.is_turned(name) else stored
            weight.copy_(values[part.first : part.first + len(weight)])


@torch.no_grad()
def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, weight on the host) of every weight, one at a time. All ranks gather them: read to the end."""
    shapes = dict(model.config.parameters())
    for module in model.modules():  # a forward without a backward leaves its weights gathered
        if hasattr(module, "reshard"):  # FSDP's
            module.reshard()
    for names, parameter in weight_names(model):
        weight = parameter.detach().to(dtype)
        weight = weight.full_tensor() if is_sharded(weight) else weight
        pieces = weight.split([shapes[name][0] for name in names])
        for name, piece in zip(names, pieces, strict=True):
            yield name, piece.cpu()


def save_model(model: nn.Module, directory: str | Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face directory that transformers opens as it is, of a model on one device."""
    hf.write_directory(directory, model.config, dtype, whole_weights(model, dtype))
