"""--document-mask and sliding windows: the C model beside the reference, a packed row beside its documents
alone, and runs of the program beside train_llama3.py's. check_documents.cpp has bits, memory, errors.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from debug_states import first_difference, run_model, write_states
from launch import needs
from run import ROOT, events, flags, losses, reference_flags, refused

import llamac
import train_llama3 as ref
from llamac.data import Loader, find_documents, tokenizer, write_bin
from llamac.model.config import RopeScaling
from llamac.training import run as training
from llamac.training.options import parse
from llamac.training.weights import load_weights, parts

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("one_thread")]
# name: test model, what is changed in its configuration
CASES = {
    "documents": ("tied-gqa", {}),
    "wide-heads": ("wide-heads", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "window": ("tied-gqa", {"model_type": "mistral", "sliding_window": 7}),
    "windows": (
        "tied-gqa",
        {
            "model_type": "mistral",
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": RopeScaling(4.0, 1.0, 3.0, 8, "yarn", 1.2),
        },
    ),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """(folder, PyTorch's tensors, float64's) of a case and a type, with documents; two updates."""
    root, cache = tmp_path_factory.mktemp("documents"), {}

    def get(case: str, dtype: str):
        folder = root / case / dtype
        if folder not in cache:
            folder.mkdir(parents=True)
            cache[folder] = write_states(folder, *CASES[case], dtype, documents=True)
        return folder, *cache[folder]

    return get


def without_updates(state: dict) -> dict:
    return {name: x for name, x in state.items() if not name.startswith("train.")}


NARROW = [("documents", "fp16"), ("wide-heads", "fp16"), ("bert", "fp16")]


@pytest.mark.parametrize("case, dtype", [*product(CASES, ("f32", "bf16")), *NARROW])
def test_debug_state(build, states, tmp_path, case, dtype):
    folder, torchs, truth = states(case, dtype)
    ours = without_updates(run_model(build, folder, tmp_path / "state", dtype))
    assert without_updates(torchs).keys() - ours.keys() == {"tokens", "targets", "first"}
    assert first_difference(ours, torchs, truth, dtype, {}) == ""


@pytest.mark.parametrize("kind", [pytest.param("naive", marks=pytest.mark.more), "kernels"])
def test_variants(build, chosen, states, tmp_path, kind):
    folder, torchs, truth = states("wide-heads", "bf16")
    ours = run_model(build, folder, tmp_path / "state", "bf16", "block", "1000000", *chosen(kind))
    assert first_difference(without_updates(ours), torchs, truth, "bf16", {}) == ""


def documents_alone(folder: Path, dtype: torch.dtype, state: dict) -> dict[str, np.ndarray]:
    """Losses and gradients of the batch by the reference model, a call per document: each begins at position
    0, where in the batch it has the positions of its row."""
    names = ("tokens", "targets", "first")
    tokens, targets, first = (torch.from_numpy(state[n]).long().view(2, -1) for n in names)
    model = ref.empty_model(ref.load_config(folder), dtype)
    load_weights(model, folder)
    cis = ref.precompute_cis(model.config, tokens.shape[1], dtype=torch.promote_types(dtype, torch.float32))
    losses = []
    for row in range(2):
        for begin in first[row].unique():
            own = first[row] == begin
            logits = model(tokens[row, own][None], cis)
            losses.append(ref.cross_entropy(logits, targets[row, own][None])[0])
    assert len(losses) > 4
    joined = torch.cat(losses)
    (joined.sum() / (targets >= 0).sum()).backward()
    found = {"losses": joined} | {f"grad.{p.name}": p.of(p.parameter.grad) for p in parts(model)}
    return {name: x.detach().double().numpy().ravel() for name, x in found.items()}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_packed_batch_is_its_documents(build, states, tmp_path, case, dtype):
    """RoPE is relative: no position begins anew. Learned positions do."""
    folder, packed, _ = states(case, dtype)
    torchs, truth = (documents_alone(folder, d, packed) for d in (ref.DTYPES[dtype], torch.float64))
    ours = run_model(build, folder, tmp_path / "state", dtype)
    ours = {name: x for name, x in ours.items() if name in truth}
    assert ours.keys() == truth.keys()
    assert first_difference(ours, torchs, truth, dtype, {}) == ""


# Runs


@pytest.fixture(scope="module")
def marked(tmp_path_factory) -> dict:
    """Flags of runs on a walk over bytes, documents of which begin with the tokenizer's mark, 256."""
    folder = tmp_path_factory.mktemp("marked")
    rng = np.random.default_rng(3)
    walk = np.cumsum(rng.choice([1, 2, 5], 3000)).astype(np.uint32) % 97
    walk[rng.random(3000) < 0.1] = 256
    write_bin(folder / "train_000.bin", walk[:2500], 257)
    write_bin(folder / "val_000.bin", walk[2500:], 257)
    tokenizer.save(folder / tokenizer.RANK_FILE, {bytes([i]): i for i in range(256)})
    config = json.loads((ROOT / "tests/models/tied-gqa.json").read_text()) | {"vocab_size": 257}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(config))
    size = {"model": folder / "model", "steps": 4, "batch_size": 2, "total_batch_size": 4 * 16}
    return {"data": folder, "tokenizer": "auto", "document_mask": "on"} | size


def of_run(out: Path) -> dict[str, list[float]]:
    return {"losses": losses(out), "val": [e["loss"] for e in events(out, "val")]}


def same(found: Path, expected: Path, rtol: float) -> None:
    for name, numbers in of_run(expected).items():
        np.testing.assert_allclose(of_run(found)[name], numbers, rtol=rtol, err_msg=name)


def test_the_same_losses(train, marked, tmp_path):
    """By the program, on one device and on two, by train_llama3.py, and with llamac's operations in it."""
    train(*flags(out=tmp_path / "c", **marked))
    train(*flags(out=tmp_path / "off", **marked | {"document_mask": "off"}))
    with pytest.raises(AssertionError, match="losses"):
        same(tmp_path / "off", tmp_path / "c", 1e-5)
    for ops in ("torch", "llamac"):
        ref.train(parse([*reference_flags(out=tmp_path / ops, **marked), "--ops", ops]))
        np.testing.assert_allclose(losses(tmp_path / ops), losses(tmp_path / "c"), rtol=1e-5)


def test_adapters_in_fp16(train, marked, tmp_path):
    """A resumed run has the bits of one that ran through, with documents."""
    marked = marked | {"lora": 4, "dtype": "fp16", "lr": 0.01, "checkpoint_every": 2}
    train(*flags(out=tmp_path / "one", **marked))
    train(*flags(out=tmp_path / "two", **marked, resume=tmp_path / "one/step_000002"))
    assert of_run(tmp_path / "two")["losses"] == losses(tmp_path / "one")[2:]
    for path in (tmp_path / "one/step_000004").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "two/step_000004" / path.name).read_bytes()
    train(*flags(out=tmp_path / "f32", **marked | {"dtype": "f32"}))
    same(tmp_path / "one", tmp_path / "f32", 2e-3)
    train(*flags(out=tmp_path / "off", **marked | {"document_mask": "off"}))
    with pytest.raises(AssertionError, match="losses"):
        same(tmp_path / "off", tmp_path / "one", 2e-3)


def test_each_rank_masks_its_own_sequences(build, train, marked, tmp_path):
    needs(build, "GLOO")
    train(*flags(out=tmp_path / "one", **marked))
    train(*flags(out=tmp_path / "two", **marked, devices=2, zero=3, recompute="block", verify_every=2))
    same(tmp_path / "two", tmp_path / "one", 2e-6)


def test_batches_of_the_callers(marked, gpu):
    """llamac.Trainer finds the documents in them, too."""
    size = {name: x for name, x in marked.items() if name not in ("data", "tokenizer")}
    folder = marked["data"]
    size |= {"model": str(size["model"]), "seq_len": 16, "warmup_steps": 2, "gemm_cache": "none"}
    size |= {"tokenizer": str(folder / tokenizer.RANK_FILE), "val_data": "none"}
    own = llamac.Trainer(**size, train_data=str(folder / "train_*.bin"))
    given, off = (llamac.Trainer(**size | mask, train_data="none") for mask in ({}, {"document_mask": "off"}))
    loader = Loader(str(folder / "train_*.bin"), 16, 257, 2, 2, seed=own.options.seed)
    for step in range(2):
        micro = [loader.micro_batch(step, k) for k in range(2)]
        batch = [np.concatenate(x) for x in zip(*micro)]
        assert off.validate(*batch) != given.validate(*batch)
        # On a GPU, each trainer times the library's products and may choose others.
        assert own.step() == pytest.approx(given.step(*batch), rel=1e-6 if gpu else 0)


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            {"tokenizer": "none"},
            "--document-mask on: expected the tokenizer of the data, whose tokens tell documents",
        ),
        ({"vocab_size": 256}, "--document-mask on: expected tokens that begin and end a text below the"),
    ],
)
def test_refused(train, marked, tmp_path, change, expected):
    """By both, in the same line."""
    values = marked | change
    if V := values.pop("vocab_size", None):
        config = json.loads((values["model"] / "config.json").read_text()) | {"vocab_size": V}
        (tmp_path / "config.json").write_text(json.dumps(config))
        write_bin(tmp_path / "train_000.bin", np.arange(500, dtype=np.uint32) % 97, V)
        values |= {"model": tmp_path, "val_data": "none", "train_data": tmp_path / "train_000.bin"}
        values["tokenizer"] = values["data"] / tokenizer.RANK_FILE
    arguments = flags(out=tmp_path / "out", **values)
    said = train(*arguments, code=2).stderr
    options = parse(reference_flags(out=tmp_path / "out", **values))
    assert said == f"train_llama3: {refused(training.prepare, options)}\n" and expected in said
    assert not (tmp_path / "out").exists()


def test_reference_tensors_with_documents():
    """The command line takes the flag; a token 0 ends a document."""
    taken = []
    training.command_line(["--document-mask", "on"], ref.train, taken.append, "")
    assert [o.document_mask for o in taken] == ["on"]
    first = find_documents(np.array([[5, 0, 7, 0, 0, 3]]), (None, 0))
    assert first.dtype == np.int32 and first.tolist() == [[0, 0, 2, 2, 4, 5]]
