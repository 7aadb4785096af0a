"""Hugging Face: transformers opens checkpoints; the program reads folders of weights, carries tokenizers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run import MODEL, ROOT, T, V, events, flags, losses, one_line

from llamac import tokenizer
from llamac.tolerance import FORWARD, violation

pytestmark = pytest.mark.program


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformers_opens_a_checkpoint(build, train, data, tmp_path, dtype):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    train(*flags(data, tmp_path / "out", dtype=dtype))
    checkpoint = tmp_path / "out/step_000008"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", attn_implementation="eager")
    assert model.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, truth = model(tokens).logits, model.double()(tokens).logits
    (tmp_path / "state").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "state" / file).write_bytes((checkpoint / file).read_bytes())
    settings = {key: "0.9" for key in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip")}
    ids = tokens.int()
    save_file({"tokens": ids, "targets": ids.clone()}, tmp_path / "state/debug_state.safetensors", settings)
    subprocess.run([build / "debug_state", tmp_path / "state", tmp_path / "ours", dtype], check=True)
    ours = load_file(tmp_path / "ours")["logits"]
    assert (
        violation(
            ours.double().numpy().reshape(truth.shape), theirs.double().numpy(), truth.numpy(), dtype, FORWARD
        )
        == ""
    )


def test_training_goes_on_from_a_hugging_face_folder(train, data, tmp_path):
    train(*flags(data, tmp_path / "first"))
    train(*flags(data, tmp_path / "second", model=tmp_path / "first/step_000008", init="load"))
    ends, begins = (
        events(tmp_path / "first", "val")[-1]["loss"],
        events(tmp_path / "second", "val")[0]["loss"],
    )
    assert ends == begins


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
    assert (
        bare == loss and f"{tmp_path / 'bare'}: the directory has no weights; the initial weights are" in said
    )
    python = [sys.executable, "train_llama3.py", "--train"]
    for name, expected in (("default", trained), ("random", loss), ("new", loss)):
        model = tmp_path / "bare" if name == "new" else folder
        extra = {"init": "random"} if name == "random" else {}
        line = flags(data, tmp_path / f"python-{name}", model=model, steps=1, **extra)
        done = subprocess.run([*python, *line], cwd=ROOT, check=True, capture_output=True, text=True)
        assert events(tmp_path / f"python-{name}", "val")[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert ("no weights" in done.stdout) == (name == "new")


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
    python = [
        sys.executable,
        "train_llama3.py",
        "--train",
        *flags(data, tmp_path / "p", model=tmp_path / "old"),
    ]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.replace("train_llama3.py", "train_llama3") == line + "\n"
    train(*flags(data, tmp_path / "out", model=tmp_path / "old", init="random", steps=1))


def test_weights_of_float16_are_read(train, data, tmp_path):
    """The bits of the same values in float32."""
    import torch
    from safetensors.torch import load_file, save_file

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
    """The files of the model's directory, else those beside the rank file; the same from both programs."""
    tokens = shutil.copytree(data, tmp_path / "tokens")
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer.save(tokens / "tokenizer.tiktoken", ranks)
    tokenizer.export(tokens, tokenizer.load(tokens / "tokenizer.tiktoken"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(json.loads(Path(MODEL).read_text()) | {"pad_token_id": -1}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        (model / name).write_text(f"{name} of the model")
    base = {"config.json", "model.safetensors", "optimizer.safetensors", "manifest.json"}
    exported = {"tokenizer.json", "tokenizer_config.json"}
    for name, extra, expected, source in (
        ("preset", {"tokenizer": "auto"}, exported, tokens),
        ("without", {"tokenizer": "none"}, set(), tokens),
        ("loaded", {"tokenizer": "auto", "model": model}, {p.name for p in model.iterdir()} - base, model),
    ):
        # Tokens of another tokenizer than the model's are refused; the shards of `data` name none.
        line = flags(data if name == "loaded" else tokens, tmp_path / name, steps=4, **extra)
        train(*line)
        python = [sys.executable, "train_llama3.py", "--train", *line, "--out", str(tmp_path / f"p-{name}")]
        subprocess.run(python, cwd=ROOT, check=True, capture_output=True)
        ours, theirs = tmp_path / name / "step_000004", tmp_path / f"p-{name}" / "step_000004"
        for path in (ours, theirs):
            assert {p.name for p in path.iterdir()} == base | expected
        for file in expected:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes() == (source / file).read_bytes()
        configs = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
        assert configs[0] == configs[1] and configs[0].get("pad_token_id") == (
            -1 if name == "loaded" else None
        )
    # A checkpoint that the run itself moves away: its files were read before.
    again = flags(tokens, tmp_path / "loaded", model=tmp_path / "loaded/step_000004", tokenizer="none")
    train(*again)
    last = tmp_path / "loaded/step_000008"
    assert (last / "tokenizer.json").read_text() == "tokenizer.json of the model"
    assert json.loads((last / "config.json").read_text())["pad_token_id"] == -1
