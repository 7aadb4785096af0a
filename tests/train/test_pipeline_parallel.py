"""Meshes with pipeline parallelism: the losses, gradients and checkpoints of one rank."""

import json
import os
import signal
import sys

import numpy as np
import pytest
from launch import as_ranks, needs, ranks_of
from run import (
    PRECISIONS,
    ROOT,
    T,
    assert_same_state,
    events,
    flags,
    losses,
    numbers,
    one_line,
    tensors,
    until,
)

pytestmark = pytest.mark.program
SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}
ALONE = {"batch_size": 1}
MESHES = {
    "pp 2": {"devices": 2, "pp": 2, "batch_size": 1},
    "pp 4": {"devices": 4, "pp": 4, "batch_size": 1},
    "pp 2 dp 2": {"devices": 4, "pp": 2, "batch_size": 1},
    "pp 2 tp 2": {"devices": 4, "pp": 2, "tp": 2, "batch_size": 1},
}
# Numbers of layers that stages divide unequally.
CHANGES = {
    "tied-gqa": {"num_hidden_layers": 5, "intermediate_size": 132},
    "untied-mha": {"num_hidden_layers": 4, "intermediate_size": 152},
    "qwen2": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 5},
}


@pytest.fixture(autouse=True, scope="module")
def _gloo(build):
    needs(build, "GLOO", devices=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a model."""

    def write(name: str) -> dict:
        config = json.loads((ROOT / f"tests/models/{name}.json").read_text()) | CHANGES.get(name, {})
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        return {"model": path}

    return write


def compare(a, b) -> None:
    np.testing.assert_allclose(losses(a), losses(b), rtol=2e-6)
    np.testing.assert_allclose(numbers(a), numbers(b), rtol=2e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mesh", "micro_batches", "zero"),
    [
        ("tied-gqa", "pp 2", 8, 1),
        ("untied-mha", "pp 4", 4, 1),
        ("gpt2", "pp 2 dp 2", 3, 3),
        pytest.param("gpt2", "pp 4", 5, 1, marks=SLOW),
        pytest.param("qwen2", "pp 2", 1, 1, marks=SLOW),
        pytest.param("qwen3", "pp 2 tp 2", 4, 1, marks=SLOW),
        pytest.param("tied-gqa", "pp 4", 2, 0, marks=SLOW),
        pytest.param("tied-gqa", "pp 2 tp 2", 2, 1, marks=SLOW),
        pytest.param("tied-gqa", "pp 2 dp 2", 6, 0, marks=SLOW),
        pytest.param("tied-gqa", "pp 2 dp 2", 2, 1, marks=SLOW),
        pytest.param("untied-mha", "pp 2 dp 2", 4, 2, marks=SLOW),
    ],
)
def test_the_numbers_of_one_rank(train, data, tmp_path, model, name, mesh, micro_batches, zero):
    """In f32, with clipped gradients; and the first gradients by the first moments, tensor by tensor."""
    data_ranks = 2 if "dp" in mesh else 1
    more = {"total_batch_size": micro_batches * data_ranks * T, "grad_clip": 0.5, "zero": zero}
    more |= SHORT | model(name)
    for out, of in (("alone", ALONE), ("mesh", MESHES[mesh])):
        train(*flags(data, tmp_path / out, **more | of | {"steps": 20}))
        train(*flags(data, tmp_path / f"{out}1", **more | of | {"steps": 1, "warmup_steps": 0}))
    compare(tmp_path / "mesh", tmp_path / "alone")
    found, expected = (tensors(tmp_path / f"{of}1/step_000001", "optimizer") for of in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("m."):
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[key], value, rtol=0, atol=2e-6 * scale, err_msg=key)
