"""llamac: Llama 3 training in C/HIP, and its operations for PyTorch.

`llamac.kernels()` lists the compiled operations, `llamac.run()` calls a variant of one by name, and
`llamac.Trainer` is the program's trainer. These three need the compiled module, but not torch. `llamac.ops`
has the differentiable operations; it needs torch and the compiled extension. `llamac.patch` makes a model of
the transformers library use them, and `llamac.unpatch` undoes it. `llamac.reference` is train_llama3.py. All
are imported at their first use. Bad input raises `llamac.Error`. The packages data, model and report need
none of these; import from them by name (`from llamac.data import read_bin`).
"""

import sys
from importlib import import_module
from typing import Any

from llamac.base.errors import InputError as Error

if sys.version_info < (3, 11):  # noqa: UP036 (a checkout has not asked pip)
    # With a name, `python -m llamac COMMAND` prints it as one line.
    raise ImportError(
        "llamac: expected Python 3.11 or newer, found "
        f"{'.'.join(map(str, sys.version_info[:3]))}: install one and run the same with it; on Ubuntu 22.04, "
        "sudo apt-get install python3.11, then python3.11",
        name="llamac",
    )

__all__ = ["Error", "Trainer", "kernels", "ops", "patch", "run", "unpatch"]
__version__ = "0.2.0"

_HOME = {
    "Trainer": "training.trainer",
    "kernels": "base.registry",
    "patch": "ops.transformers_patch",
    "run": "base.registry",
    "unpatch": "ops.transformers_patch",
}
_MODULES = {"ops": "ops", "reference": "reference", "transformers_patch": "ops.transformers_patch"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"llamac.{_MODULES[name]}")
    if name in _HOME:
        return getattr(import_module(f"llamac.{_HOME[name]}"), name)
    raise AttributeError(f"module 'llamac' has no attribute '{name}'")
