"""The reference's formulas (train_llama3.py) against transformers, in double, as far as they are the truth of
tests of compiled operations and no model in test_reference_model.py has them.
"""

import pytest
import torch
from hf_float64 import compute_in_double
from transformers.loss import loss_utils
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from llamac import reference
from llamac.model.config import Config
from llamac.training.trace import explicit_attention, repeat_kv

B, T, NH, NKV, HD, V = 2, 7, 6, 2, 16, 33
CONFIG = Config(V, NH * HD, 8, 1, NH, NKV, HD)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    compute_in_double(monkeypatch, modeling_llama, modeling_cohere)
    torch.manual_seed(1)


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_interleaved_rope():
    """Cohere's models have Meta's order of pairs."""
    cis = reference.precompute_cis(CONFIG, T + 3, dtype=torch.float64)
    q, k = randn(B, T, NH, HD), randn(B, T, NKV, HD)
    twice = [part[None, :T, 0].repeat_interleave(2, -1) for part in cis]  # theirs has every angle twice
    expected = modeling_cohere.apply_rotary_pos_emb(q, k, *twice, unsqueeze_dim=2)
    for x, rotated in zip((q, k), expected, strict=True):
        equal(reference.rope(x, cis, True), rotated)


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


def test_linear_cross_entropy():
    hidden, weight, targets = randn(B, T, 24), randn(V, 24), torch.randint(V, (B, T))
    expected = loss_utils.ForCausalLMLoss(hidden @ weight.T, None, V, shift_labels=targets)
    equal(reference.linear_cross_entropy(hidden, weight, targets), expected)
