"""Where the compiled programs are, and the reference tensors (written by `python train_llama3.py`, once)."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launch import for_gpus, needs, skip_without_devices

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LLAMAC_PYTHON"] = "/bin/false"  # a plot takes a second of each run; tests of plots name a Python
# readline, which pytest imports, sets COLUMNS for child processes.
os.environ["COLUMNS"] = ""
# Tolerances are multiples of PyTorch's rounding errors, which must not depend on the processor's vendor and
# vectors. The Makefile's `reference` has the same.
os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Programs inherit ignored signals: a shell's background ignores SIGINT, nohup SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder of the compiled programs."""
    folder = ROOT / os.environ.get("LLAMAC_BUILD", "build/auto")
    if not (folder / "train_llama3").exists():
        pytest.fail(f"{folder}/train_llama3 is missing: `make test` builds it")
    return folder


@pytest.fixture(scope="module")
def ranks_over_gloo(build):
    """Ranks of a thread each, or no tests. A run that wants more GPUs than there are is skipped."""
    needs(build, "GLOO", devices=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def gpu(build) -> bool:
    return for_gpus(build)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Tokens that a model can learn something from: a noisy walk over a vocabulary of 97."""
    from run import V

    from llamac.data import write_bin

    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    walk = np.cumsum(rng.choice([1, 2, 5], 6000)) % V
    for name, part in (("train_000", walk[:2500]), ("train_001", walk[2500:5000]), ("val_000", walk[5000:])):
        write_bin(folder / f"{name}.bin", part.astype(np.uint32), V)
    return folder


@pytest.fixture(scope="session")
def train(build) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the program, which must end with exit status `code`."""

    def run(*arguments, code=0, program=build / "train_llama3", **keywords) -> subprocess.CompletedProcess:
        command = [program, *arguments]
        keywords = {"cwd": ROOT} | keywords
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, **keywords)
        skip_without_devices(result.stderr)
        assert result.returncode == code, result.stdout[-2000:] + result.stderr
        return result

    return run


@pytest.fixture
def start(build):
    """Starts the program; what still runs at the end of the test is killed."""
    started = []

    def run(*arguments, **keywords) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        started.append(subprocess.Popen([build / "train_llama3", *arguments], **pipes | keywords))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def fault(tmp_path_factory) -> Callable[..., dict[str, str]]:
    """Variables of a process whose k-th call of a kind on files below a folder meets a fault (faults.c)."""
    from chaos.faults_library import FaultsLibrary

    return FaultsLibrary(tmp_path_factory.mktemp("faults")).environment


@pytest.fixture
def figures():
    """Those that matplotlib is told to close: they stay open until the end of the test."""
    pyplot, kept = pytest.importorskip("matplotlib.pyplot"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", kept.append)
        yield kept
    pyplot.close("all")


@pytest.fixture(scope="session")
def chosen(build, gpu) -> Callable[[str], list[str]]:
    """OPERATION=VARIANT for every operation. "reference", "naive", "optimized"; "kernels": all of them, those
    preferred first, as not every one takes every shape.
    """
    listing = subprocess.run(
        [build / "train_llama3", "--list-kernels"], check=True, capture_output=True, text=True
    ).stdout
    kernels: dict[str, list[str]] = {}
    for line in listing.splitlines()[2:]:  # behind the headings
        if found := re.match(r"(\w+):", line):
            kernels[found[1]] = []
        elif (found := re.match(r"[ *] (\S+) +(\S.*?) {2,}", line)) and found[2] != "host":
            next(reversed(kernels.values())).append(found[1])

    def choose(kind: str) -> list[str]:
        if kind == "reference" and gpu:
            pytest.skip("this build is for a GPU: the plain loops cannot reach its memory")
        return [f"{op}={','.join(names) if kind == 'kernels' else kind}" for op, names in kernels.items()]

    return choose


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of the reference tensors."""
    folder = ROOT / "data/reference"
    if not any(folder.glob("*/f32/truth.safetensors")):
        subprocess.run([sys.executable, "train_llama3.py"], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """More threads only cost PyTorch time on models this small."""
    import torch

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)
