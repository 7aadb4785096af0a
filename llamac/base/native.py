"""Loads llamac._native, as `native`."""

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from llamac.base.files import read_json


def _load_torchs_runtime() -> None:
    """The device's runtime and matrix products are torch's, also where torch is imported later. A wheel of
    ROCm's torch has them under file names that are not what they call themselves, by which the module asks
    for them: loaded by their paths, they are known by both.
    """
    module = find_spec("llamac._native")
    if module is None or module.origin is None:
        return
    with suppress(OSError, ValueError):  # no torch when it was built, or another since
        facts = read_json(Path(module.origin).with_name("_C.json"), {"libraries": [str]})
        for path in facts["libraries"]:
            ctypes.CDLL(path)


# The idle threads of OpenMP's runtimes (GNU's, LLVM's) spin before they sleep, by default for so long that
# programs on the same cores mostly wait for each other. They read this when they are loaded; child processes
# are not to inherit it.
_SPINNING = {"GOMP_SPINCOUNT": "5000", "KMP_BLOCKTIME": "0"}  # as train_llama3 has it
_ours = {} if {*_SPINNING, "OMP_WAIT_POLICY"} & os.environ.keys() else _SPINNING
os.environ.update(_ours)
try:
    _load_torchs_runtime()
    from llamac import _native as native
finally:
    for _name in _ours:
        del os.environ[_name]

__all__ = ["native"]
