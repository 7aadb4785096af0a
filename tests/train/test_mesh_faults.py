"""Faults of runs on a mesh of --tp 2 and --pp 2: signals, lost and hanging ranks, errors of one rank."""

import os
import shutil
import signal
import time

import pytest
from launch import as_ranks, start_ranks, still_run
from meshes import write_model
from run import T, assert_same_state, events, flags, numbers, one_line

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("ranks_over_gloo")]
SLOW = pytest.mark.slow
MESH = {"tp": 2, "pp": 2, "batch_size": 1, "total_batch_size": 4 * T, "val_every": 0}
ENDLESS = MESH | {"devices": 4, "steps": 1000000, "schedule": "constant"}


@pytest.fixture
def model(tmp_path) -> dict:
    return write_model(tmp_path, {"tied-gqa": {"intermediate_size": 132}}, "tied-gqa")


@pytest.mark.parametrize(
    ("number", "to_rank"),
    [
        (signal.SIGTERM, 3),
        pytest.param(signal.SIGTERM, None, marks=SLOW),
        pytest.param(signal.SIGINT, None, marks=SLOW),
        pytest.param(signal.SIGHUP, 0, marks=SLOW),
        pytest.param(signal.SIGUSR1, 1, marks=SLOW),
        pytest.param(signal.SIGUSR2, 2, marks=SLOW),
    ],
)
def test_a_signal(build, train, data, tmp_path, model, number, to_rank):
    """Between two of 16 micro-batches: all end, and a resumed run has the bits of one without the signal."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    more = ENDLESS | model | {"total_batch_size": 16 * T}
    process, ranks = start_ranks(build, data, out, **more, checkpoint_every=0)
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
    sizes = {"num_hidden_layers": 4, "intermediate_size": 132}
    more = ENDLESS | write_model(tmp_path, {"tied-gqa": sizes}, "tied-gqa") | {"pp_chunks": chunks}
    more["total_batch_size"] = 8192 * T
    process, ranks = start_ranks(build, data, tmp_path / "out", "run", **more)
    time.sleep(2)
    os.kill(ranks[2], signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and said == "" and not still_run(ranks)
    assert not events(tmp_path / "out", "step") and not list(tmp_path.glob("out/step_*"))


@pytest.mark.parametrize("rank", [3, *(pytest.param(each, marks=SLOW) for each in range(3))])
def test_a_lost_rank(build, train, data, tmp_path, model, rank):
    """The others end, each with a line that names it; the newest checkpoint resumes."""
    out, more = tmp_path / "out", ENDLESS | model | {"checkpoint_every": 2, "collective_timeout": 10}
    process, ranks = start_ranks(build, data, out, "checkpoint", **more)
    os.kill(ranks[rank], signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    first, *lines = said.splitlines()
    assert process.returncode == 128 + signal.SIGKILL and not still_run(ranks)
    assert first == f"train_llama3: rank {rank} was ended by signal 9 (Killed)"
    assert len(lines) == 3, said
    for line in lines:
        assert line.startswith(f"train_llama3: rank {rank} has ended or cannot be reached, as rank "), said
        assert "; the last checkpoint is " in line
    newest = int(max(out.glob("step_*")).name[5:])
    train(*flags(data, out, **more | {"steps": newest + 2, "resume": "auto"}))
    assert [e["step"] for e in events(out, "step")] == list(range(1, newest + 3))


@pytest.mark.more
@pytest.mark.parametrize("rank", [2, *(pytest.param(each, marks=SLOW) for each in (0, 1, 3))])
def test_a_rank_that_hangs(build, data, tmp_path, model, rank):
    """The others end when --collective-timeout is over, and --devices ends the one that hangs."""
    process, ranks = start_ranks(build, data, tmp_path / "out", **ENDLESS | model, collective_timeout=3)
    os.kill(ranks[rank], signal.SIGSTOP)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and time.monotonic() - began < 3 + 2 + 5 + 5
    # Of the others, one may wait for another that has ended before it.
    assert len(said.splitlines()) == 3 and f"rank {rank} did not answer in time, as rank " in said, said
    assert not still_run(ranks)


@pytest.mark.parametrize(
    ("rank", "of", "call", "number", "error"),
    [
        (3, "data", "read", 4, 5),
        pytest.param(0, "data", "read", 4, 5, marks=SLOW),
        pytest.param(2, "out", "open", 3, 28, marks=SLOW),
        pytest.param(0, "out", "rename", 1, 28, marks=SLOW),
    ],
)
def test_an_error_of_one_rank(build, data, tmp_path, model, fault, rank, of, call, number, error):
    """Tokens that it cannot read, or a checkpoint that it cannot write: one line, from this rank."""
    shutil.copytree(data, tmp_path / "data")
    more = MESH | model | {"steps": 1000, "checkpoint_every": 2, "checkpoint_async": "off"}
    command = [build / "train_llama3", *flags(tmp_path / "data", tmp_path / "out", **more)]
    began = time.monotonic()
    ended = as_ranks(command, 4, {rank: fault(tmp_path / of, call, number, str(error))})
    assert time.monotonic() - began < 30
    assert os.strerror(error) in one_line(ended[rank][1])
    for each, (code, said) in enumerate(ended):
        assert code == 2 and (each == rank or said == ""), ended


def test_a_checkpoint_of_another_model(train, data, tmp_path, model):
    """One line, though each stage and each rank of the tensor axis finds it."""
    train(*flags(data, tmp_path / "a", **{**MESH, "tp": 1, "pp": 1}, steps=2))
    more = MESH | model | {"devices": 4, "resume": tmp_path / "a/step_000002"}
    line = one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert f"{tmp_path}/a/step_000002/config.json: is not the model that --model " in line


def test_a_mesh_that_does_not_divide(train, data, tmp_path, model):
    more = MESH | model | {"devices": 8, "cp": 4}
    line = one_line(train(*flags(data, tmp_path / "out", **more), code=2))
    assert "--tp 2 --cp 4 --pp 2: expected a divisor of the number of devices, found 8 devices" in line
    assert not (tmp_path / "out").exists()
