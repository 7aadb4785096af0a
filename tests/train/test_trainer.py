"""llamac.Trainer: the bits of the program, whoever reads the batches, and what it refuses.

The program has to be compiled like the module: under the sanitizers (mark "program") it has other bits.
"""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from run import MODEL, PRECISIONS, Foreign, T, V, events, flags, losses, refused, refuses, trainer_flags

import llamac
from llamac.base.native import native
from llamac.data import Loader, tokenizer

FILES = ("config.json", "model.safetensors", "optimizer.safetensors")
ACCUMULATION = 2
BOS = json.loads(Path(MODEL).read_text())["bos_token_id"]


def trainer_of(data: Path, out: Path, **extra) -> llamac.Trainer:
    return llamac.Trainer(**trainer_flags(data, out, **extra))


def train_by_hand(trainer: llamac.Trainer, steps: int) -> list[float]:
    """Losses of so many steps more, on micro-batches that Python reads."""
    o, found = trainer.options, []
    loader = Loader(o.train_data, o.seq_len, V, o.batch_size, ACCUMULATION, seed=o.seed)
    for _ in range(steps):
        parts = [loader.micro_batch(trainer.steps_done, micro) for micro in range(ACCUMULATION)]
        found.append(trainer.step(*(np.concatenate(part) for part in zip(*parts))))
    return found


def same_files(ours: Path, theirs: Path) -> bool:
    return all((ours / file).read_bytes() == (theirs / file).read_bytes() for file in FILES)


def small(**extra) -> llamac.Trainer:
    """tune off: on a GPU, each of several would time the library's candidates, and could choose others."""
    return llamac.Trainer(MODEL, seq_len=T, batch_size=2, tune="off", **extra)


def ids(rows: int = 2, width: int = T) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, V, (rows, width + 1))
    return drawn[:, :-1], drawn[:, 1:].copy()


# The same bits as the program


@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates(train, data, tmp_path, precision):
    extra = PRECISIONS[precision] | {"total_batch_size": ACCUMULATION * 4 * T}
    train(*flags(data, tmp_path / "program", **extra))
    trainer = trainer_of(data, tmp_path / "unused", **extra)
    assert train_by_hand(trainer, 5) + [trainer.step() for _ in range(3)] == losses(tmp_path / "program")
    last = events(tmp_path / "program", "step")[-1]
    assert {key: trainer.last[key] for key in ("step", "loss", "grad_norm", "lr")} == {
        key: last[key] for key in ("step", "loss", "grad_norm", "lr")
    }
    trainer.save(tmp_path / "deep/folder")
    assert same_files(tmp_path / "deep/folder", tmp_path / "program/step_000008")
    assert not (tmp_path / "unused").exists()


def test_validation_and_samples(train, data, tmp_path):
    extra = {"sample_every": 4, "sample_tokens": 9, "sample_temperature": 1.5}
    train(*flags(data, tmp_path / "out", **extra))
    trainer = trainer_of(data, tmp_path, **extra)
    found = {0: trainer.validate()}
    texts = []
    for step in range(1, 9):
        trainer.step()
        if step % 4 == 0:
            found[step] = trainer.validate()
            texts.append(trainer.decode(trainer.sample()))
    assert found == {e["step"]: e["loss"] for e in events(tmp_path / "out", "val")}
    assert texts == [e["text"] for e in events(tmp_path / "out", "sample")]
    loader = Loader(trainer.options.val_data, T, V, 4)
    rows = np.stack([loader.sequence(k) for k in range(2 * 4)]).astype(np.int32)
    assert trainer.validate(rows[:, :-1], rows[:, 1:]) == found[8]


@pytest.mark.parametrize("precision", ["f32", "bf16", "fp16", "bf16-throughout"])
def test_each_goes_on_from_the_others_checkpoint(train, data, tmp_path, precision):
    """The program from Trainer.save(), a trainer from the program's and from another trainer's."""
    extra = PRECISIONS[precision] | {"total_batch_size": ACCUMULATION * 4 * T}
    train(*flags(data, tmp_path / "whole", **extra))
    whole, last = losses(tmp_path / "whole"), tmp_path / "whole/step_000008"
    trainer = trainer_of(data, tmp_path, **extra)
    first = train_by_hand(trainer, 3)
    trainer.save(tmp_path / "saved")
    train(*flags(data, tmp_path / "rest", **extra), "--resume", tmp_path / "saved")
    assert first + losses(tmp_path / "rest") == whole and same_files(tmp_path / "rest/step_000008", last)
    trainer = llamac.Trainer(tmp_path / "whole/step_000004")
    assert trainer.steps_done == 4 and trainer.options.dtype == extra.get("dtype", "f32")
    assert train_by_hand(trainer, 2) == whole[4:6]
    trainer.save(tmp_path / "again")
    again = llamac.Trainer(str(tmp_path / "again"))
    assert train_by_hand(again, 2) == whole[6:]
    again.save(tmp_path / "end")
    assert same_files(tmp_path / "end", last)


def test_a_run_configuration(train, data, tmp_path):
    text = train(*flags(data, tmp_path / "out", lr=0.01), "--print-config").stdout
    (tmp_path / "run.toml").write_text(text)
    trainer = llamac.Trainer(tmp_path / "run.toml", steps=3)
    assert trainer.options.lr == 0.01 and trainer.options.steps == 3
    assert llamac.Trainer(trainer.options, steps=4).options == SimpleNamespace(
        **vars(trainer.options) | {"steps": 4}
    )
    assert trainer.options.train_data == f"{data}/train_*.bin" and trainer.step() > 0


# What goes in and comes out


def test_batches_of_any_library():
    import torch

    tokens, targets = ids()
    read_only = tokens.copy()
    read_only.flags.writeable = False
    kinds = {
        "int64": (tokens, targets),
        "uint16": (tokens.astype(np.uint16), targets.astype(np.uint16)),
        "read-only": (read_only, targets),
        "strided": (np.repeat(tokens, 2, 1)[:, ::2], targets[:, ::-1].copy()[:, ::-1]),
        "lists": (tokens.tolist(), targets.tolist()),
        "torch": (torch.tensor(tokens), torch.tensor(targets).t().contiguous().t()),
        "foreign": (Foreign(tokens.astype(np.int32)), Foreign(targets)),
    }
    if torch.cuda.is_available():
        kinds["device"] = torch.tensor(tokens).cuda(), torch.tensor(targets, dtype=torch.int32).cuda()
    found = {kind: small().step(*batch) for kind, batch in kinds.items()}
    assert len(set(found.values())) == 1 and np.isfinite(found["int64"]), found


def test_ignored_targets_and_validation_of_any_shape():
    trainer = small()
    tokens, targets = ids(5, 7)
    rows = [trainer.validate(tokens[k : k + 1], targets[k : k + 1]) for k in range(5)]
    np.testing.assert_allclose(trainer.validate(tokens, targets), np.mean(rows), rtol=1e-5)
    targets[0] = -100
    assert trainer.validate(tokens[:1], targets[:1]) == 0
    np.testing.assert_allclose(trainer.validate(tokens, targets), np.sum(rows[1:]) / 5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_weights_in_and_out(tmp_path, dtype):
    """parameters() are what the file holds, which transformers opens; another run can begin with it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    trainer = small(dtype=dtype)
    trainer.step(*ids())
    trainer.save(tmp_path / "saved")
    held = {name: t.float().numpy() for name, t in load_file(tmp_path / "saved/model.safetensors").items()}
    ours = trainer.parameters()
    assert next(iter(ours)) == "model.embed_tokens.weight"
    assert ours.keys() == held.keys() and all(np.array_equal(ours[name], held[name]) for name in held)
    assert trainer.config == json.loads((tmp_path / "saved/config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").state_dict()
    assert all(np.array_equal(ours[name], theirs[name].float().numpy()) for name in ours)

    (tmp_path / "saved/manifest.json").unlink()
    started = llamac.Trainer(tmp_path / "saved", seq_len=T, batch_size=2, dtype=dtype, gemm_cache="none")
    assert started.steps_done == 0 and started.options.init == "load"
    assert all(np.array_equal(value, ours[name]) for name, value in started.parameters().items())
    fresh = llamac.Trainer(
        tmp_path / "saved", init="random", seq_len=T, batch_size=2, dtype=dtype, gemm_cache="none"
    )
    assert not all(np.array_equal(value, ours[name]) for name, value in fresh.parameters().items())


def test_samples():
    trainer = small(seed=7)
    assert trainer.sample(6) == trainer.sample(6) and len(trainer.sample()) == trainer.options.sample_tokens
    likeliest = trainer.sample(6, temperature=0)
    assert likeliest == trainer.sample(6, top_k=1) and all(0 <= id < V for id in likeliest)
    assert trainer.sample(5, temperature=0, prompt=[BOS, likeliest[0]]) == likeliest[1:]
    assert small(seed=7, sample_prompt_ids=f"{BOS},{likeliest[0]}").sample(5, temperature=0) == likeliest[1:]
    assert trainer.decode([3, 5]) == "3 5"
    assert trainer.sample(6, temperature=5.0, top_k=0) != likeliest


def test_text_in_and_out(data, tmp_path):
    """encode() is the tokenizer's beside the data; a sample that begins with text is text."""
    shutil.copytree(data, tmp_path / "data")
    bytes_alone = tmp_path / "data/tokenizer.tiktoken"
    tokenizer.save(bytes_alone, {bytes([byte]): byte for byte in range(256)})
    config = json.loads(Path(MODEL).read_text()) | {"vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    beside = {"train_data": str(tmp_path / "data/train_*.bin"), "init": "random"}
    for extra in (beside, {"tokenizer": str(bytes_alone)}):
        trainer = llamac.Trainer(
            tmp_path, seq_len=T, batch_size=2, gemm_cache="none", warmup_steps=0, **extra
        )
        assert trainer.encode("née") == list("née".encode()) and trainer.encode("") == []
        ids = trainer.sample(6, prompt=[256, *b"def "], temperature=0)
        assert trainer.sample("def ", temperature=0)[:2] == trainer.decode(ids)[:2]
        assert trainer.sample(6, prompt="def ", temperature=0) == trainer.decode(ids)
        refuses("sample: expected one prompt, found 'def ' and another", trainer.sample, "def ", prompt=[1])
    refuses("encode: expected train_data with a tokenizer in its folder, or the flag", small().encode, "a")
    refuses("encode: expected train_data with a tokenizer", small().sample, "text")


def test_kernels_are_the_trainers_own(tmp_path):
    """A run's choice of variants stays in its calls: those of others, and the manifest, do not see it."""
    ours = small(kernel=("rmsnorm_forward=naive", "swiglu_forward=naive"))
    plain = small()
    batch = ids()
    assert abs(plain.step(*batch) - ours.step(*batch)) < 1e-5
    x, weight, out, rstd = np.ones((2, 8)), np.ones(8), np.full((2, 8), np.nan), np.full(2, np.nan)
    llamac.run("rmsnorm_forward", [out, rstd], [x, weight], [0.0])  # naive has no f64
    assert np.array_equal(out, x)
    for trainer, chosen in ((ours, {"rmsnorm_forward": "naive", "swiglu_forward": "naive"}), (plain, {})):
        trainer.save(tmp_path / str(len(chosen)))
        manifest = json.loads((tmp_path / str(len(chosen)) / "manifest.json").read_text())
        assert manifest["kernels"] == chosen
    assert "rmsnorm_forward: no variant magic" in refused(small, kernel=["rmsnorm_forward=magic"])


def test_other_threads_run_on():
    trainer = small()
    thread = threading.Thread(target=trainer.sample, args=(300,))
    thread.start()
    ticks = 0
    while thread.is_alive():
        ticks += 1
        time.sleep(1e-3)
    assert ticks > 5


# Bad input: llamac.Error, one line


@pytest.mark.parametrize(
    "pattern, config, extra",
    [
        ("llama9", "llama9", {}),
        ("no/such.toml", "no/such.toml", {}),
        ('unknown key "learning-rate"', MODEL, {"learning_rate": 1}),
        ("seq-len 256", MODEL, {}),
        ("no/such/.*no such file", MODEL, {"train_data": "no/such/*.bin", "seq_len": T}),
        ("no/such", MODEL, {"seq_len": T, "resume": "no/such"}),
        ("memory: the run needs", MODEL, {"seq_len": T, "batch_size": 1 << 25}),
    ],
)
def test_bad_configurations(pattern, config, extra):
    refuses(pattern, llamac.Trainer, config, **extra)


def test_bad_values():
    refuses("lr: expected text, a number, .*: Out of range", llamac.Trainer, MODEL, lr=float("nan"))
    refuses("steps: expected text, a number", llamac.Trainer, MODEL, steps=np.int64(3))
    refuses("out: expected text in UTF-8", llamac.Trainer, MODEL, out="\udcff")
    refuses("kernel: expected a list of strings", llamac.Trainer, MODEL, kernel=[1])
    trainer = small()
    for bad in ([2**40], [1.5], [[1, 2]]):
        refuses("ids: expected a list of integers below", trainer.decode, bad)
    assert trainer.decode([]) == ""
    refuses("save: expected a path", trainer.save, "a\0b")


def test_bad_folders(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    refuses("manifest.json: config: expected an object", llamac.Trainer, tmp_path)
    (tmp_path / "manifest.json").write_text('{"config": {"seed": "x"}}')
    refuses("manifest.json: seed: expected an integer", llamac.Trainer, tmp_path)
    (tmp_path / "manifest.json").unlink()
    refuses("config.json", llamac.Trainer, tmp_path)


def test_bad_batches():
    trainer = small(steps=1)
    tokens, targets = ids()
    wide = ids(2, T + 1)
    for pattern, *batch in (
        (rf"tokens: expected shape \(2, {T}\), found \(2, {T + 1}\)", *wide),
        (rf"targets: expected shape \(2, {T}\), found \(1, {T}\)", tokens, targets[:1]),
        ("tokens: expected 2 dimensions", tokens[0], targets[0]),
        ("tokens: expected integers, found float64", tokens / 2, targets),
        ("tokens: expected integers, found bool", tokens > 3, targets),
        (f"tokens: expected ids from 0 to {V - 1}, found {V}", np.full_like(tokens, V), targets),
        ("tokens: expected ids .* found -100", np.full_like(tokens, -100), targets),
        ("targets: expected ids .* found -1", tokens, np.full_like(tokens, -1)),
        ("targets: expected ids .* found 4294967296", tokens, np.full_like(tokens, 1 << 32)),
        ("tokens: expected an array of integers", [[1], [2, 3]], targets),
        ("targets: expected an array of integers, found none", tokens),
        ("expected tokens and targets, or train_data",),
    ):
        refuses(pattern, trainer.step, *batch)
    refuses("rows, up to", trainer.validate, *wide)
    refuses("or val_data", trainer.validate)
    refuses("sample-tokens: expected an integer from 1 to 16777216", trainer.sample, 0)
    refuses("prompt: expected ids", trainer.sample, 1, prompt=[V])
    assert trainer.steps_done == 0 and trainer.last == {}
    trainer.step(tokens, targets)
    refuses("step 2: expected at most steps = 1", trainer.step, tokens, targets)


def test_save_writes_over_nothing(tmp_path):
    trainer = small()
    trainer.save(tmp_path / "a")
    before = (tmp_path / "a/manifest.json").read_bytes()
    refuses("a: expected no file or directory of this name", trainer.save, tmp_path / "a")
    (tmp_path / "file").write_text("")
    refuses("file", trainer.save, tmp_path / "file/below")
    assert (tmp_path / "a/manifest.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file"]


def test_a_failed_check_raises():
    """What ends the program is an exception here."""
    with pytest.raises(RuntimeError, match=r"CHECK\(.*step.*\) failed at .*schedule.cpp"):
        native.learning_rate(0, 1.0, 0.0, 0, 10, "constant")


def test_an_error_quotes_any_bytes():
    refuses(r"\\xff\\xfe: ", native.model, b"/\xff\xfe", 8)


def test_signals_are_left_to_python(data, tmp_path):
    """No handler is changed; Ctrl-C raises KeyboardInterrupt, and training can go on."""

    def handled() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

    before = handled()
    trainer = trainer_of(data, tmp_path, steps=1000000)
    trainer.step()
    assert handled() == before
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            trainer.step()
    interrupt.join()
    done = trainer.steps_done
    trainer.step()
    assert trainer.steps_done == done + 1
