"""Hugging Face: the program reads folders of weights, carries tokenizers."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hf_dirs import write_weights
from run import MODEL, ROOT, events, flags, losses, one_line, reference_flags, refused
from safetensors.torch import load_file, save_file

import train_llama3 as ref
from llamac.data import tokenizer
from llamac.inference.model import Inference
from llamac.model import hf
from llamac.model.config import find_weights
from llamac.model.hf import EMBEDDING, HEAD
from llamac.training.options import parse
from llamac.training.weights import load_weights

pytestmark = pytest.mark.program


def test_a_folders_weights_are_the_default(train, data, tmp_path):
    """--init says otherwise; a folder that has none is said."""
    train(*flags(data, tmp_path / "first"))
    folder = tmp_path / "first/step_000008"
    trained = events(tmp_path / "first", "val")[-1]["loss"]

    def begin(name: str, **extra) -> tuple[float, str]:
        said = train(*flags(data, tmp_path / name, **{"model": folder, "steps": 1} | extra)).stdout
        return events(tmp_path / name, "val")[0]["loss"], said

    assert begin("default")[0] == trained
    assert events(tmp_path / "default", "start")[0]["init"] == "load"
    loss, said = begin("random", init="random")
    assert loss > trained + 0.05 and "no weights" not in said
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bare")
    bare, said = begin("new", model=tmp_path / "bare")
    assert bare == loss
    assert f"{tmp_path / 'bare'}: the directory has no weights; the initial weights are" in said
    for name, init in (("default", "auto"), ("random", "random")):
        ref.train(parse(reference_flags(data, tmp_path / f"python-{name}", model=folder, steps=1, init=init)))
        first = losses(tmp_path / f"python-{name}")
        assert first == pytest.approx(losses(tmp_path / name), rel=1e-5)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_alone(train, data, tmp_path, name):
    """They are never read; the line says how to convert them, and --init random trains without them."""
    (tmp_path / "old").mkdir()
    shutil.copy(MODEL, tmp_path / "old/config.json")
    (tmp_path / "old" / name).write_text("{}")
    line = one_line(train(*flags(data, tmp_path / "out", model=tmp_path / "old"), code=2))
    words = f"{tmp_path / 'old'}: expected model.safetensors, found {name} alone; convert it: python -c "
    convert = f"from_pretrained('{tmp_path / 'old'}', dtype='auto').save_pretrained("
    assert words in line and convert in line
    options = parse(reference_flags(data, tmp_path / "p", model=tmp_path / "old"))
    assert line == f"train_llama3: {refused(ref.train, options)}"
    train(*flags(data, tmp_path / "out", model=tmp_path / "old", init="random", steps=1))


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "consolidated.00.pth", "own.gguf", "pytorch_model-00001-of-2.bin"],
)
def test_weights_under_other_names(train, data, tmp_path, name):
    """A run must not begin from random weights where the folder has others."""
    (tmp_path / "model").mkdir()
    shutil.copy(MODEL, tmp_path / "model/config.json")
    for file in (name, "z.safetensors"):
        (tmp_path / "model" / file).write_bytes(b"")
    line = one_line(train(*flags(data, tmp_path / "out", model=tmp_path / "model"), code=2))
    shards = "its shards with model.safetensors.index.json"
    assert f'{tmp_path}/model: expected model.safetensors, or {shards}, found "{name}"; ' in line
    assert line == f"train_llama3: {refused(hf.weight_files, tmp_path / 'model')}"


def test_files_that_are_no_weights(train, data, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(MODEL, tmp_path / "model/config.json")
    for name in ("training_args.bin", "train_000.bin", "optimizer.pt", "tokenizer.model"):
        (tmp_path / "model" / name).write_bytes(b"")
    said = train(*flags(data, tmp_path / "out", model=tmp_path / "model", steps=1)).stdout
    assert "the directory has no weights" in said and find_weights(tmp_path / "model") == ""


OWN, UNUSED = "tie_word_embeddings is true", "does not use 2 of the files' tensors"
FILES = {
    "tied": (lambda x: x, ""),
    "own head": (lambda x: x | {HEAD: x[EMBEDDING].flip(0)}, OWN),
    "the same head": (lambda x: x | {HEAD: x[EMBEDDING].clone()}, ""),
    "head alone": (lambda x: {HEAD if n == EMBEDDING else n: w for n, w in x.items()}, ""),
    "base model": (lambda x: {n.removeprefix("model."): w for n, w in x.items()}, ""),
    "unused": (
        lambda x: x | {"model.ids": torch.arange(3), "model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
        UNUSED,
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("files", FILES)
def test_files_of_a_tied_model(tmp_path, files):
    """The C model's logits and the reference's are transformers', which takes a head that differs."""
    from transformers import AutoModelForCausalLM

    change, warning = FILES[files]
    write_weights(tmp_path, json.loads((ROOT / "tests/models/tied-gqa.json").read_text()))
    save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    tokens = torch.arange(20)[None] * 3
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits[0]
        reference = ref.empty_model(hf.load_config_of_weights(tmp_path), torch.float32)
        load_weights(reference, tmp_path)
        ours = reference(tokens, ref.precompute_cis(reference.config, 20))[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = Inference(tmp_path).next_logits(tokens[0].tolist(), 1)
    torch.testing.assert_close(torch.from_numpy(found), theirs, rtol=1e-4, atol=1e-5)
    lines = [str(each.message) for each in said]
    assert lines == [] if not warning else len(lines) == 1 and warning in lines[0]


def test_a_head_of_its_own_is_trained(train, data, tmp_path):
    """The checkpoint says that the model is not tied, and the run goes on from it."""
    config = json.loads(Path(MODEL).read_text()) | {"tie_word_embeddings": True}
    model = write_weights(tmp_path / "model", config)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {HEAD: weights[EMBEDDING].flip(0)}, model / "model.safetensors")
    line = flags(data, tmp_path / "out", model=model, steps=4)
    assert OWN in train(*line).stdout
    checkpoint = tmp_path / "out/step_000004"
    assert json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"] is False
    assert HEAD in load_file(checkpoint / "model.safetensors")
    begin = losses(tmp_path / "out")[0]
    train(*flags(data, tmp_path / "out", model=model, steps=8, resume="auto"))
    ref.train(parse(reference_flags(data, tmp_path / "p", model=model, steps=1)))
    assert losses(tmp_path / "p")[0] == pytest.approx(begin, rel=1e-5)


def test_weights_of_float16_are_read(train, data, tmp_path):
    """The bits of the same values in float32."""
    train(*flags(data, tmp_path / "first"))
    checkpoint = tmp_path / "first/step_000008"
    halves = {n: x.half() for n, x in load_file(checkpoint / "model.safetensors").items()}
    found = []
    for dtype in (torch.float16, torch.float32):
        folder = shutil.copytree(checkpoint, tmp_path / str(dtype))
        save_file({n: x.to(dtype) for n, x in halves.items()}, folder / "model.safetensors")
        out = tmp_path / f"from {dtype}"
        train(*flags(data, out, model=folder, init="load"))
        found.append(losses(out))
    assert found[0] == found[1]


def test_checkpoints_carry_the_tokenizer(train, data, tmp_path):
    """The files of the model's directory, else those beside the rank file. Links
    to known names are followed, as in Hugging Face's cache; packed conversations bring their settings."""
    tokens = shutil.copytree(data, tmp_path / "tokens")
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer.save(tokens / "tokenizer.tiktoken", ranks)
    tokenizer.export(tokens, tokenizer.load(tokens / "tokenizer.tiktoken"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(json.loads(Path(MODEL).read_text()) | {"pad_token_id": -1}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        (model / name).write_text(f"{name} of the model")
    (tmp_path / "blob").write_text("tokenizer.json of the model")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("../blob")
    (tokens / "generation_config.json").write_text("of the tokens")
    base = {"config.json", "model.safetensors", "optimizer.safetensors", "manifest.json"}
    exported = {"tokenizer.json", "tokenizer_config.json"}
    for name, extra, expected, source in (
        ("preset", {"tokenizer": "auto"}, exported | {"generation_config.json"}, tokens),
        ("without", {"tokenizer": "none"}, set(), tokens),
        ("loaded", {"tokenizer": "auto", "model": model}, {p.name for p in model.iterdir()} - base, model),
    ):
        if name == "loaded":
            (model / "other.json").symlink_to("/etc/passwd")
        # Tokens of another tokenizer than the model's are refused; the shards of `data` name none.
        line = flags(data if name == "loaded" else tokens, tmp_path / name, steps=4, **extra)
        train(*line)
        path = tmp_path / name / "step_000004"
        assert {p.name for p in path.iterdir()} == base | expected
        assert not any(p.is_symlink() for p in path.iterdir())
        for file in expected:
            assert (path / file).read_bytes() == (source / file).read_bytes()
        pad = json.loads((path / "config.json").read_text()).get("pad_token_id")
        assert pad == (-1 if name == "loaded" else None)
    # A checkpoint that the run itself moves away: its files were read before.
    again = flags(tokens, tmp_path / "loaded", model=tmp_path / "loaded/step_000004", tokenizer="none")
    train(*again)
    last = tmp_path / "loaded/step_000008"
    assert (last / "tokenizer.json").read_text() == "tokenizer.json of the model"
    assert json.loads((last / "config.json").read_text())["pad_token_id"] == -1
