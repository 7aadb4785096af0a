"""The program as a user meets it: training, resuming, kernels, what it says."""

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
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
    on_a_terminal,
    one_line,
    reference_flags,
    refuses,
    timed_events,
)
from tokenizers import Tokenizer, decoders, models
from transformers import BertConfig, BertForPreTraining

from llamac import __version__, reference
from llamac.base import random
from llamac.data import read_bin, tokenizer, write_bin
from llamac.data.vocabulary import Vocabulary
from llamac.data.vocabulary import write as write_vocabulary
from llamac.inference import Inference
from llamac.model.config import load_config
from llamac.report import plot
from llamac.training.options import parse
from llamac.training.weights import load_weights

pytestmark = pytest.mark.program
PLOTS = {"env": os.environ | {"LLAMAC_PYTHON": sys.executable}}


# A run


def test_run_and_its_log(train, data, tmp_path):
    line = flags(data, tmp_path / "out", steps=40, lr=0.01, sample_every=20, sample_tokens=8)
    result = train(*line, **PLOTS)
    out = tmp_path / "out"
    steps = events(out, "step")
    assert [e["step"] for e in steps] == list(range(1, 41))
    assert steps[0]["loss"] == pytest.approx(np.log(V), abs=1.0)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    keys = {e["event"]: list(e) for e in timed_events(out)}
    assert (keys["step"], keys["run"]) == (STEP_KEYS + ["device"] * ("device" in steps[0]), RUN_KEYS)
    (start,) = events(out, "startup")
    assert list(start)[1:] == ["ranks", "weights", "tuning", "graphs", "first_step", "total"]
    assert start["first_step"] == pytest.approx(steps[0]["ms"] / 1e3) and start["weights"] > 0
    assert start["weights"] + start["first_step"] < start["total"] < 60
    assert f"start: {start['total']:.1f} s to the end of the first step" in result.stdout
    (run,) = events(out, "run")
    assert (run["host"], run["version"]) == (socket.gethostname(), __version__) and run["commit"]
    assert (run["origin"], run["from"]) == ("fresh", None)
    assert run["parameters"] == load_config(MODEL).num_parameters() and run["tokens_per_step"] == 4 * T
    assert run["tokens_per_epoch"] == 2 * (2499 // T * T)
    assert [e["step"] for e in events(out, "val")] == list(range(0, 41, 4))
    assert [e["step"] for e in events(out, "sample")] == [20, 40]
    assert sorted(p.name for p in out.glob("step_*")) == ["step_000036", "step_000040"]
    (done,) = (line for line in result.stdout.splitlines() if line.startswith("done: "))
    assert all(str(out / name) in done for name in ("step_000040", "log.jsonl", "loss.png"))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_dry_run(train, gpu, data, tmp_path):
    """The tables of the run itself, without a trace of one; a run that cannot fit ends as it would."""
    line = flags(data, tmp_path / "out", total_batch_size=8 * T)
    last = "scalars" if gpu else "total"  # behind it, what other programs have of a GPU at the moment
    table = re.compile(rf"^this run\n.*^  {last}  .*?\n", re.MULTILINE | re.DOTALL)
    said = train(*line, "--dry-run").stdout
    assert not (tmp_path / "out").exists() and said.splitlines()[-1].startswith("dry run: the run fits")
    assert table.search(said)[0] == table.search(train(*line).stdout)[0]
    large = {"batch_size": 1 << 25, "total_batch_size": 0, "val_data": ""}
    result = train(*flags(data, tmp_path / "none", **large), "--dry-run", code=2)
    assert "memory: the run needs" in one_line(result) and table.search(result.stdout)
    assert not (tmp_path / "none").exists()


def test_samples_begin_with_a_prompt(train, data, tmp_path):
    """The given ids, then what the model writes: another text than without them."""
    extra = {"sample_every": 8, "sample_tokens": 6}
    line = flags(data, tmp_path / "c", **extra, sample_prompt_ids="3,1,41")
    train(*line)
    (ours,) = events(tmp_path / "c", "sample")
    assert ours["text"].startswith("3 1 41 ") and len(ours["text"].split()) == 3 + 6
    kinds = [e["event"] for e in timed_events(tmp_path / "c")]
    assert set(kinds) == {"run", "start", "startup", "step", "val", "sample", "checkpoint"}
    train(*flags(data, tmp_path / "plain", **extra))
    plain = events(tmp_path / "plain", "sample")[0]["text"].split()
    assert len(plain) == 6 and plain != ours["text"].split()[3:]


def test_log_every(train, data, tmp_path):
    """Lines of steps 1, 3, 6 and 8 on the console, every step in the log; by default about 100 lines."""
    said = train(*flags(data, tmp_path / "out", log_every=3)).stdout
    assert re.findall(r"^ *(\d+)/8 .* s$", said, re.MULTILINE) == ["1", "3", "6", "8"], said
    assert [e["step"] for e in events(tmp_path / "out", "step")] == list(range(1, 9))
    said = train(*flags(data, tmp_path / "long", steps=250, val_every=0, checkpoint_every=-1)).stdout
    assert len(re.findall(r"^ *\d+/250 .* s$", said, re.MULTILINE)) == 85, said


@pytest.mark.parametrize(
    "words", ["--profile 1 --sample-every 8", "--dry-run --device h200", "--help", "--list-kernels"]
)
def test_a_terminal_of_80_columns(build, data, tmp_path, words):
    """Every line fits, and a run's table has the columns that fit."""
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "model.json").write_text(Path(MODEL).read_text())
    extra = {"model": "model.json", "warmup_steps": 8, "steps": 8, "sample_tokens": 3}
    line = [*flags(Path("data"), Path("out"), **extra), *words.split()]
    shown = on_a_terminal(80, build / "train_llama3", *line, cwd=tmp_path)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and max(map(len, lines)) > 70, shown
    if words.startswith("--profile"):
        assert "\nstep      loss  grad norm  " in shown and "/s  % of peak  mem GiB  time left\n" in shown
        assert "\nmemory   " in shown and "\nidle    " in shown and "\nllamac report out\n" in shown


def test_bits_per_byte(train, data, tmp_path):
    """Of the text of the targets; token k has k + 1 bytes."""
    tokens = [b"x" * (k + 1) for k in range(V)]
    write_vocabulary(tmp_path / "tokenizer.vocab", Vocabulary(tokens, 0))
    train(*flags(data, tmp_path / "out", steps=0, tokenizer=tmp_path / "tokenizer.vocab"))
    (found,) = events(tmp_path / "out", "val")
    targets = read_bin(data / "val_000.bin").tokens[1 : 2 * 4 * T + 1]
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / np.log(2) / (targets + 1.0).mean())


def test_no_steps_validate_and_end(train, data, tmp_path):
    """The loss that a run of some steps begins with, of given weights, too; nothing is saved."""
    train(*flags(data, tmp_path / "first"))
    model = tmp_path / "first/step_000008"
    said = train(*flags(data, tmp_path / "out", steps=0, model=model, sample_every=1)).stdout
    (found,) = events(tmp_path / "out", "val")
    assert found == {"event": "val", "step": 0, "loss": events(tmp_path / "first", "val")[-1]["loss"]}
    assert said.splitlines()[-1].startswith("done: no model, log ") and "--warmup-steps" not in said
    assert not events(tmp_path / "out", "sample") and not list((tmp_path / "out").glob("step_*"))
    (run,) = events(tmp_path / "out", "run")
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
        train(*line, "--resume", "auto")
        found = timed_events(out)
        good = [e for e in map(json.loads, tail[: tail.rindex(b"}") + 1].split(b"\n")) if e]
        assert found[: len(good)] == good and plot.read_log(out / "log.jsonl") == found
        steps = [e["step"] for e in found if e["event"] == "step"]
        assert steps == sorted(set(steps)) and steps[-4:] == [5, 6, 7, 8]
        shutil.rmtree(out / "step_000008")


def test_the_number_of_threads_changes_nothing(train, data, tmp_path):
    for threads in ("1", "2"):
        train(*flags(data, tmp_path / threads), env=os.environ | {"OMP_NUM_THREADS": threads})
    assert bits(tmp_path / "1") == bits(tmp_path / "2")


def test_accumulation_is_a_larger_batch(train, data, tmp_path):
    train(*flags(data, tmp_path / "whole", batch_size=4))
    train(*flags(data, tmp_path / "parts", batch_size=1, total_batch_size=4 * T, val_data=""))
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_bitwise(train, data, tmp_path, precision):
    expect_bitwise_resume(train, data, tmp_path, **PRECISIONS[precision])


@pytest.mark.parametrize(
    "model",
    [
        "qwen2",
        pytest.param("qwen3", marks=pytest.mark.more),
        "phi3",
        "olmo2",
        pytest.param("gpt2", marks=pytest.mark.more),
        "bert",
    ],
)
def test_resume_of_other_models(train, data, tmp_path, model):
    more = {"model": ROOT / f"tests/models/{model}.json"} | ({"mask_token": 4} if model == "bert" else {})
    expect_bitwise_resume(train, data, tmp_path, dtype="bf16", **more)


def test_an_encoder_predicts_masked_tokens(train, data, tmp_path):
    """As the reference trains it; what is carried through its files; what it cannot do."""
    source = tmp_path / "model"
    with torch.random.fork_rng():
        theirs = BertForPreTraining(BertConfig.from_pretrained(ROOT / "tests/models/bert.json"))
    theirs.save_pretrained(source)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names += [f"{'##' * (id % 3 == 0)}{id}" for id in range(len(names), V)]
    made = Tokenizer(models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(names[:5])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "pieces").mkdir()
    tokenizer.load(tmp_path).write_beside_tokens(tmp_path / "pieces")
    words = {"tokenizer": tmp_path / "pieces/tokenizer.vocab", "mlm_whole_words": "on"}
    # Of 960 rows of each of two micro-batches about 144 are predicted: the head computes 256.
    line = {"model": source, "sample_every": 1, "val_every": 4, "batch_size": 24, "seq_len": 40} | words
    line |= {"total_batch_size": 2 * 24 * 40}
    said = train(*flags(data, tmp_path / "out", **line)).stdout
    assert "does not use" not in said
    reference.train(parse([*reference_flags(data, tmp_path / "ref", **line)]))
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(tmp_path / "ref"), rtol=1e-5)
    train(*flags(data, tmp_path / "off", **line | {"mlm_whole_words": "off"}))
    assert losses(tmp_path / "off") != losses(tmp_path / "out")
    for seed in (1, 2):  # by the same weights
        train(*flags(data, tmp_path / f"{seed}", **line | {"lr": 0, "steps": 4, "seed": seed}))
    assert losses(tmp_path / "1") != losses(tmp_path / "2")
    assert events(tmp_path / "1", "val") == events(tmp_path / "2", "val") != []
    saved = BertForPreTraining.from_pretrained(tmp_path / "out/step_000008").state_dict()
    for name, x in theirs.state_dict().items():
        kept = name.startswith(("bert.pooler", "cls.seq_relationship"))
        assert torch.equal(x, saved[name]) == kept or "position_ids" in name, name
    refused = train(*flags(data, tmp_path / "no", model=source), code=2).stderr
    assert "--mask-token auto: expected the id of the token that replaces" in one_line(refused)
    line |= {"mask_token": 4, "tokenizer": "none"}
    refused = train(*flags(data, tmp_path / "no", **line), code=2).stderr
    assert "--mlm-whole-words on: expected the tokenizer of the data, with" in one_line(refused)
    options = parse([*reference_flags(data, tmp_path / "ref", **line)])
    refuses(re.escape(one_line(refused).removeprefix("train_llama3: ")), reference.train, options)
    line |= {"mlm_whole_words": "off"}
    refused = train(*flags(data, tmp_path / "no", **line, eval_tasks="a.questions"), code=2).stderr
    assert "--eval-tasks a.questions: expected a causal model, found one of type bert" in one_line(refused)
    refuses("a model of type bert is not causal: it generates no text", Inference, str(source))


def expect_bitwise_resume(train, data, tmp_path, **extra):
    extra["total_batch_size"] = 8 * T
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


def test_what_a_run_says_at_its_end(train, data, tmp_path):
    """The checkpoint that there is, also where nothing was left to do."""
    out = tmp_path / "a"
    said = train(*flags(data, out)).stdout
    assert re.search(rf"\ndone: model {out}/step_000008, log .*\nllamac report {out}\n$", said)
    whole = out / "step_000008"
    result = train(*flags(data, tmp_path / "b"), "--resume", whole, **PLOTS)
    last = result.stdout.strip().splitlines()[-1]  # that folder has no checkpoint for other commands
    assert last.startswith(f"done: model {whole}, log ") and "no plot (there are no steps in the log)" in last


def test_a_run_that_diverges_keeps_its_checkpoint(train, data, tmp_path):
    train(*flags(data, tmp_path / "out"))
    rest = flags(data, tmp_path / "out", steps=40, lr=1e18, keep_checkpoints=1, grad_clip=0)
    result = train(*rest, "--resume", "auto", code=2)
    line = result.stderr.strip()
    assert re.fullmatch(r"train_llama3: step \d+: expected a finite loss .*, found .*step_000008", line), line
    assert sorted(p.name for p in (tmp_path / "out").glob("step_*")) == ["step_000004", "step_000008"]
    assert events(tmp_path / "out", "step")[-1]["step"] == int(re.search(r"step (\d+)", line)[1])


def test_steps_that_are_not_finite_are_skipped(train, data, tmp_path):
    """Two in a row, and the third ends the run. The weights of a checkpoint after them are finite."""
    line = flags(
        data, tmp_path / "out", steps=40, lr=1e18, grad_clip=0, checkpoint_every=1, keep_checkpoints=9
    )
    result = train(*line, "--skip-nonfinite", "2", "--log-every", "100", code=2)
    expected = r"train_llama3: step (\d+): expected a finite loss .*, after 2 steps skipped; .*step_(\d+)"
    step, saved = map(int, re.fullmatch(expected, result.stderr.strip()).groups())
    assert saved == step - 1
    skipped = [e["step"] for e in events(tmp_path / "out", "step") if e.get("skipped")]
    assert skipped == [step - 2, step - 1, step]
    assert len(re.findall(r"^ *\d+/40 .*  skipped$", result.stdout, re.MULTILINE)) == 3
    weights = [(tmp_path / f"out/step_{s:06d}/model.safetensors").read_bytes() for s in range(step - 3, step)]
    assert weights[0] == weights[1] == weights[2]


# Beside the Python program, and with other kernels


def test_the_same_losses(train, data, tmp_path):
    """In C and in Python. A sample and a validation are those of the saved weights by the reference."""
    more = {"steps": 10, "total_batch_size": 8 * T, "schedule": "wsd"}
    train(*flags(data, tmp_path / "c", **more, sample_every=10, sample_tokens=12))
    line = reference_flags(data, tmp_path / "python", **more)
    reference.train(parse(line))
    np.testing.assert_allclose(losses(tmp_path / "c"), losses(tmp_path / "python"), rtol=1e-5)
    logs = [timed_events(tmp_path / name) for name in ("c", "python")]
    ours, theirs = ([e for e in log if e["event"] == "step"] for log in logs)
    for field in ("lr", "grad_norm"):
        rtol = 1e-4 if field == "grad_norm" else 1e-12
        np.testing.assert_allclose([e[field] for e in ours], [e[field] for e in theirs], rtol=rtol)
    model = reference.empty_model(load_config(tmp_path / "c/step_000010"), torch.float32)
    load_weights(model, tmp_path / "c/step_000010")
    cis = reference.precompute_cis(model.config, T)
    (shard,) = [read_bin(path) for path in data.glob("val_*.bin")]
    rows = torch.from_numpy(np.stack([shard.read(k * T, T + 1) for k in range(2 * 4)]).astype(np.int64))
    tokens = [model.config.bos_token_id]
    with torch.no_grad():
        expected = model(rows[:, :-1], cis, rows[:, 1:]).item()
        for u in random.uniform(42, 10, 0xFFFFFFFF, 12):
            logits = model(torch.tensor([tokens[-T:]]), cis)[0, -1].double()
            values, ids = logits.sort(descending=True, stable=True)
            shares = (values[:50] / 0.8).softmax(0).cumsum(0)
            tokens.append(int(ids[torch.searchsorted(shares[:-1], u)]))
    assert events(tmp_path / "c", "val")[-1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert events(tmp_path / "c", "sample")[0]["text"] == " ".join(map(str, tokens[1:]))


@pytest.mark.parametrize("kind", ["naive", "kernels", "optimized"])
def test_training_with_kernels(train, chosen, data, tmp_path, kind):
    """Every operation a kernel: the losses that the variants in use without --kernel give."""
    kernels = [word for choice in chosen(kind) for word in ("--kernel", choice)]
    train(*flags(data, tmp_path / "default"))
    train(*flags(data, tmp_path / "kernels"), *kernels)
    np.testing.assert_allclose(losses(tmp_path / "kernels"), losses(tmp_path / "default"), rtol=1e-5, atol=0)


def test_list_kernels(train, gpu):
    """A line for each variant, or several: name, device, idea. One of them is the default."""
    text = train("--list-kernels").stdout
    assert max(map(len, text.splitlines())) <= 110
    blocks = dict(re.findall(r"^(\w+): (.*(?:\n[ *] .*)*)", text, re.MULTILINE))
    for block in blocks.values():
        assert re.search(r"^[ *] naive +device +\w", block, re.MULTILINE), block
        assert re.search(r"^[ *] reference +host +plain loops", block, re.MULTILINE), block
        (default,) = re.findall(r"^\* \S+ +(\S.*?) {2,}", block, re.MULTILINE)
        assert (default == "host") != gpu
    one = train("--list-kernels", "attention_backward").stdout
    assert one.split("\n", 2)[2] == f"attention_backward: {blocks['attention_backward']}\n"
    line = one_line(train("--list-kernels", "rmsnorm_forwad", code=2))
    assert "no operation is called rmsnorm_forwad (did you mean rmsnorm_forward?); --list-kernels" in line
    block = " ".join(blocks["attention_backward"].split())
    assert "flash device tiles on" in block
    assert "takes HD a multiple of 8 up to 128, T and S at most 2^30, scale above 0, heads" in block


def test_kernels_are_tried_in_turn(train, data, tmp_path):
    """The tiled kernel takes no f32: alone it is refused, with another behind it that one runs."""
    line = one_line(train(*flags(data, tmp_path / "a"), "--kernel", "matmul_forward=tiled", code=2))
    assert "matmul_forward: variant tiled does not take" in line
    train(*flags(data, tmp_path / "b"), "--kernel", "matmul_forward=tiled,naive")
    manifest = next((tmp_path / "b").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["kernels"] == {"matmul_forward": "tiled,naive"}
    line = one_line(train(*flags(data, tmp_path / "c"), "--kernel", "matmul_forward=tiled,magic", code=2))
    assert "matmul_forward: no variant magic, expected one of optimized, few_rows, cpu, " in line


# What it says


def test_what_looks_wrong_is_said(train, data, tmp_path):
    """A line each: tokens of another tokenizer, which may have fewer ids than the model; a warm-up that the
    run does not outlive; data that is read again."""
    train(*flags(data, tmp_path / "first"))
    loaded = {"model": tmp_path / "first/step_000008"}
    write_bin(tmp_path / "few.bin", np.arange(500, dtype=np.uint32) % 50, 50)
    few = {"train_data": tmp_path / "few.bin", "val_data": "", "steps": 3}
    vocabulary = f"{tmp_path / 'few.bin'}: tokens of a vocabulary of 50, the model's is {V}: "
    warm_up = "--warmup-steps 7: the run ends at step 3, before its learning rate has reached --lr 0.003"
    for extra, expected in (
        ({"steps": 8, "warmup_steps": 8}, []),
        (few | {"warmup_steps": 7}, [f"{vocabulary}the ids from 50 on never occur", warm_up]),
        (few | loaded, [f"{vocabulary}were the weights trained on these tokens?"]),
        (
            {"total_batch_size": 64 * T},
            ["--steps 8: the run reads its training data 1.6 times (312 sequences)"],
        ),
    ):
        said = train(*flags(data, tmp_path / "out", **extra)).stdout
        pattern = "vocabulary of|warmup-steps .*:|training data .* t"
        assert [line for line in said.splitlines() if re.search(pattern, line)] == expected, said


def test_validation_by_another_tokenizer(train, tmp_path):
    for name, made in (("train_000", 1), ("val_000", 2)):
        write_bin(tmp_path / f"{name}.bin", np.arange(500, dtype=np.uint32) % V, V, made)
    line = one_line(train(*flags(tmp_path, tmp_path / "out"), code=2))
    assert "val_000.bin: expected tokens of the tokenizer that made " in line and "found another's" in line


def test_a_resume_says_what_is_not_as_it_was(train, data, tmp_path):
    train(*flags(data, tmp_path / "out", steps=4))
    train_data = tmp_path / "train_000.bin"
    train_data.write_bytes((data / "train_000.bin").read_bytes())
    changed = flags(data, tmp_path / "out", lr=0.5, train_data=train_data)
    said = train(*changed, "--resume", "auto").stdout
    assert (
        f'continues with other settings: --train-data was "{data}/train_*.bin", is "{train_data}", '
        "--steps was 4, is 8, --lr was 0.003, is 0.5, sequences of training data" in said
    )
    assert re.search(r"sequences of training data.* was \d+, is \d+", said)
    assert "goes on with" not in train(*changed, "--resume", "auto").stdout
