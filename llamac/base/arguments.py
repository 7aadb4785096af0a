"""The arguments of a command, and tables of its output."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llamac.base.errors import InputError


def fill(text: str, width: int = 0) -> str:
    """Paragraphs in lines of `width` columns; 0: the terminal's, or unbroken where there is none. A line that
    is indented, or has columns, is not joined with others."""
    width = width or shutil.get_terminal_size((0, 0)).columns
    lines, ended = [""], False
    for line in text.splitlines():
        alone = not line or line[0].isspace() or "  " in line
        if alone or ended:
            lines.append(line)
        else:
            lines[-1] += f" {line}" if lines[-1] else line
        ended = alone
    return "\n".join(_wrap(line, width) if width else line for line in lines)


def _wrap(line: str, width: int) -> str:
    column = re.match(r" *(\S+( \S+)* {2,})?", line)
    indent = " " * (column.end() if column else 0)
    if width < len(indent) + 40 and line[len(indent) :] and indent != line[: len(indent)]:
        # The second column has lines of its own.
        return f"{line[: len(indent)].rstrip()}\n{_wrap(' ' * 8 + line[len(indent) :], width)}"
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


class HelpFormatter(argparse.HelpFormatter):
    """The description in the terminal's width; fill() keeps its lists."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(text, width)


class Parser(argparse.ArgumentParser):
    """Of `llamac COMMAND`."""

    def __init__(self, command: str, description: str | None, **how: Any):
        super().__init__(f"llamac {command}", description=description, formatter_class=HelpFormatter, **how)

    def integer(self, flag: str, help: str, default: int | None = None, metavar: str = "N") -> None:
        self.add_argument(flag, help=help, default=default, metavar=metavar, type=int)

    def number(self, flag: str, help: str, default: float | None = None, metavar: str = "X") -> None:
        self.add_argument(flag, help=help, default=default, metavar=metavar, type=float)

    def path(self, flag: str, help: str, metavar: str) -> None:
        self.add_argument(flag, help=help, metavar=metavar, type=Path)

    def switch(self, flag: str, help: str) -> None:
        self.add_argument(flag, help=help, action="store_true")


def split_list(flag: str, text: str) -> list[str]:
    """The words of a flag's list; of an empty text none. Raises InputError for an empty word."""
    words = text.split(",") if text else []
    if not all(words):
        raise InputError(f"{flag}: expected words separated by commas, found {text[:60]!r}")
    return words


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Raises InputError where a flag that is given is less than its least value."""
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise InputError(f"--{name.replace('_', '-')}: expected at least {bound}, found {value}")


def table(heading: Sequence[str], left: int, cells: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need; the first `left` to the left, the others to the right."""
    rows = [heading, *cells]
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = (
        [cell.ljust(w) if k < left else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths))]
        for row in rows
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)
