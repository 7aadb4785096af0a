"""Runs of the program on packed files: resumed, verified, of several ranks; targets that do not count."""

import numpy as np
import pytest
from run import T, assert_same_state, events, flags, losses, reference_flags, refuses, write_packed

import train_llama3 as ref
from llamac.training.options import parse

pytestmark = pytest.mark.program
SHORT = {"val_every": 0, "checkpoint_every": 0, "document_mask": "on"}


def write(folder, share: float):
    folder.mkdir()
    for name, sequences in (("train_000", 60), ("val_000", 9)):
        write_packed(folder / f"{name}.bin", sequences, share)
    return folder


@pytest.fixture(scope="module")
def packed_data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packed") / "data", share=0.3)


# With a schedule by which the scales change until the end.
FP8 = {"model": "tests/models/sixteens.json", "matmul_dtype": "fp8", "schedule": "constant"}


@pytest.mark.parametrize(
    "precision",
    [{}, FP8, pytest.param(FP8 | {"fp8_recipe": "row"}, marks=pytest.mark.more)],
    ids=["storage", "fp8", "row"],
)
def test_a_resumed_run_has_the_same_bits(train, packed_data, tmp_path, precision):
    """And a verified one, and one in other micro-batches the same losses."""
    out, again = tmp_path / "out", tmp_path / "again"
    more = {"document_mask": "on", "total_batch_size": 8 * T} | precision
    train(*flags(packed_data, out, **more))
    train(*flags(packed_data, again, **more, verify_every=3))
    assert_same_state(out / "step_000008", again / "step_000008")
    train(*flags(packed_data, tmp_path / "resumed", resume=out / "step_000004", **more))
    assert_same_state(out / "step_000008", tmp_path / "resumed/step_000008")
    if precision:
        return
    train(*flags(packed_data, tmp_path / "small", **more | {"batch_size": 2, "val_steps": 4}))
    np.testing.assert_allclose(losses(tmp_path / "small"), losses(out), rtol=2e-6)
    val, same = ([e["loss"] for e in events(path, "val")] for path in (out, tmp_path / "small"))
    np.testing.assert_allclose(val, same, rtol=2e-6)


def test_targets_none_of_which_count(train, tmp_path):
    """A step has loss 0; validation ends the run."""
    data = write(tmp_path / "data", share=0)
    train(*flags(data, tmp_path / "out", steps=2, val_data="none", **SHORT))
    assert [(e["loss"], e["grad_norm"]) for e in events(tmp_path / "out", "step")] == [(0, 0), (0, 0)]
    said = train(*flags(data, tmp_path / "none", steps=2, **SHORT | {"val_every": 1}), code=2).stderr
    assert "expected a target that counts, found none" in said


def test_the_reference_refuses_them(packed_data, tmp_path):
    line = reference_flags(packed_data, tmp_path / "out", document_mask="on")
    refuses(r"^[^\n]*only \./train_llama3 and llamac\.Trainer train on them[^\n]*$", ref.train, parse(line))
