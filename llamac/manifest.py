"""Written twice on purpose: csrc/train/manifest.cpp has the same; tests/test_output.py compares them.

manifest.json of a checkpoint: a description of the run, and the size and hash of each file.
"""

from pathlib import Path
from typing import Any

import xxhash

from llamac.errors import InputError
from llamac.files import excerpt, parse_json

NAME = "manifest.json"
FORMATS = ("llamac checkpoint 2", "llamac checkpoint 1")  # the first is written
# The files of format 1; every format has at least one file of each role.
_FIRST_FILES = {"config.json": "config", "model.safetensors": "weights", "optimizer.safetensors": "optimizer"}
_LEAST = {"step": 0, "data_position": 0, "seed": 0, "world_size": 1, "seq_len": 1, "batch_size": 1}
_LEAST |= {"sequences": 0, "total_batch_size": 1}
_CHOICES = {"dtype": ("f32", "bf16"), "grad_dtype": ("f32", "bf16"), "optimizer_state": ("f32", "bf16")}
_CHOICES |= {"master_weights": ("on", "off")}
_KNOWN = {"format", *_LEAST, *_CHOICES, "kernels", "gemms", "config", "files", "xxh3"}


def _seal(text: bytes) -> bytes:
    """The manifest's last line: a checksum of all bytes before it, so that no change is unseen."""
    return f',\n "xxh3": "{xxhash.xxh3_64_hexdigest(text)}"\n}}\n'.encode()


def is_whole(content: bytes) -> bool:
    """Whether it has a manifest's checksum at its end, and it is right: nothing was changed or cut short."""
    end = content.rfind(b",\n")
    return end >= 0 and content[end:] == _seal(content[:end])


def parse(text: bytes, where: str) -> dict[str, Any]:
    """The fields of a whole manifest; files, also those of format 1, as [{name, bytes, xxh3, role, rank}].
    Raises InputError, which `where` begins, for what content() does not write, but for unknown roles.
    """
    fields = parse_json(text, where)
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected a JSON object, found {excerpt(fields)}")
    _one_of(fields, "format", FORMATS, where)
    _only(fields, _KNOWN, where)
    for name, least in _LEAST.items():
        _integer(fields, name, least, where)
    for name, choices in _CHOICES.items():
        _one_of(fields, name, choices, where)
    for name in ("kernels", "gemms", "config"):
        _get(fields, name, dict, "an object", where)
    if fields["format"] == FORMATS[0]:
        files = _get(fields, "files", list, "a list", where)
        fields["files"] = _files(files, fields["world_size"], f"{where}: files")
    else:
        files = _get(fields, "files", dict, "an object", where)
        fields["files"] = _first_files(files, f"{where}: files")
    return fields


def _get(fields: dict, name: str, kind: type, expected: str, where: str) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        found = excerpt(value) if name in fields else "none"
        raise InputError(f"{where}: {name}: expected {expected}, found {found}")
    return value


def _integer(fields: dict, name: str, least: int, where: str) -> int:
    value = _get(fields, name, int, "an integer of at least 0", where)
    if not least <= value < 2**63:
        raise InputError(f"{where}: {name}: expected an integer from {least} to 2^63-1, found {value}")
    return value


def _one_of(fields: dict, name: str, choices: tuple[str, ...], where: str) -> None:
    value = _get(fields, name, str, "a string", where)
    if value not in choices:
        raise InputError(f"{where}: {name}: expected {' or '.join(choices)}, found {excerpt(value)}")


def _only(fields: dict, known: set[str], where: str) -> None:
    for name in fields:
        if name not in known:
            raise InputError(f"{where}: unknown field {excerpt(name)}")


def _record(record: Any, known: set[str], where: str) -> dict:
    """Bytes and hash, which both formats have."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, found {excerpt(record)}")
    _only(record, known, where)
    xxh3 = _get(record, "xxh3", str, "a string", where)
    if len(xxh3) != 16 or set(xxh3) - set("0123456789abcdef"):
        raise InputError(f"{where}: xxh3: expected 16 hexadecimal digits, found {excerpt(xxh3)}")
    _integer(record, "bytes", 0, where)
    return record


def _first_files(files: dict, where: str) -> list[dict]:
    for name in _FIRST_FILES:
        _get(files, name, dict, "an object", where)
    _only(files, set(_FIRST_FILES), where)
    found = []
    for name, role in _FIRST_FILES.items():
        record = _record(files[name], {"bytes", "xxh3"}, f"{where}: {name}")
        found.append(record | {"name": name, "role": role, "rank": None})
    return found


def _files(files: list, world_size: int, where: str) -> list[dict]:
    names: set[str] = set()
    for k, file in enumerate(files):
        at = f"{where}: {k}"
        _record(file, {"name", "bytes", "xxh3", "role", "rank"}, at)
        name = _get(file, "name", str, "a string", at)
        _get(file, "role", str, "a string", at)
        if not name or name[0] == "." or Path(name).name != name or "\\" in name or name == NAME:
            raise InputError(f"{at}: name: expected a file in the checkpoint, found {excerpt(name)}")
        if name in names:
            raise InputError(f"{at}: name: found {excerpt(name)} twice")
        names.add(name)
        if "rank" not in file:
            raise InputError(f"{at}: rank: expected null or an integer, found none")
        if file["rank"] is not None and _integer(file, "rank", 0, at) >= world_size:
            less = f"expected less than world_size {world_size}, found {file['rank']}"
            raise InputError(f"{at}: rank: {less}")
    for name, role in _FIRST_FILES.items():
        if all(file["role"] != role for file in files):
            raise InputError(f"{where}: expected a file of the role {role} ({name}), found none")
    return files
