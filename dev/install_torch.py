"""install_torch.py [PIP ARGUMENT...]: PyTorch for the tests, into the environment that runs this.

A PyTorch that is there is kept: pip would replace a ROCm build by a CUDA one. Otherwise, on a machine with
an NVIDIA GPU, PyPI's build for CUDA; with an AMD GPU and ROCm, PyTorch's for this ROCm. Elsewhere, or where
there is none for it, the build for CPUs, from the indexes that pip is configured with or from PyTorch's
own; where neither has it, PyPI's build, which is larger and computes on a CPU as well. Arguments replace
the choice. Before the download, one line says what comes from where and how large it is.
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from llamac.base.rocm import find_rocm
from llamac.doctor.installation import driver_platform

VERSION, OLDEST = "2.13.0", (2, 11)
INDEX = "https://download.pytorch.org/whl"  # PyTorch's own: a folder for each build
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def rocm() -> str | None:
    """MAJOR.MINOR of the ROCm that is installed."""
    rocm = find_rocm()
    found = rocm and re.match(r"\d+\.\d+", rocm.release or rocm.hip)
    return found[0] if found else None


def choices() -> list[list[str]]:
    """Arguments of pip, the preferred first."""
    small, any_build = f"torch=={VERSION}+cpu", f"torch=={VERSION}"
    # One attempt: an index that is out of reach is no reason to wait.
    index = ["--extra-index-url", f"{INDEX}/cpu", "--retries", "0", "--timeout", "10"]
    found = driver_platform()
    if found == "nvidia":
        return [[any_build]]
    release = rocm() if found == "amd" else None
    # The index of a ROCm has the versions that were built for it.
    newest = [f"torch>={'.'.join(map(str, OLDEST))}", "--index-url", f"{INDEX}/rocm{release}"]
    return [*([newest] if release else []), [small], [small, *index], [any_build]]


def plan(arguments: list[str]) -> list[dict] | None:
    """What pip would install; None where it finds nothing that fits."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*PIP, "install", "--dry-run", "--quiet", "--report", str(report), *arguments]
        if subprocess.run(command, capture_output=True).returncode != 0:
            return None
        return json.loads(report.read_text())["install"]


def size(url: str) -> int | None:
    """Bytes of a file; None where its server does not say."""
    if url.startswith("file:"):
        return Path(urllib.request.url2pathname(urlsplit(url).path)).stat().st_size
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def describe(packages: list[dict]) -> str:
    """One line: the version, the number of packages, their size and where they are."""
    (torch,) = (p["metadata"]["version"] for p in packages if p["metadata"]["name"] == "torch")
    urls = [p["download_info"]["url"] for p in packages]
    sizes = [size(url) for url in urls]
    known = sum(s for s in sizes if s is not None)
    total = f"{known / 1e9:.1f} GB" if known >= 1e9 else f"{known / 1e6:.0f} MB"
    places = sorted({urlsplit(url).hostname or "this machine" for url in urls})
    if unknown := sizes.count(None):
        total += f" and {count(unknown, 'file')} of unknown size"
    return (
        f"installing PyTorch {torch}: {count(len(packages), 'package')}, {total}, from {' and '.join(places)}"
    )


def main(arguments: list[str]) -> int:
    if find_spec("torch") is not None:
        found = version("torch")
        if tuple(int(part) for part in found.split(".")[:2]) >= OLDEST:
            return 0
        expected = (
            f"expected {OLDEST[0]}.{OLDEST[1]} or newer: upgrade it, or remove it for another to be installed"
        )
        print(f"install_torch.py: PyTorch {found} is in .venv, {expected}", file=sys.stderr)
        return 1
    for candidate in [arguments] if arguments else choices():
        packages = plan(candidate)
        if packages is not None:
            print(describe(packages), flush=True)
            return subprocess.run([*PIP, "install", "--quiet", *candidate]).returncode
    wanted = " ".join(arguments) or f"torch {VERSION}"
    print(f"install_torch.py: pip finds no {wanted}: name another with TORCH='...'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
