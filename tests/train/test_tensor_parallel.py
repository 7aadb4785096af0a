"""Meshes of tensor and data parallelism: the losses, gradients and checkpoints of one rank."""

import os
import signal
import sys
from functools import partial

import numpy as np
import pytest
from launch import as_ranks, ranks_of
from meshes import compare, compare_numbers_of_one_rank, write_model
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

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}
ALONE = {"batch_size": 4}
MESHES = {
    "tp 2": {"devices": 2, "tp": 2, "batch_size": 4},
    "tp 4": {"devices": 4, "tp": 4, "batch_size": 4},
    "tp 2 dp 2": {"devices": 4, "tp": 2, "batch_size": 2},
}
# Sizes that meshes divide. The vocabularies of 97 and 101 are not among them.
CHANGES = {
    "tied-gqa": {"intermediate_size": 132},
    "untied-mha": {"intermediate_size": 152},
    "qwen3": {"num_key_value_heads": 2},
}


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a model."""
    return partial(write_model, tmp_path, CHANGES)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("untied-mha", "tp 4"),
        pytest.param("qwen2", "tp 2", marks=pytest.mark.slow),
        pytest.param("qwen3", "tp 2", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp 4", marks=pytest.mark.slow),
        pytest.param("tied-gqa", "tp 2", marks=pytest.mark.slow),
        pytest.param("qwen3", "tp 2 dp 2", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp 2 dp 2", marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_one_rank(train, data, tmp_path, model, name, mesh):
    """In f32, with clipped gradients; and the first gradients by the first moments, tensor by tensor."""
    more = {"total_batch_size": 8 * T, "grad_clip": 0.5} | SHORT | model(name)
    compare_numbers_of_one_rank(train, tmp_path, partial(flags, data, **more), MESHES[mesh], ALONE)


@pytest.mark.parametrize("name", ["tied-gqa", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_levels_have_the_same_bits(train, data, tmp_path, model, name):
    """In bf16 rounded at random, with recomputation and verified steps; and in another run."""
    more = {"recompute": "block", "verify_every": 2, "steps": 4} | PRECISIONS["bf16-throughout"]
    more |= model(name) | MESHES["tp 2 dp 2"] | SHORT
    for out, level in (("zero0", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("again", 3)):
        train(*flags(data, tmp_path / out, zero=level, **more))
        assert numbers(tmp_path / out) == numbers(tmp_path / "zero0")
        assert_same_state(tmp_path / out / "step_000004", tmp_path / "zero0/step_000004")


NEAR = {
    "bf16": {"dtype": "bf16", "recompute": "norm,swiglu,attention"},
    "fp16": {"dtype": "fp16", "recompute": "block:2"},
    "delayed": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_head": "on"},
    "tensor": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "tensor", "recompute": "norm,qkv"},
    "row": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "row", "recompute": "block"},
    "stored": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_weights": "stored", "zero": 0},
}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each == "delayed" else pytest.mark.slow) for each in NEAR]
)
def test_rounded_numbers(train, data, tmp_path, model, case):
    """In narrow types, with recomputation; scales of fp8 agree, and are in the checkpoint."""
    more = {"total_batch_size": 8 * T} | NEAR[case] | SHORT | model("sixteens")
    for out, of in (("alone", ALONE), ("mesh", MESHES["tp 2 dp 2"])):
        train(*flags(data, tmp_path / out, **more | of))
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "alone"), rtol=4e-3)


def test_adapters(train, data, tmp_path, model):
    """Those of every linear: the losses of one rank, in f32; and a checkpoint for either."""
    more = {"total_batch_size": 8 * T, "lora": 4} | SHORT | model("untied-mha")
    for out, of in (("alone", ALONE), ("mesh", MESHES["tp 2 dp 2"])):
        train(*flags(data, tmp_path / out, **more | of | {"checkpoint_every": 4}))
    compare(tmp_path / "mesh", tmp_path / "alone")
    for of in ("alone", "mesh"):
        mesh = ALONE if of == "mesh" else MESHES["tp 2 dp 2"]
        resume = {"resume": tmp_path / of / "step_000004"}
        train(*flags(data, tmp_path / f"from_{of}", **more | mesh | resume))
        np.testing.assert_allclose(losses(tmp_path / f"from_{of}"), losses(tmp_path / of)[4:], rtol=2e-6)


SAVE_AGAIN = """
import sys, llamac
trainer = llamac.Trainer(sys.argv[1], tp=int(sys.argv[2]), zero=int(sys.argv[3]), batch_size=1)
trainer.save(sys.argv[4])
"""
# Ranks, tensor parallelism, level.
RESHARDED = [
    pytest.param("gpt2", (4, 2, 2), (1, 1, 0), marks=pytest.mark.slow),
    ("gpt2", (1, 1, 0), (4, 2, 3)),
    pytest.param("untied-mha", (2, 2, 1), (4, 4, 1), marks=pytest.mark.slow),
    ("tied-gqa", (4, 2, 3), (2, 1, 3)),
]


@pytest.mark.parametrize(("name", "before", "after"), RESHARDED)
def test_resume_with_another_mesh(train, data, tmp_path, model, name, before, after):
    """The state has the same bits, and the run goes on."""
    more = {"total_batch_size": 4 * T, "batch_size": 1, "dtype": "bf16", "val_steps": 4} | model(name)
    meshes = [dict(zip(("devices", "tp", "zero"), mesh)) for mesh in (before, after)]
    saves = {"checkpoint_async": "on" if name == "tied-gqa" else "off"}
    train(*flags(data, tmp_path / "a", **more, **meshes[0], **saves))
    checkpoint = tmp_path / "a/step_000004"
    command = [sys.executable, "-c", SAVE_AGAIN, checkpoint, str(after[1]), str(after[2]), tmp_path / "again"]
    for code, text in as_ranks(command, after[0]):
        assert code == 0, text
    assert_same_state(tmp_path / "again", checkpoint)
    train(*flags(data, tmp_path / "b", **more, **meshes[1], resume=checkpoint))
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a")[4:], rtol=4e-3)


def test_the_weights_at_the_start(train, data, tmp_path, model):
    """Random numbers are those of the whole tensors; transposed matrices, columns of them, three in one."""
    more = {"steps": 1, "lr": 1e-30, "weight_decay": 0} | SHORT | model("gpt2")
    for out, of in (("alone", ALONE), ("mesh", MESHES["tp 4"])):
        train(*flags(data, tmp_path / out, **more | of))
    found, expected = (tensors(tmp_path / f"{out}/step_000001", "model") for out in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-29, err_msg=key)  # biases were 0


def test_random_rounding_is_that_of_the_whole(train, data, tmp_path, model):
    """Where gradients are nearly 0 on any mesh, the decayed weights have the same bits."""
    more = {"steps": 3, "weight_decay": 0.5, "grad_clip": 1e-30} | PRECISIONS["bf16-throughout"] | SHORT
    for out, of in (("alone", ALONE), ("mesh", MESHES["tp 2"])):
        train(*flags(data, tmp_path / out, **more | of | model("gpt2")))
    found, expected = (tensors(tmp_path / f"{out}/step_000003", "model") for out in ("mesh", "alone"))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-20, err_msg=key)  # biases were 0


def test_validation_evaluation_and_samples(train, data, tmp_path, model):
    """Those of one rank: three batches on two data-parallel ranks."""
    more = {"steps": 2, "total_batch_size": 4 * T, "val_steps": 3, "sample_every": 2} | model("tied-gqa")
    for out, of in (("alone", ALONE | {"batch_size": 2}), ("mesh", MESHES["tp 2 dp 2"])):
        train(*flags(data, tmp_path / out, **more | of))
    found, expected = (events(tmp_path / out, "val") for out in ("mesh", "alone"))
    assert len(found) == len(expected) == 2
    np.testing.assert_allclose([e["loss"] for e in found], [e["loss"] for e in expected], rtol=2e-6)
    assert events(tmp_path / "mesh", "sample") == events(tmp_path / "alone", "sample")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "rank 1 has ended or cannot be reached"),
        pytest.param(signal.SIGTERM, "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends(train, start, data, tmp_path, model, number, said):
    """Of the tensor axis, killed or with a signal: all end, and the newest checkpoint resumes."""
    out, more = tmp_path / "out", MESHES["tp 2 dp 2"] | model("tied-gqa") | {"val_every": 0}
    endless = more | {"steps": 100000, "checkpoint_every": 2, "collective_timeout": 10}
    process = start(*flags(data, out, schedule="constant", **endless))
    until(lambda: (out / "log.jsonl").exists() and events(out, "checkpoint"), process)
    os.kill(ranks_of(process)[1], number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0 and said in stderr
    last = events(out, "checkpoint")[-1]["step"]
    train("--resume", "auto", "--out", out, "--steps", str(last + 1))
    assert events(out, "step")[-1]["step"] == last + 1


BAD = {
    "devices": ({"devices": 3, "tp": 2}, "--tp 2: expected a divisor of the number of devices, found 3"),
    "heads": ({"devices": 3, "tp": 3}, "--tp 3: expected a divisor of the model's heads"),
    "width": ({"devices": 2, "tp": 2}, "found 127 feed-forward channels"),
    "batch": ({"devices": 2, "tp": 2, "total_batch_size": 3 * T}, "seq-len * devices / tp = "),
    "frozen": (
        {"devices": 2, "tp": 2, "lora": 4, "frozen_dtype": "fp8"},
        "--tp 2: expected --frozen-dtype storage",
    ),
    "rows": (
        {"devices": 4, "tp": 4, "batch_size": 1, "seq_len": 3, "model": ROOT / "tests/models/gpt2.json"},
        "--tp 4: expected a divisor of --batch-size times --seq-len, found 3 tokens",
    ),
    "bert": ({"devices": 2, "tp": 2, "model": ROOT / "tests/models/bert.json"}, "qwen3 or gpt2, found bert"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    more, expected = BAD[case]
    more = {"mask_token": 4} | more if case == "bert" else more
    assert expected in one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert not (tmp_path / "out").exists()
