"""Meshes with pipeline parallelism: the losses, gradients and checkpoints of one rank."""

import json
from functools import partial

import numpy as np
import pytest
from meshes import (
    BERT,
    SHORT,
    check_refusal,
    compare,
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
    T,
    events,
    flags,
    losses,
    tensors,
)

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
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
    "olmo2": {"num_hidden_layers": 4},
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
        pytest.param("untied-mha", "pp 4", 4, 1, marks=pytest.mark.more),
        ("tied-gqa", "pp 2 x 2", 4, 1),
        pytest.param("tied-gqa", "pp 2", 8, 1, marks=SLOW),
        pytest.param("gpt2", "pp 2 dp 2", 3, 3, marks=SLOW),
        pytest.param("gpt2", "pp 4", 5, 1, marks=SLOW),
        pytest.param("qwen2", "pp 2", 1, 1, marks=SLOW),
        pytest.param("olmo2", "pp 2 x 2", 4, 1, marks=SLOW),
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
    more = {"recompute": "norm,attention", "skip_nonfinite": 1} | model(name) | MESHES[mesh]
    more["total_batch_size"] = 2 * MESHES[mesh].get("pp_chunks", 1) * T
    for levels in ((0, 1), (2, 3, 3)) if "x" in mesh else ((0, 1, 2, 3, 3),):
        compare_levels(train, tmp_path / str(levels), partial(flags, data, **more), levels)


NEAR = {
    "bf16": {"dtype": "bf16", "recompute": "norm,swiglu,attention"},
    "fp16": {"dtype": "fp16", "recompute": "block:2"},
    "bf16 sums": {"dtype": "bf16", "zero": 2, "reduce_dtype": "bf16"},
    "delayed": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_head": "on"},
    "tensor": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "tensor", "recompute": "norm,qkv"},
    "row": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "row", "recompute": "block"},
    "stored": {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_weights": "stored", "fp8_head": "on", "zero": 0},
}


MARKS = {"fp16": pytest.mark.more, "delayed": ()}


@pytest.mark.parametrize("case", [pytest.param(each, marks=MARKS.get(each, SLOW)) for each in NEAR])
def test_rounded_numbers(train, data, tmp_path, model, case):
    """In narrow types, with recomputation; the scales of fp16 and fp8 are those of one rank, to rounding."""
    make_flags = partial(flags, data, **{"total_batch_size": 8 * T} | NEAR[case] | model("sixteens"))
    mesh = MESHES["pp 2 x 2 dp 2" if case == "stored" else "pp 2 dp 2"]
    compare_rounded(train, tmp_path, make_flags, mesh, ALONE)
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
    make_flags = partial(flags, data, total_batch_size=4 * T, frozen_dtype=frozen, **model("untied-mha"))
    compare_adapters(train, tmp_path, make_flags, MESHES[mesh], ALONE)


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


# Ranks, tensor parallelism, pipeline parallelism, level.
RESHARDED = [
    pytest.param("gpt2", (4, 1, 4, 1), (1, 1, 1, 0), marks=SLOW),
    pytest.param("gpt2", (1, 1, 1, 0), (4, 2, 2, 1), marks=SLOW),
    ("tied-gqa", (4, 1, 2, 3), (3, 1, 3, 1)),
    pytest.param("untied-mha", (4, 2, 2, 1), (4, 1, 2, 2), marks=SLOW),
]


@pytest.mark.parametrize(("name", "before", "after"), RESHARDED)
def test_resume_with_another_mesh(train, data, tmp_path, model, name, before, after):
    before, after = (dict(zip(("devices", "tp", "pp", "zero"), mesh)) for mesh in (before, after))
    saves = {"checkpoint_async": "on" if name == "tied-gqa" else "off"}
    resume_on_another_mesh(train, tmp_path, partial(flags, data, **model(name)), before, after, saves)


@SLOW
@pytest.mark.parametrize("name", ["tied-gqa", "gpt2"])
def test_the_weights_at_the_start(train, data, tmp_path, model, name):
    """Random numbers are those of one rank; transformers opens the checkpoint."""
    compare_first_weights(train, tmp_path, partial(flags, data, **model(name)), MESHES["pp 4"], ALONE)
    expected = tensors(tmp_path / "alone/step_000001", "model")
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "alone"), rtol=2e-6)
    index = json.loads((tmp_path / "mesh/step_000001/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


@pytest.mark.parametrize("sample", [{}, pytest.param({"sample_tokens": 2 * T}, marks=pytest.mark.more)])
def test_validation_and_samples(train, data, tmp_path, model, sample):
    """With and without a cache."""
    make_flags = partial(flags, data, **model("tied-gqa"), **sample)
    compare_validation(train, tmp_path, make_flags, MESHES["pp 2 dp 2"], ALONE)


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
    "bert": (BERT | {"pp": 2}, "olmo2 or gpt2, found bert"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    check_refusal(train, data, tmp_path, *BAD[case])
