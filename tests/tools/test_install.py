"""An installed program that was moved since: presets, run configurations, and who draws its plot. The package
without torch."""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT
from hf_dirs import write_directory
from run import events, flags, refuses

from llamac import Error
from llamac.base import native


@pytest.fixture(scope="module")
def moved(build, tmp_path_factory) -> Path:
    """The prefix of an installation."""
    folder = tmp_path_factory.mktemp("installation")
    command = ["cmake", "--install", build, "--prefix", folder / "first"]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "first").rename(folder / "moved")


def test_what_is_installed(build, moved):
    files = {str(path.relative_to(moved)) for path in moved.rglob("*") if path.is_file()}
    configs = [*(ROOT / "configs").glob("*.toml"), *(ROOT / "configs/models").glob("*.json")]
    shared = {f"share/llamac/{path.relative_to(ROOT)}" for path in configs} | {"share/llamac/LICENSE"}
    assert files == {"bin/train_llama3"} | shared
    cache = (build / "CMakeCache.txt").read_text()
    if "LLAMAC_PLATFORM:STRING=cpu" in cache and "LLAMAC_SANITIZE:STRING=\n" in cache:  # no debugger's paths
        assert str(ROOT).encode() not in (moved / "bin/train_llama3").read_bytes()


@pytest.mark.program
def test_presets_and_configurations_by_name(moved, train, data, tmp_path):
    program = {"program": moved / "bin/train_llama3", "cwd": tmp_path}
    small = flags(data, tmp_path / "out", model="tiny", steps=2, seq_len=8, checkpoint_every=2)
    train(*small, **program)
    assert [event["step"] for event in events(tmp_path / "out", "step")] == [1, 2]
    assert (tmp_path / "out/step_000002/model.safetensors").exists()

    by_name = ("--config", "llama3.2-1b.toml", "--print-config")
    assert 'model = "llama3.2-1b"' in train(*by_name, **program).stdout
    (tmp_path / "llama3.2-1b.toml").write_text('model = "tiny"\n')
    assert 'model = "tiny"' in train(*by_name, **program).stdout
    for missing in ("none.toml", "elsewhere/llama3.2-1b.toml", "tables/flags.toml"):
        refused = train("--config", missing, code=2, **program)
        assert refused.stderr == f"train_llama3: {missing}: cannot open: No such file or directory\n"


@pytest.fixture
def said(moved, train, data, tmp_path):
    """The part about the plot of a short run's last line, with these variables of the environment."""

    def run(**environment: str) -> str:
        short = flags(data, tmp_path / "out", steps=1, checkpoint_every=-1, val_data="none")
        program = {"program": moved / "bin/train_llama3", "cwd": tmp_path}
        done = train(*short, **program, env=os.environ | environment)
        return done.stdout.strip().partition("log.jsonl, ")[2]

    return run


def write_python(path: Path, status: int) -> Path:
    """A program that notes its arguments in PATH.log."""
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.log\nexit {status}\n')
    path.chmod(0o755)
    return path


def test_the_plot_of_a_named_python(moved, said, tmp_path):
    out = tmp_path / "out"
    for status, expected in [
        (0, f"plot {out}/loss.png"),
        (2, "no plot (there are no steps in the log)"),
        (1, f"has no llamac with matplotlib; run `python -m llamac plot {out}` with a Python that has, or "
            "name it by LLAMAC_PYTHON)"),
    ]:  # fmt: skip
        python = write_python(tmp_path / f"python{status}", status)
        assert said(LLAMAC_PYTHON=str(python)).endswith(expected)
        assert Path(f"{python}.log").read_text() == f"-m llamac plot {out}\n"


def test_the_plot_of_other_pythons(moved, said, tmp_path):
    """LLAMAC_PYTHON, also if it fails; else the one beside the program; else the one on PATH."""
    (tmp_path / "bin").mkdir()
    write_python(tmp_path / "bin/python3", 0)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    assert said(LLAMAC_PYTHON="", PATH="").startswith("no plot (python3 has no llamac")
    assert said(LLAMAC_PYTHON="", PATH=path).startswith("plot ")
    beside = write_python(moved / "bin/python3", 1)
    try:
        assert said(LLAMAC_PYTHON="", PATH=path).startswith(f"no plot ({beside} has no llamac")
        assert said(LLAMAC_PYTHON="/none/python", PATH=path).startswith("no plot (/none/python has no llamac")
    finally:
        beside.unlink()


def test_the_plot_is_drawn(said, tmp_path):
    pytest.importorskip("matplotlib")
    assert said(LLAMAC_PYTHON=sys.executable, PYTHONPATH=str(ROOT)).startswith("plot ")
    assert (tmp_path / "out/loss.png").stat().st_size > 1000


# The checkout with llamac._native as `make train_llama3` makes it: without site, no installed one is found.
ALONE = f"import sys; sys.path[:0] = {[str(ROOT), sysconfig.get_path('purelib')]!r}; "


def run_alone(program: str, *arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-S", "-c", ALONE + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "first, second",
    [("torch", "llamac.base.native"), pytest.param("llamac.base.native", "torch", marks=pytest.mark.more)],
)
def test_torch_and_the_module_of_the_program(first, second):
    """In both orders, both compute; one with a GPU runtime of its own is refused."""
    program = f"import {first}, {second}, torch; from llamac.base.native import facts, native; "
    program += (
        "rate = native.learning_rate(1, 1.0, 0.1, 2, 9, 'cosine'); product = torch.ones(2) @ torch.ones(2); "
    )
    program += "print(native.__file__, facts['torch'] or 'alone', rate, product.item())"
    if json.loads((ROOT / "llamac/_native.json").read_text())["kernels"] != "cpu":
        assert "call `make native`" in run_alone(program, code=1)
        return
    path, *found = run_alone(program).split()
    assert Path(path).parent == ROOT / "llamac" and found == ["alone", "0.5", "2.0"]


@pytest.mark.parametrize(
    "kernels, built, installed, refused",
    [
        ("nvidia", "", True, "expected it built beside PyTorch, .*: in llamac's folder, call `make native`"),
        ("amd", "", True, "expected it built beside PyTorch"),
        ("amd", "", False, ""),
        ("nvidia", "2.13.0", True, ""),
        ("cpu", "", True, ""),
    ],
)
def test_a_process_has_one_runtime_of_a_gpu(monkeypatch, kernels, built, installed, refused):
    facts = {"torch": built, "kernels": kernels, "libraries": []}
    monkeypatch.setattr(native, "read_json", lambda *_: facts)
    monkeypatch.setattr(
        native, "find_spec", lambda name: find_spec(name) if installed or name != "torch" else None
    )
    if refused:
        with pytest.raises(Error, match=refused):
            native._read_facts()
    else:
        assert native._read_facts() == facts


def test_a_module_that_is_missing(monkeypatch):
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    refuses(r"^llamac\._native: expected .*, found none; .*`make train_llama3`", native._read_facts)


COMMANDS = """
import json
sys.modules["torch"] = None
from llamac.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""


def test_commands_without_torch(tmp_path):
    """All but bench."""
    model = str(write_directory(tmp_path / "model"))
    text, rows = str(tmp_path / "text.txt"), str(tmp_path / "rows.jsonl")
    Path(text).write_text("the cat sat on the mat")
    Path(rows).write_text('{"prompt": "the cat", "completion": " sat"}')
    commands = [
        ["generate", model, "--prompt", "the cat", "--tokens", "2"],
        ["finetune", model, rows, "--prepare", str(tmp_path / "tokens")],
        ["generate", model, "--chat", "--prompt", "the cat", "--tokens", "2"],
        ["eval", model, "--text", text],
        ["export", "gguf", model, str(tmp_path / "model.gguf")],
        ["data", text, "--tokenizer", model, "--out", str(tmp_path / "data")],
        ["doctor"],
    ]
    said = run_alone(COMMANDS, json.dumps(commands))
    assert "ok    llamac._native: built without PyTorch, for " in said
