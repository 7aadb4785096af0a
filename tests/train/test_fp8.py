"""Training with products in fp8 (csrc/model/fp8.h): the same bits whatever is recomputed or captured,
and losses near those of products in the storage type.
"""

import json

import numpy as np
import pytest
from launch import needs
from run import bits, events, flags, losses, one_line, tensors

pytestmark = pytest.mark.program

MODEL = {"model": "tests/models/sixteens.json"}  # sizes that products in fp8 take on any device


@pytest.fixture
def run(train, data, tmp_path):
    """A run in tmp_path/name; returns its bits."""

    def go(name: str, recipe: str = "delayed", **extra) -> dict:
        extra = MODEL | {"matmul_dtype": "fp8", "fp8_recipe": recipe} | extra
        train(*flags(data, tmp_path / name, **extra))
        return bits(tmp_path / name)

    return go


@pytest.mark.parametrize(
    "recipe, precision",
    [
        ("delayed", {}),
        pytest.param("tensor", {"dtype": "bf16"}, marks=pytest.mark.more),
        ("row", {"dtype": "bf16"}),
    ],
    ids=str,
)
def test_losses_follow_those_of_the_storage_type(train, data, tmp_path, run, recipe, precision):
    run("fp8", recipe, steps=30, **precision)
    train(*flags(data, tmp_path / "storage", steps=30, **MODEL, **precision))
    ours, theirs = losses(tmp_path / "fp8"), losses(tmp_path / "storage")
    assert ours != theirs  # it is another computation
    assert theirs[-1] < theirs[0] - 0.2  # and there is something to learn
    assert abs(np.mean(ours[-10:]) / np.mean(theirs[-10:]) - 1) < 0.015


def test_each_choice_changes_the_bits(run):
    all_bits = [
        run("delayed"),
        run("tensor", "tensor"),
        run("row", "row"),
        run("e4m3", fp8_gradients="e4m3"),
        run("first", fp8_keep_first=1),
        run("last", fp8_keep_last=1),
        run("head", fp8_head="on"),
    ]
    assert len({json.dumps(b["steps"]) for b in all_bits}) == len(all_bits)


@pytest.mark.parametrize(
    "recipe, recompute",
    [
        pytest.param("delayed", "norm", marks=pytest.mark.more),
        pytest.param("delayed", "qkv", marks=pytest.mark.more),
        ("delayed", "norm,swiglu,attention"),
        pytest.param("delayed", "block:2", marks=pytest.mark.more),
        ("tensor", "norm,qkv"),
        ("row", "norm,swiglu,attention"),
    ],
)
def test_recomputation_keeps_the_bits(run, recipe, recompute):
    kept = {"dtype": "bf16", "grad_dtype": "bf16", "steps": 4, "fp8_head": "on"}
    assert run("again", recipe, recompute=recompute, **kept) == run("kept", recipe, **kept)


@pytest.mark.parametrize(
    "recipe, extra",
    [
        pytest.param("delayed", {}, marks=pytest.mark.more),
        ("row", {"skip_nonfinite": 2, "verify_every": 2}),
        pytest.param(
            "delayed", {"skip_nonfinite": 2, "verify_every": 2, "fp8_head": "on"}, marks=pytest.mark.more
        ),
        ("tensor", {"fp8_head": "on"}),
    ],
    ids=str,
)
def test_stored_weights_keep_the_bits(run, recipe, extra):
    """Codes of weights that AdamW writes, or the first micro-batch; and none are kept."""
    several = {"batch_size": 1, "total_batch_size": 64, "dtype": "bf16", "master_weights": "off"} | extra
    stored = run("stored", recipe, fp8_weights="stored", **several)
    assert stored == run("recomputed", recipe, fp8_weights="recomputed", **several)


@pytest.mark.parametrize("recipe", ["delayed", "row"])
def test_graphs_keep_the_bits(run, recipe):
    """Several micro-batches: the first optimizer step, whose scales are the tensors' own, is not captured."""
    several = {"batch_size": 1, "total_batch_size": 64}
    assert run("launched", recipe, graphs="off", **several) == run("replayed", recipe, **several)


@pytest.mark.parametrize(
    "before, after",
    [
        ({"fp8_keep_first": 1, "fp8_keep_last": 1}, {}),
        pytest.param({"fp8_gradients": "e4m3"}, {"fp8_gradients": "e5m2"}, marks=pytest.mark.more),
        ({}, {"fp8_head": "on"}),
        pytest.param({"fp8_head": "on"}, {}, marks=pytest.mark.more),
    ],
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) or "default",
)
def test_scales_of_changed_flags(run, train, data, tmp_path, before, after):
    """The step after a resume has the gradients of products in the storage type, as far as fp8 has them, and
    nothing saturates: tensors that were in the storage type before are measured, those of another type have
    its scales.
    """
    plain = {"schedule": "constant", "warmup_steps": 1, "lr": 1e-4, "checkpoint_every": 1, "log_every": 1}
    run("part", steps=3, **plain, **before)
    point = plain | {"steps": 4, "resume": tmp_path / "part/step_000003"}
    run("fp8", **point, **after)
    train(*flags(data, tmp_path / "storage", **MODEL, **point))

    def gradients(name: str) -> dict[str, np.ndarray]:
        then, now = (tensors(tmp_path / n, "optimizer") for n in ("part/step_000003", f"{name}/step_000004"))
        return {key: now[key] - 0.9 * then[key] for key in now if key.startswith("m.")}

    ours, theirs = gradients("fp8"), gradients("storage")
    norm = np.linalg.norm
    cosines = {k: (x * ours[k]).sum() / norm(x) / norm(ours[k]) for k, x in theirs.items()}
    assert min(cosines.values()) > 0.95, cosines
    assert all(e["share"] < 0.01 for e in events(tmp_path / "fp8", "saturated"))


def test_runs_change_between_fp8_and_storage(run, train, data, tmp_path):
    train(*flags(data, tmp_path / "storage", steps=4, **MODEL))
    run("to_fp8", resume=tmp_path / "storage/step_000004")
    back = MODEL | {"matmul_dtype": "storage", "resume": tmp_path / "to_fp8/step_000008", "steps": 9}
    result = train(*flags(data, tmp_path / "back", **back))
    assert '--matmul-dtype was "fp8", is "storage"' in result.stdout + result.stderr
    assert [e["step"] for e in events(tmp_path / "back", "step")] == [9]


def test_stored_weights_need_whole_weights(build, train, data, tmp_path):
    needs(build, "GLOO")
    extra = MODEL | {"matmul_dtype": "fp8", "fp8_weights": "stored", "zero": 3, "devices": 2}
    result = train(*flags(data, tmp_path / "out", **extra), code=2)
    assert "--fp8-weights stored: expected --zero 0 to 2" in result.stderr


def test_saturated_values_are_in_the_log(train, data, tmp_path):
    """Weights that grow from one optimizer step to the next leave the scales of the step before behind; those
    of the tensor itself fit it, and so does the first step's.
    """
    growing = {"lr": 1, "warmup_steps": 1, "schedule": "constant", "skip_nonfinite": 9, "steps": 4} | MODEL
    growing |= {"fp8_weights": "recomputed"}  # AdamW counts the codes that it stores a step earlier

    def saturated(name, **extra):
        result = train(
            *flags(data, tmp_path / name, matmul_dtype="fp8", checkpoint_every=-1, **growing, **extra)
        )
        return events(tmp_path / name, "saturated"), result.stdout

    found, shown = saturated("delayed")
    assert found and found[0]["step"] == 2  # the first step has its own scales
    for event in found:
        assert all(count > 0 for count in event["values"].values())
        assert event["worst"] in event["values"] and 0 < event["share"] <= 1
    assert {"0.qkv.weight", "2.down.weight"} <= found[0]["values"].keys()
    assert found[0]["values"]["0.qkv.weight"] <= 64 * 128 and "lies beyond fp8's largest value" in shown
    # The host's counts are the same where it computes a step twice.
    assert saturated("verified", verify_every=1)[0] == found
    assert saturated("tensor", fp8_recipe="tensor")[0] == []


def test_blocks_that_are_all_kept_are_refused(train, data, tmp_path):
    result = train(
        *flags(data, tmp_path / "out", matmul_dtype="fp8", fp8_keep_first=1, fp8_keep_last=2, **MODEL), code=2
    )
    assert "expected at least one with products in fp8" in one_line(result)
