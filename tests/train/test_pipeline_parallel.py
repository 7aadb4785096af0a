"""Meshes with pipeline parallelism: the losses, gradients and checkpoints of one rank."""

import json
import sys
from functools import partial

import numpy as np
import pytest
from launch import as_ranks
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
)

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
SHORT = {"val_every": 0, "val_data": "none", "checkpoint_every": 0}
ALONE = {"batch_size": 1}
MESHES = {
    "pp 2": {"devices": 2, "pp": 2, "batch_size": 1},
    "pp 4": {"devices": 4, "pp": 4, "batch_size": 1},
    "pp 2 dp 2": {"devices": 4, "pp": 2, "batch_size": 1},
    "pp 2 tp 2": {"devices": 4, "pp": 2, "tp": 2, "batch_size": 1},
    "pp 2 x 2": {"devices": 2, "pp": 2, "pp_chunks": 2, "batch_size": 1},
    "pp 3 x 2": {"devices": 3, "pp": 3, "pp_chunks": 2, "batch_size": 1},
    "pp 2 x 2 dp 2": {"devices": 4, "pp": 2, "pp_chunks": 2, "batch_size": 1},
}
# Numbers of layers that stages divide unequally.
CHANGES = {
    "tied-gqa": {"num_hidden_layers": 5, "intermediate_size": 132},
    "untied-mha": {"num_hidden_layers": 4, "intermediate_size": 152},
    "sixteens": {"num_hidden_layers": 4},
    "qwen2": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 7},
}


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a model."""
    return partial(write_model, tmp_path, CHANGES)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mesh", "micro_batches", "zero"),
    [
        ("untied-mha", "pp 4", 4, 1),
        ("tied-gqa", "pp 2 x 2", 4, 1),
        pytest.param("tied-gqa", "pp 2", 8, 1, marks=SLOW),
        pytest.param("gpt2", "pp 2 dp 2", 3, 3, marks=SLOW),
        pytest.param("gpt2", "pp 4", 5, 1, marks=SLOW),
        pytest.param("qwen2", "pp 2", 1, 1, marks=SLOW),
        pytest.param("tied-gqa", "pp 4", 2, 0, marks=SLOW),
        pytest.param("tied-gqa", "pp 2 dp 2", 6, 0, marks=SLOW),
        pytest.param("tied-gqa", "pp 2 dp 2", 2, 1, marks=SLOW),
        pytest.param("untied-mha", "pp 2 dp 2", 4, 2, marks=SLOW),
        pytest.param("gpt2", "pp 3 x 2", 6, 1, marks=SLOW),
        pytest.param("untied-mha", "pp 2 x 2 dp 2", 2, 3, marks=SLOW),
    ],
)
def test_the_numbers_of_one_rank(train, data, tmp_path, model, name, mesh, micro_batches, zero):
    """In f32, with clipped gradients; and the first gradients by the first moments, tensor by tensor."""
    data_ranks = 2 if "dp" in mesh else 1
    more = {"total_batch_size": micro_batches * data_ranks * T, "grad_clip": 0.5, "zero": zero}
    more |= SHORT | model(name)
    compare_numbers_of_one_rank(train, tmp_path, partial(flags, data, **more), MESHES[mesh], ALONE)


@pytest.mark.parametrize(
    ("name", "mesh"), [("tied-gqa", "pp 2 dp 2"), pytest.param("gpt2", "pp 2 x 2 dp 2", marks=SLOW)]
)
def test_levels_have_the_same_bits(train, data, tmp_path, model, name, mesh):
    """In bf16 rounded at random, with recomputation and verified steps; and in another run. With several
    micro-batches, levels 2 and 3 sum in another order."""
    more = {"recompute": "norm,attention", "verify_every": 2, "steps": 4, "skip_nonfinite": 1}
    more |= PRECISIONS["bf16-throughout"] | model(name) | MESHES[mesh] | SHORT
    more["total_batch_size"] = 2 * MESHES[mesh].get("pp_chunks", 1) * T
    for out, level in (("zero0", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("again", 3)):
        train(*flags(data, tmp_path / out, zero=level, **more))
        of = tmp_path / ("zero2" if level > 1 and "x" in mesh else "zero0")
        assert numbers(tmp_path / out) == numbers(of)
        assert_same_state(tmp_path / out / "step_000004", of / "step_000004")


NEAR = {
    "bf16": {"dtype": "bf16", "recompute": "norm,swiglu,attention"},
    "fp16": {"dtype": "fp16", "recompute": "block:2"},
    "bf16 sums": {"dtype": "bf16", "zero": 2, "reduce_dtype": "bf16"},
    "delayed": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_head": "on"},
    "tensor": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "tensor", "recompute": "norm,qkv"},
    "row": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "row", "recompute": "block"},
    "stored": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_weights": "stored", "fp8_head": "on", "zero": 0},
}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each in ("fp16", "delayed") else SLOW) for each in NEAR]
)
def test_rounded_numbers(train, data, tmp_path, model, case):
    """In narrow types, with recomputation; the scales of fp16 and fp8 are those of one rank, to rounding."""
    more = {"total_batch_size": 8 * T} | NEAR[case] | SHORT | model("sixteens")
    for out, of in (("alone", ALONE), ("mesh", MESHES["pp 2 x 2 dp 2" if case == "stored" else "pp 2 dp 2"])):
        train(*flags(data, tmp_path / out, **more | of))
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "alone"), rtol=4e-3)
    if case in ("delayed", "stored"):
        found, expected = (tensors(tmp_path / f"{o}/step_000008", "optimizer") for o in ("mesh", "alone"))
        for key in ("fp8.scale", "fp8.amax"):
            np.testing.assert_allclose(found[key], expected[key], rtol=0.1, err_msg=key)
    if case == "fp16":
        scales = [[e["loss_scale"] for e in events(tmp_path / o, "step")] for o in ("mesh", "alone")]
        assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("mesh", "frozen"),
    [
        ("pp 2 x 2", "storage"),
        pytest.param("pp 2 tp 2", "storage", marks=SLOW),
        pytest.param("pp 2 dp 2", "fp8", marks=SLOW),
    ],
)
def test_adapters(train, data, tmp_path, model, mesh, frozen):
    """Those of every linear: the losses of one rank, in f32; and a checkpoint for either."""
    more = {"total_batch_size": 4 * T, "lora": 4, "frozen_dtype": frozen} | SHORT | model("untied-mha")
    for out, of in (("alone", ALONE), ("mesh", MESHES[mesh])):
        train(*flags(data, tmp_path / out, **more | of | {"checkpoint_every": 4}))
    compare(tmp_path / "mesh", tmp_path / "alone")
    names = [tensors(tmp_path / out / "step_000004", "adapter_model").keys() for out in ("mesh", "alone")]
    assert names[0] == names[1]
    for of in ("alone", "mesh"):
        another = ALONE if of == "mesh" else MESHES[mesh]
        resume = {"resume": tmp_path / of / "step_000004"}
        train(*flags(data, tmp_path / f"from_{of}", **more | another | resume))
        np.testing.assert_allclose(losses(tmp_path / f"from_{of}"), losses(tmp_path / of)[4:], rtol=2e-6)


@SLOW
@pytest.mark.parametrize("dtype", ["storage", "fp8"])
def test_frozen_weights(train, data, tmp_path, model, dtype):
    """They stay, a tied embedding among them, and the others train as on one rank."""
    more = {"total_batch_size": 4 * T, "freeze": "*embed_tokens*,*.0.mlp.*", "frozen_dtype": dtype}
    more |= SHORT | model("tied-gqa")
    for out, of in (("alone", ALONE), ("mesh", MESHES["pp 2"])):
        train(*flags(data, tmp_path / out, **more | of))
    compare(tmp_path / "mesh", tmp_path / "alone")
    found, expected = (tensors(tmp_path / f"{out}/step_000008", "model") for out in ("mesh", "alone"))
    assert found.keys() == expected.keys()


SAVE_AGAIN = """
import json, sys, llamac
trainer = llamac.Trainer(sys.argv[1], batch_size=1, **json.loads(sys.argv[2]))
trainer.save(sys.argv[3])
"""
# Ranks, tensor parallelism, pipeline parallelism, level.
RESHARDED = [
    pytest.param("gpt2", (4, 1, 4, 1), (1, 1, 1, 0), marks=SLOW),
    pytest.param("gpt2", (1, 1, 1, 0), (4, 2, 2, 1), marks=SLOW),
    ("tied-gqa", (4, 1, 2, 3), (3, 1, 3, 1)),
    pytest.param("untied-mha", (4, 2, 2, 1), (4, 1, 2, 2), marks=SLOW),
]


@pytest.mark.parametrize(("name", "before", "after"), RESHARDED)
def test_resume_with_another_mesh(train, data, tmp_path, model, name, before, after):
    """The state has the same bits, and the run goes on."""
    more = {"total_batch_size": 4 * T, "batch_size": 1, "dtype": "bf16", "val_steps": 4} | model(name)
    meshes = [dict(zip(("devices", "tp", "pp", "zero"), mesh)) for mesh in (before, after)]
    saves = {"checkpoint_async": "on" if name == "tied-gqa" else "off"}
    train(*flags(data, tmp_path / "a", **more, **meshes[0], **saves))
    checkpoint = tmp_path / "a/step_000004"
    flags_after = json.dumps({key: value for key, value in meshes[1].items() if key != "devices"})
    command = [sys.executable, "-c", SAVE_AGAIN, checkpoint, flags_after, tmp_path / "again"]
    for code, text in as_ranks(command, after[0]):
        assert code == 0, text
    assert_same_state(tmp_path / "again", checkpoint)
    train(*flags(data, tmp_path / "b", **more, **meshes[1], resume=checkpoint))
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a")[4:], rtol=4e-3)


@SLOW
@pytest.mark.parametrize("name", ["tied-gqa", "gpt2"])
def test_the_weights_at_the_start(train, data, tmp_path, model, name):
    """Random numbers are those of one rank; transformers opens the checkpoint."""
    more = {"steps": 1, "lr": 1e-30, "weight_decay": 0} | SHORT | model(name)
    for out, of in (("alone", ALONE), ("mesh", MESHES["pp 4"])):
        train(*flags(data, tmp_path / out, **more | of))
    found, expected = (tensors(tmp_path / f"{out}/step_000001", "model") for out in ("mesh", "alone"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-29, err_msg=key)  # biases were 0
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "alone"), rtol=2e-6)
    index = json.loads((tmp_path / "mesh/step_000001/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


def test_validation_evaluation_and_samples(train, data, tmp_path, model):
    """Those of one rank: three batches on two data-parallel ranks; samples with and without a cache."""
    more = {"steps": 2, "total_batch_size": 4 * T, "val_steps": 3, "sample_every": 2} | model("tied-gqa")
    for out, of in (("alone", ALONE | {"batch_size": 2}), ("mesh", MESHES["pp 2 dp 2"] | {"batch_size": 2})):
        train(*flags(data, tmp_path / out, **more | of))
        train(*flags(data, tmp_path / f"{out}_long", **more | of | {"sample_tokens": 2 * T}))
    for end in ("", "_long"):
        found, expected = (events(tmp_path / f"{out}{end}", "val") for out in ("mesh", "alone"))
        assert len(found) == len(expected) == 2
        np.testing.assert_allclose([e["loss"] for e in found], [e["loss"] for e in expected], rtol=2e-6)
        assert events(tmp_path / f"mesh{end}", "sample") == events(tmp_path / f"alone{end}", "sample")


def test_the_plan_and_the_log(train, data, tmp_path, model):
    """Name the layers of the stages, their wait and the largest memory."""
    more = {"devices": 2, "pp": 2, "steps": 1, "total_batch_size": 16 * T} | model("tied-gqa")
    planned = train(*flags(data, tmp_path / "out", **more), "--dry-run").stdout
    assert "pipeline 2 of 3, 2 layers, bubble 20.0%" in planned
    assert "the memory is that of stage 1, which takes the most" in planned
    more["total_batch_size"] = 4 * T
    said = train(*flags(data, tmp_path / "out", **more)).stdout
    assert "--pp 2: the step has 1 micro-batches, fewer than stages" in said
    assert "bubble 50.0%" in said


BAD = {
    "devices": ({"devices": 3, "pp": 2}, "--pp 2: expected a divisor of the number of devices, found 3"),
    "mesh": ({"devices": 4, "tp": 2, "pp": 4}, "expected a divisor of the number of devices, found 4"),
    "layers": ({"devices": 4, "pp": 4}, "--pp 4: expected at least one layer per stage, found 2 layers"),
    "chunks": (
        {"devices": 2, "pp": 2, "pp_chunks": 2, "total_batch_size": 8 * T},
        "--pp 2 --pp-chunks 2: expected at least one",
    ),
    "odd": (
        {"devices": 2, "pp": 2, "pp_chunks": 2, "total_batch_size": 12 * T},
        "--pp-chunks 2: expected a multiple of --pp 2 micro-batches per step, found 3",
    ),
    "no stages": ({"pp_chunks": 2}, "--pp-chunks 2: expected --pp of at least 2, found 1"),
    "freeze": (
        {"devices": 2, "pp": 2, "freeze": "model.layers.1.*,model.norm.weight,*embed*"},
        "--freeze: expected weights that train in every stage of --pp",
    ),
    "frozen": (
        {"devices": 2, "pp": 2, "freeze": "*none*"},
        "--freeze: expected patterns of the weights' names, as",
    ),
    "bert": ({"devices": 2, "pp": 2, "model": ROOT / "tests/models/bert.json"}, "qwen3 or gpt2, found bert"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    more, expected = BAD[case]
    more = {"mask_token": 4} | more if case == "bert" else more
    assert expected in one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert not (tmp_path / "out").exists()
