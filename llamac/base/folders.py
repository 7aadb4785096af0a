"""The locations of the project's files."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# A wheel carries configs/ inside the package; in a source tree it is beside the package.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
