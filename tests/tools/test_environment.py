"""docs/environment.md and docs/multi-gpu.md have every environment variable that the code reads or sets."""

import re

import pytest
from conftest import ROOT

NAME = r"([A-Z][A-Z0-9_]*)"
PATTERNS = {
    # Names that go through a helper stand as text in a file that calls getenv.
    ("csrc", "*.cpp"): [r'getenv\("' + NAME + '"', r'setenv\("' + NAME + '"'],
    ("llamac", "*.py"): [r'environ\S*?[\[(]f?"' + NAME + '"', r'environment\.get\("' + NAME + '"'],
    ("dev", "*.py"): [r'environ\S*?[\[(]f?"' + NAME + '"'],
    ("dev", "*.sh"): [r"\$\{" + NAME + r":?-"],
    ("dev", "*.sbatch"): [r"\$\{" + NAME + r":?-", r"export " + NAME + "="],
    (".", "CMakeLists.txt"): [r"\$ENV\{" + NAME + r"\}"],
}
# A search path, tinygrad's own variable for the emulator, and where Slurm was asked to begin.
OTHERS = {"PATH", "DEV", "SLURM_SUBMIT_DIR"}
# Variables of make, which the Makefile explains.
MAKE = {"PLATFORM", "PYTHON", "TORCH", "TOOLKIT", "GPUS"}


def read_by_the_code() -> set[str]:
    found: set[str] = set()
    for (folder, files), patterns in PATTERNS.items():
        for path in (ROOT / folder).rglob(files) if folder != "." else [ROOT / files]:
            text = path.read_text()
            for pattern in patterns:
                found.update(re.findall(pattern, text))
            if folder == "csrc" and "getenv(" in text:
                found.update(re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+)"', text))
    preflight = (ROOT / "llamac/doctor/preflight.py").read_text()
    found.update(re.findall(r'"([A-Z]+_[A-Z0-9_]+)": "[01]"', preflight))
    return found - OTHERS - MAKE


def described() -> set[str]:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("environment.md", "multi-gpu.md"))
    rows = [line for line in pages.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`" + NAME + r"(?:=[^`]*)?`", row)}


def test_the_search_finds_each_kind():
    expected = {"LLAMAC_PYTHON", "SLURM_STEP_ID", "TINYGRAD", "SSL_CERT_FILE"}
    assert expected | {"ROCM_PATH", "NCCL_P2P_DISABLE", "NCCL_CROSS_NIC"} <= read_by_the_code()


def test_every_variable_is_described():
    assert sorted(read_by_the_code() - described()) == []


@pytest.mark.parametrize("name", ["LLAMAC_PYTHON", "SSL_CERT_FILE", "SLURM_STEP_ID"])
def test_a_row_that_is_missing_is_noticed(name, monkeypatch):
    kept = described() - {name}
    monkeypatch.setitem(globals(), "described", lambda: kept)
    with pytest.raises(AssertionError, match=name):
        test_every_variable_is_described()
