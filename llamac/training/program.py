"""`llamac train FLAGS` runs the program train_llama3."""

import os
import shutil
import sys
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser
from llamac.base.errors import InputError
from llamac.training.options import FLAGS


def find() -> str:
    """The program: of the working folder, of PATH, or of the package's checkout. Raises InputError."""
    places = ("./train_llama3", "train_llama3", str(Path(__file__).parents[2] / "train_llama3"))
    if program := next(filter(None, map(shutil.which, places)), None):
        return program
    raise InputError(
        "expected the program train_llama3 in the working folder, on PATH or in the checkout, found none: "
        "`make train_llama3` builds it, `make install` installs it"
    )


def add_flags(parser: Parser, without: set[str]) -> None:
    """The program's flags. Those that are given become arguments for it, in the list `flags`."""
    for row in FLAGS:
        if row["name"] not in without and row.get("only") != "torch":
            name, is_switch = f"--{row['name']}", row["type"] == "switch"
            how: dict[str, Any] = {"const": name} if is_switch else {"type": f"{name}={{}}".format}
            how["action"] = "append_const" if is_switch else "append"
            parser.add_argument(name, dest="flags", default=[], help=SUPPRESS, **how)


def main() -> None:
    program = find()
    os.execv(program, [program, *sys.argv[1:]])
