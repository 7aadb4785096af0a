"""Meshes of tensor and data parallelism: the losses, gradients and checkpoints of one rank."""

import os
import signal
from functools import partial

import numpy as np
import pytest
from launch import ranks_of
from meshes import (
    BERT,
    SHORT,
    check_refusal,
    compare_adapters,
    compare_first_weights,
    compare_levels,
    compare_numbers_of_one_rank,
    compare_rounded,
    compare_validation,
    resume_on_another_mesh,
    write_model,
)
from run import (
    PRECISIONS,
    ROOT,
    T,
    events,
    flags,
    tensors,
    until,
)

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
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
    "phi3": {"num_key_value_heads": 4},
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
        pytest.param("phi3", "tp 2", marks=pytest.mark.slow),
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
    make_flags = partial(flags, data, recompute="block", **model(name) | MESHES["tp 2 dp 2"])
    compare_levels(train, tmp_path, make_flags)


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
    more = {"total_batch_size": 8 * T} | NEAR[case] | model("sixteens")
    compare_rounded(train, tmp_path, partial(flags, data, **more), MESHES["tp 2 dp 2"], ALONE)


@pytest.mark.more
def test_adapters(train, data, tmp_path, model):
    make_flags = partial(flags, data, total_batch_size=8 * T, **model("untied-mha"))
    compare_adapters(train, tmp_path, make_flags, MESHES["tp 2 dp 2"], ALONE)


# Ranks, tensor parallelism, level.
RESHARDED = [
    pytest.param("gpt2", (4, 2, 2), (1, 1, 0), marks=pytest.mark.slow),
    pytest.param("gpt2", (1, 1, 0), (4, 2, 3), marks=pytest.mark.more),
    pytest.param("untied-mha", (2, 2, 1), (4, 4, 1), marks=pytest.mark.slow),
    ("tied-gqa", (4, 2, 3), (2, 1, 3)),
]


@pytest.mark.parametrize(("name", "before", "after"), RESHARDED)
def test_resume_with_another_mesh(train, data, tmp_path, model, name, before, after):
    before, after = (dict(zip(("devices", "tp", "zero"), mesh)) for mesh in (before, after))
    saves = {"checkpoint_async": "on" if name == "tied-gqa" else "off"}
    resume_on_another_mesh(train, tmp_path, partial(flags, data, **model(name)), before, after, saves)


def test_the_weights_at_the_start(train, data, tmp_path, model):
    """Transposed matrices, columns of them, three in one."""
    make_flags = partial(flags, data, **model("gpt2"))
    compare_first_weights(train, tmp_path, make_flags, MESHES["tp 4"], ALONE)


def test_random_rounding_is_that_of_the_whole(train, data, tmp_path, model):
    """Where gradients are nearly 0 on any mesh, the decayed weights have the same bits."""
    more = {"steps": 3, "weight_decay": 0.5, "grad_clip": 1e-30} | PRECISIONS["bf16-throughout"] | SHORT
    for out, of in (("alone", ALONE), ("mesh", MESHES["tp 2"])):
        train(*flags(data, tmp_path / out, **more | of | model("gpt2")))
    found, expected = (tensors(tmp_path / f"{out}/step_000003", "model") for out in ("mesh", "alone"))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-20, err_msg=key)  # biases were 0


def test_validation_and_samples(train, data, tmp_path, model):
    make_flags = partial(flags, data, **model("tied-gqa"))
    compare_validation(train, tmp_path, make_flags, MESHES["tp 2 dp 2"], ALONE)


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
    "bert": (BERT | {"tp": 2}, "phi3 or gpt2, found bert"),
    "olmo2": (
        {"devices": 2, "tp": 2, "model": ROOT / "tests/models/olmo2.json"},
        "phi3 or gpt2, found olmo2",
    ),
    "phi3": (
        {"devices": 2, "tp": 2, "model": ROOT / "tests/models/phi3.json"},
        "--tp 2: expected as many key and value heads as attention heads in a model of type phi3, found 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    check_refusal(train, data, tmp_path, *BAD[case])
