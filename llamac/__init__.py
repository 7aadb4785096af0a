"""llamac: Llama 3 training in C/HIP, and its operations for PyTorch.

`llamac.ops` holds the operations, differentiable; it needs torch and the compiled extension, and is imported
when it is first asked for. So are `llamac.patch` and `llamac.unpatch`, which need transformers too: they let
a model of that library run on the operations, and undo it. The modules config, random, schedule, options,
data, tokenizer, log and plot need none of these; import them by name (`from llamac.data import Loader`).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("llamac.ops")
    if name in ("patch", "unpatch"):
        return getattr(import_module("llamac.transformers_patch"), name)
    raise AttributeError(f"module 'llamac' has no attribute '{name}'")
