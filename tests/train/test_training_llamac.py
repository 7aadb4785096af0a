"""train_llama3.py --ops llamac: the model and its training on our operations, beside PyTorch's."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from run import ROOT, losses, reference_flags
from torch._dynamo.utils import counters

import train_llama3 as ref
from llamac.base.tolerance import BACKWARD, FORWARD, violation
from llamac.model.config import Config, load_config
from llamac.training.operations import adamw_step, llamac_operations
from llamac.training.options import parse
from llamac.training.weights import Part, fuse_products, init_weights, parts

MODELS = [
    "tied-gqa",
    "untied-mha",
    "scaled8",
    "wide-heads",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gpt2",
    "bert",
]
BATCHES = 32

pytestmark = pytest.mark.usefixtures("one_thread")


def results(config: Config, weights: dict, dtype: torch.dtype, ops: ref.Operations) -> dict[str, np.ndarray]:
    """Logits and gradients of one batch, losses of many: one alone may be right by luck."""
    model = ref.empty_model(config, dtype, ops=ops)
    fuse_products(model)
    with torch.no_grad():
        for part in parts(model):
            part.weight().copy_(weights[part.name])
    ids = np.random.default_rng(7).integers(config.vocab_size, size=(2, BATCHES, 2, 33))
    tokens, targets = torch.from_numpy(ids)
    cis = ops.precompute_cis(config, 40, dtype=torch.promote_types(dtype, torch.float32))
    model(tokens[0], cis, targets[0]).backward()
    found = {part.name: part.of(part.parameter.grad) for part in parts(model)}
    with torch.no_grad():
        found["logits"] = model(tokens[0], cis)
        found["losses"] = torch.stack([model(x, cis, y) for x, y in zip(tokens, targets, strict=True)])
    return {name: x.double().numpy() for name, x in found.items()}


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, "bf16") for name in MODELS),
        *(pytest.param(name, "f32", marks=pytest.mark.more) for name in MODELS[::2]),
        ("tied-gqa", "fp16"),
    ],
)
def test_the_model_is_within_the_tolerance(name, dtype):
    config = load_config(ROOT / "tests" / "models" / f"{name}.json")
    model = ref.empty_model(config, ref.DTYPES[dtype])
    init_weights(model, 5)
    weights = {part.name: part.weight() for part in parts(model)}
    truth = results(config, weights, torch.float64, ref.TORCH)
    baseline = results(config, weights, ref.DTYPES[dtype], ref.TORCH)
    ours = results(config, weights, ref.DTYPES[dtype], ref.Operations(**llamac_operations(vars(ref.TORCH))))
    wrong = {}
    for tensor in truth:
        factor = FORWARD if tensor in ("losses", "logits") else BACKWARD
        stored = "f32" if tensor == "losses" else dtype
        wrong[tensor] = violation(ours[tensor], baseline[tensor], truth[tensor], stored, factor)
    assert not {tensor: what for tensor, what in wrong.items() if what}


def run_training(data: Path, out: Path, *extra: str) -> list[float]:
    ref.train(parse([*reference_flags(data, out, steps=4, total_batch_size=128), *extra]))
    return losses(out)


BF16 = ("--dtype", "bf16")
SMALL = (*BF16, "--grad-dtype", "bf16", "--master-weights", "off", "--optimizer-state", "bf16")


@pytest.mark.parametrize("extra", [(), ("--recompute", "block:2"), BF16, SMALL])
def test_losses_follow_torchs(data, tmp_path, extra):
    """In bf16 to what one rounding in every weight and activation may be."""
    expected = run_training(data, tmp_path / "torch", *extra)
    found = run_training(data, tmp_path / "llamac", *extra, "--ops", "llamac")
    assert found == pytest.approx(expected, rel=2**-8 if "bf16" in extra else 1e-6)
    assert ("bf16" in extra) == (found != pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    "extra", [pytest.param((), marks=pytest.mark.slow), (*BF16, "--recompute", "block:2")]
)
def test_compiled_without_breaks(data, tmp_path, monkeypatch, extra):
    """One graph. The optimizer is our operation."""
    expected = run_training(data, tmp_path / "a", "--ops", "llamac", *extra)
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    found = run_training(data, tmp_path / "b", "--ops", "llamac", "--compile", *extra)
    assert found == pytest.approx(expected, rel=1e-3 if extra else 1e-6)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("master", [True, False])
def test_the_fused_update_is_the_files_own(master):
    """Random bits included: where they decide, sums in another order change one in tens of thousands."""
    torch.manual_seed(3)
    start = torch.randn(300, 100).bfloat16()
    ends = []
    for fused in (False, True):
        weight = torch.nn.Parameter(start.clone())
        part = Part("w", 5, tuple(start.shape), 0, weight, slice(None))
        settings = {
            "master_weights": master,
            "state_dtype": torch.bfloat16,
            "seed": 9,
            "fused": adamw_step if fused else None,
        }
        optimizer = ref.AdamW([part], 0.9, 0.95, 0.1, **settings)
        for step in range(1, 4):
            g = torch.randn(300, 100, generator=torch.Generator().manual_seed(step))
            optimizer.step([g], 1e-2, g.double().norm().float(), 1.0)
        ends.append([weight.detach(), optimizer.m[0], optimizer.v[0]])
    for a, b in zip(*ends, strict=True):
        assert a.dtype == torch.bfloat16 and (a != b).double().mean() < 2**-10
