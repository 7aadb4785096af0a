"""Loads llamac._C, which registers torch.ops.llamac.*, after a look at whether it was built for this
torch."""

import ctypes
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

REINSTALL = "reinstall llamac beside it: pip install --no-build-isolation"


def platform() -> str:
    """What this torch computes on: "amd", "nvidia" or "cpu"."""
    return "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "cpu"


def file() -> Path | None:
    """The extension; None where it was not built."""
    spec = find_spec("llamac._C")
    return Path(spec.origin) if spec and spec.origin else None


def built(extension: Path) -> dict:
    """What it was built for: {"torch": version, "platform", "architectures": CMake's names of them}. Raises
    ImportError where it does not say."""
    record = extension.with_name("_C.json")
    try:
        facts = json.loads(record.read_text())
        if not {"torch", "platform"} <= facts.keys():
            raise ValueError("it names no torch or no platform")
    except (OSError, ValueError, AttributeError) as error:
        raise ImportError(f"{record} does not say what llamac was built for ({error}); {REINSTALL}") from None
    return facts


def matches(facts: dict) -> bool:
    """Whether this is the torch it was built for: between releases torch changes what C++ sees of it."""
    release = torch.__version__.split(".")[:2]
    return facts["torch"].split(".")[:2] == release and facts["platform"] == platform()


@cache
def load() -> ctypes.CDLL:
    """Register the operations, once. Raises ImportError, in one line, where they are missing or do not
    match."""
    extension = file()
    if extension is None:
        raise ImportError(f"llamac was built without torch's extension, as no torch was there; {REINSTALL}")
    facts = built(extension)
    if not matches(facts):
        raise ImportError(
            f"llamac's extension was built for torch {facts['torch']} ({facts['platform']}), "
            f"this is torch {torch.__version__} ({platform()}); {REINSTALL}"
        )
    torch.ops.load_library(str(extension))
    library = ctypes.CDLL(str(extension))
    library.llamac_register_operations()
    library.llamac_least_work.restype = ctypes.c_char_p
    return library


def least_work(
    operation: str, sizes: Mapping[str, int], dtype: str, absent: Sequence[str] = ()
) -> tuple[float, float]:
    """(bytes, FLOPs) that a call of a described operation must at least move and compute.

    sizes: by dimension letter; dtype: "f32" or "bf16", of storage; absent: operands that are left out. Raises
    ValueError.
    """
    call = {"operation": operation, "sizes": dict(sizes), "dtype": dtype, "absent": list(absent)}
    work = (ctypes.c_double * 2)()
    if wrong := load().llamac_least_work(json.dumps(call).encode(), work):
        raise ValueError(wrong.decode())
    return work[0], work[1]
