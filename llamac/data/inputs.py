"""Inputs of `llamac data`: files, folders, patterns and standard input, plain or compressed.

The suffix of a name gives the format: .jsonl, .jsonlines, .ndjson and .json (JSON lines or an array, as they
begin), .parquet, .arrow, .feather, and .bin with .idx, a data set of Megatron-LM, also named by the prefix of
both. Tables of other formats are refused; anything else is text. A further suffix .gz or .zst means
compression. A folder that `datasets` wrote is read by its own list of files.
"""

import codecs
import glob
import gzip
import io
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO

from llamac.base.errors import InputError, requires
from llamac.base.files import Kind, open_file, read_json
from llamac.data import megatron

KINDS = ("text", "jsonl", "json", "parquet", "arrow", "megatron")
PACKINGS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_ENDINGS = {
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), "jsonl"),
    **{".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"},
    **dict.fromkeys((".bin", ".idx"), "megatron"),
}
_TABLES = {".csv": "CSV", ".tsv": "TSV", ".xls": "Excel", ".xlsx": "Excel", ".ods": "OpenDocument"}
# The first bytes of files, by which they are known under any name.
_SIGNATURES = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PAR1": "Parquet", b"ARROW1": "Arrow"}
_NAMES = {
    "gz": "gzip",
    "zst": "Zstandard",
    "jsonl": "JSON lines",
    "json": "JSON",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "text": "UTF-8 text",
}
STDIN = "-"
_OWN_FILE = Kind(
    "the name of a file in its folder",
    lambda name: type(name) is str and Path(name).name == name and name not in ("", ".", ".."),
)
# A byte of Zstandard can become 32 KiB: what is fed at once bounds the memory.
_ZSTD_FEED = 1 << 11
_CHUNK = 1 << 20
_MOST_FIRST_LINE = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """A file (path "-": standard input), what it holds (of KINDS) and how it is compressed: "", gz or zst."""

    path: str
    kind: str
    packing: str = ""
    optional: bool = False  # out of a folder: left out where it is no text

    @property
    def once(self) -> bool:
        """Whether it can be read once only."""
        return self.path == STDIN

    @property
    def bytes(self) -> int | None:
        """Of the file as it lies there; None: unknown."""
        return None if self.once or self.kind == "hub" else os.path.getsize(self.path)


class _Unpacked(io.RawIOBase):
    """Bytes of chunks; `source` is the file that they come from, whose position says how much was read."""

    def __init__(self, chunks: Iterator[bytes], source: IO[bytes]):
        self._chunks, self.source, self._rest = chunks, source, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        n = min(len(buffer), len(self._rest))
        buffer[:n], self._rest = self._rest[:n], self._rest[n:]
        return n

    def close(self) -> None:
        if self.source is not sys.stdin.buffer:
            self.source.close()
        super().close()


def _gzip_chunks(path: str, source: IO[bytes]) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=source, mode="rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected gzip, found damaged data: {error}") from None


def _zstd_chunks(path: str, source: IO[bytes]) -> Iterator[bytes]:
    zstandard = requires("zstandard", path)
    frame, fed = zstandard.ZstdDecompressor().decompressobj(), b""
    begun = False
    try:
        while fed := fed or source.read(_ZSTD_FEED):
            begun = True
            if chunk := frame.decompress(fed):
                yield chunk
            fed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: expected Zstandard, found damaged data: {error}") from None
    if begun:
        raise InputError(f"{path}: expected Zstandard, found damaged data: it ends within a frame")


def _plain_chunks(path: str, source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK):
        yield chunk


_UNPACK = {"": _plain_chunks, "gz": _gzip_chunks, "zst": _zstd_chunks}


class Stream(io.BufferedReader):
    """The unpacked bytes of a file, and how many bytes of the file itself were read."""

    def __init__(self, file: InputFile):
        self._source: IO[bytes] = sys.stdin.buffer if file.path == STDIN else open_file(file.path)
        super().__init__(_Unpacked(_UNPACK[file.packing](file.path, self._source), self._source), _CHUNK)

    def consumed(self) -> int:
        return self._source.tell() if self._source.seekable() else 0

    def skip(self, count: int) -> int:
        """Leave out `count` bytes; how many lines end in them."""
        lines = 0
        while count and (chunk := self.read(min(count, _CHUNK))):
            count -= len(chunk)
            lines += chunk.count(b"\n")
        return lines


def open_seekable(file: InputFile) -> BinaryIO:
    """The file, for formats that are not read from front to back; unpacked on disk where it is compressed."""
    if not file.packing and file.path != STDIN:
        return open_file(file.path)
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115
    with Stream(file) as stream:
        while chunk := stream.read(_CHUNK):
            unpacked.write(chunk)
    unpacked.seek(0)
    return unpacked  # type: ignore[return-value]


def _kind_of_json(file: InputFile) -> str:
    """json where it begins with an array, or with an object of several lines in a file that is not called
    lines; "" where it begins with neither; else jsonl.
    """
    line = b"\n"
    with Stream(file) as stream:
        while line and not line.strip():
            line = stream.readline(_MOST_FIRST_LINE).removeprefix(codecs.BOM_UTF8)
    begin = line.lstrip()[:1]
    if begin == b"[":
        return "json"
    if file.kind == "jsonl" or not line or len(line) == _MOST_FIRST_LINE:
        return "jsonl"
    try:
        return "jsonl" if isinstance(json.loads(line), dict) else ""
    except (ValueError, RecursionError):
        return "json" if begin == b"{" else ""


def _signature(beginning: bytes) -> str:
    return next((name for magic, name in _SIGNATURES.items() if beginning.startswith(magic)), "")


def _check_signature(file: InputFile) -> None:
    """A file that is not what its name says is refused before it is read: its messages would be a riddle."""

    def refuse(expected: str, found: str) -> None:
        raise InputError(f"{file.path}: expected {expected}, as its name says, found {found}")

    with open_file(file.path) as raw:
        beginning = raw.read(8)
    if not beginning:
        return  # no documents
    found = _signature(beginning)
    if file.packing:
        if found != _NAMES[file.packing]:
            refuse(_NAMES[file.packing], found or "something else")
        with Stream(file) as stream:
            beginning = stream.read(8)
        found = _signature(beginning)
    expected = _NAMES[file.kind]
    is_stream = file.kind == "arrow" and beginning.startswith(b"\xff\xff\xff\xff")
    if found != (expected if file.kind in ("parquet", "arrow") and not is_stream else ""):
        refuse(expected, found or "something else")


def describe(path: str, kind: str = "auto") -> InputFile:
    """What a file is, by its name and its beginning; `kind` is the user's word. Raises InputError."""
    name = Path(path)
    packing = PACKINGS.get(name.suffix.lower(), "")
    ending = Path(name.stem).suffix.lower() if packing else name.suffix.lower()
    found = _ENDINGS.get(ending, "text") if kind == "auto" else kind
    if kind == "auto" and ending in _TABLES:
        write = "pandas.read_csv(FILE, sep=None, engine='python').to_json(NEW, orient='records', lines=True)"
        help = f"`{write}` writes JSON lines, and --format text takes the file as one text"
        expected = "text, JSON lines, Parquet or Arrow"
        raise InputError(f"{path}: expected {expected}, found {_TABLES[ending]}: {help}")
    if found == "megatron":
        if packing:
            raise InputError(f"{path}: expected Megatron's .bin and .idx unpacked, found {_NAMES[packing]}")
        return InputFile(megatron.find(path), found)
    file = InputFile(path, found, packing)
    _check_signature(file)
    if kind == "auto" and found in ("json", "jsonl"):
        file = replace(file, kind=_kind_of_json(file))
    if not file.kind:
        expected = "JSON lines or a JSON array"
        raise InputError(f"{path}: expected {expected}, found other text: --format text takes it as text")
    return file


def _describe_stdin(kind: str) -> InputFile:
    if kind == "megatron":
        raise InputError("-: expected the prefix of Megatron's .bin and .idx, found standard input")
    beginning = sys.stdin.buffer.peek(64)[:64]  # type: ignore
    packing = {"gzip": "gz", "Zstandard": "zst"}.get(_signature(beginning), "")
    if kind == "auto" and packing:
        found = f"{_NAMES[packing]}: name its format with --format"
        raise InputError(f"-: expected text or JSON lines, found {found}")
    if kind == "auto":
        kind = {"Parquet": "parquet", "Arrow": "arrow"}.get(_signature(beginning), "")
        kind = kind or ("jsonl" if beginning.lstrip().startswith(b"{") else "text")
        kind = "json" if re.match(rb"\s*\[\s*\{", beginning) else kind
    return InputFile(STDIN, kind, packing)


def _datasets_folder(folder: Path, split: str) -> list[InputFile] | None:
    """The files of a folder that datasets' save_to_disk wrote; None where it is none."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json", {"splits": [str]})["splits"]
        if split not in splits:
            raise InputError(f"{folder}: expected the split {split}, found {', '.join(splits)}: --split")
        folder = folder / split
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    state = read_json(folder / "state.json", {"_data_files": [{"filename": _OWN_FILE}]})
    return [describe(str(folder / entry["filename"]), "arrow") for entry in state["_data_files"]]


def _folder(folder: Path, out: Path, kind: str) -> tuple[list[InputFile], list[tuple[str, str]]]:
    """(files of a folder by name, without hidden ones and `out`; (path, reason) of those left out)."""
    files, refused = [], []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file() or out in path.resolve().parents:
            continue
        if path.suffix == ".bin" and path.with_suffix(".idx").exists():
            continue  # the .idx stands for both
        try:
            files.append(replace(describe(str(path), kind), optional=True))
        except InputError as error:
            refused.append((str(path), str(error).removeprefix(f"{path}: ")))
    return files, refused


def find(name: str, out: Path, kind: str = "auto", split: str = "train"):
    """(the files of one argument, (path, reason) of files left out). Raises InputError if there is none."""
    if name == STDIN:
        return [_describe_stdin(kind)], []
    path = Path(name)
    if path.is_dir():
        saved = _datasets_folder(path, split)
        files, refused = (saved, []) if saved is not None else _folder(path, out.resolve(), kind)
        if not files:
            others = f"{len(refused)} others: {': '.join(refused[0])}" if refused else "none"
            raise InputError(f"{path}: expected files of text, JSON lines, Parquet or Arrow, found {others}")
        return files, refused
    if path.exists():
        return [describe(name, kind)], []
    if os.path.exists(name + ".bin") or os.path.exists(name + ".idx"):
        return [describe(name + ".idx", kind)], []
    matches = sorted(found for found in glob.glob(name, recursive=True) if os.path.isfile(found))
    if not matches:
        raise InputError(f"{name}: no such file or folder, and no pattern that matches a file")
    return list(dict.fromkeys(describe(match, kind) for match in matches)), []
