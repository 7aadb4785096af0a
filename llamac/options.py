"""The flags of a training run, from the table configs/tables/flags.toml, which the C program also reads.

The flag names are also keys of the TOML file of --config. Flags override the file, and the file overrides the
defaults.
"""

import argparse
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import Field, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

from llamac.block import RECOMPUTED
from llamac.config import find_weights
from llamac.dtypes import TABLE
from llamac.errors import InputError
from llamac.files import read_json, read_text
from llamac.folders import CONFIGS

_TYPES = {"text": str, "integer": int, "number": float, "switch": bool, "list": tuple[str, ...]}


_TABLE = tomllib.loads((CONFIGS / "tables/flags.toml").read_text(encoding="utf-8"))["flag"]
_NO_KEYS = {row["name"] for row in _TABLE if not row.get("key", True) and row.get("only") != "c"}


def _member(row: dict) -> tuple[str, type, Field]:
    """A row as a field of Options: name, type, default, with what is accepted as metadata."""
    default = tuple(row["default"]) if row["type"] == "list" else row["default"]
    rule = {"choices": tuple(row.get("choices", ())), "below": row.get("below", math.inf)}
    rule |= {"low": row.get("min", -math.inf), "high": row.get("max", math.inf)}
    words = {name: row.get(name, "") for name in ("help", "group", "value", "only")}
    metadata = rule | words | {"key": row.get("key", True)}
    return row["name"].replace("-", "_"), _TYPES[row["type"]], field(default=default, metadata=metadata)


class Options(make_dataclass("Flags", (_member(row) for row in _TABLE if row.get("only") != "c"))):  # type: ignore[misc]
    """One training run. Field `batch_size` is the flag --batch-size and the TOML key batch-size."""

    def micro_batches(self, devices: int = 1) -> int:
        """Micro-batches of a step: total_batch_size / (batch_size·seq_len·devices). Raises InputError."""
        if self.batch_size * self.seq_len >= 2**31:
            raise InputError(
                f"--batch-size {self.batch_size} --seq-len {self.seq_len}: expected a product below 2^31"
            )
        if self.total_batch_size >= 2**48:
            raise InputError(f"--total-batch-size {self.total_batch_size}: expected less than 2^48")
        micro = self.batch_size * self.seq_len * devices
        if self.total_batch_size % micro != 0:
            raise InputError(
                f"--total-batch-size: expected a multiple of batch-size·seq-len·devices = {micro} tokens, "
                f"found {self.total_batch_size}"
            )
        return max(1, self.total_batch_size // micro)

    def to_dict(self) -> dict:
        """The resolved configuration under the flags' names."""
        return {_name(f): getattr(self, f.name) for f in fields(self) if f.metadata["key"]}

    def to_toml(self) -> str:
        """The resolved configuration; --config reads it back, here and in the C program."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items())


def _name(f: Field) -> str:
    return f.name.replace("_", "-")


def _toml(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", text) + '"'
    return repr(value)


_LETTERS = {int: "N", float: "X"}  # of values in --help
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text in UTF-8"}


def _expected(f: Field) -> str:
    """What a value of this flag must be, in words."""
    *first, last = f.metadata["choices"] or [_KINDS.get(f.type, "a list of strings")]
    low, high, below = (f.metadata[name] for name in ("low", "high", "below"))
    text = f"{', '.join(first)} or {last}" if first else last
    if math.isfinite(below):
        return f"{text} from {low} to below {below}"
    if math.isfinite(high):
        return f"{text} from {low} to {high}"
    return f"{text} of at least {low}" if math.isfinite(low) else text


def _is_text(value) -> bool:
    """Whether value is a string that UTF-8 can hold; other arguments arrive as lone surrogates."""
    return type(value) is str and not re.search(r"[\0\ud800-\udfff]", value)


def _check(f: Field, value, where: str):
    """The value if it is one this flag can take, as the flag's type. Raises InputError."""
    rule = f.metadata
    if f.type == tuple[str, ...]:
        good = type(value) is list and all(map(_is_text, value))
    elif f.type is str:
        good = _is_text(value) and (not rule["choices"] or value in rule["choices"])
    elif f.type is bool:
        good = type(value) is bool
    else:
        good = type(value) in (int, f.type) and rule["low"] <= value <= rule["high"]
        good = good and value < rule["below"] and (type(value) is float or abs(value) < 2**63)
        good = good and math.isfinite(value)
    if not good:
        raise InputError(f"{where}: expected {_expected(f)}, found {_found(value)}")
    if f.name == "recompute":
        recompute_parts(value)
    if f.name == "sample_prompt_ids":
        prompt_ids(value)
    return f.type(value)


def _found(value: Any) -> str:
    """A refused value for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, endless nesting
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= 200 else text[:200] + "..."


def prompt_ids(text: str) -> list[int]:
    """The ids of a --sample-prompt-ids list like "17,4,250"; "": []. Raises InputError."""
    parts = text.split(",") if text else []
    for part in parts:
        if not re.fullmatch(r"0*[0-9]{1,10}", part) or int(part.lstrip("0") or "0") >= 2**31:
            expected = "ids separated by commas, for example 17,4,250"
            raise InputError(f"--sample-prompt-ids: expected {expected}, found {json.dumps(part)}")
    return [int(part.lstrip("0") or "0") for part in parts]


def recompute_parts(text: str) -> dict[str, int]:
    """{part: every k-th block} of a --recompute list like "norm,block:2"; none: {}. Raises InputError."""
    parts: dict[str, int] = {}
    for part in [] if text == "none" else text.split(","):
        match = re.fullmatch(rf"({'|'.join(RECOMPUTED)}|block)|block:([0-9]{{1,19}})", part)
        if not match or (match[2] and not 1 <= int(match[2]) < 2**63):
            expected = f"none or a list of {', '.join(RECOMPUTED)}, block, block:K"
            raise InputError(f"--recompute: expected {expected}, found {part!r}")
        parts[match[1] or "block"] = int(match[2] or 1)
    return parts


def find_configuration(path: str) -> Path:
    """The file; one of llamac's run configurations where there is none and the path is a name alone."""
    own = CONFIGS / path
    is_name = Path(path).name == path and not os.path.exists(path)
    return own if is_name and os.path.exists(own) else Path(path)


def read_toml(path: str) -> dict:
    """{field name: value} of a configuration file, checked. Raises InputError."""
    text = read_text(find_configuration(path)).removeprefix("\ufeff")  # as toml++ reads it
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"--config {path}: expected TOML, found too many levels of nesting") from None
    except ValueError as error:  # also of an integer of more digits than Python reads
        raise InputError(f"--config {path}: expected TOML: {error}") from None
    return from_keys(values, path)


def read_checkpoint(directory: str | Path) -> dict:
    """{field name: value} of the run that wrote a checkpoint, checked. Raises InputError."""
    manifest = Path(directory) / "manifest.json"
    return from_keys(read_json(manifest, {"config": {}})["config"], str(manifest))


def from_keys(values: dict, where: str) -> dict:
    """{field name: value} of {flag's name: value}, checked. Raises InputError."""
    known = {_name(f): f for f in fields(Options) if f.metadata["key"]}
    return {f.name: _check(f, value, f"{where}: {key}") for f, key, value in _known(values, known, where)}


def override(options: Options, flags: dict) -> Options:
    """Options with {field name: value} over them, checked. Raises InputError."""
    known = {f.name: f for f in fields(Options) if f.metadata["key"]}

    def plain(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        return list(value) if isinstance(value, tuple) else value

    given = ((f, plain(value), name) for f, name, value in _known(flags, known, ""))
    return replace(options, **{f.name: _check(f, value, name) for f, value, name in given})


def _known(values: dict, known: dict[str, Field], where: str) -> Iterator[tuple[Field, str, Any]]:
    for key, value in values.items():
        if key not in known:
            begin = f"{where}{': ' if where else ''}unknown key {key}"
            if where and key in _NO_KEYS:
                raise InputError(f"{begin}: expected it on the command line, as --{key}")
            near = difflib.get_close_matches(key, known, 1)
            raise InputError(begin + (f" (did you mean {near[0]}?)" if near else ""))
        yield known[key], key, value


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)


def _from_text(f: Field, text: str):
    """A flag's text as the flag's type; text that is not a number stays text, for _check to refuse."""
    try:
        return f.type(text) if f.type in (int, float) else text
    except ValueError:
        return text


def parse(argv: list[str], description: str = "Train Llama 3.") -> Options:
    """Options from the command line and the file that --config names. Raises InputError; --help exits."""
    parser = _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for f in fields(Options):
        default = "" if f.default == "" or f.type in (bool, tuple[str, ...]) else f" [{f.default}]"
        how: dict = {"help": f.metadata["help"].replace("%", "%%") + default, "dest": f.name}
        if f.type is bool:
            how["action"] = "store_true"
        else:
            how["action"] = "append" if f.type == tuple[str, ...] else "store"
            how["metavar"] = (
                f.metadata["value"] or "|".join(f.metadata["choices"]) or _LETTERS.get(f.type, "")
            )
        title = f.metadata["group"]
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        groups[title].add_argument("--" + _name(f), **how)
    given = vars(parser.parse_args(argv))
    by_name = {f.name: f for f in fields(Options)}
    flags = {name: _check(by_name[name], _from_text(by_name[name], value), "--" + _name(by_name[name]))
             for name, value in given.items()}  # fmt: skip
    file = read_toml(flags["config"]) if flags.get("config") else {}
    options = Options(**(file | flags))
    weights, gradients = TABLE[options.dtype], TABLE[options.grad_dtype]
    if gradients.mantissa_bits < weights.mantissa_bits:
        needed = f"expected {weights.name}, which --dtype {weights.name} needs"
        raise InputError(f"--grad-dtype {gradients.name}: {needed}")
    meant = {name: "" for name in ("train_data", "val_data") if getattr(options, name) == "none"}
    # Another text, of another tokenizer perhaps, says nothing of this one's.
    if options.train_data != Options.train_data and options.val_data == Options.val_data:
        meant["val_data"] = ""
    if options.init == "auto":
        meant["init"] = "load" if find_weights(options.model) else "random"
    return replace(options, **meant)
