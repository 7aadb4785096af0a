"""A checkpoint of the first release, tests/data/resume_9252fa4, is resumed to the same bits.

Its README says in which builds bits are compared, and why the tolerance of the others is what it is.
"""

import hashlib
import json
import os
import platform
from pathlib import Path

import pytest
from run import ROOT, events
from safetensors.numpy import load_file

DATA = Path("tests/data/resume_9252fa4")  # as the checkpoint's own flags have it
EXPECTED = json.loads((ROOT / DATA / "expected.json").read_text())
FILES = ("model.safetensors", "optimizer.safetensors")
TOLERANCE = 2.0**-20
RUN = {
    "model": DATA / "model.json",
    "train-data": DATA / "tokens_000.bin",
    "val-data": "none",
    "tokenizer": "none",
    "gemm-cache": "none",
    "seq-len": 16,
    "batch-size": 2,
    "total-batch-size": 64,
    "seed": 7,
    "steps": 12,
    "lr": 0.01,
    "warmup-steps": 3,
    "sample-every": 0,
    "checkpoint-every": 6,
}


def digest(path: Path) -> str:
    """Of the tensors by name: a file may have other metadata."""
    sha = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        sha.update(name.encode() + b"\0" + tensor.tobytes())
    return sha.hexdigest()


def differences(out: Path) -> list[float]:
    """The largest relative difference of each step's loss, gradient norm and learning rate."""
    found = events(out, "step")
    assert [step["step"] for step in found] == [step["step"] for step in EXPECTED["steps"]]
    keys = ("loss", "grad_norm", "lr")
    return [
        max(abs(ours[key] / theirs[key] - 1) for key in keys)
        for ours, theirs in zip(found, EXPECTED["steps"])
    ]


@pytest.fixture
def resumed(train, gpu, chosen, tmp_path):
    """Resumes a checkpoint; returns the run's output. Plain loops, where the build can run them."""
    kernels = [] if gpu else chosen("reference")
    levels = "operations for baseline" in train("--version").stdout
    environment = os.environ | ({"LLAMAC_CPU_LEVEL": "baseline"} if levels else {})

    def run(checkpoint: Path, **changed) -> Path:
        values = RUN | changed | {"out": tmp_path / "out", "resume": checkpoint}
        flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        train(*flags, *(word for choice in kernels for word in ("--kernel", choice)), env=environment)
        return tmp_path / "out"

    return run


@pytest.fixture
def bits_are_the_same(build, gpu) -> bool:
    """Whether this build computes as the checkpoint's did: IEEE 754 without fused multiply-add."""
    cache = (build / "CMakeCache.txt").read_text()
    return not gpu and "LLAMAC_NATIVE:BOOL=OFF" in cache and platform.machine() == "x86_64"


@pytest.mark.program
def test_resume(resumed, bits_are_the_same):
    out = resumed(DATA / "step_000006")
    found = differences(out)
    assert max(found) <= (0 if bits_are_the_same else TOLERANCE), found
    if bits_are_the_same:
        assert {file: digest(out / "step_000012" / file) for file in FILES} == EXPECTED["sha256"]
    written = json.loads((out / "step_000012/manifest.json").read_text())
    assert written["format"] == "llamac checkpoint 2"
    assert [(f["name"], f["role"], f["rank"]) for f in written["files"]] == [
        ("config.json", "config", None),
        ("model.safetensors", "weights", None),
        ("optimizer.safetensors", "optimizer", None),
    ]


def test_what_is_resumed_is_what_was_written(gpu, tmp_path, monkeypatch):
    """Trainer reads the flags from the manifest; before a step, weights and moments have the file's bits."""
    if gpu:
        pytest.skip("the checkpoint's run names variants that compute on the host")
    import llamac

    monkeypatch.chdir(ROOT)
    trainer = llamac.Trainer(DATA / "step_000006")
    trainer.save(tmp_path / "saved")
    for file in FILES:
        assert digest(tmp_path / "saved" / file) == digest(DATA / "step_000006" / file)
    again = llamac.Trainer(tmp_path / "saved")
    assert again.options.total_batch_size == 64 and again.steps_done == 6
