"""Meshes with context parallelism: the tensors, losses, gradients and checkpoints of one rank."""

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from debug_states import first_difference, load
from launch import as_ranks
from meshes import (
    BERT,
    SHORT,
    check_refusal,
    compare_adapters,
    compare_levels,
    compare_numbers_of_one_rank,
    compare_rounded,
    compare_validation,
    resume_on_another_mesh,
    write_model,
    write_packed,
)
from run import ROOT, T, flags
from safetensors.torch import load_file

import train_llama3 as ref
from llamac.training import references
from llamac.training.options import Options

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
ALONE = {"batch_size": 4}
MESHES = {
    "cp 2": {"devices": 2, "cp": 2, "batch_size": 4},
    "cp 4": {"devices": 4, "cp": 4, "batch_size": 4},
    "cp 2 dp 2": {"devices": 4, "cp": 2, "batch_size": 2},
    "cp 2 tp 2": {"devices": 4, "cp": 2, "tp": 2, "batch_size": 4},
}
# "model change": what is changed in the model's configuration.
CHANGES = {
    "tied-gqa": {"intermediate_size": 132},
    "untied-mha": {"intermediate_size": 152},
    "qwen3": {"num_key_value_heads": 2},
    "tied-gqa window": {"model_type": "mistral", "sliding_window": 7, "intermediate_size": 132},
}


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a model."""
    return partial(write_model, tmp_path, CHANGES)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict:
    """Flags of runs on packed documents of any length, of whose targets a third does not count."""
    return write_packed(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize(
    ("name", "mesh", "zero", "documents"),
    [
        ("tied-gqa window", "cp 4", 1, False),
        pytest.param("gpt2", "cp 2 dp 2", 3, True, marks=pytest.mark.slow),
        pytest.param("tied-gqa", "cp 4", 0, True, marks=pytest.mark.slow),
        pytest.param("untied-mha", "cp 2", 0, False, marks=pytest.mark.slow),
        pytest.param("qwen2", "cp 2", 2, True, marks=pytest.mark.slow),
        pytest.param("qwen3", "cp 2 tp 2", 1, True, marks=pytest.mark.slow),
        pytest.param("gpt2", "cp 2 tp 2", 0, False, marks=pytest.mark.slow),
        pytest.param("tied-gqa window", "cp 2 dp 2", 2, True, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_of_one_rank(train, data, packed, tmp_path, model, name, mesh, zero, documents):
    """In f32, with clipped gradients; and the first gradients by the first moments, tensor by tensor."""
    more = {"total_batch_size": 8 * T, "grad_clip": 0.5} | SHORT | model(name)
    more |= packed if documents else {}
    compare_numbers_of_one_rank(
        train, tmp_path, partial(flags, data, **more), MESHES[mesh] | {"zero": zero}, ALONE
    )


# Tensors of one rank


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """(folder, PyTorch's tensors, float64's) of a model and a type, of sequences that 4 ranks divide."""

    def get(name: str, dtype: str, documents: bool):
        folder = tmp_path_factory.mktemp("states")
        changes = {k: v for k, v in CHANGES.get(name, {}).items() if k in ("model_type", "sliding_window")}
        config = replace(ref.load_config(ROOT / f"tests/models/{name.split()[0]}.json"), **changes)
        settings = {"lr": ref.LR, **ref.OPTIMIZER, "grad_clip": ref.GRAD_CLIP}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(references, "T", 32)
            patch.setattr(ref, "UPDATES", 2)
            o = Options(document_mask="on" if documents else "off")
            references.write_reference(
                config, ref.DTYPES[dtype], folder, ref.empty_model, ref.debug_state, settings, o
            )
        return folder, load(folder / "debug_state.safetensors"), load(folder / "truth.safetensors")

    return get


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


CASES = [
    ("tied-gqa", "f32", 4, False),
    ("gpt2", "bf16", 2, True),
    pytest.param("tied-gqa window", "f32", 2, True, marks=pytest.mark.slow),
    pytest.param("untied-mha", "bf16", 2, False, marks=pytest.mark.slow),
    pytest.param("qwen2", "fp16", 2, False, marks=pytest.mark.slow),
    pytest.param("qwen3", "bf16", 4, True, marks=pytest.mark.slow),
    pytest.param("phi3", "f32", 2, True, marks=pytest.mark.slow),
    pytest.param("olmo2", "bf16", 2, True, marks=pytest.mark.slow),
    pytest.param("gpt2", "f32", 4, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "dtype", "ranks", "documents"), CASES)
def test_debug_state(build, states, tmp_path, name, dtype, ranks, documents):
    """Each activation and gradient, assembled from those of the ranks, beside the reference model's; some are
    computed again."""
    folder, torchs, truth = states(name, dtype, documents)
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


# Runs


@pytest.mark.parametrize("name", ["tied-gqa", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_levels_have_the_same_bits(train, data, tmp_path, model, name):
    """In bf16 rounded at random, with recomputation and verified steps; and in another run."""
    make_flags = partial(flags, data, recompute="block", **model(name) | MESHES["cp 2 dp 2"])
    compare_levels(train, tmp_path, make_flags, (0, 3, 3) if name == "tied-gqa" else (0, 1, 2, 3, 3))


NEAR = {
    "bf16": ("cp 2 dp 2", {"dtype": "bf16", "recompute": "norm,swiglu,attention"}, {"shard_group": 2}),
    "fp16": ("cp 4", {"dtype": "fp16", "recompute": "block:2"}, {}),
    "delayed": ("cp 2 tp 2", {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_head": "on"}, {}),
    "tensor": ("cp 2 dp 2", {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "tensor"}, {"zero": 2}),
    "row": ("cp 2", {"dtype": "bf16", "matmul_dtype": "fp8", "fp8_recipe": "row", "recompute": "block"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NEAR)
def test_rounded_numbers(train, data, tmp_path, model, case):
    mesh, precision, grouped = NEAR[case]
    make_flags = partial(flags, data, total_batch_size=8 * T, **precision, **model("sixteens"))
    compare_rounded(train, tmp_path, make_flags, MESHES[mesh] | grouped, ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["storage", "fp8"])
def test_adapters(train, data, tmp_path, model, frozen):
    make_flags = partial(flags, data, total_batch_size=8 * T, frozen_dtype=frozen, **model("untied-mha"))
    compare_adapters(train, tmp_path, make_flags, MESHES["cp 2 dp 2"], ALONE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, 2, 2, 1), (4, 4, 1, 3), marks=pytest.mark.more),
        pytest.param((1, 1, 1, 1), (4, 2, 1, 2), marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 3), (1, 1, 1, 0), marks=pytest.mark.slow),
    ],
)
def test_resume_with_another_mesh(train, data, tmp_path, model, before, after):
    before, after = (dict(zip(("devices", "cp", "tp", "zero"), mesh)) for mesh in (before, after))
    resume_on_another_mesh(train, tmp_path, partial(flags, data, **model("tied-gqa")), before, after, {})


def test_validation_and_samples(train, data, tmp_path, model):
    """Samples longer than a rank's tokens."""
    prompt = {"sample_prompt_ids": ",".join(map(str, range(1, 12))), "sample_tokens": 9}
    make_flags = partial(flags, data, **model("tied-gqa"), **prompt)
    compare_validation(train, tmp_path, make_flags, MESHES["cp 2 dp 2"], ALONE)


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
def test_other_lengths(model):
    """Between steps, a validation of shorter sequences, and a sample without cache: RoPE's angles are
    those of each."""
    name = model("tied-gqa")["model"]
    said = []
    for sizes in ({"devices": 1}, {"devices": 2, "cp": 2}, {"devices": 4, "cp": 2, "tp": 2}):
        command = [sys.executable, "-c", OTHER_LENGTHS, name, json.dumps({**sizes, "devices": 1})]
        runs = as_ranks(command, sizes["devices"], pipe="stdout")
        assert all(code == 0 for code, _ in runs)
        said += [json.loads(text) for _, text in runs]
    assert len(said) == 7
    for found in said[1:]:
        np.testing.assert_allclose(found, said[0], rtol=2e-6)


def test_rows_that_cannot_be_divided(model):
    code = OTHER_LENGTHS.replace(":8", ":6")
    command = [sys.executable, "-c", code, model("tied-gqa")["model"], '{"cp": 2}']
    for exit_code, text in as_ranks(command, 2):
        assert exit_code == 1 and "rows of a multiple of 2 * cp = 4 tokens, found 6" in text


BAD = {
    "devices": ({"devices": 3, "cp": 2}, "--cp 2: expected a divisor of the number of devices, found 3"),
    "mesh": ({"devices": 6, "cp": 2, "tp": 2}, "--tp 2 --cp 2: expected a divisor of the number of devices"),
    "sequence": (
        {"devices": 2, "cp": 2, "seq_len": 18},
        "--cp 2: expected --seq-len to be a multiple of 2 * cp = 4, found 18",
    ),
    "batch": ({"devices": 2, "cp": 2, "total_batch_size": 3 * T}, "seq-len * devices / cp = "),
    "bert": (BERT | {"cp": 2}, "olmo2 or gpt2, found bert"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(train, data, tmp_path, case):
    check_refusal(train, data, tmp_path, *BAD[case])
