"""train_llama3.py without the compiled modules, and as the package carries it."""

import subprocess
import sys
from pathlib import Path

from run import ROOT, losses, reference_flags

import llamac.reference

BLOCKED = """
import sys
for module in ("llamac._native", "llamac._C"):
    sys.modules[module] = None  # import raises
import train_llama3
train_llama3.main()
print("refused:", file=sys.stderr)
sys.argv += ["--ops", "llamac"]
train_llama3.run(train_llama3.main)
"""


def test_trains_without_the_compiled_modules(data, tmp_path):
    """In a Python that cannot import them; llamac's operations are refused in one line."""
    line = reference_flags(data, tmp_path / "out", steps=2, profile=1)
    command = [sys.executable, "-c", BLOCKED, "--train", *line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert len(losses(tmp_path / "out")) == 2 and (tmp_path / "out/model/model.safetensors").exists()
    said = done.stderr.partition("refused:\n")[2]
    assert done.returncode == 2 and "--ops llamac: " in said and said.count("\n") == 1


def test_the_package_carries_the_file():
    """Through a symbolic link, which a wheel replaces by the file."""
    file = ROOT / "train_llama3.py"
    assert Path(llamac.reference.__file__).resolve() == file
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 500
