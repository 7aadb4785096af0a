"""Meshes of tensor, pipeline, context and data parallelism: losses, gradients, checkpoints of one rank."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from debug_states import first_difference, write_states
from launch import AXES, as_ranks, mesh_flags
from run import (
    MODEL,
    PRECISIONS,
    ROOT,
    SHORT,
    T,
    assert_same_state,
    events,
    flags,
    losses,
    numbers,
    one_line,
    tensors,
    write_model,
    write_packed,
)
from safetensors.torch import load_file

from llamac.training import references

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
# Heads and channels that 4 ranks divide; stages divide the layers unequally.
SIZES = {
    "tied-gqa": {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 132},
    "untied-mha": {"intermediate_size": 152},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "phi3": {"num_key_value_heads": 4},
}
OLMO2, PHI3 = (ROOT / f"tests/models/{name}.json" for name in ("olmo2", "phi3"))
BERT = {"model": ROOT / "tests/models/bert.json", "mask_token": 4}
WINDOW = {"model_type": "mistral", "sliding_window": 7}
LAYERS = {"tied-gqa": 5, "untied-mha": 4, "sixteens": 4, "qwen2": 3, "qwen3": 3, "olmo2": 4, "gpt2": 7}


def more(*values: object):
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.more)


def slow(*values: object):
    """A case for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def model_flags(folder: Path, name: str, mesh: str, **changes) -> dict:
    """Of a model of tests/models, with sizes that the mesh divides; data-parallel ranks divide any size."""
    base, *window = name.split()
    axes = {"tp", "pp", "cp"}.intersection(mesh.split())
    sizes = SIZES.get(base, {}) if axes else {}
    if "pp" in axes:
        sizes = sizes | {"n_layer" if base == "gpt2" else "num_hidden_layers": LAYERS[base]}
    model = write_model(folder, base, **sizes | (WINDOW if window else {}) | changes)
    return model | ({"mask_token": 4} if base == "bert" else {})


@pytest.fixture
def run_both(train, data, tmp_path):
    """Runs a model (model_flags) on a mesh and on one rank; returns both folders. suffix: of their names;
    alone: sequences of a micro-batch on one rank."""

    def run(model: dict, mesh: str, suffix: str = "", alone: int = 0, **extra) -> tuple[Path, Path]:
        alone = alone or (1 if "pp" in mesh.split() else 4)
        folders = tmp_path / f"mesh{suffix}", tmp_path / f"alone{suffix}"
        for folder, own in zip(folders, (mesh_flags(mesh), {"batch_size": alone})):
            train(*flags(data, folder, **SHORT | own | model | extra))
        return folders

    return run


def compare(folders: tuple[Path, Path]) -> None:
    """Losses and other numbers of two runs in f32."""
    np.testing.assert_allclose(*map(losses, folders), rtol=2e-6)
    np.testing.assert_allclose(*map(numbers, folders), rtol=2e-5)


def compare_numbers(run_both, model: dict, mesh: str, **extra) -> None:
    """In f32, with clipped gradients; and the first gradients by the first moments, tensor by tensor."""
    extra["grad_clip"] = 0.5
    compare(run_both(model, mesh, steps=20, **extra))
    first = run_both(model, mesh, "1", steps=1, warmup_steps=0, **extra)
    found, expected = (tensors(folder / "step_000001", "optimizer") for folder in first)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("m."):
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[key], value, rtol=0, atol=2e-6 * scale, err_msg=key)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict:
    """Flags of runs on packed documents of any length, of whose targets a third does not count."""
    shard = tmp_path_factory.mktemp("packed") / "train_000.bin"
    write_packed(shard, 60, share=0.7)
    return {"train_data": shard, "document_mask": "on"}


# What the table of pairs below has not: groups, three stages, windows, numbers of micro-batches of a step.
NUMBERS = [
    ("tied-gqa", "dp 2 zero 3", 1, False),
    more("tied-gqa", "dp 4 shard_group 2", 1, False),
    ("untied-mha", "tp 4", 2, False),
    more("untied-mha", "pp 4", 4, False),
    ("tied-gqa", "pp 2 pp_chunks 2", 4, False),
    slow("phi3", "tp 2", 2, False),
    slow("olmo2", "pp 2 pp_chunks 2", 4, False),
    slow("gpt2", "pp 3 pp_chunks 2", 6, False),
    slow("gpt2", "pp 4", 5, False),
    slow("gpt2", "pp 2 dp 2 zero 3", 3, False),
    slow("tied-gqa", "pp 2", 8, False),
    slow("tied-gqa", "pp 2 dp 2 zero 0", 6, False),
    ("tied-gqa window", "cp 4", 2, False),
    slow("tied-gqa window", "cp 2 dp 2 zero 2", 2, True),
]


@pytest.mark.parametrize(("name", "mesh", "micro_batches", "documents"), NUMBERS)
def test_the_numbers_of_one_rank(run_both, packed, tmp_path, name, mesh, micro_batches, documents):
    words = mesh.split()
    data_ranks = int(words[words.index("dp") + 1]) if "dp" in words else 1
    tokens = micro_batches * data_ranks * mesh_flags(mesh)["batch_size"] * T
    extra = packed if documents else {}
    compare_numbers(run_both, model_flags(tmp_path, name, mesh), mesh, total_batch_size=tokens, **extra)


# Pairs of factors


SEQUENCES = 16  # of an optimizer step
# Each mesh of 2, 4 or 8 ranks of these sizes, and each pair of values of two columns that a case can have: of
# `zero` where ranks have the same weights, and two chunks in stages that divide the micro-batches.
PAIRS = """
tp pp cp dp zero  model     micro_batches  chunks packed  recompute
1  1  1  2  3    qwen3       1             1      1      norm,swiglu,attention
1  1  2  1  0    gpt2        4             1      1      block
1  2  1  1  0    gpt2        4             2      1      none
2  1  1  1  2    tied-gqa    2             1      0      norm,swiglu,attention
1  1  1  4  3    untied-mha  4             1      0      block
1  1  1  4  1    qwen3       1             1      1      none
1  1  1  4  1    qwen2       1             1      0      none
1  1  2  2  2    qwen3       1             1      1      block
1  1  4  1  2    untied-mha  2             1      1      block
1  1  4  1  2    gpt2        2             1      0      norm,swiglu,attention
1  2  1  2  0    qwen3       2             2      1      block
1  2  2  1  2    tied-gqa    2             2      1      norm,swiglu,attention
1  4  1  1  2    untied-mha  2             1      1      block
2  1  1  2  1    untied-mha  2             1      0      none
2  1  2  1  2    untied-mha  1             1      1      block
2  2  1  1  3    qwen2       2             1      1      none
4  1  1  1  2    tied-gqa    1             1      0      none
1  1  2  4  0    tied-gqa    1             1      0      block
1  1  4  2  0    tied-gqa    4             1      0      none
1  2  1  4  3    tied-gqa    2             2      1      norm,swiglu,attention
1  2  2  2  1    tied-gqa    2             2      0      block
1  2  2  2  3    untied-mha  2             2      1      block
1  2  4  1  1    qwen2       4             2      1      block
1  4  1  2  0    untied-mha  4             2      0      norm,swiglu,attention
1  4  1  2  3    qwen2       1             1      1      none
1  4  1  2  1    gpt2        2             1      0      norm,swiglu,attention
1  4  2  1  2    qwen3       4             2      0      none
2  1  1  4  2    gpt2        1             1      1      norm,swiglu,attention
2  1  2  2  0    qwen2       1             1      0      norm,swiglu,attention
2  1  2  2  1    qwen2       1             1      1      norm,swiglu,attention
2  1  2  2  3    untied-mha  4             1      1      block
2  1  4  1  3    qwen3       1             1      1      norm,swiglu,attention
2  2  1  2  1    untied-mha  1             1      0      none
2  2  1  2  3    untied-mha  4             1      0      block
2  2  2  1  3    gpt2        2             2      0      none
2  2  2  1  1    qwen3       2             2      0      block
2  4  1  1  1    tied-gqa    4             1      1      block
4  1  1  2  2    qwen2       2             1      0      block
4  1  1  2  3    gpt2        1             1      1      norm,swiglu,attention
4  1  1  2  0    untied-mha  2             1      1      block
4  1  2  1  1    untied-mha  2             1      1      none
4  2  1  1  3    qwen3       4             2      0      norm,swiglu,attention
"""
FACTORS, *ROWS = [line.split() for line in PAIRS.strip().splitlines()]
PAIRWISE = [{name: int(x) if x.isdecimal() else x for name, x in zip(FACTORS, row)} for row in ROWS]
# "tp pp cp dp zero": two axes of each pair of them, and three. `make test` and `make test-more` run them.
QUICK = ("1 2 1 2 0", "2 1 2 1 2", "2 2 1 1 3")
MORE = ("1 1 2 2 2", "1 2 2 1 2", "2 1 1 2 1")


MARKS = dict.fromkeys(QUICK, ()) | dict.fromkeys(MORE, pytest.mark.more)
PARAMETERS = [
    pytest.param(case, id=(name := " ".join(row[:5])), marks=MARKS.get(name, pytest.mark.slow))
    for case, row in zip(PAIRWISE, ROWS)
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_pairs(train, data, packed, run_both, tmp_path, case):
    """The numbers of one rank, and the same bits in another run."""
    name, layers = case["model"], case["pp"] * case["chunks"] + 1  # of which one part has two
    changes = {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    # With larger weights or steps, losses or gradients of one rank change by more than 2e-6, too, if its
    # first weights change by one ulp.
    model = model_flags(tmp_path, name, "tp 2", **changes, initializer_range=0.03)
    extra = {"total_batch_size": SEQUENCES * T, "lr": 3e-4, "recompute": case["recompute"]}
    extra |= packed if case["packed"] else {}
    axes = " ".join(f"{axis} {case[axis]}" for axis in (*AXES, "zero"))
    micro_batch = SEQUENCES // case["dp"] // case["micro_batches"]
    mesh = f"{axes} pp_chunks {case['chunks']} batch_size {micro_batch}"
    compare_numbers(run_both, model, mesh, alone=SEQUENCES, **extra)
    again = SHORT | mesh_flags(mesh) | model | extra | {"grad_clip": 0.5, "steps": 20}
    train(*flags(data, tmp_path / "again", **again))
    assert numbers(tmp_path / "again") == numbers(tmp_path / "mesh")
    assert_same_state(tmp_path / "again/step_000020", tmp_path / "mesh/step_000020")


# Tensors of ranks that share sequences


def assembled(parts: list[dict], B: int) -> dict[str, np.ndarray]:
    """Tensors of whole sequences: rank i has piece i, then piece 2 * ranks - 1 - i."""
    ranks, whole = len(parts), {}
    order = [place for i in range(ranks) for place in (i, 2 * ranks - 1 - i)]
    for name in parts[0]:
        found = [part[name].double().numpy() for part in parts]
        if name.startswith("grad."):
            assert all(np.array_equal(each, found[0]) for each in found), name
            whole[name] = found[0].ravel()
        elif name == "loss":
            whole[name] = np.mean(found, 0)
        elif not name.startswith("train."):
            if name.endswith("_lse"):  # [B,heads,time], half by half
                halves = [half for x in found for half in x.reshape(2, B, x.shape[1], -1)]
            else:
                halves = [half for x in found for half in x.reshape(B, 2, -1).swapaxes(0, 1)]
            in_order = [halves[order.index(place)] for place in range(2 * ranks)]
            whole[name] = np.concatenate(in_order, axis=-1).ravel()
    return whole


STATES = [
    ("tied-gqa", "f32", 4, False),
    ("gpt2", "bf16", 2, True),
    slow("tied-gqa window", "f32", 2, True),
    slow("untied-mha", "bf16", 2, False),
    slow("qwen2", "fp16", 2, False),
    slow("qwen3", "bf16", 4, True),
    slow("phi3", "f32", 2, True),
    slow("olmo2", "bf16", 2, True),
    slow("gpt2", "f32", 4, True),
]


@pytest.mark.parametrize(("name", "dtype", "ranks", "documents"), STATES)
def test_debug_state(build, tmp_path, name, dtype, ranks, documents):
    """Each activation and gradient, assembled from those of the ranks, beside the reference model's; some are
    computed again."""
    folder, (base, *window) = tmp_path / "reference", name.split()
    folder.mkdir()
    changes = WINDOW if window else {}
    torchs, truth = write_states(folder, base, changes, dtype, documents, 32)  # which 4 ranks divide
    tail = [dtype, "norm,swiglu,qkv,attention", "0", f"cp={ranks}"]
    commands = [[build / "debug_state", folder, tmp_path / f"{rank}", *tail] for rank in range(ranks)]
    for code, text in as_ranks(commands, ranks):
        assert code == 0, text
    parts = [load_file(tmp_path / f"{rank}") for rank in range(ranks)]
    ours = assembled(parts, references.B)
    raw = (tmp_path / "0").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    ours = {key: ours[key] for key in sorted(ours, key=lambda key: header[key]["data_offsets"])}
    wanted = {key for key in torchs if not key.startswith("train.")}
    assert wanted - ours.keys() <= {"tokens", "targets", "first"}
    assert first_difference(ours, torchs, truth, dtype, {}) == ""


# Runs in narrow types, resumed, with adapters


IN_FP8 = {"dtype": "bf16", "matmul_dtype": "fp8"}
FP8 = {
    "delayed": {**IN_FP8, "fp8_head": "on"},
    "tensor": {**IN_FP8, "fp8_recipe": "tensor"},
    "row": {**IN_FP8, "fp8_recipe": "row"},
}
LEVELS = [
    # model, mesh, precision, recomputation, levels of ZeRO
    ("tied-gqa", "dp 2", "f32", "none", (0, 1, 2, 3)),
    ("tied-gqa", "dp 2", "bf16", "block", (0, 1, 2, 3, 3)),
    more("tied-gqa", "dp 2", "fp16", "block", (0, 3)),
    more("tied-gqa", "dp 4 shard_group 2", "bf16", "block", (0, 2)),
    more("qwen2", "dp 4 shard_group 2", "bf16-throughout", "block", (0, 3)),
    more("qwen3", "dp 2", "bf16-throughout", "block", (0, 2)),
    more("phi3", "dp 2", "bf16-throughout", "block", (0, 3)),
    more("olmo2", "dp 2", "bf16-throughout", "block", (0, 1, 2, 3)),
    ("gpt2", "dp 4 shard_group 2", "bf16-throughout", "block", (1, 3)),
    more("bert", "dp 4 shard_group 2", "bf16-throughout", "block", (0, 3)),
    ("sixteens", "dp 2", "delayed", "none", (0, 2)),
    more("sixteens", "dp 2", "row", "none", (0, 3)),
    ("tied-gqa", "tp 2 dp 2", "bf16-throughout", "block", (0, 1, 2, 3, 3)),
    slow("gpt2", "tp 2 dp 2", "bf16-throughout", "block", (0, 1, 2, 3, 3)),
    ("tied-gqa", "pp 2 dp 2", "bf16-throughout", "norm,attention", (0, 1, 2, 3, 3)),
    slow("gpt2", "pp 2 pp_chunks 2 dp 2", "bf16-throughout", "norm,attention", (0, 1)),
    slow("gpt2", "pp 2 pp_chunks 2 dp 2", "bf16-throughout", "norm,attention", (2, 3, 3)),
    ("tied-gqa", "cp 2 dp 2", "bf16-throughout", "block", (0, 3, 3)),
    slow("gpt2", "cp 2 dp 2", "bf16-throughout", "block", (0, 1, 2, 3, 3)),
]


@pytest.mark.parametrize(("name", "mesh", "precision", "recompute", "levels"), LEVELS)
def test_levels_have_the_same_bits(train, data, tmp_path, name, mesh, precision, recompute, levels):
    """With bf16 rounded at random, with verified steps; a level of ZeRO twice: another run. Of several
    micro-batches, which chunks need, levels 2 and 3 sum in another order."""
    extra = SHORT | (PRECISIONS | FP8)[precision] | mesh_flags(mesh) | model_flags(tmp_path, name, mesh)
    extra |= {"steps": 4, "verify_every": 2, "recompute": recompute}
    extra |= {"skip_nonfinite": 1} if "pp" in mesh else {}
    extra |= {"total_batch_size": 4 * T} if "pp_chunks" in mesh else {}
    for number, level in enumerate(levels):
        out = tmp_path / str(number)
        train(*flags(data, out, **extra | {"zero": level}))
        assert numbers(out) == numbers(tmp_path / "0")
        assert_same_state(out / "step_000004", tmp_path / "0/step_000004")


NARROW = {
    "bf16": {"dtype": "bf16", "recompute": "norm,swiglu,attention"},
    "bf16 sums": {"dtype": "bf16", "zero": 2, "reduce_dtype": "bf16"},
    "fp16": {"dtype": "fp16", "recompute": "block:2"},
    "delayed": FP8["delayed"],
    "tensor": FP8["tensor"] | {"recompute": "norm,qkv"},
    "row": FP8["row"] | {"recompute": "block"},
    "stored": FP8["delayed"] | {"fp8_weights": "stored", "zero": 0},
}
ROUNDED = [
    ("tp 2 dp 2", "delayed"),
    *(slow("tp 2 dp 2", each) for each in ("bf16", "fp16", "tensor", "row", "stored")),
    ("pp 2 dp 2", "delayed"),
    more("pp 2 dp 2", "fp16"),
    *(slow("pp 2 dp 2", each) for each in ("bf16", "bf16 sums", "tensor", "row")),
    slow("pp 2 pp_chunks 2 dp 2", "stored"),
    slow("cp 2 dp 2 shard_group 2", "bf16"),
    slow("cp 4", "fp16"),
    slow("cp 2 tp 2", "delayed"),
    slow("cp 2 dp 2 zero 2", "tensor"),
    slow("cp 2", "row"),
]


@pytest.mark.parametrize(("mesh", "precision"), ROUNDED)
def test_rounded_numbers(run_both, tmp_path, mesh, precision):
    """With recomputation; the scales of fp16, and in a pipeline those of fp8, are those of one rank."""
    model = model_flags(tmp_path, "sixteens", mesh)
    folders = run_both(model, mesh, total_batch_size=8 * T, **NARROW[precision])
    np.testing.assert_allclose(*map(losses, folders), rtol=4e-3)
    if "pp" in mesh and precision in ("delayed", "stored"):
        found, expected = (tensors(folder / "step_000008", "optimizer") for folder in folders)
        for key in ("fp8.scale", "fp8.amax"):
            np.testing.assert_allclose(found[key], expected[key], rtol=0.1, err_msg=key)
    if precision == "fp16":
        scales = [[e["loss_scale"] for e in events(folder, "step")] for folder in folders]
        assert scales[0] == scales[1]


ADAPTERS = [
    more("tp 2 dp 2", "storage"),
    ("pp 2 pp_chunks 2", "storage"),
    slow("pp 2 tp 2", "storage"),
    slow("pp 2 dp 2", "fp8"),
    slow("cp 2 dp 2", "storage"),
    slow("cp 2 dp 2", "fp8"),
]


@pytest.mark.parametrize(("mesh", "frozen"), ADAPTERS)
def test_adapters(train, data, run_both, tmp_path, mesh, frozen):
    """Those of every linear: the losses of one rank, in f32; and a checkpoint for either."""
    model = model_flags(tmp_path, "untied-mha", mesh)
    extra = {"lora": 4, "frozen_dtype": frozen, "total_batch_size": (4 if "pp" in mesh else 8) * T}
    folders = run_both(model, mesh, **extra, checkpoint_every=4)
    compare(folders)
    checkpoints = [folder / "step_000004" for folder in folders]
    names = [tensors(checkpoint, "adapter_model").keys() for checkpoint in checkpoints]
    assert names[0] == names[1]
    for checkpoint, other in zip(checkpoints, ({"batch_size": 1}, mesh_flags(mesh))):
        out = tmp_path / f"from_{checkpoint.parent.name}"
        train(*flags(data, out, **SHORT | other | model | extra, resume=checkpoint))
        np.testing.assert_allclose(losses(out), losses(checkpoint.parent)[4:], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["storage", "fp8"])
def test_frozen_weights(run_both, tmp_path, dtype):
    """They stay, a tied embedding among them, and the others train as on one rank."""
    frozen = {"freeze": "*embed_tokens*,*.0.mlp.*", "frozen_dtype": dtype}
    folders = run_both(model_flags(tmp_path, "tied-gqa", "pp 2"), "pp 2", total_batch_size=4 * T, **frozen)
    compare(folders)
    names = [tensors(folder / "step_000008", "model").keys() for folder in folders]
    assert names[0] == names[1]


SAVE_AGAIN = """
import json, sys, llamac
trainer = llamac.Trainer(sys.argv[1], **json.loads(sys.argv[2]))
trainer.save(sys.argv[3])
"""
RESHARDED = [
    more("tied-gqa", "dp 4 zero 3", "dp 2 zero 1"),
    more("tied-gqa", "dp 2 zero 2", "dp 2 zero 3"),
    ("tied-gqa", "zero 0", "dp 4 zero 3 shard_group 2"),
    ("tied-gqa", "dp 4 zero 1 shard_group 2", "zero 0"),
    slow("gpt2", "tp 2 dp 2 zero 2", "zero 0"),
    more("gpt2", "zero 0", "tp 2 dp 2 zero 3"),
    slow("untied-mha", "tp 2", "tp 4"),
    ("tied-gqa", "tp 2 dp 2 zero 3", "dp 2 zero 3"),
    slow("gpt2", "pp 4", "zero 0"),
    slow("gpt2", "zero 0", "tp 2 pp 2"),
    ("tied-gqa", "pp 2 dp 2 zero 3", "pp 3"),
    slow("untied-mha", "tp 2 pp 2", "pp 2 dp 2 zero 2"),
    more("tied-gqa", "cp 2 tp 2", "cp 4 zero 3"),
    slow("tied-gqa", "zero 1", "cp 2 dp 2 zero 2"),
    slow("tied-gqa", "cp 2 zero 3", "zero 0"),
]


@pytest.mark.parametrize(("name", "before", "after"), RESHARDED)
def test_resume_on_another_mesh(train, data, tmp_path, name, before, after):
    """The state has the same bits, and the run goes on; checkpoints of some are written in the background."""
    both = f"{before} {after}"
    extra = {"total_batch_size": 4 * T, "dtype": "bf16", "val_steps": 4} | model_flags(tmp_path, name, both)
    none = {"tp": 1, "pp": 1, "cp": 1, "shard_group": 0}  # else a resumed run keeps those that it had
    first, second = (none | mesh_flags(mesh) | {"batch_size": 1} for mesh in (before, after))
    saves = {"checkpoint_async": "on" if "zero 3" in before else "off"}
    train(*flags(data, tmp_path / "a", **extra | first | saves))
    checkpoint = tmp_path / "a/step_000004"
    ranks = second.pop("devices")
    command = [sys.executable, "-c", SAVE_AGAIN, checkpoint, json.dumps(second), tmp_path / "again"]
    for code, text in as_ranks(command, ranks):
        assert code == 0, text
    assert_same_state(tmp_path / "again", checkpoint)
    train(*flags(data, tmp_path / "b", **extra | second, devices=ranks, resume=checkpoint))
    rtol = 2e-3 if {"tp", "pp", "cp"}.isdisjoint(both.split()) else 4e-3
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a")[4:], rtol=rtol)


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", "tp 4"), slow("tied-gqa", "pp 4"), slow("gpt2", "pp 4")])
def test_the_weights_at_the_start(run_both, tmp_path, name, mesh):
    """Random numbers are those of whole tensors, also of transposed and joined ones; the index names them."""
    model = model_flags(tmp_path, name, mesh)
    folders = run_both(model, mesh, steps=1, lr=1e-30, weight_decay=0)
    found, expected = (tensors(folder / "step_000001", "model") for folder in folders)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-29, err_msg=key)  # biases were 0
    np.testing.assert_allclose(*map(losses, folders), rtol=2e-6)
    index = json.loads((folders[0] / "step_000001/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


def test_random_rounding_is_that_of_the_whole(run_both, tmp_path):
    """Where gradients are nearly 0 on any mesh, the decayed weights have the same bits."""
    extra = {"steps": 3, "weight_decay": 0.5, "grad_clip": 1e-30} | PRECISIONS["bf16-throughout"]
    folders = run_both(model_flags(tmp_path, "gpt2", "tp 2"), "tp 2", **extra)
    found, expected = (tensors(folder / "step_000003", "model") for folder in folders)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-20, err_msg=key)  # biases were 0


VALIDATED = [
    ("dp 2 zero 1", {}),
    ("dp 2 zero 3", {}),
    ("dp 2", {"document_mask": "on"}),
    ("tp 2 dp 2", {}),
    ("pp 2 dp 2", {}),
    more("pp 2 dp 2", {"sample_tokens": 2 * T}),  # without a cache
    # Longer than a rank's tokens.
    ("cp 2 dp 2", {"sample_prompt_ids": ",".join(map(str, range(1, 12))), "sample_tokens": 9}),
]


@pytest.mark.parametrize(("mesh", "sample"), VALIDATED)
def test_validation_and_samples(run_both, data, packed, tmp_path, mesh, sample):
    """Validation of three batches on two data-parallel ranks, and samples, are those of one rank."""
    validated = {"val_every": 4, "val_data": f"{data}/val_*.bin", "val_steps": 3, "sample_every": 2}
    sizes = {"steps": 2, "batch_size": 2, "total_batch_size": 4 * T}
    if "document_mask" in sample:
        validated |= packed | {"val_data": packed["train_data"]}
    folders = run_both(model_flags(tmp_path, "tied-gqa", mesh), mesh, **validated | sizes | sample)
    found, expected = ([e["loss"] for e in events(folder, "val")] for folder in folders)
    assert len(found) == len(expected) == 2
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert not mesh.startswith("dp") or found[0] == expected[0]
    found, expected = (events(folder, "sample") for folder in folders)
    assert found == expected


def test_the_plan_and_the_log(train, data, tmp_path):
    """Name the layers of the stages, their wait and the largest memory."""
    extra = {"devices": 2, "pp": 2, "steps": 1} | model_flags(tmp_path, "tied-gqa", "pp 2")
    plan = flags(data, tmp_path / "out", **extra, total_batch_size=16 * T)
    planned = train(*plan, "--dry-run").stdout
    assert "pipeline 2 of 3, 2 layers, bubble 20.0%" in planned
    assert "the memory is that of stage 1, which takes the most" in planned
    said = train(*flags(data, tmp_path / "out", **extra, total_batch_size=4 * T)).stdout
    assert "--pp 2: the step has 1 micro-batches, fewer than stages" in said
    assert "bubble 50.0%" in said


# Other lengths, bad input


OTHER_LENGTHS = """
import json, sys, numpy as np, llamac
none = dict.fromkeys(("train_data", "val_data", "tokenizer", "gemm_cache"), "none")
sizes = {"batch_size": 2, "seq_len": 16, "sample_every": 0} | json.loads(sys.argv[2])
trainer = llamac.Trainer(model=sys.argv[1], **none, **sizes)
ids = np.random.default_rng(3).integers(97, size=(2, 2, 16))
found = [trainer.step(*ids)]
found.append(trainer.validate(*ids[:, :, :8]))
found += trainer.sample(7, top_k=1, prompt=[1, 2, 3])
found.append(trainer.step(*ids))
print(found)
"""


@pytest.mark.more
def test_other_lengths(tmp_path):
    """Between steps, a validation of shorter sequences, and a sample without cache: RoPE's angles are
    those of each."""
    model = model_flags(tmp_path, "tied-gqa", "cp 2 tp 2")["model"]
    said = []
    for sizes in ({"devices": 1}, {"devices": 2, "cp": 2}, {"devices": 4, "cp": 2, "tp": 2}):
        command = [sys.executable, "-c", OTHER_LENGTHS, model, json.dumps({**sizes, "devices": 1})]
        runs = as_ranks(command, sizes["devices"], pipe="stdout")
        assert all(code == 0 for code, _ in runs)
        said += [json.loads(text) for _, text in runs]
    assert len(said) == 7
    for found in said[1:]:
        np.testing.assert_allclose(found, said[0], rtol=2e-6)


def test_rows_that_cannot_be_divided():
    code = OTHER_LENGTHS.replace(":8", ":6")
    command = [sys.executable, "-c", code, MODEL, '{"cp": 2}']
    for exit_code, text in as_ranks(command, 2):
        assert exit_code == 1 and "rows of a multiple of 2 * cp = 4 tokens, found 6" in text


# Of flags beside those of a small run: what the program says.
BAD = {
    **{
        f"{axis} devices": (
            {"devices": 3, axis: 2},
            f"--{axis} 2: expected a divisor of the number of devices, found 3",
        )
        for axis in ("tp", "pp", "cp")
    },
    **{
        f"{axis} bert": ({"devices": 2, axis: 2} | BERT, "or gpt2, found bert") for axis in ("tp", "pp", "cp")
    },
    "tp olmo2": ({"devices": 2, "tp": 2, "model": OLMO2}, "phi3 or gpt2, found olmo2"),
    "tp phi3": (
        {"devices": 2, "tp": 2, "model": PHI3},
        "--tp 2: expected as many key and value heads as attention heads in a model of type phi3, found 2",
    ),
    "tp heads": ({"devices": 3, "tp": 3}, "--tp 3: expected a divisor of the model's heads"),
    "tp width": ({"devices": 2, "tp": 2}, "found 127 feed-forward channels"),
    "tp batch": ({"devices": 2, "tp": 2, "total_batch_size": 3 * T}, "seq-len * devices / tp = "),
    "tp frozen": (
        {"devices": 2, "tp": 2, "lora": 4, "frozen_dtype": "fp8"},
        "--tp 2: expected --frozen-dtype storage",
    ),
    "tp rows": (
        {"devices": 4, "tp": 4, "batch_size": 1, "seq_len": 3, "model": ROOT / "tests/models/gpt2.json"},
        "--tp 4: expected a divisor of --batch-size times --seq-len, found 3 tokens",
    ),
    "pp mesh": ({"devices": 4, "tp": 2, "pp": 4}, "expected a divisor of the number of devices, found 4"),
    "pp layers": ({"devices": 4, "pp": 4}, "--pp 4: expected at least one layer per stage, found 2 layers"),
    "pp chunks": (
        {"devices": 2, "pp": 2, "pp_chunks": 2, "total_batch_size": 8 * T},
        "--pp 2 --pp-chunks 2: expected at least one",
    ),
    "pp odd": (
        {"devices": 2, "pp": 2, "pp_chunks": 2, "total_batch_size": 12 * T},
        "--pp-chunks 2: expected a multiple of --pp 2 micro-batches per step, found 3",
    ),
    "pp no stages": ({"pp_chunks": 2}, "--pp-chunks 2: expected --pp of at least 2, found 1"),
    "pp freeze": (
        {"devices": 2, "pp": 2, "freeze": "model.layers.1.*,model.norm.weight,*embed*"},
        "--freeze: expected weights that train in every stage of --pp",
    ),
    "pp frozen": (
        {"devices": 2, "pp": 2, "freeze": "*none*"},
        "--freeze: expected patterns of the weights' names, as",
    ),
    "cp mesh": (
        {"devices": 6, "cp": 2, "tp": 2},
        "--tp 2 --cp 2: expected a divisor of the number of devices",
    ),
    "cp sequence": (
        {"devices": 2, "cp": 2, "seq_len": 18},
        "--cp 2: expected --seq-len to be a multiple of 2 * cp = 4, found 18",
    ),
    "cp batch": ({"devices": 2, "cp": 2, "total_batch_size": 3 * T}, "seq-len * devices / cp = "),
    "three axes": (
        {"devices": 8, "tp": 2, "pp": 2, "cp": 4},
        "--tp 2 --cp 4 --pp 2: expected a divisor of the number of devices, found 8 devices",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    extra, expected = BAD[case]
    assert expected in one_line(train(*flags(data, tmp_path / "out", **extra), code=2))
    assert not (tmp_path / "out").exists()
