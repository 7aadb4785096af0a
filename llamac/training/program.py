"""`llamac train FLAGS` runs the program train_llama3."""

import os
import shutil
import sys

from llamac.base.errors import InputError


def main() -> None:
    """Executes the program of the working folder, where `make train_llama3` puts it, or of PATH."""
    program = shutil.which("./train_llama3") or shutil.which("train_llama3")
    if not program:
        raise InputError(
            "expected the program train_llama3 in the working folder or on PATH, found neither: "
            "`make train_llama3` builds it, `make install` installs it"
        )
    os.execv(program, [program, *sys.argv[1:]])
