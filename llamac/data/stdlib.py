"""The source code of the Python standard library: real text that every machine has.

Validation consists of whole top-level packages, chosen only by name, so that every machine holds out the same
ones.
"""

import re
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.errors import InputError
from llamac.data.documents import refusal
from llamac.data.inputs import InputFile
from llamac.data.tokens import permute

# Left out at the top: what is not the library's own (site-packages), what is generated or nearly identical
# (tables, encodings), and what some systems or newer versions do not have.
LEFT_OUT = re.compile(
    r"site-packages|dist-packages|ensurepip|lib-dynload|config-.*|_sysconfigdata.*|sitecustomize.py|encodings"
    r"|pydoc_data|locale.py|stringprep.py|msilib|lib2to3|distutils|idlelib|turtledemo|__phello__"
)
LEFT_OUT_ANYWHERE = {"test", "tests", "idle_test", "entities.py"}
VAL_FRACTION = 0.07  # of the names
VAL_SEED = 31  # gives a mixed 6% of the bytes, of which fewer lines than usual recur in the training part
ORDER_SEED = 1


def sources(root: Path) -> dict[str, list[Path]]:
    """The library's files by the name of their top-level package or module, without underscores around it."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not LEFT_OUT.fullmatch(parts[0]) and not LEFT_OUT_ANYWHERE & set(parts):
            groups.setdefault(parts[0].removesuffix(".py").strip("_"), []).append(path)
    return groups


def held_out(name: str) -> bool:
    """Whether this package is validation text."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed=VAL_SEED) < VAL_FRACTION * 2**64


def files(root: Path) -> tuple[list[InputFile], list[InputFile]]:
    """(training, in an order of its own; validation): the library's files that are UTF-8 and not empty."""
    train: list[InputFile] = []
    val: list[InputFile] = []
    groups = sources(root)
    for name in sorted(groups):
        found = [InputFile(str(path), "text") for path in groups[name]]
        (val if held_out(name) else train).extend(file for file in found if not refusal(file))
    if not train or not val:
        raise InputError(f"{root}: expected the sources of the Python standard library, found too few")
    return [train[int(i)] for i in permute(np.arange(len(train)), len(train), ORDER_SEED, 0)], val
