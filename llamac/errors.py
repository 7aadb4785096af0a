"""What a user can get wrong: one clear line, exit code 2."""

import sys
from collections.abc import Callable
from pathlib import Path


class InputError(ValueError):
    """Bad input, to Python or to the compiled modules; llamac.Error is its other name. The message is one
    line: what, where (file and field), expected, found."""


def run(main: Callable[[], None]) -> None:
    """Run a script's main(); bad input or a failing file: `script: message` on stderr, exit code 2."""
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
