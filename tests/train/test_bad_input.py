"""Bad input to the program: one line that says what, where, expected and found; exit code 2."""

import re
import resource
import signal

import pytest
from run import V, flags, one_line

pytestmark = pytest.mark.program


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--steps", "many"], "steps many"),  # other values and flags: check_options.cpp
        (["--model", "llama9"], "llama9 llama3.1-8b, tiny"),
        (["--model", "a" * 300], "llama3.1-8b"),
        (["--model", "meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B --local-dir hub"),
        (["--model", "/no/such/folder/config.json"], "/no/such/folder/config.json No such file"),
        (["--train-data", "/no/such/*.bin"], "/no/such/*.bin"),
        (["--tokenizer", "/no/such/ranks"], "/no/such/ranks No such file"),
        (["--seq-len", "100000"], "seq-len 100000 64"),
        (["--seq-len", "63", "--val-data", "{data}/val_000.bin", "--batch-size", "64"], "val_000.bin 64"),
        (["--kernel", "rope_forward=9"], "rope_forward 9 optimized reference"),
        (["--kernel", "rope=naive"], "rope"),
        (["--resume", "{data}"], "{data} manifest.json"),
        (["--resume", "/no/such"], "/no/such"),
        (["--sample-prompt-ids", "3,x"], "--sample-prompt-ids ids commas x"),
        (["--sample-prompt-ids", "3,"], "--sample-prompt-ids ids commas"),
        (["--sample-every", "1", "--sample-prompt-ids", "3,97"], f"--sample-prompt-ids {V} 97"),
        (["--out", "{data}/train_000.bin"], "train_000.bin"),
    ],
)
def test_bad_flags(train, data, tmp_path, arguments, words):
    arguments = [a.format(data=data) for a in arguments]
    line = one_line(train(*flags(data, tmp_path / "out"), *arguments, code=2))
    for word in words.format(data=data).split():
        assert word in line, line
    assert not (tmp_path / "out").exists()


def test_a_run_that_cannot_fit(train, data, tmp_path):
    """32 million sequences: terabytes of activations. tests/train/check_trainer.cpp takes such advice."""
    sizes = {"batch_size": 1 << 25, "total_batch_size": 0, "val_data": ""}
    line = one_line(train(*flags(data, tmp_path / "out", **sizes), code=2))
    found = r"memory: the run needs \d+\.\d\d GiB, the device has \d+\.\d\d GiB free of \d+\.\d\d GiB"
    assert re.search(f"{found}; it fits with .*--batch-size \\d+ --total-batch-size 536870912", line), line
    assert not (tmp_path / "out").exists()


def test_a_gemm_cache_that_is_none(train, data, tmp_path):
    (tmp_path / "gemm.json").write_text('{"device": "?"}')
    line = one_line(train(*flags(data, tmp_path / "out", gemm_cache=tmp_path / "gemm.json"), code=2))
    assert "gemm.json: expected device, library and choices" in line


def test_full_disk_keeps_the_checkpoint_before(train, data, tmp_path):
    out = tmp_path / "out"
    train(*flags(data, out, steps=4))
    before = {p: p.read_bytes() for p in (out / "step_000004").iterdir()}
    limit = max(len(raw) for raw in before.values()) // 2

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = one_line(train(*flags(data, out), "--resume", "auto", code=2, preexec_fn=limited))
    assert re.search(r"step_000008.*(File too large|No space)", line), line
    assert before == {p: p.read_bytes() for p in (out / "step_000004").iterdir()}
    train(*flags(data, out), "--resume", "auto")
    assert (out / "step_000008/manifest.json").exists()
