"""Loads llamac._C, which registers torch.ops.llamac.*, after a look at whether it was built for this
torch."""

import ctypes
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

REINSTALL = "reinstall llamac beside it: pip install --no-build-isolation"


def platform() -> str:
    """What this torch computes on: "amd", "nvidia" or "cpu"."""
    return "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "cpu"


@cache
def load() -> None:
    """Register the operations, once. Raises ImportError, in one line, where they are missing or do not
    match."""
    spec = find_spec("llamac._C")
    if spec is None or spec.origin is None:
        raise ImportError(f"llamac was built without torch's extension, as no torch was there; {REINSTALL}")
    built = json.loads(Path(spec.origin).with_name("_C.json").read_text())
    # Between releases torch changes what C++ sees of it.
    if built["torch"].split(".")[:2] != torch.__version__.split(".")[:2] or built["platform"] != platform():
        raise ImportError(
            f"llamac's extension was built for torch {built['torch']} ({built['platform']}), "
            f"this is torch {torch.__version__} ({platform()}); {REINSTALL}"
        )
    torch.ops.load_library(spec.origin)
    ctypes.CDLL(spec.origin).llamac_register_operations()
