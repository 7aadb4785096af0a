"""--version, the one place of the version, and the table of tests/README.md."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    return re.search(r'^__version__ = "(.*)"$', (ROOT / "llamac/__init__.py").read_text(), re.MULTILINE)[1]


@pytest.mark.program
def test_version(train):
    lines = train("--version").stdout.splitlines()
    assert lines[0] == f"llamac {version()}"
    assert [line.split()[0] for line in lines[1:]] == ["commit", "compiler", "platform", "libraries"]
    assert all(re.fullmatch(r"\w+ +\S.*", line) for line in lines)
    assert re.search(r"CLI11 \d+\.\d+\.\d+, nlohmann/json \d+\.\d+\.\d+, toml\+\+ .*, xxHash 0\.\d", lines[4])


def test_the_commit_is_the_checkouts(build, train):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        assert "commit    unknown" in train("--version").stdout
        return
    commit = train("--version").stdout.splitlines()[1].split()[1]
    known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT)
    assert known.returncode == 0, f"{commit} is no commit of this branch"


def test_the_version_stands_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and "version" in project["dynamic"]
    assert f"## {version()}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert version() not in (ROOT / "CMakeLists.txt").read_text()


def test_the_readme_names_every_test():
    text = (ROOT / "tests/README.md").read_text()
    files = {path.name for suffix in ("py", "cpp", "h") for path in (ROOT / "tests").glob(f"*.{suffix}")}
    named = set(re.findall(r"`(\w+\.(?:py|cpp|h))`", text))
    unnamed = {name for name in files - named if not name.startswith("tile_")}
    assert not unnamed, "tests/README.md does not say what they test"
    tests = {name for name in named if re.match(r"(test|check)_|.*_faults\.cpp", name)}
    assert tests <= files | {"check.h"}, f"{tests - files}: no such file"
