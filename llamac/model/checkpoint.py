"""`llamac checkpoint list OUT` and `... verify OUT|DIR` list checkpoints and verify their files.

They need no GPU and no PyTorch, and write nothing. The rule is that of the C program
(open_checkpoint in csrc/checkpoint/checkpoint.cpp); tests/train/test_output.py compares them.
"""

import argparse
import os
import re
import stat
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from llamac.base.arguments import Parser
from llamac.base.errors import InputError, printable
from llamac.base.files import MOST_JSON, open_file, read_bytes

_PIECE = 1 << 20
_DAMAGED = re.compile(r"damaged_(step_\d+)(_\d+)?")


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder, step_000100; None for other names."""
    found = re.fullmatch(r"step_(\d{6}|[1-9]\d{6,17})", name, re.ASCII)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class File:
    """A file as the manifest has it. problem: how it differs from that; "": not at all."""

    name: str
    bytes: int
    xxh3: str
    problem: str = ""


@dataclass
class Checkpoint:
    """The state of a checkpoint. problem: of the manifest, or of the first file that has one; "": complete.
    readable: whether it could be read; else the problem says why, and nothing is known about the checkpoint.
    """

    path: Path
    step: int | None = None
    files: list[File] = field(default_factory=list)
    problem: str = ""
    readable: bool = True

    @property
    def state(self) -> str:
        if not self.problem:
            return "complete"
        return f"{'damaged' if self.readable else 'cannot be read'}: {self.problem}"


class _Damage(Exception):
    pass


MANIFEST = "manifest.json"


def _manifest(path: Path) -> tuple[int, list]:
    """The step, and name, bytes and XXH3_64 of each file. Raises _Damage; InputError where it is whole, and
    of another version."""
    if (size := _size(path)) > MOST_JSON:
        raise _Damage(f"{path.name}: expected at most {MOST_JSON} bytes, found {size}")
    from llamac.base.native import native  # find_model() of a model without a manifest needs none

    found = native.manifest(read_bytes(path, MOST_JSON), str(path))
    if found is None:
        raise _Damage(f"{path.name}: its checksum is not that of its text: it was changed or cut short")
    return found


def _size(path: Path) -> int:
    """Of a file. Raises _Damage where there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _Damage(f"{path.name}: expected a file, found none") from None
    if not stat.S_ISREG(status.st_mode):
        raise _Damage(f"{path.name}: expected a file, found something else")
    return status.st_size


def _problem(path: Path, expected: File, sums: bool) -> str:
    try:
        size = _size(path)
    except _Damage as damage:
        return str(damage)
    if size != expected.bytes:
        return f"{path.name}: expected {expected.bytes} bytes, found {size}"
    if not sums:
        return ""
    digest = xxhash.xxh3_64()
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != expected.xxh3:
        return f"{path.name}: expected the XXH3 checksum {expected.xxh3}, found {digest.hexdigest()}"
    return ""


def _compare(found: Checkpoint, sums: bool) -> None:
    found.step, files = _manifest(found.path / MANIFEST)
    if step_of(found.path.name) not in (None, found.step):  # a copy under another name would hide newer ones
        expected = f"expected {step_of(found.path.name)}, as its folder's name says, found {found.step}"
        raise _Damage(f"{MANIFEST}: step: {expected}")
    for file in (File(*record) for record in files):
        problem = _problem(found.path / file.name, file, sums)
        found.files.append(File(file.name, file.bytes, file.xxh3, problem))
        found.problem = found.problem or problem


def check(path: str | Path, sums: bool = True) -> Checkpoint:
    """Compare a checkpoint's files with its manifest: sizes, and checksums unless not `sums`."""
    found = Checkpoint(Path(path))
    try:
        _compare(found, sums)
    except _Damage as damage:
        found.problem = str(damage)
    except OSError as error:
        found.problem, found.readable = f"{error.filename or path}: {error.strerror}", False
    except InputError as error:  # of another version
        found.problem, found.readable = str(error), False
    return found


def checkpoints_in(out: str | Path) -> list[Path]:
    """The checkpoints of an output folder, oldest first, then damaged ones that a resume set aside, then
    those of earlier runs in previous_N. A link to a folder elsewhere is a checkpoint, too.
    """
    out = Path(out)
    names = os.listdir(out)
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    found = [out / name for _, name in steps]
    found += [out / name for name in sorted(filter(_DAMAGED.fullmatch, names))]
    earlier = sorted((int(n[1]), n[0]) for n in map(re.compile(r"previous_(\d+)").fullmatch, names) if n)
    for _, name in earlier:
        if (out / name).is_dir():
            found += checkpoints_in(out / name)
    return found


def find_model(directory: str | os.PathLike) -> Path:
    """The directory itself or, of the output folder of a run, its newest complete checkpoint, as --resume
    auto takes it, but without its checksums. Raises InputError where all are damaged."""
    out = Path(directory)
    if not out.is_dir() or (out / "config.json").exists():
        return out
    found = [out / name for name in os.listdir(out) if step_of(name) is not None]
    problems: list[str] = []
    for path in sorted(found, key=lambda path: -step_of(path.name)):  # type: ignore[operator]
        checkpoint = check(path, sums=False)
        if not checkpoint.problem:
            for problem in problems:
                warnings.warn(f"{problem}; {path} is used instead", stacklevel=2)
            return path
        problems.append(f"{path} is {checkpoint.state}")
    if problems:
        raise InputError(f"{out}: expected a complete checkpoint, found none: {problems[0]}")
    return out


def _chosen(path: Path) -> list[Path]:
    """The checkpoints of a command's argument: one, or all of an output folder."""
    if (path / MANIFEST).exists() or step_of(path.name) is not None or _DAMAGED.fullmatch(path.name):
        return [path]
    if not path.is_dir():
        raise InputError(f"{path}: expected a folder, found {'a file' if path.exists() else 'none'}")
    found = checkpoints_in(path)
    if not found:
        raise InputError(f"{path}: expected checkpoints (step_000100), found none")
    return found


def main() -> None:
    parser = Parser(
        "checkpoint",
        "List the checkpoints of a run, and verify their files.",
        epilog="Exit status: 0, all are complete; 1, one is damaged (damaged_* counts only as argument);\n"
        "2, one cannot be read, or there is none. Checkpoints in previous_*/ are included.",
    )
    kind = argparse.ArgumentParser
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify", parser_class=kind)
    listing = commands.add_parser("list", help="print a line per checkpoint: name, step, MiB, state")
    listing.add_argument("path", metavar="OUT", type=Path, help="a run's output folder")
    listing.add_argument("--quick", action="store_true", help="compare sizes, and read only the manifest")
    verifying = commands.add_parser("verify", help="print a line per file: size, checksum, state")
    which = "a run's output folder, or one checkpoint"
    verifying.add_argument("path", metavar="OUT|DIR", type=Path, help=which)
    arguments = parser.parse_args()
    out: Path = arguments.path
    paths = _chosen(out)
    width, status = max(len(str(path)) for path in paths), 0
    if arguments.command == "list":
        print(f"{'checkpoint'.ljust(width)}  {'step':>9}  {'MiB':>10}  state")
    for path in paths:
        found = check(path, not getattr(arguments, "quick", False))
        if arguments.command == "list":
            step = "-" if found.step is None else found.step
            mib = f"{sum(file.bytes for file in found.files) / 2**20:.1f}"
            print(printable(f"{str(path).ljust(width)}  {step:>9}  {mib:>10}  {found.state}"), flush=True)
        else:
            for file in found.files:
                state = file.problem or f"{file.bytes} bytes, {file.xxh3}"
                print(printable(f"{path / file.name}  {state}"))
            print(printable(f"{path}  {found.state}"), flush=True)
        if not found.readable:
            status = 2
        elif found.problem and (path == out or not _DAMAGED.fullmatch(path.name)):
            status = max(status, 1)
    sys.exit(status)
