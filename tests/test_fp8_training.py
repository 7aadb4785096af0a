"""train_llama3.py --train --matmul-dtype fp8 beside the C program: losses, and each resumes the other's
checkpoint with the scales in it.
"""

import numpy as np
import pytest
import torch
from run import assert_same_state, events, flags, losses, tensors

import train_llama3 as ref
from llamac.errors import InputError
from llamac.options import parse

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("one_thread", "on_the_cpu")]
RUN = {"model": "tests/models/sixteens.json", "matmul_dtype": "fp8", "schedule": "constant"}
LLAMAC, HEAD = {"ops": "llamac"}, {"fp8_head": "on"}


@pytest.fixture(scope="module")
def on_the_cpu(gpu):
    if gpu:
        pytest.skip("a GPU's matrix units sum fp8 in less than f32: codes differ from the first layer on")


def run(data, out, **extra):
    ref.train(parse(flags(data, out, **RUN | extra)))


def scales(out, step: int) -> np.ndarray | None:
    return tensors(out / f"step_{step:06d}", "optimizer").get("fp8.scale")


@pytest.mark.parametrize(
    "recipe, how",
    [
        ("delayed", {}),
        ("row", HEAD),
        ("delayed", LLAMAC | HEAD),
        ("tensor", LLAMAC | {"dtype": "bf16"}),
        ("row", LLAMAC),
    ],
    ids=str,
)
def test_losses_are_the_programs(train, data, tmp_path, how, recipe):
    """Before a code is rounded the other way they agree as in f32; from there on as two runs in fp8 do."""
    both = {"fp8_recipe": recipe, "steps": 6, "dtype": "f32"} | how
    run(data, tmp_path / "torch", **both)
    both.pop("ops", None)
    train(*flags(data, tmp_path / "c", **RUN | both))
    ours, theirs = losses(tmp_path / "c"), losses(tmp_path / "torch")
    assert theirs[0] == pytest.approx(ours[0], rel=1e-6 if both["dtype"] == "f32" else 5e-3)
    assert theirs == pytest.approx(ours, rel=0.02)
    found = scales(tmp_path / "torch", 6)
    assert (found is None) == (recipe != "delayed")
    if found is not None:
        ratio = found / scales(tmp_path / "c", 6)
        assert (np.frexp(found)[0] == 0.5).all() and len(np.unique(found)) > 3
        assert (np.abs(np.log2(ratio)) <= 1).all() and np.mean(ratio == 1) > 0.8


@pytest.mark.parametrize("more", [HEAD, LLAMAC | HEAD, LLAMAC | {"fp8_recipe": "row"}], ids=str)
def test_a_resumed_run_has_the_same_bits(data, tmp_path, more):
    run(data, tmp_path / "whole", steps=6, **more)
    run(data, tmp_path / "part", steps=3, **more)
    run(data, tmp_path / "resumed", steps=6, resume=tmp_path / "part/step_000003", **more)
    assert_same_state(tmp_path / "whole/step_000006", tmp_path / "resumed/step_000006")
    assert losses(tmp_path / "whole")[3:] == losses(tmp_path / "resumed")


def test_each_resumes_the_others_checkpoint(train, data, tmp_path):
    """The first step after it is with the checkpoint's scales: its loss is the other program's."""
    run(data, tmp_path / "torch", steps=4, **HEAD)
    train(*flags(data, tmp_path / "c", steps=4, **RUN | HEAD))
    for name in ("torch", "c"):
        point = {"resume": tmp_path / name / "step_000004", "steps": 5} | HEAD
        run(data, tmp_path / f"{name}-torch", **point)
        run(data, tmp_path / f"{name}-llamac", ops="llamac", **point)
        train(*flags(data, tmp_path / f"{name}-c", **RUN | point))
        found = [losses(tmp_path / f"{name}-{by}") for by in ("c", "torch", "llamac")]
        assert found[1] == pytest.approx(found[0], rel=2e-6) and found[2] == pytest.approx(found[0], rel=2e-6)


def test_validation_and_kept_blocks(data, tmp_path):
    """Validation measures nothing; kept blocks have no scales."""
    run(data, tmp_path / "often", steps=3, val_every=1)
    run(data, tmp_path / "rarely", steps=3, val_every=3)
    assert losses(tmp_path / "often") == losses(tmp_path / "rarely")
    run(data, tmp_path / "kept", steps=2, fp8_keep_first=1, fp8_keep_last=1)
    blocks = scales(tmp_path / "kept", 2).reshape(3, 12)
    assert (blocks[[0, 2]] == 1).all() and (blocks[1] != 1).any()
    with pytest.raises(InputError, match="expected at least one with products in fp8"):
        run(data, tmp_path / "none", steps=1, fp8_keep_first=1, fp8_keep_last=2)


def test_recomputation_changes_no_bit(data, tmp_path):
    run(data, tmp_path / "kept", steps=3)
    run(data, tmp_path / "again", steps=3, recompute="block")
    assert_same_state(tmp_path / "kept/step_000003", tmp_path / "again/step_000003")


def test_scales_of_another_model_are_refused(data, tmp_path):
    run(data, tmp_path / "part", steps=2)
    model = ref.empty_model(ref.load_config(RUN["model"]), torch.float32)
    for products in (ref.training.fp8.ReferenceProducts, ref.training.fp8.LlamacProducts):
        model.fp8 = products(2, "delayed", "e5m2", "cpu")
        point = ref.training.checkpoints.find("", str(tmp_path / "part/step_000002"))
        with pytest.raises(InputError, match=r'"fp8.scale": expected f32 \[24\], found f32 \[36\]'):
            ref.training.checkpoints.load_fp8(point, model.fp8)
    assert events(tmp_path / "part", "step")
