"""Written twice on purpose: csrc/core/json.cpp has the same; test_readers.py::test_c_and_python_agree.

Reading of whole files, and of JSON from files. Malformed content raises InputError.
"""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from llamac.errors import InputError

MOST_NESTING = 32
_SURROGATE = re.compile("[\ud800-\udfff]")  # "\ud800" alone, which UTF-8 cannot hold


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, for reading. Anything else is refused: a pipe would be waited for."""
    try:
        # O_NONBLOCK: opening a pipe returns. It means nothing for a regular file.
        file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115
    except IsADirectoryError:
        raise InputError(f"{path}: expected a file, found a folder") from None
    except OSError as error:
        raise InputError(f"{path}: cannot open: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{path}: expected a path, which has no NUL") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{path}: expected a file, found a device")
    return file


def read_bytes(path: str | Path) -> bytes:
    """The content of a regular file."""
    with open_file(path) as file:
        return file.read()


def read_json(path: str | Path) -> Any:
    """parse_json() of a file."""
    return parse_json(read_bytes(path), str(path))


def parse_json(content: bytes, where: str) -> Any:
    """The value of a JSON text; `where` begins the messages. Stricter than JSON: no byte-order mark, no NaN,
    no object with a key twice, no number beyond a double, MOST_NESTING levels. An integer that 64 bits cannot
    hold is a float.
    """

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise InputError(f"{where}: expected JSON, found a number that is too large")
        return value

    def integer(text: str) -> int | float:
        value = int(text) if len(text) <= 20 else number(text)
        return value if -(2**63) <= value < 2**64 else float(value)

    def unknown(text: str):
        raise InputError(f"{where}: expected JSON, found {text}")

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{where}: expected each key once, found {excerpt(twice)} twice")
        return found

    deep = InputError(f"{where}: expected at most {MOST_NESTING} levels of nesting, found more")

    def check(value: Any, depth: int) -> None:
        if depth > MOST_NESTING:
            raise deep
        if isinstance(value, str) and _SURROGATE.search(value):
            raise InputError(f"{where}: expected text in UTF-8, found {excerpt(value)}")
        if isinstance(value, dict):
            for key in value:
                check(key, depth + 1)
        if isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                check(item, depth + 1)

    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=members,
            parse_int=integer,
            parse_float=number,
            parse_constant=unknown,
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{where}: expected JSON: {error}") from None
    except RecursionError:
        raise deep from None
    check(value, 0)
    return value


def excerpt(value: Any) -> str:
    """A value from a file for one line of a message: as JSON in ASCII, cut to a readable length."""
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."
