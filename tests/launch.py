"""What starts several processes of a run, for tests."""

import os
import re
import shutil
import socket
import subprocess
import time
from math import prod
from pathlib import Path

import pytest
from run import events, flags

ROOT = Path(__file__).resolve().parents[1]
AXES = ("tp", "pp", "cp", "dp")


def mesh_flags(mesh: str) -> dict:
    """The flags of a mesh, as "tp 2 dp 2 zero 3": axes, and values of other flags. Micro-batches are of one
    sequence in a pipeline, else of four on all ranks."""
    words = mesh.split()
    sizes = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    ranks, data_ranks = prod(sizes.get(axis, 1) for axis in AXES), sizes.pop("dp", 1)
    return {"devices": ranks, "batch_size": 1 if "pp" in sizes else 4 // data_ranks} | sizes


def free_port() -> int:
    """One whose rendezvous port (platform/ranks/launch.h) is free, too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port - 8192))
            except OSError:
                continue
            return port


def torchrun_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def has(build, library: str) -> bool:
    """Whether the build has an engine: GLOO or MPI."""
    cache = (build / "CMakeCache.txt").read_text()
    name = {"GLOO": "LLAMAC_GLOO_LIBRARY", "MPI": "MPI_mpi_LIBRARY"}[library]
    return any(line.startswith(f"{name}:") and "NOTFOUND" not in line for line in cache.splitlines())


def for_gpus(build) -> bool:
    """Whether the programs compute on a GPU; else on the host, with a warp's size for the emulated device."""
    return "LLAMAC_WARP:" not in (build / "CMakeCache.txt").read_text()


def needs(build, library: str, devices: int = 2) -> None:
    """Skip the test, unless the build has the engine and this machine can start that many ranks with it."""
    if library == "GLOO" and not has(build, "GLOO"):
        pytest.skip("the build is without Gloo")
    if library == "MPI" and not (has(build, "MPI") and shutil.which("mpirun")):
        pytest.skip("the build is without MPI, or there is no mpirun")
    if for_gpus(build):
        import torch

        if torch.cuda.device_count() < devices:
            pytest.skip(f"needs {devices} GPUs, found {torch.cuda.device_count()}")


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that --devices has started, in order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    variables = {int(pid): Path(f"/proc/{pid}/environ").read_text() for pid in children}
    return sorted(variables, key=lambda pid: int(re.search(r"\0RANK=(\d+)", variables[pid])[1]))


def as_ranks(
    command: list, ranks: int = 2, own: dict[int, dict[str, str]] | None = None, pipe: str = "stderr"
) -> list[tuple[int, str]]:
    """Exit codes and what is said of processes that torchrun might have started. command: one for all ranks,
    or one per rank; own: variables of single ranks."""
    port, pipes = free_port(), {"stdout": subprocess.DEVNULL} | {pipe: subprocess.PIPE}
    processes = []
    for rank in range(ranks):
        variables = {"OMP_NUM_THREADS": "1"} | torchrun_environment(rank, ranks, port)
        variables |= (own or {}).get(rank, {})
        line = command[rank] if isinstance(command[0], list) else command
        processes.append(subprocess.Popen(line, cwd=ROOT, env=os.environ | variables, text=True, **pipes))
    try:
        said = [process.communicate(timeout=120)[pipe == "stderr"] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for text in said:
        skip_without_devices(text)
    return [(process.returncode, text) for process, text in zip(processes, said)]


def skip_without_devices(said: str) -> None:
    """A build for GPUs refuses more ranks than there are GPUs."""
    if "expected a device for each of" in said:
        pytest.skip(said.strip())


def start_ranks(build, data, out, awaited: str = "step", **more) -> tuple[subprocess.Popen, list[int]]:
    """--devices, once it has logged such an event: its process, and the process ids of its ranks."""
    process = subprocess.Popen(
        [build / "train_llama3", *flags(data, out, **more)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out / "log.jsonl").exists() or not events(out, awaited):
        if process.poll() is not None:
            said = process.communicate()[1]
            skip_without_devices(said)
            raise AssertionError(said)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, ranks_of(process)


def still_runs(pid: int) -> bool:
    """Also one that is stopped; not one that has ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def still_run(pids: list[int]) -> list[int]:
    return [pid for pid in pids if still_runs(pid)]
