"""Faults of data-parallel ranks and of --tp 2 --pp 2: signals, lost and hanging ranks, errors of one rank."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import as_ranks, mesh_flags, start_ranks, still_run, still_runs
from run import ROOT, T, assert_same_state, events, flags, numbers, one_line, write_model

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
SLOW = pytest.mark.slow
ENDLESS = {"steps": 1000000, "schedule": "constant", "val_every": 0}
PARALLEL = ENDLESS | {"devices": 2, "batch_size": 2}
ASYNC = {"checkpoint_async": "on", "checkpoint_every": 1}
MESH = "tp 2 pp 2"


def endless(folder: Path, mesh: str, **changes) -> dict:
    """Flags of a run on a mesh and of a model that it divides; a pipeline has four micro-batches."""
    more = ENDLESS | mesh_flags(mesh) | write_model(folder, "tied-gqa", intermediate_size=132, **changes)
    return more | ({"total_batch_size": 4 * T} if mesh == MESH else {})


@pytest.mark.parametrize(
    ("mesh", "number", "to_rank", "saves"),
    [
        ("dp 2", signal.SIGTERM, None, {}),
        pytest.param("dp 2", signal.SIGUSR1, 1, {}, marks=pytest.mark.more),
        ("dp 2", signal.SIGTERM, 1, ASYNC),
        pytest.param("dp 2", signal.SIGUSR1, None, ASYNC, marks=pytest.mark.more),
        (MESH, signal.SIGTERM, 3, {}),
        pytest.param(MESH, signal.SIGTERM, None, {}, marks=SLOW),
        pytest.param(MESH, signal.SIGINT, None, {}, marks=SLOW),
        pytest.param(MESH, signal.SIGHUP, 0, {}, marks=SLOW),
        pytest.param(MESH, signal.SIGUSR1, 1, {}, marks=SLOW),
        pytest.param(MESH, signal.SIGUSR2, 2, {}, marks=SLOW),
    ],
)
def test_a_signal(build, train, data, tmp_path, mesh, number, to_rank, saves):
    """To the process that started the ranks, or to one of them; a pipeline has 16 micro-batches. All end
    with a checkpoint of the last step, and a resumed run has the bits of one without the signal."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    more = endless(tmp_path, mesh) | saves
    more |= {"total_batch_size": 16 * T, "checkpoint_every": 0} if mesh == MESH else {}
    process, ranks = start_ranks(build, data, out, **more)
    os.kill(process.pid if to_rank is None else ranks[to_rank], number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and said == "" and not still_run(ranks)
    last = events(out, "step")[-1]["step"]
    assert events(out, "checkpoint")[-1]["step"] == last
    for folder, resume in ((out, "auto"), (whole, "none")):
        train(*flags(data, folder, **more | {"steps": last + 1, "resume": resume}))
    assert numbers(out) == numbers(whole)
    name = f"step_{last + 1:06d}"
    assert_same_state(out / name, whole / name)


@pytest.mark.more
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=SLOW)])
def test_a_signal_inside_a_step(build, data, tmp_path, chunks):
    """Of 8192 micro-batches."""
    more = endless(tmp_path, MESH, num_hidden_layers=4)
    more |= {"pp_chunks": chunks, "total_batch_size": 8192 * T}
    process, ranks = start_ranks(build, data, tmp_path / "out", "run", **more)
    time.sleep(2)
    os.kill(ranks[2], signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and said == "" and not still_run(ranks)
    assert not events(tmp_path / "out", "step") and not list(tmp_path.glob("out/step_*"))


@pytest.mark.parametrize(
    ("mesh", "rank", "saves"),
    [
        ("dp 3", 0, "on"),
        pytest.param("dp 3", 1, "off", marks=pytest.mark.more),
        pytest.param("dp 3", 2, "on", marks=pytest.mark.more),
        (MESH, 3, "off"),
        *(pytest.param(MESH, rank, "off", marks=SLOW) for rank in range(3)),
    ],
)
def test_a_lost_rank(build, train, data, gpu, tmp_path, mesh, rank, saves):
    """The others end with a line that names it, and no process is left; the newest checkpoint resumes."""
    if gpu and mesh == "dp 3":
        mesh, rank = "dp 2", rank % 2  # two GPUs suffice
    more = endless(tmp_path, mesh) | {"checkpoint_every": 2, "checkpoint_async": saves}
    out = tmp_path / "out"
    process, ranks = start_ranks(build, data, out, "checkpoint", **more, collective_timeout=10)
    os.kill(ranks[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    first, *lines = said.splitlines()
    assert process.returncode == 128 + signal.SIGKILL and not still_run(ranks)
    assert first == f"train_llama3: rank {rank} was ended by signal 9 (Killed)"
    assert len(lines) == len(ranks) - 1, said
    for line in lines:
        assert line.startswith(f"train_llama3: rank {rank} has ended or cannot be reached, as rank "), said
        # On a GPU its heartbeat ends a rank that waits in a collective, without a word of the run.
        assert gpu or "; the last checkpoint is " in line
    newest = int(max(out.glob("step_*")).name[5:])
    train(*flags(data, out, **more | {"steps": newest + 2, "resume": "auto"}))
    assert [e["step"] for e in events(out, "step")] == list(range(1, newest + 3))


@pytest.mark.parametrize(
    ("mesh", "rank"),
    [
        ("dp 3", 1),
        pytest.param(MESH, 2, marks=pytest.mark.more),
        *(pytest.param(MESH, rank, marks=SLOW) for rank in (0, 1, 3)),
    ],
)
def test_a_rank_that_hangs(build, data, tmp_path, mesh, rank):
    """The others end when --collective-timeout is over, and --devices ends the one that hangs."""
    more = endless(tmp_path, mesh) | {"collective_timeout": 3}
    process, ranks = start_ranks(build, data, tmp_path / "out", **more)
    os.kill(ranks[rank], signal.SIGSTOP)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - began < 3 + 2 + 5 + 5
    assert len(said.splitlines()) == len(ranks) - 1, said
    # In a mesh, one may wait for another that has ended before it.
    named = said.count(f"train_llama3: rank {rank} did not answer in time, as rank ")
    assert named == len(ranks) - 1 or (mesh == MESH and named), said
    assert not still_run(ranks)


@pytest.mark.parametrize(
    ("mesh", "rank", "of", "call", "number", "error"),
    [
        ("dp 2 zero 3", 0, "out", "rename", 1, 28),
        ("dp 2 zero 3", 1, "out", "open", 3, 28),
        (MESH, 3, "data", "read", 4, 5),
        pytest.param(MESH, 0, "data", "read", 4, 5, marks=SLOW),
        pytest.param(MESH, 2, "out", "open", 3, 28, marks=SLOW),
        pytest.param(MESH, 0, "out", "rename", 1, 28, marks=SLOW),
    ],
)
def test_an_error_of_one_rank(build, data, tmp_path, fault, mesh, rank, of, call, number, error):
    """Tokens that it cannot read, or a checkpoint that it cannot write: one line, from this rank. The others,
    which may gather weights for the checkpoint, do not wait for it."""
    shutil.copytree(data, tmp_path / "data")
    more = endless(tmp_path, mesh) | {"steps": 1000, "checkpoint_every": 2, "checkpoint_async": "off"}
    devices = more.pop("devices")
    command = [build / "train_llama3", *flags(tmp_path / "data", tmp_path / "out", **more)]
    began = time.monotonic()
    ended = as_ranks(command, devices, {rank: fault(tmp_path / of, call, number, str(error))})
    assert time.monotonic() - began < 20
    assert os.strerror(error) in one_line(ended[rank][1])
    for each, (code, said) in enumerate(ended):
        assert code == 2 and (each == rank or said == ""), ended


def test_a_checkpoint_of_another_model(train, data, tmp_path):
    """One line, though each stage and each rank of the tensor axis finds it."""
    train(*flags(data, tmp_path / "a", steps=2))
    more = endless(tmp_path, MESH) | {"resume": tmp_path / "a/step_000002"}
    line = one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert f"{tmp_path}/a/step_000002/config.json: is not the model that --model " in line


def test_a_rank_that_is_killed_at_once(build, data, tmp_path):
    """Before the ranks have met: the flags' limit holds already."""
    command = [build / "train_llama3", *flags(data, tmp_path / "out", devices=2, collective_timeout=2)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while not (ranks := children.read_text().split()):
        assert time.monotonic() < deadline
    os.kill(int(ranks[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert said.startswith("train_llama3: rank 0 was ended by signal 9 (Killed)\n")


NO_SECOND_RANK = """
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
int execv(const char* path, char* const* arguments) {
    const char* rank = getenv("RANK");
    if (!rank || *rank != '1') return execve(path, arguments, environ);
    errno = ENOMEM;
    return -1;
}
"""


def test_a_rank_whose_program_cannot_start(train, data, tmp_path):
    """The process is there, but execve fails: the only line that names the cause is its own."""
    (tmp_path / "no.c").write_text(NO_SECOND_RANK)
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", tmp_path / "no.so", tmp_path / "no.c"], check=True
    )
    options = flags(data, tmp_path / "out", devices=2, collective_timeout=1)
    done = train(*options, code=2, env=os.environ | {"LD_PRELOAD": str(tmp_path / "no.so")})
    expected = "rank 1: cannot start the program again: Cannot allocate memory"
    assert done.stderr.startswith(f"train_llama3: {expected}\n")


# A rank, the kind of a call that is slow on it, the files that it concerns, and --checkpoint-async.
SLOW_CALLS = [
    pytest.param(0, "fsync", "out", "off", marks=pytest.mark.more),
    (1, "fsync", "out", "on"),
    pytest.param(1, "read", "data", "off", marks=pytest.mark.more),
    pytest.param(0, "write", "out/log", "on", marks=pytest.mark.more),
]


@pytest.mark.parametrize(("rank", "call", "below", "saves"), SLOW_CALLS)
def test_a_slow_rank_is_waited_for(build, data, tmp_path, fault, rank, call, below, saves):
    """Files that take longer than --collective-timeout, of one rank alone."""
    shutil.copytree(data, tmp_path / "data")
    more = {"steps": 3, "batch_size": 2, "checkpoint_every": 2, "collective_timeout": 1, "zero": 3}
    command = [build / "train_llama3"]
    command += flags(tmp_path / "data", tmp_path / "out", checkpoint_async=saves, **more)
    assert as_ranks(command, 2, {rank: fault(tmp_path / below, call, 4, "sleep:3")}) == [(0, ""), (0, "")]
    assert [e["step"] for e in events(tmp_path / "out", "step")] == [1, 2, 3]


def test_the_watchdog_limits_the_wait(build, data, tmp_path, fault):
    shutil.copytree(data, tmp_path / "data")
    more = {"batch_size": 2, "collective_timeout": 1, "watchdog": 2}
    command = [build / "train_llama3", *flags(tmp_path / "data", tmp_path / "out", **more)]
    began = time.monotonic()
    ended = as_ranks(command, 2, {1: fault(tmp_path / "data", "open", 2, "sleep:6")})
    assert ended[0][0] == 2 and "rank 1 did not answer in time, as rank 0 found" in ended[0][1]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.more)])
def test_an_own_error_wins(build, data, tmp_path, fault, rank):
    """One rank cannot read, while the other one still reads, or does not answer any more."""
    shutil.copytree(data, tmp_path / "data")
    for slow in ("sleep:3", "kill"):
        command = [build / "train_llama3"]
        command += flags(tmp_path / "data", tmp_path / slow, batch_size=2, collective_timeout=1)
        own = {
            rank: fault(tmp_path / "data", "read", 2, "5"),
            1 - rank: fault(tmp_path / "data", "read", 2, slow),
        }
        ended = as_ranks(command, 2, own)
        assert ended[rank][0] == 2 and "cannot read: Input/output error" in one_line(ended[rank][1])
        assert slow == "kill" or ended[1 - rank] == (2, "")


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.more), 3])
def test_validation_that_one_rank_cannot_read(build, data, tmp_path, zero):
    """A token beyond the vocabulary in the batch of rank 1: one line, in time, with all finished steps."""
    shutil.copy(data / "val_000.bin", tmp_path / "val.bin")
    out = tmp_path / "out"
    more = PARALLEL | {"val_data": tmp_path / "val.bin", "val_every": 20, "checkpoint_every": 0, "zero": zero}
    process, ranks = start_ranks(build, data, out, **more, collective_timeout=60)
    with open(tmp_path / "val.bin", "r+b") as file:
        file.seek(1024 + 2 * (2 * T + 5))
        file.write(b"\xff\xff")
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - began < 20
    last = events(out, "step")[-1]["step"]
    assert f"rank 1: {tmp_path / 'val.bin'}: " in one_line(said) and f"step_{last:06d}" in said
    assert all(0 < e["loss"] < 10 for e in events(out, "val"))
    assert events(out, "checkpoint")[-1]["step"] == last and not still_run(ranks)


@pytest.mark.parametrize("saves", [{}, {"checkpoint_async": "on", "checkpoint_every": 2}])
def test_a_thread_that_cannot_start(train, data, tmp_path, fault, saves):
    """One line, and the steps that are finished: 2 of them, where it is the thread that would save them."""
    number = fault(tmp_path, "thread", 2 if saves else 1, "11")
    done = train(*flags(data, tmp_path / "out", **saves), code=2, env=os.environ | number)
    line = one_line(done)
    assert "cannot start a thread: Resource temporarily unavailable" in line
    assert ("step_000002" in line) == bool(saves)
    assert (tmp_path / "out/step_000002/manifest.json").exists() == bool(saves)


def test_a_signal_while_a_rank_hangs(build, data, tmp_path):
    """The ranks cannot agree on a step: they end within seconds, as launchers expect it, and save nothing."""
    more = PARALLEL | {"checkpoint_every": -1}
    process, ranks = start_ranks(build, data, tmp_path, **more)
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(ranks[0], signal.SIGTERM)
    deadline = time.monotonic() + 10
    while still_runs(ranks[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(ranks[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        said == "train_llama3: SIGTERM: the other ranks do not answer: ended at once, without a checkpoint\n"
    )


def test_data_that_one_rank_cannot_read(build, data, tmp_path):
    """All ranks end at the same step, with its checkpoint and one line that names it, not the one before."""
    shard = tmp_path / "train.bin"
    shutil.copy(data / "train_000.bin", shard)
    out = tmp_path / "out"
    more = PARALLEL | {"train_data": str(shard), "collective_timeout": 10}
    more["checkpoint_every"] = 20
    process, ranks = start_ranks(build, data, out, "checkpoint", **more)
    os.truncate(shard, 1024)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and len(said.splitlines()) == 1, said
    last = events(out, "step")[-1]["step"]
    assert str(shard) in said and f"step_{last:06d}" in said
    assert not still_run(ranks)
