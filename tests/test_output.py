"""The output folder of C and Python alike: one owner at a time, by real processes; a replaced folder is not
written to; `--resume auto` falls back to the newest complete checkpoint; llamac.checkpoint finds damage.

Lock and leftovers one by one: check_output.cpp.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from run import MODEL, bits, events, flags, one_line

from llamac.errors import InputError
from llamac.output import LOCK, OutputFolder, step_of

ROOT = Path(__file__).resolve().parents[1]
ENDLESS = {"steps": 1000000, "checkpoint_every": 5, "val_every": 0, "schedule": "constant"}
HELD = r"expected a folder that no other run writes to, found process (\d+) on (\S+), started (\S+); wait"


def steps_of(out: Path) -> list[int]:
    return [event["step"] for event in events(out, "step")]


@contextmanager
def running(build: Path, arguments: list, out: Path):
    """The program, once it has written a checkpoint; killed at the end, if it still runs."""
    command = [build / "train_llama3", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.time() + 120
        while not list(out.glob("step_*")):
            assert time.time() < deadline and process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def tree(folder: Path) -> dict[str, bytes]:
    """Of files of an ordinary size, the content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() if p.stat().st_size < 1 << 28 else b"" for p in files}


# One owner


@pytest.mark.program
def test_a_second_run_is_refused(build, train, data, tmp_path):
    """Of either kind, and a checkpoint of Trainer's; and the first goes on."""
    out = tmp_path / "out"
    with running(build, flags(data, out, **ENDLESS), out) as first:
        for more in ([], ["--resume", "auto"]):
            line = one_line(train(*flags(data, out), *more, code=2))
            pid, host, started = re.search(HELD, line).groups()
            assert (int(pid), host) == (first.pid, socket.gethostname())
            assert (
                abs(time.time() - time.mktime(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ")) + time.timezone)
                < 600
            )
        with pytest.raises(InputError) as error:
            OutputFolder(out)
        assert line == f"train_llama3: {error.value}"
        said = train(*flags(data, out), "--dry-run").stdout
        assert said.splitlines()[-1].startswith("dry run: the run fits")
        before = steps_of(out)[-1]
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    assert not list(out.glob("previous_*")) and steps_of(out) == list(range(1, steps_of(out)[-1] + 1))
    assert steps_of(out)[-1] >= before
    assert json.loads((out / LOCK).read_text())["pid"] == first.pid


def test_python_excludes_the_program(train, data, tmp_path):
    """And is told in the same words; it is what train_llama3.py and Trainer.save take."""
    import llamac

    out = tmp_path / "out"
    out.mkdir()
    held = OutputFolder(out)
    assert one_line(train(*flags(data, out), code=2)).startswith(f"train_llama3: {out}: expected a folder")
    trainer = llamac.Trainer(MODEL, seq_len=16, batch_size=2, gemm_cache="none")
    for name in ("step_000001", "mine"):
        with pytest.raises(InputError, match=HELD) as error:
            trainer.save(out / name)
        assert int(re.search(HELD, str(error.value))[1]) == os.getpid()
    held.close()
    trainer.save(out / "step_000001")
    trainer.save(out / "mine")
    trainer.save(tmp_path / "elsewhere/mine")
    assert sorted(p.name for p in out.iterdir()) == [LOCK, "mine", "step_000001"]
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["mine"]
    record = json.loads((out / LOCK).read_text())
    OutputFolder(out).close()
    text = (out / LOCK).read_text()
    assert list(json.loads(text)) == list(record) == ["host", "pid", "started"]
    assert text == json.dumps(json.loads(text), separators=(",", ":")) + "\n"


def test_training_in_python_takes_the_lock(data, tmp_path):
    import train_llama3 as ref
    from llamac.options import parse

    out = tmp_path / "out"
    out.mkdir()
    held, options = OutputFolder(out), parse(flags(data, out, steps=2, checkpoint_every=1, val_data="none"))
    with pytest.raises(InputError, match=HELD):
        ref.train(options)
    held.close()
    assert [p.name for p in out.iterdir()] == [LOCK]
    ref.train(options)
    OutputFolder(out).close()
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".png") == [
        *(LOCK, "log.jsonl", "step_000001", "step_000002")
    ]


@pytest.mark.program
def test_an_overlapping_requeue(build, data, tmp_path):
    """Two starts at once with --resume auto: the folder ends as that of one run; whoever fails says why."""
    for trial in range(3):
        out = tmp_path / str(trial)
        command = [build / "train_llama3", *map(str, flags(data, out)), "--resume", "auto"]
        both = [
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        ends = [(process.communicate(timeout=120)[1], process.returncode) for process in both]
        assert 0 in [code for _, code in ends] and {code for _, code in ends} <= {0, 2}, ends
        for said, code in ends:
            assert code == 0 or re.search(rf"{HELD}|another run, which has begun since", said), said
        assert steps_of(out) == list(range(1, 9)) and not list(out.glob("previous_*"))
        assert sorted(p.name for p in out.glob("step_*")) == ["step_000004", "step_000008"]


@pytest.mark.program
@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_folder_that_is_replaced(build, data, tmp_path, how):
    """The run ends with one line, and writes nothing into the folder that came after its own."""
    out, old = tmp_path / "out", tmp_path / "old"
    with running(build, flags(data, out, **ENDLESS), out) as process:
        process.send_signal(signal.SIGSTOP)  # so that it sees only the final state
        os.waitpid(process.pid, os.WUNTRACED)
        out.rename(old)
        if how == "removed":
            shutil.rmtree(old, ignore_errors=True)
        if how == "replaced":
            out.mkdir()
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=60)[1]
    found = "another one" if how == "replaced" else "none"
    assert process.returncode == 2 and len(said.splitlines()) == 1
    assert f"{out}: expected the folder that is being written to, found {found}" in said, said
    assert list(out.iterdir()) == [] if how == "replaced" else not out.exists()
    if how == "moved":
        assert not [p for p in old.iterdir() if p.name.startswith(".step_")]


def test_a_folder_that_is_replaced_in_python(data, tmp_path, monkeypatch):
    import train_llama3 as ref
    from llamac.options import parse
    from llamac.training import checkpoints

    out, write = tmp_path / "out", checkpoints.write

    def write_and_move(*arguments):
        path = write(*arguments)
        out.rename(tmp_path / "old")
        out.mkdir()
        return path

    monkeypatch.setattr(checkpoints, "write", write_and_move)
    with pytest.raises(InputError, match="expected the folder that is being written to, found another one"):
        ref.train(parse(flags(data, out, steps=2, checkpoint_every=1, val_data="none")))
    assert list(out.iterdir()) == [] and (tmp_path / "old/step_000001").is_dir()


def test_what_python_sets_aside(tmp_path):
    """As the program does (check_output.cpp): all of the earlier run, links with their meaning; no more."""
    out = tmp_path / "out"
    assert OutputFolder(out).prepare() == []
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("mine")
    for name in ("step_000001", "damaged_step_000003", "step_12", ".step_000004.tmp"):
        (out / name).mkdir()
    (out / "step_000002").symlink_to("../elsewhere")
    (out / ".step_000005.tmp").symlink_to(tmp_path / "elsewhere")
    for name in ("log.jsonl", "notes.txt", ".log.jsonl.0.tmp"):
        (out / name).write_text("x")
    previous = out / "previous_1"
    output = OutputFolder(out)
    assert output.prepare() == [f"an earlier run's log and checkpoints are now in {previous}"]
    assert sorted(os.listdir(out)) == [LOCK, "notes.txt", "previous_1", "step_12"]
    assert sorted(os.listdir(previous)) == ["damaged_step_000003", "log.jsonl", "step_000001", "step_000002"]
    assert (previous / "step_000002/file").read_text() == "mine"
    (out / "step_000006").symlink_to(tmp_path / "elsewhere")
    output.remove("step_000006")
    assert (tmp_path / "elsewhere/file").read_text() == "mine" and not (out / "step_000006").is_symlink()
    (out / LOCK).unlink()
    with pytest.raises(InputError, match="expected the lock of this run, found none"):
        output.check()


def test_a_folder_that_goes_during_the_check_in_python(tmp_path, monkeypatch):
    """Its lock is gone, too, but the folder is what is named, as in the program."""
    out = tmp_path / "out"
    output = OutputFolder(out)
    output.prepare()
    look = output._in_place

    def remove_and_look():
        shutil.rmtree(out)
        return look()

    monkeypatch.setattr(output, "_in_place", remove_and_look)
    with pytest.raises(InputError, match="out: expected the folder that is being written to, found none"):
        output.check()


def test_a_forked_child_and_the_lock(tmp_path):
    """It neither gives the lock back nor keeps it."""
    output = OutputFolder(tmp_path)
    for closes in (True, False):
        child = os.fork()
        if child == 0:
            if closes:
                output.close()
            signal.pause()
        time.sleep(0.1)
        if closes:
            with pytest.raises(InputError, match=HELD):
                OutputFolder(tmp_path)
        else:
            output.close()
            OutputFolder(tmp_path).close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_locks(tmp_path, monkeypatch):
    """A file system without them: a warning, and the run goes on."""
    import errno

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    output = OutputFolder(tmp_path)
    assert re.search("the file system has no locks .*: nothing keeps a second run out", output.prepare()[0])
    monkeypatch.undo()


def test_names_of_checkpoints():
    good = {"step_000000": 0, "step_000100": 100, "step_1000000": 1000000}
    bad = ["step_12", "step_0000002", "step_000x", "step_", "steps", "step_0000100"]
    assert {name: step_of(name) for name in good} == good and [step_of(name) for name in bad] == [None] * len(
        bad
    )


# The newest complete checkpoint


@pytest.fixture(scope="module")
def whole(train, data, tmp_path_factory) -> Path:
    """A run with checkpoints of its steps 4 and 8."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(*flags(data, out))
    return out


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_step(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step_000004"), step)


DAMAGES = {
    "flipped": lambda step: flip(step / "model.safetensors"),
    "cut": lambda step: os.truncate(step / "optimizer.safetensors", 100),
    "manifest": lambda step: flip(step / "manifest.json"),
    "incomplete": lambda step: (step / "config.json").unlink(),
    "unfinished": lambda step: (step / "manifest.json").unlink(),
    "pipe": lambda step: pipe(step / "manifest.json"),
    "huge": lambda step: os.truncate(step / "manifest.json", 60 << 30),  # a hole: it takes no space on a disk
    "a copy": other_step,
}


@pytest.mark.program
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(train, data, whole, tmp_path, damage):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    DAMAGES[damage](out / "step_000008")
    before = tree(out / "step_000008")
    line = one_line(train(*flags(data, out), "--resume", out / "step_000008", code=2))
    assert "step_000008" in line and line.endswith(
        f"; the newest complete checkpoint in its folder is {out}/step_000004"
    )
    assert tree(out / "step_000008") == before
    said = train(*flags(data, out), "--resume", "auto").stdout
    assert re.search(r"--resume auto: step_000008 is damaged: .*step_000008", said)
    assert f"the damaged checkpoint is now {out}/damaged_step_000008" in said
    assert f"resuming from {out}/step_000004" in said
    assert tree(out / "damaged_step_000008") == before and bits(out) == bits(whole)
    assert steps_of(out) == list(range(1, 9)) and not list(out.glob("previous_*"))
    assert " is damaged: " not in train(*flags(data, out), "--resume", "auto").stdout


def test_another_run_is_not_damaged(train, data, whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = tree(out)
    line = one_line(train(*flags(data, out, seed=7), "--resume", "auto", code=2))
    assert "step_000008: was written with --seed 42, expected the same, found 7" in line
    flip(out / "step_000008/model.safetensors")
    damaged = tree(out)
    line = one_line(train(*flags(data, out, seed=7), "--resume", "auto", code=2))
    assert "step_000004: was written with --seed" in line
    assert tree(out) | {LOCK: b""} == damaged | {LOCK: b""} != before | {LOCK: b""}


def test_trainer_passes_over_a_damaged_checkpoint(data, whole, tmp_path):
    """As the program, but it does not own the folder: nothing is moved."""
    import llamac
    from llamac.options import parse

    out = tmp_path / "out"
    shutil.copytree(whole, out)
    flip(out / "step_000008/model.safetensors")
    before = tree(out)
    with pytest.warns(
        UserWarning, match=r"--resume auto: step_000008 is damaged: .*model.safetensors: expected the"
    ):
        trainer = llamac.Trainer(parse(flags(data, out)), resume="auto")
    assert trainer.steps_done == 4 and tree(out) == before
    with pytest.raises(InputError, match=f"in its folder is {out}/step_000004"):
        llamac.Trainer(out / "step_000008")


def test_each_file_is_verified_once(data, whole):
    """One pass for its checksum, one for its tensors."""
    import llamac
    from llamac.options import parse

    def read_so_far() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    def bytes_read(**extra) -> int:
        before = read_so_far()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            llamac.Trainer(parse(flags(data, whole)), **extra)
        return read_so_far() - before

    size = sum(p.stat().st_size for p in (whole / "step_000008").iterdir())
    for resume in ("auto", str(whole / "step_000008")):
        assert 1.8 * size < bytes_read(resume=resume) - bytes_read() < 2.5 * size


@pytest.mark.program
def test_a_linked_checkpoint(train, data, whole, tmp_path):
    """It is resumed, goes on in its folder, and is pruned without what it leads to."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "step_000008").rename(tmp_path / "eight")
    (out / "step_000008").symlink_to("../eight")
    before = tree(tmp_path / "eight")
    for resume in ("auto", out / "step_000008"):
        said = train(*flags(data, out), "--resume", resume).stdout
        assert f"resuming from {out}/step_000008" in said and "previous_1" not in said
    train(*flags(data, out, steps=12, keep_checkpoints=1), "--resume", "auto")
    assert [p.name for p in out.glob("step_*")] == ["step_000012"] and tree(tmp_path / "eight") == before


# llamac.checkpoint


def checkpoint(*arguments) -> tuple[int, str]:
    command = [sys.executable, "-m", "llamac.checkpoint", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stdout + result.stderr


def test_list_and_verify(train, data, whole, tmp_path):
    """C and Python agree on what is complete: a damaged checkpoint, aside or not, one of an earlier run."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for command in ("list", "verify"):
        code, said = checkpoint(command, out)
        assert code == 0 and said.count("complete\n") == 2, said
    for damage, expected in (
        ("pipe", "expected a file, found something else"),
        ("huge", "expected at most 134217728 bytes, found 64424509440"),
        ("a copy", "step: expected 8, as its folder's name says, found 4"),
    ):
        DAMAGES[damage](out / "step_000008")
        for command in ("list", "verify"):
            code, said = checkpoint(command, out)
            assert code == 1 and f"manifest.json: {expected}" in said
        shutil.rmtree(out)
        shutil.copytree(whole, out)
    flip(out / "step_000008/model.safetensors")
    code, said = checkpoint("verify", out)
    assert code == 1 and re.search(
        r"step_000008  damaged: model.safetensors: expected the XXH3 checksum", said
    )
    assert checkpoint("list", out, "--quick")[0] == 0  # the size is right
    assert checkpoint("list", out)[0] == checkpoint("verify", out / "step_000008")[0] == 1
    assert checkpoint("verify", out / "step_000004")[0] == 0
    train(*flags(data, out), "--resume", "auto")
    code, said = checkpoint("list", out)
    assert code == 0 and re.search(r"damaged_step_000008 .* damaged: model", said) and "step_000008 " in said
    assert checkpoint("verify", out / "damaged_step_000008")[0] == 1
    train(*flags(data, out, steps=4))
    code, said = checkpoint("list", out)
    names = [line.split()[0] for line in said.splitlines()[1:]]
    assert code == 0 and names == [
        f"{out}/{name}"
        for name in (
            "step_000004",
            *(f"previous_1/{x}" for x in ("step_000004", "step_000008", "damaged_step_000008")),
        )
    ]


def test_checkpoints_that_cannot_be_read(whole, tmp_path):
    code, said = checkpoint("list", tmp_path)
    assert code == 2 and "expected checkpoints" in said
    assert checkpoint("verify", tmp_path / "none")[0] == checkpoint("list")[0] == 2
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    manifest = out / "step_000008/manifest.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # reading gives EIO
    code, said = checkpoint("list", out)
    assert code == 2 and re.search("step_000004 .* complete", said), said
    assert re.search("step_000008 .* cannot be read: .*Input/output error", said), said


def test_the_first_format():
    assert checkpoint("verify", ROOT / "tests/data/resume_9252fa4/step_000006")[0] == 0
