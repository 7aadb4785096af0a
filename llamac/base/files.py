"""Written twice on purpose: csrc/core/json.cpp has the same; test_readers.py::test_c_and_python_agree.

Reading of whole files, and of JSON from files. Content that is malformed, or of other types than a reader
expects, raises InputError.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamac.base.errors import InputError

MOST_NESTING = 32
# Bytes of a file that is read whole, as in csrc/core/{file,json}.h and checkpoint/truncate_log.cpp.
MOST_BYTES, MOST_JSON, MOST_LOG = 1 << 30, 128 << 20, 1 << 34
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which UTF-8 cannot hold alone


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


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file. More than `most` bytes are refused: they would fill the memory."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise InputError(f"{path}: expected at most {most} bytes, found {size}")
        return file.read()


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file, renamed into place when it is on disk."""
    temporary = Path(f"{path}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a file that a flag names. Raises InputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot write: {error.strerror}") from None


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}: expected UTF-8") from None


def check_text(text: str, where: str) -> str:
    """The text. Raises InputError where UTF-8 cannot hold it: arguments in another encoding."""
    if _HALF.search(text):
        raise InputError(f"{where}: expected text in UTF-8, found {excerpt(text)}")
    return text


def read_json(path: str | Path, kind: Any = object) -> Any:
    """parse_json() of a file."""
    return parse_json(read_bytes(path, MOST_JSON), str(path), kind)


def parse_json(content: bytes | str, where: str, kind: Any = object) -> Any:
    """The value of a JSON text, if it is of the kind: expect(); `where` begins the messages. Stricter than
    JSON: no byte-order mark, no NaN, no object with a key twice, no number beyond a double, MOST_NESTING
    levels, no half of a surrogate pair. An integer that 64 bits cannot hold is a float.
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
            keys = Counter(key for key, _ in pairs)
            twice = keys.most_common(1)[0][0]
            raise InputError(f"{where}: expected each key once, found {excerpt(twice)} twice")
        return found

    deep = InputError(f"{where}: expected at most {MOST_NESTING} levels of nesting, found more")
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=members, parse_int=integer, parse_float=number, parse_constant=unknown
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{where}: expected JSON: {error}") from None
    except RecursionError:
        raise deep from None
    if _is_deep(value):
        raise deep
    if "\\ud" in text or "\\uD" in text:  # perhaps of half a pair
        check_text(json.dumps(value, ensure_ascii=False), where)
    return expect(value, kind, where)


def _is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level := [
        item for each in level if isinstance(each, (dict, list))
        for item in (each.values() if isinstance(each, dict) else each)
    ]:  # fmt: skip
        depth += 1
        if depth > MOST_NESTING:
            return True
    return False


def flaw(row: Any) -> str:
    """Why a row of data, which json.loads() takes, can be neither shown nor encoded; "": it can."""
    if _is_deep(row):
        return f"more than {MOST_NESTING} levels of nesting"
    return "no Unicode" if _HALF.search(json.dumps(row, ensure_ascii=False, default=str)) else ""


@dataclass(frozen=True)
class Kind:
    """A kind of values that no type is: its name in messages, and whether a value is of it."""

    name: str
    has: Callable[[Any], bool]


_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number", None: "null"}


def expect(value: Any, kind: Any, where: str, at: str = "") -> Any:
    """The value, if it is of the kind. `where` begins the messages, `at` is the value's path. A kind is

    - str, bool, int, float (any number), None (null), object (anything), a Kind;
    - range(n): an integer within; {"a", "b"}: one of these strings;
    - [kind]: a list of this kind; {"name": kind, ...}: an object with these fields, and others;
      {str: kind}: an object with any fields, of this kind;
    - (kind, ...): any of these; a field that may be None may be missing.
    """
    kinds = _kinds(kind)
    found = next((each for each in kinds if _is_of(value, each)), expect)
    if found is expect:
        raise _unexpected(kind, excerpt(value), where, at)
    if isinstance(found, list):
        for i, item in enumerate(value):
            expect(item, found[0], where, f"{at}[{i}]")
    if isinstance(found, dict):
        for name in value if str in found else found:
            inner = found[str if str in found else name]
            path = f"{at}.{name}" if at else name
            if name in value:
                expect(value[name], inner, where, path)
            elif None not in _kinds(inner) and inner is not object:
                raise _unexpected(inner, "nothing", where, path)
    return value


def _kinds(kind: Any) -> tuple:
    return kind if isinstance(kind, tuple) else (kind,)


def _unexpected(kind: Any, found: str, where: str, at: str) -> InputError:
    expected = " or ".join(map(_name, _kinds(kind)))
    return InputError(f"{where}: {f'{at}: ' if at else ''}expected {expected}, found {found}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether it is, without its fields and items."""
    if isinstance(kind, Kind):
        return kind.has(value)
    if isinstance(kind, (list, dict)):
        return type(value) is type(kind)
    if isinstance(kind, (range, set)):
        return type(value) is (int if isinstance(kind, range) else str) and value in kind
    if kind is object or kind is None:
        return kind is object or value is None
    return type(value) in ((int, float) if kind is float else (kind,))


def _name(kind: Any) -> str:
    if isinstance(kind, range):
        return f"an integer from {kind.start} to {_integer(kind.stop - 1)}"
    if isinstance(kind, (list, dict)):
        return "a list" if isinstance(kind, list) else "an object"
    if isinstance(kind, set):
        return " or ".join(sorted(kind))
    return kind.name if isinstance(kind, Kind) else _NAMES[kind]


def _integer(value: int) -> str:
    """Large ones as powers of two."""
    for less, text in ((0, ""), (1, "-1")):
        if value >= 1 << 20 and (value + less).bit_count() == 1:
            return f"2^{(value + less).bit_length() - 1}{text}"
    return str(value)


def excerpt(value: Any) -> str:
    """A value from a file for one line of a message: as JSON in ASCII, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:100] + "..."
