"""The training of Llama, Qwen3 and GPT-2 as users write it, for llamac.bench.training.

script        a plain PyTorch model (q/k/v and gate/up as one product each) under torch.compile; under
              DistributedDataParallel on torchrun's devices
torchao       the same, with torchao's float8 (--float8) in every linear layer but the head
transformers  transformers' model as it is
liger         the same with all of Liger's kernels; Llama's alone
compiled      the same as transformers, under torch.compile
hf            with Liger's fused linear and cross-entropy, its decoder under torch.compile; Llama's alone
patched       under llamac.patch; Llama's alone
dtensor       the plain model divided among torchrun's devices by PyTorch's tensor parallelism; Llama's alone

Weights, gradients and moments have the type of --dtype and are rounded to nearest. The optimizer is
torch.optim.AdamW(fused=True) after clipping at 1; attention is cuDNN's where it takes the shape. Batches are
those of train_llama3, as are transformers' initial weights; with --lora, PEFT's adapters are trained. Flags
of train_llama3.py that are not listed are ignored. --log gets a JSON object per step.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

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
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from llamac.base.dtypes import torch_dtypes
from llamac.base.errors import InputError
from llamac.bench import harness
from llamac.bench.training import PEERS, SEED
from llamac.data.tokens import Loader
from llamac.model.config import Config, load_config
from llamac.training.run import ATTENTION
from llamac.training.weights import init_weight

Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens and targets [B,T]
Cis = tuple[Tensor, Tensor]
OTHERS = ("gpt2", "phi3", "olmo2")  # models that Liger and llamac.patch do not take as a Llama


def rotated(x: Tensor, cis: Cis) -> Tensor:
    """Heads [B,NH,T,HD], turned in f32."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cis
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.is_gpt2, self.approximate = c.has_positions, "tanh" if c.hidden_act == "gelu_new" else "none"
        linear, C, rows = partial(nn.Linear, bias=self.is_gpt2), c.hidden_size, self.heads * self.head_dim
        norm = nn.LayerNorm if self.is_gpt2 else nn.RMSNorm
        self.attention_norm, self.mlp_norm = (norm(C, eps=c.rms_norm_eps) for _ in range(2))
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity() for _ in range(2)
        )
        self.qkv = linear(C, rows + 2 * self.kv_heads * self.head_dim)
        self.out, self.down = linear(rows, C), linear(c.intermediate_size, C)
        self.gate_up = linear(C, (1 if self.is_gpt2 else 2) * c.intermediate_size)

    def rotated(self, x: Tensor, norm: nn.Module, cis: Cis) -> Tensor:
        """x [B,T,NH*HD] as heads [B,NH,T,HD], normalized, turned unless positions are learned."""
        x = norm(x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        return x if self.is_gpt2 else rotated(x, cis)

    def forward(self, x: Tensor, cis: Cis) -> Tensor:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = self.qkv(self.attention_norm(x)).split(widths, -1)
        q, k, v = (
            self.rotated(q, self.q_norm, cis),
            self.rotated(k, self.k_norm, cis),
            v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2),
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        gate_up = self.gate_up(self.mlp_norm(x))
        if self.is_gpt2:
            return x + self.down(F.gelu(gate_up, approximate=self.approximate))
        gate, up = gate_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, c: Config, recompute: bool, block: Callable[[Config], nn.Module] = Block):
        super().__init__()
        self.recompute, self.base, self.head_dim = recompute, c.rope_theta, c.head_dim
        C, T = c.hidden_size, c.max_position_embeddings
        V = -(-c.vocab_size // 64) * 64  # as users of odd vocabularies round them up: aligned products
        self.embedding, self.positions = nn.Embedding(V, C), nn.Embedding(T, C) if c.has_positions else None
        self.norm = (nn.LayerNorm if c.has_positions else nn.RMSNorm)(C, c.rms_norm_eps)
        self.blocks = nn.ModuleList(block(c) for _ in range(c.num_hidden_layers))
        self.head = nn.Linear(C, V, bias=False)
        if c.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=c.initializer_range)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        exponent = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        angle = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.base**-exponent)
        x, cis = self.embedding(tokens), (angle.cos(), angle.sin())
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, cis, use_reentrant=False) if self.recompute else block(x, cis)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def script(c: Config, recompute: bool, float8: str = "", ranks: int = 1) -> tuple[nn.Module, Loss]:
    if c.is_encoder or c.model_type in OTHERS[1:]:
        raise InputError(f"script: expected a Llama, Qwen or GPT-2, found a model of type {c.model_type}")
    model = Llama(c, recompute)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(float8)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
    if ranks > 1:
        dist.init_process_group()
        return model, torch.compile(
            DistributedDataParallel(model, gradient_as_bucket_view=True), dynamic=False
        )
    return model, torch.compile(model, dynamic=False)


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


class DividedBlock(nn.Module):
    """Of modules that can be divided: products as in Megatron-LM (Shoeybi et al. 2019), norms and residual by
    tokens (Korthikanti et al. 2022), the vocabulary in embedding, head and loss.
    """

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


def dtensor(c: Config, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model on all devices of torchrun, and its loss; to call within loss_parallel(), as the backward."""
    if c.model_type != "llama":
        raise InputError(f"dtensor: expected a Llama, found a model of type {c.model_type}")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = Llama(c, False, DividedBlock)
    divide(model, mesh)
    if c.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    return model, torch.compile(model, dynamic=False)


def hugging_face(c: Config, recompute: bool, program: str, lora: int = 0) -> tuple[nn.Module, Loss]:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if c.is_encoder or (c.model_type in OTHERS and program not in ("transformers", "compiled")):
        raise InputError(f"{program}: expected a Llama, found a model of type {c.model_type}")
    values = c.to_dict("bfloat16") | {"use_cache": False}
    if program in ("hf", "compiled"):
        # Under torch.compile transformers builds a mask [T,T] for the attention "sdpa", which excludes
        # causal kernels. It builds none for another name.
        AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
        values["attn_implementation"] = "sdpa_causal"
    if program in ("hf", "liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        parts = ("rope", "rms_norm", "swiglu") if program == "hf" else ()  # these are the compiler's
        apply_liger_kernel_to_llama(**dict.fromkeys(parts, False))
    chosen = {
        "dtype": torch.get_default_dtype(),
        "attn_implementation": values.pop("attn_implementation", None),
    }
    model = base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), **chosen)
    for index, (name, _) in enumerate(c.parameters()):
        weight = base.get_parameter(name)
        own = weight.T if c.is_turned(name) else weight
        init_weight(own, name, index, c.initializer_range, SEED)
    if recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if program == "hf":
        base.model.compile(dynamic=False)
    if program == "compiled":
        base.compile(dynamic=False)
    if lora:
        import peft

        model = peft.get_peft_model(base, peft.LoraConfig(r=lora, target_modules="all-linear"))
    if program == "patched":
        from llamac.ops.transformers_patch import patch

        patch(base)
    # shift_labels: each token's target, so that the last one counts, too.
    return model, lambda tokens, targets: model(input_ids=tokens, labels=targets, shift_labels=targets).loss


def train(model: nn.Module, loss_of: Loss, vocabulary: int, o, ranks: int = 1) -> None:
    """ranks: that train on batches of their own."""
    device, rank = next(model.parameters()).device, dist.get_rank() if ranks > 1 else 0
    data = Loader(o.train_data, o.seq_len, vocabulary, o.batch_size, rank=rank, world=ranks, seed=SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:  # of the initial weights' random numbers
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with open(o.log, "w") as log, sdpa_kernel(ATTENTION, set_priority=True):
        for step in range(1, o.steps + 1):
            tokens, targets = (torch.from_numpy(x).long().to(device) for x in data.micro_batch(step - 1, 0))
            wait()
            begin = time.perf_counter()
            loss = loss_of(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            wait()
            seconds = time.perf_counter() - begin
            if ranks > 1:
                dist.all_reduce(loss.detach_().div_(ranks))
            event = {"event": "step", "step": step, "loss": loss.item(), "ms": 1e3 * seconds}
            event["tokens_per_s"] = o.batch_size * o.seq_len * ranks / seconds
            event["gpu_mem_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
            log.write(json.dumps(event) + "\n")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("program", choices=PEERS)
    parser.add_argument("--model", required=True, help="a preset or a config.json")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--train-data", required=True, metavar="GLOB")
    for name, value in (("batch-size", 1), ("seq-len", 8192), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--recompute", choices=("none", "block"), default="none")
    parser.add_argument("--float8", default="tensorwise", help="torchao's recipe [tensorwise]")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="0: all weights are trained")
    o, _ = parser.parse_known_args()
    c, recompute = load_config(o.model), o.recompute == "block"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(1)
    torch.set_default_dtype(torch_dtypes(o.dtype)[o.dtype])
    ranks = int(os.environ.get("WORLD_SIZE", 1)) if o.program == "script" else 1
    with device:
        if o.program in ("script", "torchao"):
            model, loss_of = script(c, recompute, o.float8 if o.program == "torchao" else "", ranks)
        elif o.program == "dtensor":
            model, loss_of = dtensor(c, device)
        else:
            model, loss_of = hugging_face(c, recompute, o.program, o.lora)
    torch.set_default_dtype(torch.float32)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    count = sum(p.numel() for p in model.parameters())
    print(f"PyTorch {torch.__version__} on {name}, {o.model}: {count:,} parameters")
    if int(os.environ.get("RANK", 0)):
        o.log = Path(os.devnull)
    with loss_parallel() if o.program == "dtensor" else nullcontext():
        train(model.train(), loss_of, c.vocab_size, o, ranks)
