"""The readers in Python, as functions of bytes, and whether they and those in C (readers.cpp) agree."""

import io
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from glob import escape
from pathlib import Path

import numpy as np
from fuzz.inputs import safetensors, tensor

from llamac.base.errors import InputError
from llamac.data import Loader, tokenizer
from llamac.model import hf
from llamac.model.config import load_config
from llamac.profile import profile
from llamac.report import plot

# In C alone, or with another purpose in C: Python's verdict may be another one, but it is a verdict.
APART = {"log", "gemms", "profile"}


def _put(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return str(path)


def _safetensors(folder: Path, content: bytes) -> None:
    path = _put(folder, "model.safetensors", content)
    header = hf.read_header(path)
    floats = {name: row.shape for name, row in header.items() if row.type.mantissa_bits}
    for name, values in hf.read_weights(folder, floats):
        assert tuple(values.shape) == floats[name]


def _index(folder: Path, content: bytes) -> None:
    index = folder / "index"
    for shard, name in (("one", "a"), ("two", "b")):
        _put(index, f"{shard}.safetensors", safetensors({name: tensor("F32", [1], 0, 4)}, b"1234"))
    _put(index, "model.safetensors.index.json", content)
    found = hf.weight_files(index)
    list(hf.read_weights(index, {name: (1,) for names in found.values() for name in names}))


def _config(folder: Path, content: bytes) -> None:
    load_config(_put(folder, "config.json", content))


def _tokens(folder: Path, content: bytes) -> None:
    loader = Loader(escape(_put(folder, "tokens.bin", content)), 4, 300, 2)
    for step in range(min(-(-loader.sequences // 2), 32)):
        tokens, targets = loader.micro_batch(step, 0)
        assert np.all((tokens >= 0) & (tokens < 300))
        assert np.all((targets >= 0) & (targets < 300))


def _tokenizer(folder: Path, content: bytes) -> None:
    if content[:1] == b"+":
        path = folder / "ranks"
        tokenizer.save(path, {bytes([byte]): byte for byte in range(256)})
        content = path.read_bytes() + content[1:]
    tokenizer.load(_put(folder, "tokenizer.tiktoken", content)).decode([0, 10**9])


def _log(folder: Path, content: bytes) -> None:
    events = plot.read_log(Path(_put(folder, "log.jsonl", content)))
    if any(event.get("event") == "step" for event in events):
        for field in ("loss", "lr"):
            plot.smooth(np.array(plot.series(events, "step", field)[1], float))
        plot._title(events)


def _profile(folder: Path, content: bytes) -> None:
    with redirect_stdout(io.StringIO()):
        profile.report(profile.read(_put(folder, "profile.json", content)))


TWINS: dict[str, Callable[[Path, bytes], None]] = {
    "safetensors": _safetensors,
    "index": _index,
    "config": _config,
    "tokens": _tokens,
    "tokenizer": _tokenizer,
    "log": _log,
    "profile": _profile,
}


def refusal(reader: str, content: bytes) -> str:
    """Why Python's reader refuses the bytes; "": it does not. Any other exception goes through."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            TWINS[reader](Path(folder), content)
        except InputError as error:
            assert len(str(error).splitlines()) == 1, error
            return str(error)
    return ""


def refusals_in_c(read_inputs: Path, reader: str, paths: list[Path]) -> list[str]:
    """The same of the reader in C, for files."""
    found: list[str] = []
    for begin in range(0, len(paths), 500):
        command = [str(read_inputs), reader, *map(str, paths[begin : begin + 500])]
        done = subprocess.run(command, capture_output=True, timeout=600)
        lines = done.stdout.decode("utf-8", "replace").split("\n")[:-1]
        at = paths[min(begin + len(lines), len(paths) - 1)]
        assert done.returncode == 0, f"{at}: exit code {done.returncode}: {done.stderr.decode()}"
        found += ["" if line == "accepted" else line for line in lines]
    assert len(found) == len(paths)
    return found


def differences(reader: str, contents: list[bytes], in_c: list[str]) -> list[str]:
    """A line for each input on whose acceptance the two disagree, or that Python does not survive."""
    lines = []
    for content, theirs in zip(contents, in_c):
        try:
            ours = refusal(reader, content)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            lines.append(f"{reader} {content[:200]!r}: {type(error).__name__}: {str(error)[:200]}")
            continue
        known = reader in APART or "packed documents: only" in ours
        if not known and bool(ours) != bool(theirs):
            lines.append(f"{reader} {content[:300]!r}: C: {theirs[:200]!r}, Python: {ours[:200]!r}")
    return lines


def compare(read_inputs: Path, corpus: Path) -> bool:
    """Whether both read CORPUS/READER/* alike; prints what differs."""
    failed = 0
    for reader in TWINS:
        paths = sorted(path for path in (corpus / reader).glob("*") if path.is_file())
        contents = [path.read_bytes() for path in paths]
        in_c = [""] * len(paths) if reader == "profile" else refusals_in_c(read_inputs, reader, paths)
        lines = differences(reader, contents, in_c)
        failed += len(lines)
        print(
            f"{reader}: {len(paths)} inputs in C and Python, {len(lines)} differ",
            *lines,
            sep="\n  ",
            flush=True,
        )
    return failed == 0
