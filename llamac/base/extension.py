"""Loads llamac._C, which registers torch.ops.llamac.*, and checks that it was built for this torch."""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from llamac.base.files import read_json

REINSTALL = "reinstall llamac beside it: pip install --no-build-isolation"


def platform() -> str:
    """The platform of this torch: "amd", "nvidia" or "cpu"."""
    return "amd" if torch.version.hip else "nvidia" if torch.version.cuda else "cpu"


def file() -> Path | None:
    """The extension; None where it was not built."""
    spec = find_spec("llamac._C")
    return Path(spec.origin) if spec and spec.origin else None


def built(extension: Path) -> dict:
    """What it was built for: {"torch": version, "platform": torch's, "kernels": the platform they are for,
    "without_gpu": why that is the CPU beside a torch for GPUs, and what to do; "architectures": CMake's names
    of them}. Raises ImportError where it does not say."""
    record = extension.with_name("_native.json")
    try:
        facts = read_json(record, dict.fromkeys(("torch", "platform", "kernels", "without_gpu"), str))
    except (OSError, ValueError) as error:
        raise ImportError(f"{record} does not say what llamac was built for ({error}); {REINSTALL}") from None
    return facts


def matches(facts: dict) -> bool:
    """Whether this is the torch it was built for: between releases torch changes what C++ sees of it."""
    release = torch.__version__.split(".")[:2]
    return facts["torch"].split(".")[:2] == release and facts["platform"] == platform()


def without_gpu() -> str:
    """Why the extension lacks kernels for torch's GPUs, and what to do; "" if it has all."""
    load()
    extension = file()
    assert extension is not None  # it is loaded
    return built(extension)["without_gpu"]


def device() -> str:
    """Where the operations can compute: "cuda", as ROCm's torch calls its devices too, or "cpu"."""
    return "cuda" if torch.cuda.is_available() and not without_gpu() else "cpu"


@cache
def load() -> None:
    """Register the operations, once. Raises ImportError if they are missing or do not match torch."""
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
    ctypes.CDLL(str(extension)).llamac_register_operations(facts["without_gpu"].encode())
