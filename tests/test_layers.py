"""Which source may include which: docs/architecture.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each may include itself and those before it.
LAYERS = ["platform", "core", "ops", "model", "checkpoint", "train", "python"]


def wrong_includes(folder: str, text: str) -> list[str]:
    """What a source in this folder of the repository includes and may not."""
    layer = folder.split("/")[1] if folder.startswith("csrc/") else None
    allowed = LAYERS[: LAYERS.index(layer) + 1] if layer else LAYERS + (["dev"] if folder == "tests" else [])
    names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
    return [name for name in names if "/" in name and name.split("/")[0] not in allowed]


def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cpp", ".hip")]


@pytest.mark.parametrize("folder", ["csrc", "dev", "tests"])
def test_no_include_points_upwards(folder):
    paths = sources(folder)
    assert len(paths) > 15
    found = {path: wrong_includes(str(path.parent.relative_to(ROOT)), path.read_text()) for path in paths}
    assert {str(path): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "folder, included",
    [
        ("csrc/platform/emulation", "core/tensor.h"),
        ("csrc/core", "ops/operations.h"),
        ("csrc/ops", "model/model.h"),
        ("csrc/model", "train/options.h"),
        ("csrc/train", "python/native.h"),
        ("csrc/train", "../../tests/check.h"),
        ("csrc/train", "dev/hip/benchmark.h"),
        ("dev/hip", "../../tests/check.h"),
        ("dev/hip", "tests/check.h"),
    ],
)
def test_an_include_upwards_is_seen(folder, included):
    assert wrong_includes(folder, f'#pragma once\n# include "{included}"\n') == [included]
