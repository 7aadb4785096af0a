"""The arguments of a command, and tables of its output."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llamac.base.errors import InputError


class Parser(argparse.ArgumentParser):
    """Of `llamac COMMAND`. --help keeps the lines of the description."""

    def __init__(self, command: str, description: str | None, **how: Any):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"llamac {command}", description=description, formatter_class=form, **how)

    def integer(self, flag: str, help: str, default: int | None = None, metavar: str = "N") -> None:
        self.add_argument(flag, help=help, default=default, metavar=metavar, type=int)

    def number(self, flag: str, help: str, default: float | None = None, metavar: str = "X") -> None:
        self.add_argument(flag, help=help, default=default, metavar=metavar, type=float)

    def path(self, flag: str, help: str, metavar: str) -> None:
        self.add_argument(flag, help=help, metavar=metavar, type=Path)

    def switch(self, flag: str, help: str) -> None:
        self.add_argument(flag, help=help, action="store_true")


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
