"""The C model against the reference model: every activation, every gradient, ten steps, in order."""

from collections.abc import Callable

import numpy as np
import pytest
from debug_states import MODELS, first_difference, load, run_model
from safetensors.torch import load_file

from llamac.base.tolerance import Error, error_of

RECOMPUTE = ["norm", "swiglu", "qkv", "attention", "norm,swiglu,qkv,attention", "block", "block:2"]

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def series(states) -> Callable[[str], dict[str, Error]]:
    """PyTorch's errors of the ten steps' numbers in a type, relative to the largest: the root mean square
    over the test models. Ten numbers that follow from each other are one draw, which differs between models,
    and with PyTorch's kernels between CPUs, by a factor of 7.
    """

    def get(dtype: str) -> dict[str, Error]:
        errors: dict[str, list[tuple[float, float]]] = {"train.losses": [], "train.grad_norms": []}
        for model in MODELS:
            _, torch, truth = states(model, dtype)
            for name, found in errors.items():
                error = error_of(torch[name], truth[name])
                found.append((error.relative_l2, error.largest / np.abs(truth[name]).max()))
        return {name: Error(*np.sqrt(np.mean(np.square(found), 0))) for name, found in errors.items()}

    return get


@pytest.fixture(scope="module")
def states(reference):
    """(PyTorch's tensors, float64's) of a model and a type, read once."""
    cache = {}

    def get(model: str, dtype: str):
        folder = reference / model / dtype
        if folder not in cache:
            cache[folder] = load(folder / "debug_state.safetensors"), load(folder / "truth.safetensors")
        return folder, *cache[folder]

    return get


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_debug_state(build, states, series, tmp_path, model, dtype):
    folder, torch, truth = states(model, dtype)
    ours = run_model(build, folder, tmp_path / "state", dtype)
    missing = set(torch) - set(ours) - {"tokens", "targets"}
    assert not missing, f"the C model does not show {sorted(missing)}"
    assert first_difference(ours, torch, truth, dtype, series(dtype)) == ""
    counted = load_file(folder / "debug_state.safetensors")["targets"] >= 0  # of masked tokens not all
    assert ours["loss"] == pytest.approx(ours["losses"].sum() / int(counted.sum()), rel=2**-23)


@pytest.mark.parametrize("model", MODELS)
def test_losses_of_ten_updates_in_f32(build, states, tmp_path, model):
    folder, torch, _ = states(model, "f32")
    ours = run_model(build, folder, tmp_path / "state", "f32")
    np.testing.assert_allclose(ours["train.losses"], torch["train.losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "model, dtype",
    [
        pytest.param("scaled8", "f32", marks=pytest.mark.more),
        ("scaled8", "bf16"),
        ("qwen2", "f32"),
        pytest.param("qwen3", "bf16", marks=pytest.mark.more),
        ("olmo2", "bf16"),
        pytest.param("gpt2", "bf16", marks=pytest.mark.more),
        ("bert", "bf16"),
    ],
)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputation_changes_no_bit(build, states, tmp_path, model, dtype, recompute):
    folder, *_ = states(model, dtype)
    kept = run_model(build, folder, tmp_path / "kept", dtype)
    again = run_model(build, folder, tmp_path / "again", dtype, recompute)
    for name, value in kept.items():
        assert np.array_equal(value, again[name]), f"{name} differs with --recompute {recompute}"


@pytest.mark.parametrize("dtype, gradients", [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16")])
@pytest.mark.parametrize("model", ["tied-gqa", "untied-mha"])
def test_logits_in_chunks(build, states, series, tmp_path, model, dtype, gradients):
    """66 rows of logits in eight chunks, the most that are made: the head's gradient is a sum over as many
    products, rounded to its type with each.
    """
    folder, torch, truth = states(model, dtype)
    row = 97 * (4 if dtype == "f32" else 2)
    ours = run_model(build, folder, tmp_path / "state", f"{dtype},{gradients}", "none", str(9 * row))
    if gradients != "f32":  # PyTorch's steps have gradients of the reference's type
        ours = {name: value for name, value in ours.items() if not name.startswith("train.")}
    assert first_difference(ours, torch, truth, dtype, series(dtype)) == ""


@pytest.mark.parametrize(
    "model, kind, dtype",
    [
        ("wide-heads", "kernels", "bf16"),
        pytest.param("qwen3", "kernels", "bf16", marks=pytest.mark.more),
        pytest.param("olmo2", "kernels", "bf16", marks=pytest.mark.more),
        ("gpt2", "kernels", "bf16"),
        pytest.param("bert", "kernels", "bf16", marks=pytest.mark.more),
        pytest.param("scaled32", "kernels", "f32", marks=pytest.mark.more),
        pytest.param("qwen2", "kernels", "f32", marks=pytest.mark.more),
        ("qwen2", "naive", "bf16"),
        pytest.param("gpt2", "naive", "f32", marks=pytest.mark.more),
        pytest.param("bert", "naive", "f32", marks=pytest.mark.more),
        pytest.param("scaled32", "reference", "bf16", marks=pytest.mark.more),
        ("qwen3", "reference", "f32"),
        pytest.param("bert", "reference", "bf16", marks=pytest.mark.more),
    ],
)
def test_variants(build, chosen, states, series, tmp_path, model, kind, dtype):
    """The plain loops, which explain the operations, and the kernels compute the same model; in bf16 the one
    with wide heads on matrix cores.
    """
    folder, torch, truth = states(model, dtype)
    ours = run_model(build, folder, tmp_path / "state", dtype, "none", "1000000", *chosen(kind))
    assert first_difference(ours, torch, truth, dtype, series(dtype)) == ""


@pytest.mark.parametrize(
    "name, spoil",
    [
        ("act.0.k", lambda x: np.roll(x, 1)),
        ("act.1.residual_out", lambda x: x * (1 + 1e-4)),
        ("dact.1.swiglu", np.zeros_like),
        ("grad.model.norm.weight", lambda x: np.where(np.arange(x.size) == 0, np.nan, x)),
        ("train.losses", lambda x: x[::-1]),
    ],
)
def test_a_fault_is_caught_and_named(build, states, series, tmp_path, name, spoil):
    folder, torch, truth = states("untied-mha", "f32")
    ours = run_model(build, folder, tmp_path / "state", "f32")
    ours[name] = spoil(ours[name])
    assert first_difference(ours, torch, truth, "f32", series("f32")).startswith(name + ":")
