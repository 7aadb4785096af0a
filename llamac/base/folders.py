"""The locations of the project's files."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# A wheel carries configs/ inside the package; in a source tree it is beside the package.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"


def how_to_fetch(model: str) -> str:
    """How to get it, where the name may be a model's on the Hugging Face hub, "owner/name"; else ""."""
    if not re.fullmatch(r"[^/.~][^/]*/[^/]+", model):
        return ""
    name = model.partition("/")[2]
    command = f"`hf download {model} --local-dir {name}` (pip install huggingface_hub)"
    return f"; a model of the Hugging Face hub is fetched with {command}, then name {name}"
