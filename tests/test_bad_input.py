"""Bad input to the program: one line that says what, where, expected and found; exit code 2."""

import json
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from run import MODEL, ROOT, V, flags, one_line

from llamac.data import write_bin

pytestmark = pytest.mark.program


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--steps", "many"], "steps many"),
        (["--step", "3"], "--step"),
        (["--schedule", "cubic"], "cubic cosine linear constant wsd"),
        (["--dtype", "f16"], "f16 f32 bf16"),
        (["--recompute", "norm,all"], "recompute all"),
        (["--model", "llama9"], "llama9 llama3.1-8b, tiny"),
        (["--model", "a" * 300], "llama3.1-8b"),
        (["--model", "meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B --local-dir hub"),
        (["--model", "/no/such/folder/config.json"], "/no/such/folder/config.json No such file"),
        (["--train-data", "/no/such/*.bin"], "/no/such/*.bin"),
        (["--tokenizer", "/no/such/ranks"], "/no/such/ranks No such file"),
        (["--seq-len", "100000"], "seq-len 100000 64"),
        (["--seq-len", "63", "--val-data", "{data}/val_000.bin", "--batch-size", "64"], "val_000.bin 64"),
        (["--total-batch-size", "100"], "total-batch-size 100 64"),
        (["--kernel", "rope_forward=9"], "rope_forward 9 optimized reference"),
        (["--kernel", "rope=naive"], "rope"),
        (["--config", "/no/such.toml"], "/no/such.toml"),
        (["--resume", "{data}"], "{data} manifest.json"),
        (["--resume", "/no/such"], "/no/such"),
        (["--init", "load"], "init load"),
        (["--grad-dtype", "bf16"], "grad-dtype bf16 dtype"),
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
    """32 million sequences: terabytes of activations. tests/check_trainer.cpp takes such advice."""
    sizes = {"batch_size": 1 << 25, "total_batch_size": 0, "val_data": ""}
    line = one_line(train(*flags(data, tmp_path / "out", **sizes), code=2))
    found = r"memory: the run needs \d+\.\d\d GiB, the device has \d+\.\d\d GiB free of \d+\.\d\d GiB"
    assert re.search(f"{found}; it fits with .*--batch-size \\d+ --total-batch-size 536870912", line), line
    assert not (tmp_path / "out").exists()


def test_a_gemm_cache_that_is_none(train, data, tmp_path):
    (tmp_path / "gemm.json").write_text('{"device": "?"}')
    line = one_line(train(*flags(data, tmp_path / "out", gemm_cache=tmp_path / "gemm.json"), code=2))
    assert "gemm.json: expected device, library and choices" in line


CONFIG = json.loads(Path(MODEL).read_text())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_attention_heads": 3}, "num_attention_heads num_key_value_heads 3 2"),
        ({"num_attention_heads": 0}, "num_attention_heads from 1 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"hidden_size": "64"}, 'hidden_size "64"'),
        ({"hidden_size": None}, "hidden_size nothing"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"vocab_size": 1 << 24, "hidden_size": 1 << 24}, "2^48 parameters"),
        ({"head_dim": 1 << 24}, "head_dim"),
        ({"head_dim": 7}, "head_dim even 7"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act silu gelu"),
        ({"model_type": "qwen2"}, "model_type llama mistral qwen2"),
        ({"attention_bias": True}, "attention_bias false"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config quantized original {"bits":4}'),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": 8}, "rope_scaling 8"),
    ],
)
def test_bad_config(train, data, tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    line = one_line(train(*flags(data, tmp_path / "out", model=tmp_path), code=2))
    for word in ["config.json", *words.split()]:
        assert word in line, line


def test_truncated_config(train, data, tmp_path):
    text = json.dumps(CONFIG)
    for length in range(0, len(text), 23):
        (tmp_path / "config.json").write_text(text[:length])
        assert "config.json" in one_line(train(*flags(data, tmp_path / "out", model=tmp_path), code=2))


def test_bad_tokens(train, data, tmp_path):
    raw = (data / "train_000.bin").read_bytes()

    def refused(content: bytes, *words: str):
        (tmp_path / "bad.bin").write_bytes(content)
        line = one_line(train(*flags(data, tmp_path / "out", train_data=tmp_path / "bad.bin"), code=2))
        assert all(word in line for word in ("bad.bin", *words)), line

    for word in range(8):  # cut within each field of the header
        refused(raw[: 4 * word + 2])
    refused(raw[: 1024 + 33], "size")
    refused(raw + b"\0", "size")
    refused(b"\1" + raw[1:], "magic")
    refused(raw[:8] + b"\xff" * 4 + raw[12:], "size")
    refused(raw[:20] + b"\xff" * 4 + raw[24:], "size")
    refused(raw[:12] + (V + 1).to_bytes(4, "little") + raw[16:], "vocabulary", str(V + 1), str(V))
    everywhere = np.full(2500, 60000, "<u2").tobytes()
    refused(raw[:12] + bytes(4) + raw[16:1024] + everywhere, "60000", str(V))


def test_validation_by_another_tokenizer(train, data, tmp_path):
    for name, made_with in (("a.bin", 1), ("b.bin", 2)):
        write_bin(tmp_path / name, np.arange(500, dtype=np.uint32) % V, V, made_with)
    files = {"train_data": tmp_path / "a.bin", "val_data": tmp_path / "b.bin"}
    line = one_line(train(*flags(data, tmp_path / "out", **files), code=2))
    assert "a.bin" in line and "b.bin" in line and "tokenizer" in line


@pytest.fixture(scope="module")
def checkpoint(train, data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "out"
    train(*flags(data, out))
    return out


def broken_copy(checkpoint: Path, to: Path, file: str, change) -> Path:
    """The run's output with one file of its newest checkpoint changed."""
    for source in checkpoint.rglob("*"):
        target = to / source.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            target.write_bytes(source.read_bytes())
    path = to / "step_000008" / file
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    "file", ["manifest.json", "model.safetensors", "optimizer.safetensors", "config.json"]
)
@pytest.mark.parametrize("change", ["truncated", "emptied", "flipped", "lengthened"])
def test_bad_checkpoint(train, data, checkpoint, tmp_path, file, change):
    changes = {
        "truncated": lambda raw: raw[: len(raw) // 2],
        "emptied": lambda raw: b"",
        "lengthened": lambda raw: raw + b" x",
        "flipped": lambda raw: (
            raw[: len(raw) // 3] + bytes([raw[len(raw) // 3] ^ 4]) + raw[len(raw) // 3 + 1 :]
        ),
    }
    path = broken_copy(checkpoint, tmp_path / "out", file, changes[change])
    before = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    named = ("--resume", path.parent)
    line = one_line(train(*flags(data, tmp_path / "out", steps=12), *named, code=2))
    assert str(path) in line
    before |= {(lock := tmp_path / "out/.lock"): lock.read_bytes()}
    assert before == {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_resume_of_another_run(train, data, checkpoint):
    for change in (
        {"seed": 7},
        {"batch_size": 2},
        {"dtype": "bf16"},
        {"model": ROOT / "tests/models/untied-mha.json"},
    ):
        line = one_line(train(*flags(data, checkpoint, steps=12, **change), "--resume", "auto", code=2))
        assert "step_000008" in line


def test_bad_weights(train, data, checkpoint, tmp_path):
    """A Hugging Face folder whose file is cut within each field, or does not fit its config.json."""
    source = checkpoint / "step_000008"
    raw = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())

    def refused(content: bytes, *words: str):
        (tmp_path / "model.safetensors").write_bytes(content)
        line = one_line(train(*flags(data, tmp_path / "out", model=tmp_path, init="load"), code=2))
        assert all(word in line for word in ("model.safetensors", *words)), line

    def with_header(changed: dict) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    for size in (0, 3, 8, 20, 8 + length // 2, 8 + length, len(raw) - 1):
        refused(raw[:size])
    refused(raw + b"\0", "size")
    refused(b"\xff" * 8 + raw[8:], "length")
    name = "model.layers.0.mlp.down_proj.weight"
    entry = header[name]
    begin, end = entry["data_offsets"]
    for change, word in (
        ({"dtype": "I32"}, "dtype"),
        ({"dtype": "I64"}, "data_offsets"),
        ({"dtype": "F16"}, "data_offsets"),
        ({"shape": [1 << 62, 4]}, "shape"),
        ({"shape": [-1, 4]}, "shape"),
        ({"data_offsets": [begin, end + 4]}, "data_offsets"),
        ({"data_offsets": [begin - 4, end - 4]}, "data_offsets"),
        ({"shape": entry["shape"][::-1]}, "shape"),
    ):
        refused(with_header(header | {name: entry | change}), name, word)
    refused(with_header({key: value for key, value in header.items() if key != name}))


def test_full_disk_keeps_the_checkpoint_before(build, train, data, tmp_path):
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
