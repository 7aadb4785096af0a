"""--version, the one place of the version, what measured numbers say of it; the table of tests/README.md."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from launch import for_gpus, has
from run import ROOT

import llamac.base.version
from llamac.base.version import commit, provenance, provenance_text


def version() -> str:
    return re.search(r'^__version__ = "(.*)"$', (ROOT / "llamac/__init__.py").read_text(), re.MULTILINE)[1]


@pytest.mark.program
def test_version(build, train):
    lines = train("--version").stdout.splitlines()
    assert lines[0] == f"llamac {version()}"
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["commit", "compiler", "platform", "libraries", "engines"]
    assert all(re.fullmatch(r"\w+ +\S.*", line) for line in lines)
    assert re.search(r"CLI11 \d+\.\d+\.\d+, nlohmann/json \d+\.\d+\.\d+, toml\+\+ .*, xxHash 0\.\d", lines[4])
    engines = ", ".join(("" if has(build, name.upper()) else "no ") + name for name in ("Gloo", "MPI"))
    assert re.fullmatch(f"engines   {engines}(, (no )?[NR]CCL.*)?", lines[5])
    assert (", " in lines[5].removeprefix(f"engines   {engines}")) is for_gpus(build)


def test_the_commit_is_the_checkouts(train):
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


def test_measured_numbers_name_the_commit(monkeypatch, tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = commit()
    assert (
        head.stdout.startswith(found.removesuffix(" (modified)"))
        if head.returncode == 0
        else found == "unknown"
    )
    facts = provenance() | {"device": "D"}
    assert facts["version"] == version() and re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert provenance_text(facts) == f"llamac {version()}, commit {found}, {facts['date']}"

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "site-packages").mkdir()
    # Without a commit, and in another project's checkout.
    for folder in (tmp_path, tmp_path / "site-packages"):
        monkeypatch.setattr(llamac.base.version, "FOLDER", folder)
        assert commit() == "unknown"


def in_folders(suffix: str) -> list[Path]:
    """Of tests/ and its folders by subject, not of programs that have folders of their own."""
    subjects = (".", "ops", "model", "train", "data", "tools")
    return [path for folder in subjects for path in (ROOT / "tests" / folder).glob(f"*.{suffix}")]


def test_tests_do_not_import_each_other():
    tests = {path.stem: path.read_text() for path in in_folders("py")}
    imported = {
        name: found
        for name, text in tests.items()
        if (found := re.findall(r"^\s*(?:from|import) (test_\w+)", text, re.MULTILINE))
    }
    assert not imported
    helpers = [name for name in tests if not name.startswith("test_") and "def test_" in tests[name]]
    assert not helpers, "pytest does not collect what they test"


def test_the_readme_names_every_test():
    text = (ROOT / "tests/README.md").read_text()
    files = {path.name for suffix in ("py", "cpp", "h") for path in in_folders(suffix)}
    named = set(re.findall(r"`(\w+\.(?:py|cpp|h))`", text))
    unnamed = {name for name in files - named if not name.startswith("tile_")}
    assert not unnamed, "tests/README.md does not say what they test"
    tests = {name for name in named if re.match(r"(test|check)_|.*_faults\.cpp", name)}
    assert tests <= files | {"check.h"}, f"{tests - files}: no such file"


def test_scripts_that_the_pages_call_can_be_run():
    """A page names them by their path, with arguments or as a line of a block."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "dev").rglob("*.md")]
    call = re.compile(r"(?:`|^(?:\w+=\S+ )*)((?:dev|tests)/[\w/]+\.(?:py|sh))(?: [^`\n|]|$)", re.MULTILINE)
    scripts = {name for page in pages for name in call.findall(page.read_text())}
    assert {"dev/bench_train.py", "dev/hip/resources.py", "dev/fresh.sh"} <= scripts
    for script in map(ROOT.joinpath, sorted(scripts)):
        assert os.access(script, os.X_OK) and script.read_bytes().startswith(b"#!"), script
