"""Which source may include or import which: docs/architecture.md."""

import ast
import graphlib
import re
from pathlib import Path

import pytest
from run import ROOT

# Each may include itself and those before it.
LAYERS = ["platform", "core", "ops", "model", "data", "run", "checkpoint", "train", "program", "python"]


def wrong_includes(folder: str, text: str) -> list[str]:
    """What a source in this folder of the repository includes and may not."""
    layer = folder.split("/")[1] if folder.startswith("csrc/") else None
    others = LAYERS + ["dev"] * folder.startswith("tests")
    allowed = LAYERS[: LAYERS.index(layer) + 1] if layer else others
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
        ("csrc/model", "run/options.h"),
        ("csrc/data", "run/options.h"),
        ("csrc/run", "checkpoint/manifest.h"),
        ("csrc/checkpoint", "train/trainer.h"),
        ("csrc/train", "program/log.h"),
        ("csrc/program", "python/native.h"),
        ("csrc/train", "../../tests/check.h"),
        ("csrc/train", "dev/hip/benchmark.h"),
        ("dev/hip", "../../tests/check.h"),
        ("dev/hip", "tests/check.h"),
    ],
)
def test_an_include_upwards_is_seen(folder, included):
    assert wrong_includes(folder, f'#pragma once\n# include "{included}"\n') == [included]


# The same of the package llamac: its packages, and train_llama3.py as llamac.reference. The lazy names of
# __init__.py and the modules of the commands are strings, no imports.
TOWER = ["base", "data", "model", "inference", "profile", "ops", "training", "reference"]
TOWER += ["serve", "eval", "report", "bench", "doctor", "completion"]


def imported(text: str) -> set[str]:
    """The modules and names of llamac that a Python source imports, within functions, too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "llamac"}


def wrong_imports(package: str, text: str) -> list[str]:
    """Imports of a source in this package of llamac from a package above it."""
    above = TOWER[TOWER.index(package) + 1 :]
    return sorted(name for name in imported(text) if name.split(".")[1] in above)


def modules() -> dict[str, str]:
    """The text of each module of llamac by its name."""
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "llamac").rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path.read_text() for name, path in paths.items()}


def test_no_import_points_upwards():
    found = modules()
    packages = {name: name.split(".")[1] for name in found if name not in ("llamac", "llamac.__main__")}
    assert len(found) > 90 and set(packages.values()) == set(TOWER)
    wrong = {name: wrong_imports(package, found[name]) for name, package in packages.items()}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_no_import_goes_round_in_a_circle():
    found = modules()
    graph: dict[str, set[str]] = {}
    for name, text in found.items():
        used = {module for i in imported(text) for module in (i, i.rpartition(".")[0]) if module in found}
        # The __init__.py of a package may import its modules, and they each other by `from PACKAGE import`.
        graph[name] = {module for module in used if not f"{name}.".startswith(f"{module}.")}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "package, text, found",
    [
        ("data", "from llamac import ops", "llamac.ops"),
        ("base", "def f():\n    from llamac.data.tokens import Loader", "llamac.data.tokens.Loader"),
        ("training", "import llamac.reference", "llamac.reference"),
        ("report", "import llamac.doctor.preflight as p", "llamac.doctor.preflight"),
    ],
)
def test_an_import_upwards_is_seen(package, text, found):
    assert wrong_imports(package, text) == [found]
