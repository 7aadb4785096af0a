"""Several devices: the processes that torchrun started, and FSDP2 over them."""

import os
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamac.base.dtypes import torch_dtypes
from llamac.training.options import Options

DTYPES = torch_dtypes("f32", "bf16", "fp16")


def rank() -> int:
    """This process's number among those that torchrun started."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_ranks(device: str) -> None:
    """Meet the other processes, if there are any."""
    if world() == 1:
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")


def leave() -> None:
    """Wait for the other processes, if there are any, and end without the libraries' own endings: with gloo
    (torch 2.13) one in 25 runs was seen to abort in them, all work done, and torchrun to end the other ranks
    for it.
    """
    if world() > 1:
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor. torch.distributed.tensor takes seconds to import, so this does not name it."""
    return hasattr(x, "to_local")


def local(x: Tensor) -> Tensor:
    """The part of x in this process."""
    return x.to_local() if is_sharded(x) else x


def shard(model: nn.Module, o: Options, device: str) -> None:
    """Spread the parameters over the ranks (FSDP2: Zhao et al., "PyTorch FSDP", 2023). Each block, the
    embedding and the head gather theirs in --dtype for the time they need them, and the next one's
    meanwhile; gradients are averaged over the ranks in --reduce-dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    summed = o.grad_dtype if o.reduce_dtype == "auto" else o.reduce_dtype
    dtypes = {"param_dtype": DTYPES[o.dtype], "reduce_dtype": DTYPES[summed]}
    how = {
        "mesh": init_device_mesh(device, (world(),)),
        "mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False),  # cis stays fp32
    }
    blocks = list(model.model.layers)
    for block in blocks:
        if o.compile:  # without the hooks that gather, which no compiler follows
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        fully_shard(block, **how)
    order = blocks
    if not model.config.tie_word_embeddings:  # else it is the head's, too, and stays with the model
        fully_shard(model.model.embed_tokens, **how)
        fully_shard([model.model.norm, model.lm_head], **how, reshard_after_forward=False)
        order = [model.model.embed_tokens, *blocks, model.model.norm]
    fully_shard(model, **how)
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


def gradients(model: nn.Module, batches: list, cis: Any, parts: list, dtype: torch.dtype, scale: float = 1):
    """The mean loss of the micro-batches, and `scale` times its gradient by each part, summed in dtype."""
    of_counted = _tokens_per_target(batches) if model.config.is_encoder else 1
    if world() > 1:
        return _sharded_gradients(model, batches, cis, parts, of_counted, scale)
    losses: list[Tensor] = []
    sums: list[Tensor] = []
    for tokens, *others in batches:
        loss = model(tokens, cis, *others) * of_counted / len(batches)
        (loss * scale).backward()
        losses.append(loss.detach())
        fresh = [part.of(part.parameter.grad).to(dtype) for part in parts]
        for part in parts:
            part.parameter.grad = None
        if not sums:
            sums = fresh
        else:
            torch._foreach_add_(sums, fresh)
    return torch.stack(losses).sum(), sums


def _tokens_per_target(batches: list) -> Tensor:
    """Of all ranks: the mean loss over all tokens times it is that over the targets that count."""
    targets = torch.stack([targets for _, targets, *_ in batches])
    counts = torch.stack([(targets >= 0).sum(), torch.tensor(targets.numel(), device=targets.device)])
    if world() > 1:
        dist.all_reduce(counts)
    return counts[1] / counts[0].clamp(min=1)


def _sharded_gradients(model: nn.Module, batches: list, cis: Any, parts: list, of_counted: Any, scale: float):
    """gradients() of a sharded model: sums in its parameters, reduced over the ranks once."""
    losses = []
    for micro, (tokens, *others) in enumerate(batches, 1):
        model.set_requires_gradient_sync(micro == len(batches))
        loss = model(tokens, cis, *others) * of_counted / len(batches)
        (loss * scale).backward()
        losses.append(loss.detach())
    sums = [part.of(part.parameter.grad) for part in parts]
    for part in parts:
        part.parameter.grad = None
    return torch.stack(losses).sum(), sums


def across_ranks(loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of all ranks, and the norm of the gradient whose parts have these norms."""
    if world() == 1:
        return loss, norm
    sums = torch.stack([loss.double() / dist.get_world_size(), norm.square()])
    dist.all_reduce(sums)
    return sums[0].to(loss.dtype), sums[1].sqrt()
