"""Errors of the user: one clear line, and exit code 2."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

MOST = 5000  # characters of a message: longer than a path


class InputError(ValueError):
    """Bad input, to Python or to the compiled modules; llamac.Error is its other name. The message is one
    line: what, where (file and field), expected, found."""

    def __init__(self, message: str = ""):
        # As in the C program (platform/error.cpp): files and names may hold anything.
        line = re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\x{ord(m[0]):02x}", str(message))
        super().__init__(line if len(line) <= MOST else line[:MOST] + "...")


def run(main: Callable[[], None]) -> None:
    """Run a script's main(); bad input or a failing file: `script: message` on stderr, exit code 2."""
    try:
        main()
    except (InputError, OSError) as error:
        script = Path(sys.argv[0])
        name = script.parent.name if script.name == "__main__.py" else script.name  # of a package
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
