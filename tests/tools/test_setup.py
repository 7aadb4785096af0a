"""dev/setup.sh, dev/platform.sh and dev/install_torch.py: what a machine that lacks something is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev"))
import install_torch

SYSTEM_PACKAGES = "libcli11-dev nlohmann-json3-dev libtomlplusplus-dev libxxhash-dev libboost-context-dev"


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def said_by(command: list, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def setup(*arguments: str, **variables: str) -> list[str]:
    """The lines of a set-up that has to stop."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    found = said_by([ROOT / "dev/setup.sh", *arguments], **environment)
    assert found.returncode == 1, found.stdout + found.stderr
    return [line.removeprefix("setup: ") for line in found.stderr.splitlines()]


@pytest.mark.parametrize(
    "platform, variable, compiler, packages",
    [("nvidia", "CUDACXX", "CUDA", "cuda-toolkit-13-0"), ("amd", "HIPCXX", "HIP", "amdrocm-core-sdk")],
)
def test_a_gpu_without_its_compiler(platform, variable, compiler, packages):
    head, *ways = setup(PLATFORM=platform, **{variable: "/none"})
    assert head.startswith(f"no {compiler} compiler") and head.endswith("Any one of these helps:")
    assert any(packages in way for way in ways) and "PLATFORM=cpu" in ways[-1]
    assert any("TOOLKIT=pip" in way for way in ways) is (platform == "nvidia")


@pytest.mark.parametrize("platform", ["cpu", "amd"])
def test_pip_has_only_nvidias_compiler(platform):
    (line,) = setup(PLATFORM=platform, TOOLKIT="pip")
    assert line == f"TOOLKIT=pip is for PLATFORM=nvidia, found PLATFORM={platform}"


def empty_checkout(tmp_path: Path) -> Path:
    """Without .venv."""
    checkout = tmp_path / "a checkout"
    (checkout / "dev").mkdir(parents=True)
    for name in ("dev/setup.sh", "dev/platform.sh", "pyproject.toml"):
        (checkout / name).symlink_to(ROOT / name)
    return checkout


def test_an_old_python(tmp_path):
    """One that is older, beside no .venv that would do."""
    old = '[ "$1" = -c ] && case "$2" in *exit*) exit 1;; *) echo 3.10.12;; esac'
    old = program(tmp_path, "python3", old)
    found = said_by([empty_checkout(tmp_path) / "dev/setup.sh"], PATH=os.environ["PATH"], PYTHON=str(old))
    assert found.returncode == 1
    head, advice = found.stderr.splitlines()
    assert head.startswith(f"setup: {old} is Python 3.10.12, expected 3.11 or newer")
    assert "python3.11-venv" in advice


@pytest.mark.parametrize(
    "platform, old",
    [
        ("amd", "3.22.1"),
        pytest.param("amd", "3.25.1", marks=pytest.mark.more),
        pytest.param("cpu", "3.22.1", marks=pytest.mark.more),
    ],
)
def test_a_cmake_that_is_too_old_for_rocm(tmp_path, platform, old):
    """The Makefile finds another before it, in .venv."""
    checkout = empty_checkout(tmp_path)
    program(
        checkout / ".venv/bin",
        "python",
        f'echo "$*" >>{tmp_path}/log; [ "$1" != -c ] || {sys.executable} "$@"',
    )
    program(tmp_path / "bin", "cmake", f"echo cmake version {old}")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = said_by([checkout / "dev/setup.sh"], PATH=path, PLATFORM=platform, HIPCXX="/bin/true")
    assert done.returncode == 0, done.stderr
    wanted = platform == "amd" and old == "3.22.1"
    assert ("install --no-compile cmake>=3.25" in (tmp_path / "log").read_text()) is wanted
    assert (checkout / ".venv/cmake/ctest").is_symlink() is wanted
    # The command llamac, without its compiled modules; not where `make native` has installed it with them.
    assert "wheel.cmake=false -e ." in (tmp_path / "log").read_text()
    program(checkout / ".venv/bin", "llamac", "")
    (checkout / ".venv/run").unlink()
    (tmp_path / "log").unlink()
    assert said_by([checkout / "dev/setup.sh"], PATH=path, PLATFORM="cpu").returncode == 0
    assert "-e ." not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "kind, gpus, more", [("run", "", ""), ("test", "1", ""), ("run", "8", " libgloo-dev")]
)
def test_missing_packages_without_root(tmp_path, kind, gpus, more):
    """Named, with the line that installs them; nothing is installed."""
    program(tmp_path, "id", "echo 1000")
    program(tmp_path, "apt-get", "echo apt was called >&2")
    program(tmp_path, "ccache", "exit 0")
    program(tmp_path, "c++", 'case "$1" in -print-multiarch) echo none;; *) exit 1;; esac')
    path = f"{tmp_path}:{os.environ['PATH']}"
    missing, advice = setup(kind, PATH=path, PYTHON=sys.executable, GPUS=gpus)
    assert missing == f"system packages are missing: {SYSTEM_PACKAGES}{more}"
    assert advice == f"install them with: sudo apt-get install {SYSTEM_PACKAGES}{more}"


def test_training_needs_pythons_headers(tmp_path):
    """The set-up of the first command, too: llamac._native is made with the program."""
    python = f'case "$2" in *Python.h*) exit 1;; esac; exec {sys.executable} "$@"'
    python = program(tmp_path, "python3", python)
    program(tmp_path, "id", "echo 1000")
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = said_by(
        [empty_checkout(tmp_path) / "dev/setup.sh"], PATH=path, PYTHON=str(python), PLATFORM="cpu"
    )
    assert "setup: install them with: sudo apt-get install python3-dev\n" in found.stderr


def test_a_number_of_gpus():
    assert setup(PLATFORM="cpu", GPUS="many") == ["GPUS: expected a number, found many"]


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_several_gpus_without_gloo_and_without_root(tmp_path, gpus):
    """One GPU is of use, too: the set-up goes on, here to the compiler that is missing."""
    program(tmp_path, "id", "echo 1000")
    program(tmp_path, "c++", 'case "$*" in *-E*) ! grep -q gloo;; *) exec /usr/bin/c++ "$@";; esac')
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = setup(PATH=path, PYTHON=sys.executable, PLATFORM="amd", HIPCXX="/none", GPUS=gpus)
    gloo = "without Gloo, only one GPU is used: sudo apt-get install libgloo-dev, then call make again"
    assert (said[0] == gloo) is (gpus == "8") and any("no HIP compiler" in line for line in said[:2])


def test_cmake_without_the_compiler(tmp_path):
    """Whoever calls CMake directly is told as well."""
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DLLAMAC_PLATFORM=nvidia"]
    found = said_by(command, PATH=os.environ["PATH"], CUDACXX="/none")
    text = " ".join(found.stderr.split())
    assert found.returncode != 0 and "no CUDA compiler was found. `make setup PLATFORM=nvidia` says" in text


def compiler(platform: str, **variables: str) -> str:
    environment = {"PATH": os.environ["PATH"]} | variables
    return said_by([ROOT / "dev/platform.sh", "compiler", platform], **environment).stdout.strip()


def test_where_a_compiler_is_looked_for(tmp_path):
    nvcc = program(tmp_path / "bin", "nvcc", "")
    assert compiler("nvidia", CUDACXX=str(nvcc)) == str(nvcc)
    assert compiler("nvidia", CUDACXX="/none") == ""
    if not list(ROOT.glob(".venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc")):
        assert compiler("nvidia", PATH=f"{nvcc.parent}:/usr/bin:/bin") == str(nvcc)
        assert compiler("nvidia", PATH="/usr/bin:/bin", CUDA_PATH=str(tmp_path)) == str(nvcc)
    clang = program(tmp_path / "rocm/llvm/bin", "clang++", "")
    assert compiler("amd", ROCM_PATH=str(tmp_path / "rocm")) == str(clang)
    assert compiler("amd", HIPCXX="/none", ROCM_PATH=str(tmp_path / "rocm")) == ""


# ---- PyTorch


def package(name: str, version: str, url: str) -> dict:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": url}}


def test_the_download_is_described(tmp_path):
    wheel = tmp_path / "a wheel.whl"
    wheel.write_bytes(b"0" * 2_000_000)
    packages = [package("torch", "2.13.0+cpu", wheel.as_uri())]
    assert (
        install_torch.describe(packages)
        == "installing PyTorch 2.13.0+cpu: 1 package, 2 MB, from this machine"
    )
    packages.append(package("sympy", "1.14", "http://127.0.0.1:9/sympy.whl"))
    assert install_torch.describe(packages) == (
        "installing PyTorch 2.13.0+cpu: 2 packages, 2 MB and 1 file of unknown size, "
        "from 127.0.0.1 and this machine"
    )


@pytest.mark.parametrize("platform, first", [("cpu", "+cpu"), ("amd", "+cpu"), ("nvidia", "")])
def test_which_build_is_preferred(platform, first, monkeypatch):
    monkeypatch.setattr(install_torch, "driver_platform", lambda: platform)
    monkeypatch.setenv("ROCM_PATH", "/none")
    wanted = [choice[0] for choice in install_torch.choices()]
    assert wanted[0] == f"torch=={install_torch.VERSION}{first}"
    assert wanted[-1] == f"torch=={install_torch.VERSION}"


@pytest.mark.parametrize("variable", ["ROCM_PATH", "HIP_PATH"])
def test_the_build_for_a_rocm_that_is_installed(tmp_path, monkeypatch, variable):
    """Its layouts: test_preflight.py."""
    monkeypatch.setattr(install_torch, "driver_platform", lambda: "amd")
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info/version").write_text("7.0.2-56\n")
    first, second, *_ = install_torch.choices()
    assert first == ["torch>=2.11", "--index-url", f"{install_torch.INDEX}/rocm7.0"]
    assert second == [f"torch=={install_torch.VERSION}+cpu"]


def run(monkeypatch, arguments: list[str], offered: dict[str, str]) -> tuple[int, list[str]]:
    """Exit code and what pip is then asked for, where an index offers these."""
    asked: list[str] = []

    def plan(candidate):
        url = offered.get(" ".join(candidate))
        return None if url is None else [package("torch", "2.13.0", url)]

    def install(command, **keywords):
        asked.extend(command[command.index("install") + 2 :])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install_torch, "plan", plan)
    monkeypatch.setattr(install_torch, "find_spec", lambda name: None)
    monkeypatch.setattr(install_torch, "driver_platform", lambda: "cpu")
    monkeypatch.setattr(install_torch, "size", lambda url: 1)
    monkeypatch.setattr(install_torch.subprocess, "run", install)
    return install_torch.main(arguments), asked


def test_the_first_build_that_is_offered(monkeypatch, capsys):
    plain = f"torch=={install_torch.VERSION}"
    both = {plain: "https://a/torch", f"{plain}+cpu": "https://b/torch"}
    assert run(monkeypatch, [], both) == (0, [f"{plain}+cpu"])
    assert "from b" in capsys.readouterr().out
    assert run(monkeypatch, [], {plain: "https://a/torch"}) == (0, [plain])
    named = ["torch==2.12", "-i", "x"]
    assert run(monkeypatch, named, {" ".join(named): "https://a/torch"}) == (0, named)
    assert run(monkeypatch, [], {})[0] == 1
    assert "pip finds no torch 2.13.0: name another with TORCH='...'" in capsys.readouterr().err


def test_a_torch_that_is_there_is_kept(monkeypatch, capsys):
    monkeypatch.setattr(install_torch, "plan", lambda candidate: pytest.fail("pip was asked"))
    assert install_torch.main(["torch==1.0"]) == 0
    monkeypatch.setattr(install_torch, "version", lambda name: "2.9.1+rocm6.4")
    assert install_torch.main([]) == 1
    assert "PyTorch 2.9.1+rocm6.4 is in .venv, expected 2.11 or newer: upgrade it" in capsys.readouterr().err


# ---- which kernels the extension gets

FAKE_TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0+{toolkit}"
version = SimpleNamespace(cuda={cuda!r}, hip={hip!r})
"""


def configure(tmp_path: Path, cuda=None, hip=None, compiler="/none", platform="auto") -> tuple[dict, str]:
    """What CMake decides beside a torch of this toolkit and with this compiler: the facts of _native.json and
    what
    it says."""
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text(FAKE_TORCH.format(toolkit=cuda or hip or "cpu", cuda=cuda, hip=hip))
    pybind11 = said_by([sys.executable, "-m", "pybind11", "--cmakedir"]).stdout.strip()
    command = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DLLAMAC_PYTHON=ON", "-DBUILD_TESTING=OFF"]
    command += [f"-DLLAMAC_PLATFORM={platform}", f"-Dpybind11_DIR={pybind11}"]
    command.append(f"-DPython_EXECUTABLE={sys.executable}")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    found = said_by(command, **environment, CUDACXX=compiler, HIPCXX=compiler)
    facts = tmp_path / "build/csrc/python/_native.json"
    return json.loads(facts.read_text()) if facts.exists() else {}, " ".join(found.stderr.split())


def test_kernels_beside_a_torch_for_gpus_without_a_compiler(tmp_path):
    facts, _ = configure(tmp_path, cuda="13.0")
    assert (facts["platform"], facts["kernels"], facts["libraries"]) == ("nvidia", "cpu", [])
    assert "because no CUDA compiler was found" in facts["without_gpu"]
    assert "TOOLKIT=pip" in facts["without_gpu"]


@pytest.mark.more
def test_kernels_beside_a_torch_of_another_toolkit(tmp_path):
    nvcc = program(tmp_path / "bin", "nvcc", "echo Cuda compilation tools, release 12.4, V12.4.131")
    facts, _ = configure(tmp_path, cuda="13.0", compiler=str(nvcc))
    assert facts["kernels"] == "cpu"
    assert f"because {nvcc} is of CUDA 12 and PyTorch of 13.0 when" in facts["without_gpu"]


@pytest.mark.more
def test_kernels_beside_rocms_torch(tmp_path):
    facts, _ = configure(tmp_path, hip="7.0.51831")
    assert (facts["platform"], facts["kernels"]) == ("amd", "cpu")
    assert "because no HIP compiler was found" in facts["without_gpu"]
    assert "Install ROCm 7's toolkit, then" in facts["without_gpu"]


@pytest.mark.more
@pytest.mark.parametrize(
    "said, reason",
    [
        (
            "Found HIP installation: /opt/rocm-6.4.3, version 6.4.43484",
            "is of ROCm 6 and PyTorch of 7.0.51831",
        ),
        ("InstalledDir: /usr/bin", "names no ROCm"),
    ],
)
def test_kernels_beside_a_torch_of_another_rocm(tmp_path, said, reason):
    """llvm is a link in AMD's packages: the headers are not where the compiler's path leads."""
    program(tmp_path / "rocm/lib/llvm/bin", "clang++", f'echo "{said}" >&2')
    (tmp_path / "rocm/llvm").symlink_to("lib/llvm")
    facts, _ = configure(tmp_path, hip="7.0.51831", compiler=str(tmp_path / "rocm/llvm/bin/clang++"))
    assert facts["kernels"] == "cpu" and f"clang++ {reason} when" in facts["without_gpu"]


@pytest.mark.more
def test_kernels_that_were_asked_for(tmp_path):
    facts, _ = configure(tmp_path, cuda="13.0", platform="cpu")
    assert facts["kernels"] == "cpu" and "because LLAMAC_PLATFORM was cpu" in facts["without_gpu"]
    (tmp_path / "again").mkdir()
    facts, said = configure(tmp_path / "again", cuda="13.0", platform="nvidia")
    assert facts == {}
    assert "no CUDA kernels for PyTorch 2.13.0+13.0, because no CUDA compiler was found" in said


def test_kernels_beside_a_torch_for_the_cpu(tmp_path):
    facts, _ = configure(tmp_path)
    assert (facts["platform"], facts["kernels"], facts["without_gpu"]) == ("cpu", "cpu", "")
