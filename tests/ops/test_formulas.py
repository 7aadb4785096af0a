"""The reference's formulas (train_llama3.py) against transformers, in double: the truth of tests of compiled
operations. AdamW's is compared with torch's in test_reference_training.py.
"""

import pytest
import torch
from hf_float64 import compute_in_double
from transformers import LlamaConfig, modeling_rope_utils
from transformers.activations import ACT2FN
from transformers.loss import loss_utils
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from llamac import reference
from llamac.model.config import Config, RopeScaling
from llamac.training.trace import explicit_attention, repeat_kv

B, T, NH, NKV, HD, V = 2, 7, 6, 2, 16, 33
EPS = 1e-5


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    compute_in_double(monkeypatch, modeling_llama, modeling_rope_utils, modeling_cohere)
    torch.manual_seed(1)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rmsnorm():
    norm, x, residual = modeling_llama.LlamaRMSNorm(24, EPS), randn(B, T, 24), randn(B, T, 24)
    norm.weight.data = weight = randn(24)
    equal(reference.rmsnorm(x, weight, EPS), norm(x))
    equal(x * reference.rstd(x, EPS)[..., None] * weight, norm(x))
    total, out = reference.residual_rmsnorm(x, residual, weight, EPS)
    equal(total, x + residual)
    equal(out, norm(x + residual))


def configs(factor: float | None) -> tuple[Config, LlamaConfig]:
    """The same RoPE, ours and theirs."""
    rope = {"rope_type": "default", "rope_theta": 1e5}
    if factor:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 32
    theirs = LlamaConfig(hidden_size=NH * HD, num_attention_heads=NH, head_dim=HD, rope_parameters=rope)
    sizes = {"vocab_size": V, "hidden_size": NH * HD, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": NH, "num_key_value_heads": NKV, "head_dim": HD, "rope_theta": 1e5}
    scaling = RopeScaling(factor, 1.0, 4.0, 32) if factor else None
    return Config(**sizes, **heads, rope_scaling=scaling), theirs


@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_precompute_cis(factor):
    ours, theirs = configs(factor)
    cos, sin = reference.precompute_cis(ours, 100, dtype=torch.float64)
    expected = modeling_llama.LlamaRotaryEmbedding(theirs)(randn(1), torch.arange(100)[None])
    for part, whole in zip((cos, sin), expected, strict=True):  # theirs has every angle twice
        equal(part[:, 0].repeat(1, 2), whole[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved):
    """Cohere's models have Meta's order of pairs."""
    cos, sin = cis = reference.precompute_cis(configs(None)[0], T + 3, dtype=torch.float64)
    q, k = randn(B, T, NH, HD), randn(B, T, NKV, HD)
    angles = [part[None, :T, 0] for part in cis]  # theirs has every angle twice
    if interleaved:
        twice, theirs = [part.repeat_interleave(2, -1) for part in angles], modeling_cohere
    else:
        twice, theirs = [part.repeat(1, 1, 2) for part in angles], modeling_llama
    expected = theirs.apply_rotary_pos_emb(q, k, *twice, unsqueeze_dim=2)
    for x, rotated in zip((q, k), expected, strict=True):
        equal(reference.rope(x, (cos, sin), interleaved), rotated)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(scale):
    q, k, v = randn(B, T, NH, HD), randn(B, T, NKV, HD), randn(B, T, NKV, HD)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = NH // NKV
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, weights = modeling_llama.eager_attention_forward(
        module, *heads_first, mask, HD**-0.5 if scale is None else scale
    )
    equal(reference.attention(q, k, v, scale), out)
    explicit, lse = explicit_attention(q, k, v, reference.seen(T, None, None, True, q.device), scale)
    equal(explicit, out.flatten(2))
    scores = torch.einsum("bthd,bshd->bhts", q, repeat_kv(k, NH)) * (scale or HD**-0.5)
    equal((scores - lse[..., None]).exp().tril(), weights)


def test_repeat_kv():
    x = randn(B, T, NKV, HD)
    expected = modeling_llama.repeat_kv(x.transpose(1, 2), NH // NKV).transpose(1, 2)
    assert torch.equal(repeat_kv(x, NH), expected)


def test_swiglu():
    gate, up = randn(B, T, 12), randn(B, T, 12)
    expected = ACT2FN["silu"](gate) * up
    equal(reference.swiglu(gate, up), expected)
    equal(reference.swiglu(torch.cat((gate, up), -1)), expected)


@pytest.mark.parametrize("ignored", [0, 5])
def test_cross_entropy(ignored):
    logits, targets = randn(B, T, V), torch.randint(V, (B, T))
    targets.view(-1)[:ignored] = reference.IGNORED
    expected = loss_utils.ForCausalLMLoss(logits, None, V, shift_labels=targets)
    losses = reference.cross_entropy(logits, targets)
    mean, count = reference.mean_loss(losses, targets)
    equal(mean, expected)
    assert losses.shape == targets.shape and count == B * T - ignored
    assert not losses.view(-1)[:ignored].any() and losses.view(-1)[ignored:].all()


def test_linear_cross_entropy():
    hidden, weight, targets = randn(B, T, 24), randn(V, 24), torch.randint(V, (B, T))
    expected = loss_utils.ForCausalLMLoss(hidden @ weight.T, None, V, shift_labels=targets)
    equal(reference.linear_cross_entropy(hidden, weight, targets), expected)
