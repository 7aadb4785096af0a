"""Errors of the user: one clear line, and exit code 2."""

import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MOST = 5000  # characters of a message: longer than a path
# As control_bytes() in csrc/platform/error.cpp; test_readers.py::test_no_control_character_is_shown.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class InputError(ValueError):
    """Bad input, to Python or to the compiled modules; llamac.Error is its other name. The message is one
    line: what, where (file and field), expected, found."""

    def __init__(self, message: str = ""):
        line = printable(str(message), "")  # files and names may hold anything
        super().__init__(line if len(line) <= MOST else line[:MOST] + "...")


def printable(text: str, kept: str = "\n\t") -> str:
    """The text for a terminal, with "\\x1b" for each byte of a character that could move its cursor, change
    its state or turn the direction of the text around, except for the `kept` ones."""

    def escape(match: re.Match) -> str:
        return match[0] if match[0] in kept else "".join(f"\\x{byte:02x}" for byte in match[0].encode())

    return CONTROL.sub(escape, text)


def first_line(error: BaseException) -> str:
    """What an exception of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def one_line(error: BaseException) -> str:
    """The same, with its class."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def requires(module: str, what: str) -> Any:
    """An optional library. Raises InputError that says how to install it."""
    try:
        return import_module(module)
    except ImportError:
        name = module.split(".")[0]
        raise InputError(f"{what} needs {name}, which is not installed: pip install {name}") from None


def run(main: Callable[[], None]) -> None:
    """Run a script's main(). Bad input prints `script: message` and exits with 2; warnings are lines, too."""
    name = Path(sys.argv[0]).name
    warnings.formatwarning = lambda message, *_, **__: f"{name}: {printable(str(message), '')}\n"
    try:
        main()
    except (InputError, OSError, MemoryError) as error:
        text = str(error) or "out of memory"
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"{name}: {printable(text, '')}", file=sys.stderr)
        sys.exit(2)
