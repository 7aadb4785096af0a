"""The program as a user meets it: training, resuming, files that others open, bad input."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from run import (
    MODEL,
    PRECISIONS,
    ROOT,
    RUN_KEYS,
    STEP_KEYS,
    T,
    V,
    bits,
    events,
    flags,
    losses,
    one_line,
    timed_events,
)

from llamac import __version__, plot, tokenizer
from llamac.config import load_config
from llamac.data import write_bin
from llamac.tolerance import FORWARD, violation

pytestmark = pytest.mark.program


# A run


def test_run_and_its_log(train, data, tmp_path):
    result = train(*flags(data, tmp_path / "out", steps=40, lr=0.01, sample_every=20, sample_tokens=8))
    out = tmp_path / "out"
    steps = events(out, "step")
    assert [e["step"] for e in steps] == list(range(1, 41))
    assert (
        steps[0]["loss"] == pytest.approx(np.log(V), abs=1.0) and steps[-1]["loss"] < steps[0]["loss"] - 0.5
    )
    keys = {e["event"]: list(e) for e in timed_events(out)}
    assert (keys["step"], keys["run"]) == (STEP_KEYS, RUN_KEYS)
    (run,) = events(out, "run")
    assert (run["host"], run["version"]) == (socket.gethostname(), __version__) and run["commit"]
    assert (run["origin"], run["from"]) == ("fresh", None)
    assert run["parameters"] == load_config(MODEL).num_parameters() and run["tokens_per_step"] == 4 * T
    assert [e["step"] for e in events(out, "val")] == list(range(0, 41, 4))
    assert [e["step"] for e in events(out, "sample")] == [20, 40]
    assert sorted(p.name for p in out.glob("step_*")) == ["step_000036", "step_000040"]
    last = result.stdout.strip().splitlines()[-1]
    assert all(str(out / name) in last for name in ("step_000040", "log.jsonl", "loss.png"))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_dry_run(train, data, tmp_path):
    """The tables of the run itself, without a trace of one; a run that cannot fit ends as it would."""
    line = flags(data, tmp_path / "out", total_batch_size=8 * T)
    table = re.compile(r"^this run\n.*^  total  .*?\n", re.MULTILINE | re.DOTALL)
    said = train(*line, "--dry-run").stdout
    assert not (tmp_path / "out").exists() and said.splitlines()[-1].startswith("dry run: the run fits")
    assert table.search(said)[0] == table.search(train(*line).stdout)[0]
    large = {"batch_size": 1 << 25, "total_batch_size": 0, "val_data": ""}
    result = train(*flags(data, tmp_path / "none", **large), "--dry-run", code=2)
    assert "memory: the run needs" in one_line(result) and table.search(result.stdout)
    assert not (tmp_path / "none").exists()


def test_samples_begin_with_a_prompt(train, data, tmp_path):
    """The given ids, then what the model writes: the same from both programs, another than without them."""
    extra = {"sample_every": 8, "sample_tokens": 6}
    line = flags(data, tmp_path / "c", **extra, sample_prompt_ids="3,1,41")
    train(*line)
    python = [sys.executable, "train_llama3.py", "--train", *line, "--out", str(tmp_path / "python")]
    subprocess.run(python, cwd=ROOT, check=True, capture_output=True)
    (ours,), (theirs,) = (events(tmp_path / name, "sample") for name in ("c", "python"))
    assert ours == theirs and ours["text"].startswith("3 1 41 ") and len(ours["text"].split()) == 3 + 6
    c, theirs = (
        {e["event"]: list(e) for e in timed_events(tmp_path / name) if e["event"] != "start"}
        for name in ("c", "python")
    )
    assert c == theirs and c.keys() == {"run", "step", "val", "sample", "checkpoint"}
    train(*flags(data, tmp_path / "plain", **extra))
    plain = events(tmp_path / "plain", "sample")[0]["text"].split()
    assert len(plain) == 6 and plain != ours["text"].split()[3:]


def test_log_every(train, data, tmp_path):
    """Lines of steps 1, 3, 6 and 8 on the console, every step in the log, from both programs."""
    line = flags(data, tmp_path / "c", log_every=3)
    python = [sys.executable, "train_llama3.py", "--train", *line, "--out", str(tmp_path / "python")]
    theirs = subprocess.run(python, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name, said in (("c", train(*line).stdout), ("python", theirs)):
        assert re.findall(r"^ +(\d+)/8 .* s$", said, re.MULTILINE) == ["1", "3", "6", "8"], said
        assert [e["step"] for e in events(tmp_path / name, "step")] == list(range(1, 9))


def test_no_steps_validate_and_end(train, data, tmp_path):
    """The loss that a run of some steps begins with, of given weights, too; nothing is saved."""
    train(*flags(data, tmp_path / "first"))
    model = tmp_path / "first/step_000008"
    said = train(*flags(data, tmp_path / "out", steps=0, model=model, sample_every=1)).stdout
    (found,) = events(tmp_path / "out", "val")
    assert found == {"event": "val", "step": 0, "loss": events(tmp_path / "first", "val")[-1]["loss"]}
    assert said.splitlines()[-1].startswith("done: no model, log ") and "--warmup-steps" not in said
    assert not events(tmp_path / "out", "sample") and not list((tmp_path / "out").glob("step_*"))
    line = flags(data, tmp_path / "python", steps=0, model=model, sample_every=1)
    python = [sys.executable, "train_llama3.py", "--train", *line]
    theirs = subprocess.run(python, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert events(tmp_path / "python", "val")[0]["loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert theirs.splitlines()[-1].startswith("done: no model, log ")
    assert sorted(p.name for p in (tmp_path / "python").iterdir()) == ["log.jsonl"]
    for name in ("out", "python"):
        (run,) = events(tmp_path / name, "run")
        assert (run["origin"], run["from"]) == ("loaded", str(model))


def test_a_log_that_was_cut_is_continued(train, data, tmp_path):
    """Within a line, before its newline, and where zeros follow; check_log tries every byte."""
    out = tmp_path / "out"
    line = flags(data, out, sample_every=4, sample_tokens=5)
    train(*line)
    whole = (out / "log.jsonl").read_bytes()
    lines = whole.split(b"\n")
    begin = len(b"\n".join(lines[: next(i for i, text in enumerate(lines) if b'"step":3' in text)])) + 1
    shutil.rmtree(out / "step_000008")
    for tail in (whole[: begin + 30], whole[: whole.index(b"\n", begin)], whole[:begin] + bytes(9)):
        (out / "log.jsonl").write_bytes(tail)
        train(*line, "--resume", "auto", env=os.environ | {"LLAMAC_PYTHON": "/bin/false"})  # no plot
        found = timed_events(out)
        good = [e for e in map(json.loads, tail[: tail.rindex(b"}") + 1].split(b"\n")) if e]
        assert found[: len(good)] == good and plot.read_log(out / "log.jsonl") == found
        steps = [e["step"] for e in found if e["event"] == "step"]
        assert steps == sorted(set(steps)) and steps[-4:] == [5, 6, 7, 8]
        shutil.rmtree(out / "step_000008")


def test_the_same_run_twice_gives_the_same_bits(train, data, tmp_path):
    for name in ("a", "b"):
        train(*flags(data, tmp_path / name))
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_the_number_of_threads_changes_little(train, data, tmp_path):
    """BLAS may divide a sum by threads; everything of ours may not."""
    for threads in ("1", "2"):
        train(*flags(data, tmp_path / threads), env=os.environ | {"OMP_NUM_THREADS": threads})
    np.testing.assert_allclose(losses(tmp_path / "1"), losses(tmp_path / "2"), rtol=1e-6)


def test_accumulation_is_a_larger_batch(train, data, tmp_path):
    train(*flags(data, tmp_path / "whole", batch_size=4))
    train(*flags(data, tmp_path / "parts", batch_size=1, total_batch_size=4 * T, val_data=""))
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_bitwise(train, data, tmp_path, precision):
    extra = PRECISIONS[precision] | {"total_batch_size": 8 * T}
    train(*flags(data, tmp_path / "whole", **extra))
    half = flags(data, tmp_path / "half", **extra)
    train(*[*half, "--checkpoint-every", "3"])
    newest = tmp_path / "half/step_000008"
    newest.rename(tmp_path / "set-aside")
    train(*half, "--resume", "auto")
    assert bits(tmp_path / "half") == bits(tmp_path / "whole")
    run = events(tmp_path / "half", "run")[-1]
    assert (run["origin"], run["from"]) == ("resumed", str(tmp_path / "half/step_000006"))


def test_every_precision_learns(train, data, tmp_path):
    """From ln 97 = 4.6, or more at first, to where the f32 run gets, which is well below."""
    ends = {}
    for name, precision in PRECISIONS.items():
        train(*flags(data, tmp_path / name, steps=60, lr=0.01, checkpoint_every=0, val_every=0, **precision))
        ends[name] = np.mean(losses(tmp_path / name)[-5:])
    assert ends["f32"] < np.log(V) - 1
    assert all(abs(end - ends["f32"]) < 0.05 for end in ends.values()), ends


def interrupted(command: list, out: Path) -> int:
    """Exit code of a program that gets Ctrl-C after a few steps."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.time() + 60
    while time.time() < deadline and not (
        out.exists() and (out / "log.jsonl").exists() and len(losses_so_far(out)) > 3
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return process.wait(60)


def test_an_interrupted_run_goes_on_with_the_same_bits(build, train, data, tmp_path):
    """Steps that are in flight when the signal comes are finished, logged and saved."""
    endless = {"checkpoint_every": 0, "val_every": 0, "schedule": "constant"}
    out = tmp_path / "out"
    assert interrupted([build / "train_llama3", *flags(data, out, steps=1000000, **endless)], out) == 130
    last = events(out, "step")[-1]["step"]
    assert (out / f"step_{last:06d}" / "manifest.json").exists()
    train(*flags(data, out, steps=last + 3, **endless), "--resume", "auto")
    train(*flags(data, tmp_path / "whole", steps=last + 3, **endless))
    assert bits(out) == bits(tmp_path / "whole")


def test_what_a_run_says_at_its_end(train, data, tmp_path):
    """The checkpoint that there is, also where nothing was left to do."""
    train(*flags(data, tmp_path / "a"))
    whole = tmp_path / "a/step_000008"
    result = train(*flags(data, tmp_path / "b"), "--resume", whole)
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith(f"done: model {whole}, log ") and "no plot (there are no steps in the log)" in last


def test_a_run_without_checkpoints(build, train, data, tmp_path):
    """Neither at the end nor when interrupted."""
    result = train(*flags(data, tmp_path / "a", checkpoint_every=-1))
    assert result.stdout.strip().splitlines()[-1].startswith("done: no model, log ")
    out = tmp_path / "b"
    command = [build / "train_llama3", *flags(data, out, steps=1000000, checkpoint_every=-1, val_every=0)]
    assert interrupted(command, out) == 130
    assert len(losses(tmp_path / "a")) == 8 and not list(tmp_path.glob("*/step_*"))


def losses_so_far(out: Path) -> list[str]:
    return [line for line in (out / "log.jsonl").read_text().splitlines() if '"step"' in line]


def test_a_run_that_diverges_keeps_its_checkpoint(train, data, tmp_path):
    train(*flags(data, tmp_path / "out"))
    rest = flags(data, tmp_path / "out", steps=40, lr=1e18, keep_checkpoints=1, grad_clip=0)
    result = train(*rest, "--resume", "auto", code=2)
    line = result.stderr.strip()
    assert re.fullmatch(r"train_llama3: step \d+: expected a finite loss .*, found .*step_000008", line), line
    assert sorted(p.name for p in (tmp_path / "out").glob("step_*")) == ["step_000004", "step_000008"]
    assert events(tmp_path / "out", "step")[-1]["step"] == int(re.search(r"step (\d+)", line)[1])


def test_a_second_run_keeps_the_first(train, data, tmp_path):
    train(*flags(data, tmp_path / "out"))
    first = (tmp_path / "out/log.jsonl").read_text()
    result = train(*flags(data, tmp_path / "out", seed=7))
    assert "previous_1" in result.stdout
    assert (tmp_path / "out/previous_1/log.jsonl").read_text() == first
    assert (tmp_path / "out/previous_1/step_000008/manifest.json").exists()


# What others read


def test_the_same_losses(train, data, tmp_path):
    """And samples, in C and in Python."""
    arguments = flags(
        data,
        tmp_path / "c",
        steps=10,
        total_batch_size=8 * T,
        schedule="wsd",
        sample_every=10,
        sample_tokens=12,
    )
    train(*arguments)
    python = [sys.executable, "train_llama3.py", "--train", *arguments, "--out", str(tmp_path / "python")]
    subprocess.run(python, cwd=ROOT, check=True, capture_output=True)
    np.testing.assert_allclose(losses(tmp_path / "c"), losses(tmp_path / "python"), rtol=1e-5)
    for field in ("lr", "grad_norm"):
        ours, theirs = ([e[field] for e in events(tmp_path / name, "step")] for name in ("c", "python"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4 if field == "grad_norm" else 1e-12)
    ours, theirs = ([e["loss"] for e in events(tmp_path / name, "val")] for name in ("c", "python"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert [e["text"] for e in events(tmp_path / "c", "sample")] == [
        e["text"] for e in events(tmp_path / "python", "sample")
    ]


@pytest.mark.parametrize("kind", ["naive", "kernels", "optimized"])
def test_training_with_kernels(train, chosen, data, tmp_path, kind):
    """Every operation a kernel: the losses that the variants in use without --kernel give."""
    kernels = [word for choice in chosen(kind) for word in ("--kernel", choice)]
    train(*flags(data, tmp_path / "default"))
    train(*flags(data, tmp_path / "kernels"), *kernels)
    np.testing.assert_allclose(losses(tmp_path / "kernels"), losses(tmp_path / "default"), rtol=1e-5, atol=0)


def test_list_kernels(train):
    """A line for each variant, or several: name, device, whether its bits are the same in every run, idea."""
    text = train("--list-kernels").stdout
    assert max(map(len, text.splitlines())) <= 100
    blocks = dict(re.findall(r"^(\w+): (.*(?:\n .*)*)", text, re.MULTILINE))
    for block in blocks.values():
        assert re.search(r"^  naive +device +yes +\w", block, re.MULTILINE), block
        assert re.search(r"^  reference +host +yes +plain loops", block, re.MULTILINE), block
    block = " ".join(blocks["attention_backward"].split())
    assert "flash device yes tiles on" in block and "flash_atomic device no as flash" in block
    assert "takes HD 64 or 128, T at most 2^30, scale above 0, heads that begin at multiples" in block


def test_kernels_are_tried_in_turn(train, data, tmp_path):
    """The tiled kernel takes no f32: alone it is refused, with another behind it that one runs."""
    line = one_line(train(*flags(data, tmp_path / "a"), "--kernel", "matmul_forward=tiled", code=2))
    assert "matmul_forward: variant tiled does not take" in line
    train(*flags(data, tmp_path / "b"), "--kernel", "matmul_forward=tiled,naive")
    manifest = next((tmp_path / "b").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["kernels"] == {"matmul_forward": "tiled,naive"}
    line = one_line(train(*flags(data, tmp_path / "c"), "--kernel", "matmul_forward=tiled,magic", code=2))
    assert "matmul_forward: no variant magic, expected one of optimized, cpu, " in line


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformers_opens_a_checkpoint(build, train, data, tmp_path, dtype):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    train(*flags(data, tmp_path / "out", dtype=dtype))
    checkpoint = tmp_path / "out/step_000008"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", attn_implementation="eager")
    assert model.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, truth = model(tokens).logits, model.double()(tokens).logits
    (tmp_path / "state").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "state" / file).write_bytes((checkpoint / file).read_bytes())
    settings = {key: "0.9" for key in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip")}
    ids = tokens.int()
    save_file({"tokens": ids, "targets": ids.clone()}, tmp_path / "state/debug_state.safetensors", settings)
    subprocess.run([build / "debug_state", tmp_path / "state", tmp_path / "ours", dtype], check=True)
    ours = load_file(tmp_path / "ours")["logits"]
    assert (
        violation(
            ours.double().numpy().reshape(truth.shape), theirs.double().numpy(), truth.numpy(), dtype, FORWARD
        )
        == ""
    )


def test_training_goes_on_from_a_hugging_face_folder(train, data, tmp_path):
    train(*flags(data, tmp_path / "first"))
    train(*flags(data, tmp_path / "second", model=tmp_path / "first/step_000008", init="load"))
    ends, begins = (
        events(tmp_path / "first", "val")[-1]["loss"],
        events(tmp_path / "second", "val")[0]["loss"],
    )
    assert ends == begins


def test_a_folders_weights_are_the_default(train, data, tmp_path):
    """--init says otherwise; a folder that has none is said."""
    train(*flags(data, tmp_path / "first"))
    folder = tmp_path / "first/step_000008"
    trained = events(tmp_path / "first", "val")[-1]["loss"]

    def begin(name: str, **extra) -> tuple[float, str]:
        said = train(*flags(data, tmp_path / name, **{"model": folder, "steps": 1} | extra)).stdout
        return events(tmp_path / name, "val")[0]["loss"], said

    assert begin("default")[0] == trained
    assert events(tmp_path / "default", "start")[0]["init"] == "load"
    loss, said = begin("random", init="random")
    assert loss > trained + 0.05 and "no weights" not in said
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "bare")
    bare, said = begin("new", model=tmp_path / "bare")
    assert bare == loss and f"{tmp_path / 'bare'}: the directory has no weights: the initial ones are" in said
    python = [sys.executable, "train_llama3.py", "--train"]
    for name, expected in (("default", trained), ("random", loss), ("new", loss)):
        model = tmp_path / "bare" if name == "new" else folder
        extra = {"init": "random"} if name == "random" else {}
        line = flags(data, tmp_path / f"python-{name}", model=model, steps=1, **extra)
        done = subprocess.run([*python, *line], cwd=ROOT, check=True, capture_output=True, text=True)
        assert events(tmp_path / f"python-{name}", "val")[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert ("no weights" in done.stdout) == (name == "new")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_alone(train, data, tmp_path, name):
    """They are never read; the line says how to convert them, and --init random trains without them."""
    (tmp_path / "old").mkdir()
    shutil.copy(MODEL, tmp_path / "old/config.json")
    (tmp_path / "old" / name).write_text("{}")
    line = one_line(train(*flags(data, tmp_path / "out", model=tmp_path / "old"), code=2))
    words = f"{tmp_path / 'old'}: expected model.safetensors, found {name} alone; convert it: python -c "
    convert = f"from_pretrained('{tmp_path / 'old'}', dtype='auto').save_pretrained("
    assert words in line and convert in line
    python = [
        sys.executable,
        "train_llama3.py",
        "--train",
        *flags(data, tmp_path / "p", model=tmp_path / "old"),
    ]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.replace("train_llama3.py", "train_llama3") == line + "\n"
    train(*flags(data, tmp_path / "out", model=tmp_path / "old", init="random", steps=1))


def test_weights_of_float16_are_read(train, data, tmp_path):
    """The bits of the same values in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    train(*flags(data, tmp_path / "first"))
    checkpoint = tmp_path / "first/step_000008"
    halves = {n: x.half() for n, x in load_file(checkpoint / "model.safetensors").items()}
    found = []
    for dtype in (torch.float16, torch.float32):
        folder = shutil.copytree(checkpoint, tmp_path / str(dtype))
        save_file({n: x.to(dtype) for n, x in halves.items()}, folder / "model.safetensors")
        out = tmp_path / f"from {dtype}"
        train(*flags(data, out, model=folder, init="load"))
        found.append(losses(out))
    assert found[0] == found[1]


def test_checkpoints_carry_the_tokenizer(train, data, tmp_path):
    """The files of the model's directory, else those beside the rank file; the same from both programs."""
    tokens = shutil.copytree(data, tmp_path / "tokens")
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer.save(tokens / "tokenizer.tiktoken", ranks)
    tokenizer.export(tokens, tokenizer.load(tokens / "tokenizer.tiktoken"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | {"pad_token_id": -1}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"):
        (model / name).write_text(f"{name} of the model")
    base = {"config.json", "model.safetensors", "optimizer.safetensors", "manifest.json"}
    exported = {"tokenizer.json", "tokenizer_config.json"}
    for name, extra, expected, source in (
        ("preset", {"tokenizer": "auto"}, exported, tokens),
        ("without", {"tokenizer": "none"}, set(), tokens),
        ("loaded", {"tokenizer": "auto", "model": model}, {p.name for p in model.iterdir()} - base, model),
    ):
        line = flags(tokens, tmp_path / name, steps=4, **extra)
        train(*line)
        python = [sys.executable, "train_llama3.py", "--train", *line, "--out", str(tmp_path / f"p-{name}")]
        subprocess.run(python, cwd=ROOT, check=True, capture_output=True)
        ours, theirs = tmp_path / name / "step_000004", tmp_path / f"p-{name}" / "step_000004"
        assert {p.name for p in ours.iterdir()} == base | expected
        assert {p.name for p in theirs.iterdir()} == {"config.json", "model.safetensors"} | expected
        for file in expected:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes() == (source / file).read_bytes()
        configs = [json.loads((path / "config.json").read_text()) for path in (ours, theirs)]
        assert configs[0] == configs[1] and configs[0].get("pad_token_id") == (
            -1 if name == "loaded" else None
        )
    # A checkpoint that the run itself moves away: its files were read before.
    again = flags(tokens, tmp_path / "loaded", model=tmp_path / "loaded/step_000004", tokenizer="none")
    train(*again)
    last = tmp_path / "loaded/step_000008"
    assert (last / "tokenizer.json").read_text() == "tokenizer.json of the model"
    assert json.loads((last / "config.json").read_text())["pad_token_id"] == -1


def test_what_looks_wrong_is_said(train, data, tmp_path):
    """A line each, the same from both programs: tokens of another tokenizer, which may have fewer ids than
    the model; a warm-up that the run does not outlive; data that is read again."""
    train(*flags(data, tmp_path / "first"))
    loaded = {"model": tmp_path / "first/step_000008"}
    write_bin(tmp_path / "few.bin", np.arange(500, dtype=np.uint32) % 50, 50)
    few = {"train_data": tmp_path / "few.bin", "val_data": "", "steps": 3}
    vocabulary = f"{tmp_path / 'few.bin'}: tokens of a vocabulary of 50, the model's is {V}: "
    warm_up = "--warmup-steps 7: the run ends at step 3, before its learning rate has reached --lr 0.003"
    for extra, expected in (
        ({"steps": 8, "warmup_steps": 8}, []),
        (few, [f"{vocabulary}the ids from 50 on never occur"]),
        (few | loaded, [f"{vocabulary}were the weights trained on these tokens?"]),
        ({"steps": 3, "warmup_steps": 7}, [warm_up]),
        (
            {"total_batch_size": 64 * T},
            ["--steps 8: the run reads its training data 1.6 times (312 sequences)"],
        ),
    ):
        line = flags(data, tmp_path / "out", **extra)
        python = [sys.executable, "train_llama3.py", "--train", *line]
        theirs = subprocess.run(python, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for said in (train(*line).stdout, theirs):
            found = [
                x
                for x in said.splitlines()
                if re.search("vocabulary of|warmup-steps .*:|training data .* t", x)
            ]
            assert found == expected, said


def test_resume_auto_without_a_checkpoint(train, data, tmp_path):
    said = f"--resume auto: no checkpoint in {tmp_path / 'out'}: the run begins at step 0"
    arguments = flags(data, tmp_path / "out")
    assert said in train(*arguments, "--resume", "auto").stdout.splitlines()
    assert said not in train(*arguments, "--resume", "auto").stdout


def test_a_resume_says_what_is_not_as_it_was(train, data, tmp_path):
    train(*flags(data, tmp_path / "out", steps=4))
    train_data = tmp_path / "train_000.bin"
    train_data.write_bytes((data / "train_000.bin").read_bytes())
    changed = flags(data, tmp_path / "out", lr=0.5, train_data=train_data)
    said = train(*changed, "--resume", "auto").stdout
    assert (
        "goes on with other settings: --steps was 4, is 8, --lr was 0.003, is 0.5, --train-data was" in said
    )
    assert re.search(r"sequences of training data.* was \d+, is \d+", said)
    assert "goes on with" not in train(*changed, "--resume", "auto").stdout


def test_print_config_reads_back(train, data, tmp_path):
    arguments = [
        *flags(data, tmp_path / 'o "u" t\\é', lr=1 / 3, grad_clip=0),
        "--kernel",
        "rope_forward=reference",
    ]
    text = train(*arguments, "--print-config").stdout
    (tmp_path / "run.toml").write_text(text)
    assert train("--config", tmp_path / "run.toml", "--print-config").stdout == text
    values = tomllib.loads(text)
    assert values["lr"] == 1 / 3 and values["kernel"] == ["rope_forward=reference"]
    assert values["out"] == str(tmp_path / 'o "u" t\\é')


# Bad input: one line that says what, where, expected and found; exit code 2


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
        ({"model_type": "mistral"}, "model_type llama mistral"),
        ({"attention_bias": True}, "attention_bias false"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config quantized original {"bits":4}'),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn"),
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
    line = one_line(train(*flags(data, tmp_path / "out", steps=12), "--resume", "auto", code=2))
    assert str(path) in line
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
        ({"dtype": "I64"}, "dtype"),
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
