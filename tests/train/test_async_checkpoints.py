"""Checkpoints that are written while training goes on: the bytes, the log, memory, errors, signals.

Kills at random moments: tests/chaos/kill.py; lost ranks: tests/train/test_rank_faults.py.
"""

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import mesh_flags, needs, ranks_of
from run import MODEL, ROOT, end, events, flags, one_line, until_logged

pytestmark = [pytest.mark.program, pytest.mark.usefixtures("one_thread")]
EVERY_STEP = {"checkpoint_every": 1, "keep_checkpoints": 100}
ENDLESS = {"steps": 1000000, "schedule": "constant", "val_every": 0, "val_data": "none"}
RANKS = ["", "dp 2 zero 1", "dp 2 zero 3"]


def flags_of(build, ranks: str) -> dict:
    if ranks:
        needs(build, "GLOO", 2)
    return mesh_flags(ranks)


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.glob("step_*/*"))}


@pytest.mark.parametrize(
    "dtype, ranks",
    [("f32", ""), pytest.param("bf16", "dp 2 zero 1", marks=pytest.mark.more), ("bf16", "dp 2 zero 3")],
)
def test_the_bytes_of_a_synchronous_save(start, build, data, tmp_path, ranks, dtype):
    """Of every checkpoint and its manifest. A save waits for the one before."""
    own, found = flags_of(build, ranks) | EVERY_STEP, {}
    for saves in ("off", "on"):
        line = flags(data, tmp_path / "out", dtype=dtype, checkpoint_async=saves, **own)
        end(start(*line), 0)
        assert [e["step"] for e in events(tmp_path / "out", "checkpoint")] == list(range(1, 9))
        assert not list((tmp_path / "out").glob(".step_*"))
        (tmp_path / "out").rename(tmp_path / saves)
        found[saves] = files(tmp_path / saves)
    assert found["on"] == found["off"]


@pytest.mark.more
def test_under_mpirun(build, data, tmp_path):
    needs(build, "MPI")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", build / "train_llama3"]
    found = []
    for saves in ("off", "on"):
        line = flags(data, tmp_path / "out", batch_size=2, checkpoint_async=saves, **EVERY_STEP)
        subprocess.run([*command, *line], check=True, timeout=120, cwd=ROOT)
        found.append(files(tmp_path / "out"))
        shutil.rmtree(tmp_path / "out")
    assert found[0] == found[1] and len(found[0]) == 8 * 7


def test_old_checkpoints_are_removed(start, data, tmp_path):
    end(start(*flags(data, tmp_path, checkpoint_async="on", checkpoint_every=1)), 0)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000007", "step_000008"]


def test_the_log_and_the_memory_table(start, data, tmp_path):
    """The copy is a row beneath the total, also of a dry run, where it is to be taken."""
    row = re.compile(r"^  checkpoint copy \(host\) +(\d+) +([0-9.]+)$", re.MULTILINE)
    seen = {}
    for name, more in (
        ("on", {"checkpoint_async": "on"}),
        ("off", {"checkpoint_async": "off"}),
        ("at the end only", {"checkpoint_async": "on", "checkpoint_every": 0}),
    ):
        line = flags(data, tmp_path / name, **more)
        planned, real = (end(start(*line, *flag), 0).stdout for flag in (["--dry-run"], []))
        assert row.findall(planned) == row.findall(real)
        seen[name] = row.findall(real)
        assert all(0 < e["ms"] < 60_000 for e in events(tmp_path / name, "checkpoint"))
    assert not seen["off"] and not seen["at the end only"]
    ((tensors, mib),) = seen["on"]
    state = [tmp_path / f"on/step_000004/{name}.safetensors" for name in ("model", "optimizer")]
    headers = [int.from_bytes(path.read_bytes()[:8], "little") for path in state]
    bytes_of = sum(path.stat().st_size - 8 - header for path, header in zip(state, headers))
    assert float(mib) == pytest.approx(bytes_of / (1 << 20), abs=0.051)
    names = [json.loads(p.read_bytes()[8 : 8 + n]).keys() for p, n in zip(state, headers)]
    assert int(tensors) == sum(len(keys) - 1 for keys in names)  # without __metadata__


def test_no_memory_for_the_copy(start, gpu, data, tmp_path, monkeypatch):
    """An address space that the run fits into, and half of its copy does not: a line says so; it saves."""
    if gpu:
        pytest.skip("a GPU's driver takes more address space than any limit allows")
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}  # 48 MiB of state in f32
    (tmp_path / "model.json").write_text(json.dumps(json.loads(Path(MODEL).read_text()) | wide))
    line = flags(data, tmp_path / "out", model=tmp_path / "model.json", steps=3, checkpoint_every=1)

    def bounded(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))  # threads take as much, each
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    without = functools.partial(bounded, resource.RLIM_INFINITY)
    process, peak = start(*line, "--checkpoint-async", "off", preexec_fn=without), 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(peak, *map(int, re.findall(r"^VmPeak:\s+(\d+) kB$", status, re.MULTILINE)), 0)
        time.sleep(0.005)
    limit = (peak << 10) + (20 << 20)
    process = start(*line, "--checkpoint-async", "on", preexec_fn=functools.partial(bounded, limit))
    said = end(process, 0).stdout
    assert "checkpoint copy" not in said
    (told,) = (text for text in said.splitlines() if text.startswith("--checkpoint-async: "))
    assert "MiB of pinned memory are needed" in told and "training pauses" in told
    assert [e["step"] for e in events(tmp_path / "out", "checkpoint")] == [1, 2, 3]


def test_a_signal_while_one_is_written(start, data, tmp_path):
    """The last step's checkpoint, whatever was being written."""
    process = start(*flags(data, tmp_path, checkpoint_async="on", **ENDLESS | {"checkpoint_every": 1}))
    until_logged(tmp_path, "checkpoint", process)
    process.send_signal(signal.SIGTERM)
    assert not end(process, 143).stderr
    last = events(tmp_path, "step")[-1]["step"]
    assert max(tmp_path.glob("step_*")).name == f"step_{last:06d}"
    assert events(tmp_path, "checkpoint")[-1]["step"] == last
    assert not list(tmp_path.glob(".step_*"))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_that_cannot_be_written(start, build, data, tmp_path, ranks):
    """Files may no longer be so large, on the last rank: one line with the last good one, which resumes."""
    more = flags_of(build, ranks)
    kept = {"checkpoint_async": "on", "checkpoint_every": 2, "keep_checkpoints": 1000} | more
    process = start(*flags(data, tmp_path, **ENDLESS | kept))
    until_logged(tmp_path, "checkpoint", process)
    last = ranks_of(process)[1] if ranks else process.pid
    limit = max(tmp_path.glob("step_*/optimizer*"), key=lambda p: p.name).stat().st_size - 1
    resource.prlimit(last, resource.RLIMIT_FSIZE, (limit, limit))
    line = one_line(end(process, 2))
    newest = max(tmp_path.glob("step_*"))
    reason = f"cannot write: File too large; the last checkpoint is {newest}"
    assert "optimizer" in line and line.endswith(reason)
    assert ("rank 1: " in line) == bool(ranks)
    assert not list(tmp_path.glob(".step_*"))
    step = int(newest.name[5:])
    assert events(tmp_path, "checkpoint")[-1]["step"] == step
    again = ENDLESS | kept | {"steps": step + 3, "resume": "auto"}
    said = end(start(*flags(data, tmp_path, **again)), 0).stdout
    assert f"resuming from {newest}" in said
    assert [e["step"] for e in events(tmp_path, "step")] == list(range(1, step + 4))


HANG = """
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int file) {
    while (syscall(SYS_gettid) != getpid()) pause();
    return (int)syscall(SYS_fsync, file);
}
"""


def test_the_watchdog_ends_a_run_whose_checkpoint_hangs(start, data, tmp_path, monkeypatch):
    """A disk that never answers the thread: the next checkpoint waits for the first one in vain."""
    (tmp_path / "hang.c").write_text(HANG)
    library = tmp_path / "hang.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "hang.c"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with_asan = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    monkeypatch.setenv("ASAN_OPTIONS", with_asan)
    out = tmp_path / "out"
    process = start(*flags(data, out, checkpoint_async="on", watchdog=1, **ENDLESS | {"checkpoint_every": 3}))
    said = end(process, 75).stderr.splitlines()
    assert said[0].startswith("train_llama3: checkpoint of step 3: expected progress within --watchdog 1 ")
    assert [e["step"] for e in events(out, "step")] == [1, 2, 3, 4, 5, 6]
    assert not events(out, "checkpoint") and not list(out.glob("step_*"))
