"""The plain Llama of peers.py, that PyTorch's tensor and sequence parallelism divides among devices.

Products are divided as in Megatron-LM (Shoeybi et al. 2019), norms and the residual by tokens (Korthikanti et
al. 2022), the vocabulary in embedding, head and loss.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llamac.base.errors import InputError
from llamac.bench.peers import Cis, Llama, Loss, rotated
from llamac.model.config import Config


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.head_dim
        C, rows, few = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q, self.k, self.v = (nn.Linear(C, width, bias=False) for width in (rows, few, few))
        self.out = nn.Linear(rows, C, bias=False)

    def forward(self, x: Tensor, cis: Cis) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cis), rotated(k, cis)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate, self.up = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(c), FeedForward(c)

    def forward(self, x: Tensor, cis: Cis) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cis)
        return x + self.mlp(self.mlp_norm(x))


def divide(model: Llama, mesh: DeviceMesh) -> None:
    tokens = Shard(1)  # a tensor [B,T,C] by its tokens
    whole = PrepareModuleInput(input_layouts=(tokens, None), desired_input_layouts=(Replicate(), None))
    for block in model.blocks:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
            "attention.out": RowwiseParallel(output_layouts=tokens),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down": RowwiseParallel(output_layouts=tokens),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


def build(c: Config, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model on all devices of torchrun, and its loss; to call within loss_parallel(), as the backward."""
    if c.model_type != "llama":
        raise InputError(f"dtensor: expected a Llama, found a model of type {c.model_type}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = Llama(c, False, Block)
    divide(model, mesh)
    if c.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    return model, torch.compile(model, dynamic=False)
