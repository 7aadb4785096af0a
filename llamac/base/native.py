"""Loads llamac._native, as `native`."""

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from llamac.base.errors import InputError
from llamac.base.files import read_json

REBUILD = "in llamac's folder, `make train_llama3` builds it, and `make native` where PyTorch is installed"


def _read_facts() -> dict:
    """What the module was built for; torch: its version, "" where the module has the device's runtime itself.
    Raises InputError where it cannot be loaded: a process must not have two runtimes of a GPU."""
    module = find_spec("llamac._native")
    if module is None or module.origin is None:
        raise InputError(f"llamac._native: expected the compiled module, found none; {REBUILD}")
    record = Path(module.origin).resolve().with_name("_native.json")
    try:
        facts = read_json(record, {"torch": str, "kernels": str, "libraries": [str]})
    except ValueError as error:
        raise InputError(f"{error}: it says what llamac._native was built for; {REBUILD}") from None
    if not facts["torch"] and facts["kernels"] != "cpu" and find_spec("torch"):
        raise InputError(
            f"{module.origin}: expected it built beside PyTorch, which is installed, found it with a GPU "
            "runtime of its own: in llamac's folder, call `make native`"
        )
    return facts


# The idle threads of OpenMP's runtimes (GNU's, LLVM's) spin before they sleep, by default for so long that
# programs on the same cores mostly wait for each other. They read this when they are loaded; child processes
# are not to inherit it.
_SPINNING = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}  # as train_llama3 has it
_ours = {} if {*_SPINNING, "OMP_WAIT_POLICY"} & os.environ.keys() else _SPINNING
os.environ.update(_ours)
try:
    facts = _read_facts()
    # The device's runtime and matrix products are torch's, also where torch is imported later. A wheel of
    # ROCm's torch has them under file names that are not what they call themselves, by which the module asks
    # for them: loaded by their paths, they are known by both.
    for _path in facts["libraries"]:
        with suppress(OSError):  # another torch since
            ctypes.CDLL(_path)
    from llamac import _native as native
except ImportError as _error:
    raise InputError(f"llamac._native: {_error}; {REBUILD}") from None
finally:
    for _name in _ours:
        del os.environ[_name]

__all__ = ["facts", "native"]
