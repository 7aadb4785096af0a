"""The output folder: one owner at a time, by real processes; a replaced folder is not written to;
`--resume auto` falls back to the newest complete checkpoint; llamac.model.checkpoint finds damage.

Lock and leftovers one by one: check_output.cpp.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import tomllib
import warnings
from datetime import datetime
from pathlib import Path

import pytest
from run import (
    MODEL,
    ROOT,
    bits,
    events,
    flags,
    one_line,
    refused,
    run_llamac,
    trainer_flags,
    until,
    write_manifest,
)

import llamac
from llamac.model.checkpoint import check, step_of

LOCK = ".lock"
ENDLESS = {"steps": 1000000, "checkpoint_every": 5, "val_every": 0, "schedule": "constant"}
HELD = r"expected a folder that no other run writes to, found process (\d+) on (\S+), started (\S+); wait"


def steps_of(out: Path) -> list[int]:
    return [event["step"] for event in events(out, "step")]


def tree(folder: Path) -> dict[str, bytes]:
    """Of files of an ordinary size, the content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() if p.stat().st_size < 1 << 28 else b"" for p in files}


# One owner


@pytest.mark.program
def test_a_second_run_is_refused(start, train, data, tmp_path):
    """Of either kind, and a checkpoint of Trainer's; and the first goes on."""
    out = tmp_path / "out"
    first = start(*flags(data, out, **ENDLESS), stdout=subprocess.DEVNULL)
    until(lambda: list(out.glob("step_*")), first)
    for more in ([], ["--resume", "auto"]):
        line = one_line(train(*flags(data, out), *more, code=2))
        pid, host, started = re.search(HELD, line).groups()
        assert (int(pid), host) == (first.pid, socket.gethostname())
        began = datetime.strptime(f"{started[:-1]}+0000", "%Y-%m-%dT%H:%M:%S%z")
        assert abs(time.time() - began.timestamp()) < 600
    said = train(*flags(data, out), "--dry-run").stdout
    assert said.splitlines()[-1].startswith("dry run: the run fits")
    before = steps_of(out)[-1]
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert not list(out.glob("previous_*")) and steps_of(out) == list(range(1, steps_of(out)[-1] + 1))
    assert steps_of(out)[-1] >= before
    assert json.loads((out / LOCK).read_text())["pid"] == first.pid


@pytest.mark.program
def test_a_lock_of_python_and_trainers_save(train, data, tmp_path):
    """flock on OUT/.lock excludes a run, and a checkpoint that Trainer.save writes there."""
    out = tmp_path / "out"
    out.mkdir()
    owner = {"host": "here", "pid": os.getpid(), "started": "now"}
    trainer = llamac.Trainer(MODEL, seq_len=16, batch_size=2, gemm_cache="none")
    with open(out / LOCK, "w") as held:
        held.write(json.dumps(owner))
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        line = one_line(train(*flags(data, out), code=2))
        assert line.startswith(f"train_llama3: {out}: expected a folder")
        for name in ("step_000001", "mine"):
            assert int(re.search(HELD, refused(trainer.save, out / name))[1]) == os.getpid()
    trainer.save(out / "step_000001")
    trainer.save(out / "mine")
    trainer.save(tmp_path / "elsewhere/mine")
    assert sorted(p.name for p in out.iterdir()) == [LOCK, "mine", "step_000001"]
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["mine"]
    text = (out / LOCK).read_text()
    assert list(json.loads(text)) == ["host", "pid", "started"]
    assert text == json.dumps(json.loads(text), separators=(",", ":")) + "\n"


@pytest.mark.program
def test_an_overlapping_requeue(start, data, tmp_path):
    """Two starts at once with --resume auto: the folder ends as that of one run; whoever fails says why."""
    for trial in range(3):
        out = tmp_path / str(trial)
        line = [*flags(data, out), "--resume", "auto"]
        both = [start(*line, stdout=subprocess.DEVNULL) for _ in range(2)]
        ends = [(process.communicate(timeout=120)[1], process.returncode) for process in both]
        assert 0 in [code for _, code in ends] and {code for _, code in ends} <= {0, 2}, ends
        for said, code in ends:
            assert code == 0 or re.search(rf"{HELD}|another run, which has begun since", said), said
        assert steps_of(out) == list(range(1, 9)) and not list(out.glob("previous_*"))
        assert sorted(p.name for p in out.glob("step_*")) == ["step_000004", "step_000008"]


@pytest.mark.program
def test_a_folder_that_is_replaced(start, data, tmp_path):
    """The run ends with one line, and writes nothing into the folder that came after its own. One that is
    moved or removed: check_output.cpp.
    """
    out, old = tmp_path / "out", tmp_path / "old"
    process = start(*flags(data, out, **ENDLESS), stdout=subprocess.DEVNULL)
    until(lambda: list(out.glob("step_*")), process)
    process.send_signal(signal.SIGSTOP)  # so that it sees only the final state
    os.waitpid(process.pid, os.WUNTRACED)
    out.rename(old)
    out.mkdir()
    process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and len(said.splitlines()) == 1
    assert f"{out}: expected the folder that is being written to, found another one" in said, said
    assert list(out.iterdir()) == [] and not [p for p in old.iterdir() if p.name.startswith(".step_")]


def test_names_of_checkpoints():
    good = {"step_000000": 0, "step_000100": 100, "step_1000000": 1000000}
    bad = ["step_12", "step_0000002", "step_000x", "step_", "steps", "step_0000100"]
    assert {name: step_of(name) for name in [*good, *bad]} == good | dict.fromkeys(bad)


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
    "emptied": lambda step: os.truncate(step / "model.safetensors", 0),
    "lengthened": lambda step: (step / "config.json").write_text("{} x"),
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


MANIFESTS: dict[str, tuple] = {
    "format": (lambda m: m.update(format="llamac checkpoint 3"), "format: expected"),
    "unknown": (lambda m: m.update(extra=1), 'unknown field "extra"'),
    "integer": (lambda m: m.update(seq_len=0), "seq_len: expected an integer from 1"),
    "type": (lambda m: m.update(step="2"), "step: expected an integer"),
    "missing": (lambda m: m.pop("dtype"), "dtype: expected a string, found none"),
    "choice": (lambda m: m.update(master_weights="maybe"), "master_weights: expected on or off"),
    "path": (lambda m: m["files"][0].update(name="../a"), "name: expected a file in the checkpoint"),
    "twice": (lambda m: m["files"].append(m["files"][0]), 'name: found "config.json" twice'),
    "hash": (lambda m: m["files"][0].update(xxh3="0"), "xxh3: expected 16 hexadecimal digits"),
    "rank": (lambda m: m["files"][0].update(rank=1), "rank: expected less than world_size 1"),
    "role": (lambda m: m["files"][2].update(role="state"), "expected a file of the role optimizer"),
    "bytes": (lambda m: m["files"][1].update(bytes=7), "expected 7 bytes"),
    "sum": (lambda m: m["files"][1].update(xxh3="0123456789abcdef"), "expected the XXH3 checksum"),
    "position": (lambda m: m.update(data_position=31), "data_position: expected"),
    "another step": (lambda m: m.update(step=7, data_position=28), "step: expected 8, as its folder's name"),
}


@pytest.mark.program
@pytest.mark.parametrize("change", MANIFESTS)
def test_both_refuse_in_the_same_words(train, data, whole, tmp_path, change):
    """The program, and llamac.model.checkpoint: a manifest that is changed, with the right checksum."""
    folder, (edit, expected) = tmp_path / "step_000008", MANIFESTS[change]
    shutil.copytree(whole / "step_000008", folder)
    fields = json.loads((folder / "manifest.json").read_text())
    edit(fields)
    write_manifest(folder / "manifest.json", fields)
    said = one_line(train(*flags(data, tmp_path / "out"), "--resume", folder, code=2))
    found = check(folder)
    assert expected in said and found.problem in said, (said, found.problem)
    assert not (tmp_path / "out").exists()


# A run knows itself


def line_of(said: str, part: str) -> str:
    (line,) = (line for line in said.splitlines() if part in line)
    return line


@pytest.mark.program
def test_a_run_knows_itself(train, data, tmp_path):
    """--resume without other flags, from another folder, of a run that was moved; to the same bits."""
    extra = {"lr": 0.02, "total_batch_size": 128, "schedule": "constant", "kernel": "rope_forward=reference"}
    train(*flags(data, tmp_path / "whole", **extra))
    away = {"cwd": tmp_path, "env": os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}}
    first = flags(Path(os.path.relpath(data, tmp_path)), "out", **extra, steps=4, resume="auto")
    none = "--resume auto: no checkpoint in out: the run begins at step 0"
    assert none in train(*first, **away).stdout.splitlines()
    values = tomllib.loads((tmp_path / "out/config.toml").read_text())
    assert values["train-data"] == f"{tmp_path}/{os.path.relpath(data, tmp_path)}/train_*.bin"
    assert (values["out"], values["model"], values["lr"]) == (f"{tmp_path}/out", MODEL, 0.02)
    (tmp_path / "out").rename(tmp_path / "moved")
    said = train("--resume", "auto", "--out", tmp_path / "moved", "--steps", "6", "--log-every", "3").stdout
    assert "no checkpoint" not in said
    line = line_of(said, "continues with other settings")
    assert line.endswith('settings: --steps was 4, is 6, --log-every was "auto", is 3')
    said = train("--resume", tmp_path / "moved/step_000006", "--steps", "8").stdout
    assert line_of(said, "continues with other settings").endswith("settings: --steps was 6, is 8")
    assert "other settings" not in train("--resume", "auto", "--out", "moved", **away).stdout
    assert bits(tmp_path / "moved") == bits(tmp_path / "whole")
    values = tomllib.loads((tmp_path / "moved/config.toml").read_text())
    assert (values["out"], values["steps"], values["log-every"]) == (f"{tmp_path}/moved", 8, 3)
    again = train("--resume", "none", "--config", tmp_path / "moved/config.toml", "--log-every", "9")
    assert line_of(again.stdout, "now in").endswith("moved/previous_1")
    assert bits(tmp_path / "moved") == bits(tmp_path / "whole")
    assert (tmp_path / "moved/previous_1/config.toml").exists()


@pytest.mark.program
def test_a_run_that_was_resumed_before_its_first_checkpoint(train, data, tmp_path):
    """It begins where it began: at another run's checkpoint."""
    train(*flags(data, tmp_path / "a", steps=4))
    more = {"steps": 8, "checkpoint_every": -1}
    train(*flags(data, tmp_path / "b", **more, resume=tmp_path / "a/step_000004"))
    said = train("--resume", "auto", "--out", tmp_path / "b", "--checkpoint-every", "4").stdout
    assert f"resuming from {tmp_path}/a/step_000004" in said
    assert "--checkpoint-every was -1, is 4" in said
    assert (tmp_path / "b/step_000008").exists()


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda text: "", "config.toml: expected the configuration that a run wrote, .* found an empty file"),
        (lambda text: text[: text.index("lr =")], "config.toml: expected .* found another file or a part"),
        (lambda text: 'name = "other"\n', "config.toml: expected .* found another file .*; remove it"),
        (lambda text: text.replace("lr =", "lr = x"), r"config.toml: line \d+: "),
        (lambda text: text.replace("lr =", "rate ="), r"config.toml: line \d+: unknown key \"rate\""),
        (lambda text: text.replace("seed = 42", "seed = 7"), "was written with --seed 42, .* found 7"),
        (lambda text: text.replace("/train_*", "/gone_*"), "gone_.*; flags .* are from .*config.toml"),
        (lambda text: re.sub("model = .*", 'model = "/gone"', text), "/gone.*; flags .* are from .*config"),
    ],
)
def test_a_damaged_or_foreign_configuration(train, data, whole, tmp_path, change, expected):
    shutil.copytree(whole, tmp_path / "out")
    config = tmp_path / "out/config.toml"
    config.write_text(change(config.read_text()))
    line = one_line(train("--resume", "auto", "--out", tmp_path / "out", code=2))
    assert re.search(expected, line), line
    said = refused(llamac.Trainer, resume="auto", out=tmp_path / "out")
    assert said == line.removeprefix("train_llama3: ")


@pytest.mark.program
def test_a_run_without_a_configuration_is_resumed_by_flags(train, data, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out/config.toml").unlink()
    again = [*flags(data, tmp_path / "out", steps=10), "--resume", "auto"]
    assert "settings: --steps was 8, is 10" in train(*again).stdout
    assert (tmp_path / "out/step_000010").exists() and (tmp_path / "out/config.toml").exists()


@pytest.mark.program
def test_what_a_resume_may_not_change(train, whole):
    """Also of a run that knows itself; its configuration stays as it was."""
    before = (whole / "config.toml").read_bytes()
    for flag, value in {"--seed": "7", "--steps": "7", "--dtype": "bf16", "--lr": "-1"}.items():
        assert flag in one_line(train("--resume", "auto", "--out", whole, flag, value, code=2))
    other = ("--model", "tests/models/untied-mha.json")
    assert "step_000008" in one_line(train("--resume", "auto", "--out", whole, *other, code=2))
    assert (whole / "config.toml").read_bytes() == before


def test_a_trainer_resumes_a_run_by_its_folder(whole):
    """As the program: the run's values, and flags that override them, each of which is said."""
    with pytest.warns(UserWarning, match="settings: --steps was 8, is 9, --lr was 0.003, is 0.5$"):
        trainer = llamac.Trainer(resume="auto", out=whole, steps=9, lr=0.5)
    assert trainer.steps_done == 8 and trainer.options.batch_size == 4 and trainer.step() > 0


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
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    flip(out / "step_000008/model.safetensors")
    before = tree(out)
    with pytest.warns(
        UserWarning, match=r"--resume auto: step_000008 is damaged: .*model.safetensors: expected the"
    ):
        trainer = llamac.Trainer(**trainer_flags(data, out, resume="auto"))
    assert trainer.steps_done == 4 and tree(out) == before
    assert f"in its folder is {out}/step_000004" in refused(llamac.Trainer, out / "step_000008")


def test_each_file_is_verified_once(data, whole):
    """One pass for its checksum, one for its tensors."""

    def read_so_far() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    def bytes_read(**extra) -> int:
        before = read_so_far()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            llamac.Trainer(**trainer_flags(data, whole, **extra))
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


# llamac.model.checkpoint


def checkpoint(*arguments, code: int = 0) -> str:
    done = run_llamac("checkpoint", *arguments, code=code)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_list_and_verify(train, data, whole, tmp_path):
    """C and Python agree on what is complete: a damaged checkpoint, aside or not, one of an earlier run."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    assert all(checkpoint(command, out).count("complete\n") == 2 for command in ("list", "verify"))
    for damage, expected in (
        ("pipe", "expected a file, found something else"),
        ("huge", "expected at most 134217728 bytes, found 64424509440"),
        ("a copy", "step: expected 8, as its folder's name says, found 4"),
    ):
        DAMAGES[damage](out / "step_000008")
        for command in ("list", "verify"):
            assert f"manifest.json: {expected}" in checkpoint(command, out, code=1)
        shutil.rmtree(out)
        shutil.copytree(whole, out)
    flip(out / "step_000008/model.safetensors")
    said = checkpoint("verify", out, code=1)
    assert "step_000008  damaged: model.safetensors: expected the XXH3 checksum" in said
    checkpoint("list", out, "--quick")  # the size is right
    checkpoint("list", out, code=1)
    checkpoint("verify", out / "step_000008", code=1)
    checkpoint("verify", out / "step_000004")
    train(*flags(data, out), "--resume", "auto")
    said = checkpoint("list", out)
    assert re.search(r"damaged_step_000008 .* damaged: model", said) and "step_000008 " in said
    checkpoint("verify", out / "damaged_step_000008", code=1)
    train(*flags(data, out, steps=4))
    names = [line.split()[0].removeprefix(f"{out}/") for line in checkpoint("list", out).splitlines()[1:]]
    before = ("step_000004", "step_000008", "damaged_step_000008")
    assert names == ["step_000004", *(f"previous_1/{name}" for name in before)]


def test_checkpoints_that_cannot_be_read(whole, tmp_path):
    assert "expected checkpoints" in checkpoint("list", tmp_path, code=2)
    checkpoint("verify", tmp_path / "none", code=2)
    checkpoint("list", code=2)
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    manifest = out / "step_000008/manifest.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # reading gives EIO
    said = checkpoint("list", out, code=2)
    assert re.search("step_000004 .* complete", said), said
    assert re.search("step_000008 .* cannot be read: .*Input/output error", said), said


def test_the_first_format():
    checkpoint("verify", ROOT / "tests/data/resume_9252fa4/step_000006")
