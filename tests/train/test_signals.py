"""Signals, a console that goes away, files that shrink or may not grow, hangs: a run goes on, or ends with a
line that says why, a checkpoint of what was finished, and an exit code of its own.
"""

import fcntl
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launch import still_runs
from run import ROOT, T, V, bits, end, events, flags, one_line, until

from llamac.data import write_bin

pytestmark = pytest.mark.program

ENDLESS = {"steps": 1000000, "val_every": 0, "checkpoint_every": 0, "schedule": "constant"}


def step_logged(out: Path, step: int = 1) -> Callable[[], bool]:
    log, entry = out / "log.jsonl", re.compile(rf'"event": ?"step".*"step": ?{step},')
    return lambda: log.exists() and entry.search(log.read_text()) is not None


def saved_step(out: Path) -> int:
    """The newest checkpoint, which is of the last step in the log."""
    newest = max(out.glob("step_*"))
    assert (newest / "manifest.json").exists()
    assert int(newest.name[5:]) == events(out, "step")[-1]["step"]
    return int(newest.name[5:])


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_ends_the_run_with_a_checkpoint(start, data, tmp_path, name):
    process = start(*flags(data, tmp_path, **ENDLESS))
    until(step_logged(tmp_path), process)
    process.send_signal(getattr(signal, name))
    done = end(process, 128 + getattr(signal, name))
    step = saved_step(tmp_path)
    interrupted, _, command = done.stdout.splitlines()[-3:]
    assert interrupted.startswith(f"interrupted by {name}: model {tmp_path}/step_{step:06d}, log ")
    assert not done.stderr
    last = [*shlex.split(command), "--steps", str(step + 1)]
    again = subprocess.run(last, capture_output=True, text=True, cwd=ROOT)
    assert again.returncode == 0 and f"--steps was 1000000, is {step + 1}" in again.stdout, again.stderr
    assert saved_step(tmp_path) == step + 1


def test_a_step_that_a_signal_interrupts_is_done_again(start, train, data, tmp_path):
    """Steps of 16 micro-batches: the signal comes between two, and a resumed run has the same bits."""
    long = ENDLESS | {"total_batch_size": 16 * 4 * T}
    process = start(*flags(data, tmp_path / "out", **long))
    until(step_logged(tmp_path / "out", 3), process)
    process.send_signal(signal.SIGTERM)
    end(process, 143)
    last = saved_step(tmp_path / "out")
    train(*flags(data, tmp_path / "out", **long | {"steps": last + 1}), "--resume", "auto")
    train(*flags(data, tmp_path / "whole", **long | {"steps": last + 1}))
    assert bits(tmp_path / "out") == bits(tmp_path / "whole")


def test_a_profile_of_a_run_that_a_signal_ends(start, data, tmp_path):
    """Of the steps that were finished: what the abandoned one had begun is left out."""
    long = ENDLESS | {"total_batch_size": 16 * 4 * T, "profile": 1000000, "val_data": ""}
    process = start(*flags(data, tmp_path, **long))
    until(step_logged(tmp_path, 2), process)
    process.send_signal(signal.SIGTERM)
    end(process, 143)
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == saved_step(tmp_path)


def test_a_run_without_checkpoints(start, train, data, tmp_path):
    """Neither at the end nor when interrupted."""
    last = train(*flags(data, tmp_path / "a", checkpoint_every=-1)).stdout.strip().splitlines()[-1]
    assert last.startswith("done: no model, log ")
    process = start(*flags(data, tmp_path / "b", **ENDLESS | {"checkpoint_every": -1}))
    until(step_logged(tmp_path / "b", 3), process)
    process.send_signal(signal.SIGINT)
    end(process, 130)
    assert not list(tmp_path.glob("*/step_*"))


def test_a_signal_inside_a_step(start, data, tmp_path):
    """Within a micro-batch, of which this step has 131,072."""
    process = start(*flags(data, tmp_path, val_data="", total_batch_size=(1 << 17) * 4 * T, watchdog=5))
    until(lambda: (tmp_path / "log.jsonl").exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    said = end(process, 143).stdout.splitlines()
    assert said[-3].startswith("interrupted by SIGTERM: no model, log ")
    assert said[-1].endswith(f"train_llama3 --resume auto --out {tmp_path} --watchdog 5.0")
    assert not list(tmp_path.glob("step_*"))


def test_a_signal_inside_validation(start, data, tmp_path):
    """Of a quarter of a million batches."""
    write_bin(tmp_path / "val_000.bin", np.arange(1 << 24, dtype=np.uint32) % V, V)
    process = start(*flags(data, tmp_path, val_data=tmp_path / "val_000.bin", val_steps=1 << 18))
    until(lambda: (tmp_path / "log.jsonl").exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    end(process, 143)


def test_a_signal_inside_a_sample(start, data, tmp_path):
    process = start(*flags(data, tmp_path, val_data="", sample_every=1, sample_tokens=1 << 24))
    until(step_logged(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    end(process, 143)
    assert saved_step(tmp_path) == 1


def test_the_third_signal_ends_at_once(start, data, tmp_path):
    """Signals that wait for a stopped process arrive together when it goes on."""
    for signals, ends in (([signal.SIGTERM, signal.SIGINT], {143, 130}),
                          ([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], {143, 130, 129})):  # fmt: skip
        out = tmp_path / str(len(signals))
        process = start(*flags(data, out, **ENDLESS))
        until(step_logged(out), process)
        for number in (signal.SIGSTOP, *signals, signal.SIGCONT):
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode in ends
        assert "a third signal ends it at once" in err.splitlines()[0]
        if len(signals) == 2:
            saved_step(out)
            assert len(err.splitlines()) == 1
        else:
            assert "third signal: ended at once" in err.splitlines()[1]
            assert not list(out.glob("step_*"))


def test_an_ignored_signal_stays_ignored(start, data, tmp_path):
    process = start(
        *flags(data, tmp_path, **ENDLESS), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    until(step_logged(tmp_path), process)
    process.send_signal(signal.SIGHUP)
    last = events(tmp_path, "step")[-1]["step"]
    until(step_logged(tmp_path, last + 20), process)
    process.send_signal(signal.SIGTERM)
    end(process, 143)


def test_a_closed_console_does_not_end_the_run(start, data, tmp_path):
    """`| head`, of stderr as well: the second signal's line goes nowhere."""
    process = start(*flags(data, tmp_path, **ENDLESS))
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    until(step_logged(tmp_path, 20), process)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) in (138, 140)
    assert saved_step(tmp_path) >= 20


def test_a_console_that_nobody_reads_does_not_hold_up_the_run(start, data, tmp_path):
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    process = start(*flags(data, tmp_path, steps=60), stdout=write)
    os.close(write)
    end(process, 0)
    assert len(events(tmp_path, "step")) == 60
    os.close(read)


def test_a_shard_that_shrinks(start, data, tmp_path):
    shard = tmp_path / "train.bin"
    shutil.copy(data / "train_000.bin", shard)
    process = start(*flags(data, tmp_path / "out", train_data=shard, **ENDLESS))
    until(step_logged(tmp_path / "out", 3), process)
    os.truncate(shard, 1024)
    line, newest = one_line(end(process, 2)), max((tmp_path / "out").glob("step_*"))
    assert f"{shard}: expected" in line and "found 1024: " in line
    assert line.endswith(f"; the last checkpoint is {newest}") and (newest / "manifest.json").exists()
    assert saved_step(tmp_path / "out") == events(tmp_path / "out", "checkpoint")[-1]["step"]


def test_a_log_beyond_the_file_size_limit(start, data, tmp_path):
    """The checkpoint, each of whose files is smaller, is written all the same."""
    process = start(
        *flags(data, tmp_path, **ENDLESS, optimizer_state="bf16"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (230_000, 230_000)),
    )
    line = one_line(end(process, 2))
    newest = max(tmp_path.glob("step_*"))
    assert re.search(f"log.jsonl: cannot write: File too large; the last checkpoint is {newest}$", line), line
    assert (newest / "manifest.json").exists()


def test_memory_that_runs_out(start, gpu, data, tmp_path):
    """For a sample, which is no bad input: one line, and the checkpoint of what is finished."""
    if gpu:
        pytest.skip("the runtime's address space cannot be limited")
    more = ENDLESS | {"sample_every": 400, "sample_tokens": 1 << 24}
    process = start(*flags(data, tmp_path, **more), env=os.environ | {"OMP_NUM_THREADS": "1"})
    until(step_logged(tmp_path, 1), process)
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (8 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    line = one_line(end(process, 2))
    assert (
        line
        == f"train_llama3: out of memory; the last checkpoint is {tmp_path}/step_{saved_step(tmp_path):06d}"
    )


def test_the_log_is_removed(start, data, tmp_path):
    process = start(*flags(data, tmp_path, **ENDLESS))
    until(step_logged(tmp_path), process)
    (tmp_path / "log.jsonl").unlink()
    line = one_line(end(process, 2))
    assert f"{tmp_path}/log.jsonl: expected the log of this run, found none: it was removed" in line
    assert line.endswith(f"; the last checkpoint is {max(tmp_path.glob('step_*'))}")


def test_the_watchdog_ends_a_run_without_progress(start, gpu, data, tmp_path):
    """A micro-batch that takes longer than the watchdog waits. The first step is exempt. A GPU computes one
    step while the host starts the next.
    """
    seconds, rows = (0.02, 65536) if gpu else (0.2, 4096)
    slow = {"batch_size": rows, "val_data": "", "watchdog": seconds}
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # with which it takes a second
    done = end(start(*flags(data, tmp_path, **slow), env=one_thread), 75)
    logged = [e["step"] for e in events(tmp_path, "step")]
    assert logged == [1] or (gpu and logged == [1, 2]), done.stdout
    line, *stack = done.stderr.splitlines()
    limit = re.escape(str(seconds))
    said = rf"train_llama3: step (\d): expected progress within --watchdog {limit} seconds, found none; "
    found = re.match(said, line)
    assert found and 1 <= int(found[1]) - logged[-1] <= (2 if gpu else 1), line
    assert " exit code 75, " in line
    assert sum("train_llama3" in frame for frame in stack) >= 3, stack


def test_the_plot_ends_with_the_program(start, data, tmp_path):
    """A Python that stops itself: it is killed at one more signal, and with the program."""
    script, pid_file = tmp_path / "python", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {pid_file}\nkill -STOP $$\n")
    script.chmod(0o755)

    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        pid_file.unlink(missing_ok=True)
        process = start(*flags(data, tmp_path / "out"), env=os.environ | {"LLAMAC_PYTHON": str(script)})
        until(lambda: pid_file.exists() and pid_file.read_text().strip().isdigit(), process)
        pid = int(pid_file.read_text())
        process.send_signal(number)
        done = end(process, code)
        assert code or ", no plot (" in done.stdout
        deadline = time.monotonic() + 20
        while still_runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
