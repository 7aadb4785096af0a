"""A plain Llama that PyTorch's tensor and sequence parallelism divides among devices.

Products are divided as in Megatron-LM (Shoeybi et al. 2019), norms and the residual by tokens (Korthikanti et
al. 2022), the vocabulary in embedding, head and loss.
"""

from collections.abc import Callable

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
from llamac.model.config import Config

Cis = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.head_dim
        C, rows, few = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q, self.k, self.v = (nn.Linear(C, width, bias=False) for width in (rows, few, few))
        self.out = nn.Linear(rows, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.base, self.head_dim = c.rope_theta, c.head_dim
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=c.initializer_range)

    def forward(self, tokens: Tensor) -> Tensor:
        exponent = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        angle = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.base**-exponent)
        x, cos, sin = self.embedding(tokens), angle.cos(), angle.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def divide(model: Llama, mesh: DeviceMesh) -> None:
    tokens = Shard(1)  # a tensor [B,T,C] by its tokens
    whole = PrepareModuleInput(
        input_layouts=(tokens, None, None), desired_input_layouts=(Replicate(), None, None)
    )
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


def build(c: Config, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The model on all devices of torchrun, and its loss; to call within loss_parallel(), as the backward."""
    if c.model_type != "llama":
        raise InputError(f"dtensor: expected a Llama, found a model of type {c.model_type}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = Llama(c)
    divide(model, mesh)
    if c.tie_word_embeddings:
        model.head.weight = model.embedding.weight

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    return model, torch.compile(loss, dynamic=False)
