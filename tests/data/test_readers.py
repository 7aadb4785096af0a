"""Files from elsewhere: C and Python read the inputs of fuzz/inputs.py, or refuse them in one line, alike."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from damaged import damaged
from fuzz import damage, inputs, twins
from run import one_line, refused, refuses

from llamac.base import files
from llamac.base.errors import InputError, printable
from llamac.data import read_bin, tokenizer, write_bin
from llamac.model import hf
from llamac.model.config import load_config
from llamac.profile import profile
from llamac.report import log, plot
from llamac.training.trainer import Trainer

C_READERS = sorted(set(inputs.SEEDS) - {"profile"})


@pytest.fixture(scope="module")
def verdicts(build, tmp_path_factory):
    """{(reader, name): why C refuses it} of all inputs."""
    folder, found = tmp_path_factory.mktemp("inputs"), {}
    for reader in C_READERS:
        chosen = [(name, content) for which, name, content in inputs.inputs() if which == reader]
        paths = [folder / f"{reader}_{k}" for k in range(len(chosen))]
        for path, (_, content) in zip(paths, chosen):
            path.write_bytes(content)
        lines = twins.refusals_in_c(build / "read_inputs", reader, paths)
        found |= {(reader, name): line for (name, _), line in zip(chosen, lines)}
    return found


@pytest.mark.program
@pytest.mark.parametrize("reader", C_READERS)
def test_c_survives(verdicts, reader):
    """read_inputs itself requires one line of an error; seeds are what each reader is for."""
    for name in inputs.SEEDS[reader]:
        refused = (reader, name) in {("toml", "table"), ("tokens", "empty")}
        assert bool(verdicts[reader, name]) == refused, f"{name}: {verdicts[reader, name]}"
    assert any(verdicts[reader, name] for name in inputs.REGRESSIONS.get(reader, {})) or reader == "log"


@pytest.mark.program
@pytest.mark.parametrize("reader", C_READERS)
def test_c_survives_damage(build, tmp_path, reader):
    """Cut or changed files are read or refused in one line; cut ones of binary formats are refused."""
    rng, contents, cuts = random.Random(reader), [], 0
    for seed in inputs.SEEDS[reader].values():
        cut = [seed[:end] for end in range(0, len(seed), max(1, len(seed) // 200))]
        if reader in ("safetensors", "tokens", "vocabulary", "questions"):
            contents[:0], cuts = cut, cuts + len(cut)
        else:
            contents += cut
        contents += [damaged(rng, seed) for _ in range(100)]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents):
        path.write_bytes(content)
    verdicts = twins.refusals_in_c(build / "read_inputs", reader, paths)
    assert all(verdicts[:cuts]) and (any(verdicts[cuts:]) or reader == "log")


@pytest.mark.parametrize("reader", [reader for reader in twins.TWINS if reader in C_READERS])
def test_c_and_python_agree(verdicts, reader):
    chosen = [(name, content) for which, name, content in inputs.inputs() if which == reader]
    contents = [content for _, content in chosen]
    assert twins.differences(reader, contents, [verdicts[reader, name] for name, _ in chosen]) == []


def test_python_alone():
    contents = [content for which, _, content in inputs.inputs() if which == "profile"]
    assert twins.differences("profile", contents, [""] * len(contents)) == []


@pytest.mark.parametrize(
    "reader, name, expected",
    [
        ("toml", "assertion in a table", "line 1: expected TOML"),
        ("toml", "assertion in a table's list", "line 3: expected TOML"),
        ("index", "NUL in a name", "one.safetensors\\x00: expected a path, which has no NUL"),
        ("index", "line feed in a name", "one\\x0asafetensors: cannot open"),
        ("config", "NUL in a word", 'expected "silu", found "silu\\u0000"'),
        ("config", "NUL behind", "expected JSON, found an error at byte"),
        ("gemms", "tried overflows", "expected device, library and choices"),
        ("manifest", "tried overflows", "gemms: expected device, library and choices"),
    ],
)
@pytest.mark.program
def test_what_c_says(verdicts, reader, name, expected):
    assert expected in verdicts[reader, name]


@pytest.mark.program
def test_no_control_character_is_shown(build, tmp_path):
    """In messages of C and Python: ASCII's, C1 (U+009B), and marks that turn a text around."""
    shown = "ab\\x1b[2J\\xc2\\x9b1m\\xe2\\x80\\xae\\xe2\\x81\\xa6\\x07\\x0d\\x09é\u200d\u0100"
    text = "ab\x1b[2J\x9b1m\u202e\u2066\x07\r\té\u200d\u0100"
    assert printable(text) == shown.replace("\\x09", "\t")
    path = tmp_path / "index"
    path.write_text(json.dumps({"weight_map": {"a": text}}))
    assert f"{shown}: cannot open" in twins.refusal("index", path.read_bytes())
    assert f"{shown}: cannot open" in twins.refusals_in_c(build / "read_inputs", "index", [path])[0]


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 60 << 30)  # a hole: it takes no space on a disk
    for read in (files.read_json, files.read_bytes, files.read_text, load_config, plot.read_log, log.read):
        refuses(r"config.json: expected at most \d+ bytes, found 64", read, path)


KIND = {"a": (str, None), "b": [{"c": range(2**31)}], "d": {str: float}, "e": ({"x", "y"}, None)}


@pytest.mark.parametrize(
    "value, message",
    [
        ({"b": [], "d": {}}, ""),
        ({"a": None, "b": [{"c": 0, "more": []}], "d": {"x": 1, "y": 1.5}, "e": "x", "more": 1}, ""),
        (5, "expected an object, found 5"),
        ({"b": [], "d": {}, "a": 5}, "a: expected a string or null, found 5"),
        ({"d": {}}, "b: expected a list, found nothing"),
        ({"b": [{"c": 1}, {"c": True}], "d": {}}, "b[1].c: expected an integer from 0 to 2^31-1, found true"),
        ({"b": [{"c": 2**31}], "d": {}}, "b[0].c: expected an integer from 0 to 2^31-1, found 2147483648"),
        ({"b": [], "d": {"x": "1"}}, 'd.x: expected a number, found "1"'),
        ({"b": [], "d": {}, "e": "z"}, 'e: expected x or y or null, found "z"'),
    ],
)
def test_kinds(value, message):
    if message:
        assert refused(files.expect, value, KIND, "f") == f"f: {message}"
    else:
        assert files.expect(value, KIND, "f") is value


@pytest.mark.parametrize("count", [2, pytest.param(460, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_files(monkeypatch, count):
    """Of each reader in Python: they are read, or refused in one line. 20,000 in `make test-all`."""
    monkeypatch.setattr(damage.limited, "SECONDS", 1.0)
    for name, reader in damage.readers().items():
        assert damage.attempt(reader, "", b"") == "", name
        assert damage.check(name, reader, count, seed=1) == []


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
    """A pipe that nobody writes to would be waited for."""
    make = _pipe if kind == "pipe" else lambda path: path.mkdir() or path
    for name in ("config.json", "model.safetensors"):
        make(tmp_path / name)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    make(shards / "one.safetensors")
    for read in (
        lambda: load_config(tmp_path),
        lambda: list(hf.read_weights(tmp_path, {"a": (1,)})),
        lambda: hf.weight_files(shards),
        lambda: read_bin(make(tmp_path / "tokens.bin")),
        lambda: tokenizer.load(make(tmp_path / "tokenizer.model")),
        lambda: plot.read_log(make(tmp_path / "log.jsonl")),
        lambda: profile.read(make(tmp_path / "profile.json")),
        lambda: Trainer(make(tmp_path / "run.toml")),
    ):
        refuses(r"expected a (file, found a (device|folder)|tokenizer in the d)", read)


@pytest.mark.program
def test_the_program_waits_for_no_pipe(train, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes(inputs.LLAMA.read_bytes())
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    _pipe(model / "one.safetensors")
    write_bin(tmp_path / "train.bin", np.arange(3000) % 97, 97)
    values = {"model": model, "train-data": tmp_path / "train.bin", "seq-len": 64, "out": tmp_path / "out"}
    said = one_line(train(*(f"--{name}={value}" for name, value in values.items()), code=2))
    assert "one.safetensors: expected a file, found a device" in said


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_what_a_log_holds_is_drawn(tmp_path):
    """The largest numbers that read_log() takes, and names that are no formulas."""
    large = {"loss": 1e100, "lr": 1e100, "tokens_per_s": 1e100}
    steps = [large | {"step": 2**53 * k, "loss": (-1) ** k * 1e100} for k in (0, 1)]
    events = [{"event": "step"} | step for step in steps]
    events += [{"event": "run", "device": "$\\frac{", "parameters": 1e100, "tokens_per_step": 1e100}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    plot.draw(plot.read_log(tmp_path / "log.jsonl"), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_json_is_an_excerpt_in_messages():
    assert files.excerpt("x" * 1000) == '"' + "x" * 99 + "..."
    assert str(InputError("a\nb\0c")) == "a\\x0ab\\x00c" and len(str(InputError("x" * 10**6))) < 6000
