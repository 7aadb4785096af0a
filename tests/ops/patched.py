"""Small models of the families that llamac.patch knows, inputs for them, their float64 truth, and counts of
our operations.
"""

import functools
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_float64 import compute_in_double
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.ops.transformers_patch import FAMILIES

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
B, T, V, LAYERS = 2, 19, 131, 2
SIZES = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 64, "initializer_range": 0.2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# name: family, its configuration
MODELS = {
    "llama": ("Llama", {}),
    "llama-flash": ("Llama", {"head_dim": 64}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "llama-biased": ("Llama", {"mlp_bias": True, "attention_bias": True, "rope_scaling": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def build(name: str = "llama", dtype: torch.dtype = torch.float32, kind: str = "ForCausalLM", **changes):
    """A model in training mode, the same weights every time: those that bfloat16 holds."""
    family, config = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | config | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{kind}")(config)
    for parameter in model.parameters():  # and no buffers: transformers loads frequencies in float32
        if parameter.dim() == 1:  # norms are ones, biases zeros
            parameter.data += torch.randn_like(parameter) * 0.2
        parameter.data = parameter.data.bfloat16().to(dtype)
    return model.train()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(seed))


def masked(mask: torch.Tensor) -> torch.Tensor:
    """Labels that count where the mask is not 0."""
    return tokens().masked_fill(mask == 0, -100)


SOME = torch.ones(B, T)
SOME[:, 3:7] = 0
PADDED = torch.ones(B, T, dtype=torch.long)
PADDED[0, -5:] = 0
BOTH = PADDED.clone()
BOTH[:, :3] = 0
HOLES = PADDED.clone()
HOLES[1, 8] = 0
LENGTHS = torch.tensor([0, 8, 9, T], dtype=torch.int32)
PACKED = torch.cat((torch.arange(8), torch.arange(T - 8))).expand(B, T)
OFFSET = torch.arange(T) + torch.tensor([[0], [9]])
SPECIAL = {
    "plain": {},
    "no cache": {"use_cache": False},
    "ignored": {"labels": masked(SOME)},
    "items": {"labels": masked(SOME), "num_items_in_batch": torch.tensor(17)},
    "number": {"num_items_in_batch": 23, "ignore_index": int(tokens()[1, 1])},
    "shifted": {"shift_labels": masked(SOME)},
    "all seen": {"attention_mask": torch.ones(B, T)},
    "padded right": {"labels": masked(PADDED), "attention_mask": PADDED},
    "padded left": {"labels": masked(PADDED.flip(1)), "attention_mask": PADDED.flip(1)},
    "padded": {"labels": masked(BOTH), "attention_mask": BOTH},
    "holes": {"labels": masked(HOLES), "attention_mask": HOLES},
    "packed": {"position_ids": PACKED, "use_cache": False},
    "packed, unseen": {"position_ids": PACKED},
    "offset": {"position_ids": OFFSET},
    "embedded": {"input_ids": None, "inputs_embeds": F.one_hot(tokens() % 64, 64)},
}
# Tokens of their own: errors on the same ones are no more than one sample.
INPUTS = {
    name: {"input_ids": tokens(seed), "labels": tokens()} | special
    for seed, (name, special) in enumerate(SPECIAL.items())
}


def call(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict]:
    """The loss and all gradients."""
    inputs = {n: x.to(model.device) if torch.is_tensor(x) else x for n, x in inputs.items()}
    if "inputs_embeds" in inputs:
        inputs["inputs_embeds"] = inputs["inputs_embeds"].to(model.dtype)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def in_double(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict]:
    """Of a float64 model: transformers in float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        modules = {sys.modules[type(m).__module__] for m in model.modules()}
        compute_in_double(patch, *(m for m in modules if m.__name__ in FAMILIES))
        return call(model, inputs)


@functools.cache
def truth(name: str, inputs: str) -> tuple[torch.Tensor, dict]:
    return in_double(build(name, torch.float64), INPUTS[inputs])


def mismatches(ours: list, theirs: list, exact: list, dtype: str) -> list[str]:
    """Of calls by the three models. All calls' losses are one tensor, and all their gradients of a parameter:
    a single number, or the largest of a few, can be right by luck."""
    wrong = []

    def compare(name: str, factor: float, *tensors: torch.Tensor) -> None:
        if message := violation(*(x.double().cpu().numpy() for x in tensors), dtype, factor):
            wrong.append(f"{name}: {message}")

    losses = [torch.stack([loss for loss, _ in calls]) for calls in (ours, theirs, exact)]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    compare("loss", FORWARD, *losses)
    columns = [[gradients for _, gradients in calls] for calls in (ours, theirs, exact)]
    assert all(a.keys() == b.keys() == c.keys() for a, b, c in zip(*columns))
    for name in columns[0][0]:
        compare(name, BACKWARD, *(torch.stack([x[name] for x in calls if name in x]) for calls in columns))
    return wrong


class Called(TorchDispatchMode):
    """Counts calls of our operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "llamac":
            self.counts[name] += 1
        return func(*args, **kwargs or {})


# How often our operations run in a call with labels and its backward.
NORMS = {"rmsnorm_forward": LAYERS + 1, "rmsnorm_backward": 2 * LAYERS + 1}
NORMS |= {"residual_rmsnorm_forward": LAYERS}
ROPES = {"rope_forward": 2 * LAYERS, "rope_backward": 2 * LAYERS}
FLASH = {"attention_forward": LAYERS, "attention_backward": LAYERS}
OTHERS = {"swiglu_forward": LAYERS, "swiglu_backward": LAYERS, "linear_cross_entropy": 1}
ALL = NORMS | ROPES | FLASH | OTHERS


def without(*operations: str) -> dict[str, int]:
    return {n: count for n, count in ALL.items() if not n.startswith(operations)}


def counted(model: nn.Module, inputs: dict) -> dict[str, int]:
    """Calls of our operations, by name; the loss's own is inside linear_cross_entropy."""
    with Called() as called:
        call(model, inputs)
    return {n: count for n, count in called.counts.items() if n != "cross_entropy"}
