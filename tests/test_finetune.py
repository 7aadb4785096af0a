"""llamac.finetune: which tokens count, loss and gradient norm of transformers, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from directories import write_directory

from llamac import Error, Trainer, finetune
from llamac.finetune import Encoder, Example, batch, batches
from llamac.options import Options

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "the moon 🙂"},
]
ROWS = [
    {"messages": CHAT},
    {"prompt": "the cat sat", "completion": " on the mat"},
    {"messages": CHAT[1:3]},
    {"prompt": "déjà", "completion": " vu, said the cat"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"))


def test_answers_count(directory):
    encoder = Encoder(directory)
    own = encoder.tokenizer

    def counted(example: Example) -> list[str]:
        """Texts of the stretches that count."""
        texts, last = [], False
        for id, counts in zip(example.ids, example.counts, strict=True):
            if counts:
                texts += [""] if not last else []
                texts[-1] += own.decode([id]) if "\ufffd" not in own.decode([id]) else "?"
            last = counts
        return texts

    whole = encoder.row(ROWS[0], "")
    answers = counted(whole)
    assert answers[0] == "on the mat<|end|>" and answers[1].startswith("the moon ") and len(answers) == 2
    assert answers[1].endswith("<|end|>")
    assert own.decode(whole.ids).startswith(
        "<|begin|><|system|>be brief<|end|><|user|>the cat?<|end|><|assistant|>"
    )
    pair = encoder.row(ROWS[1], "")
    assert own.decode(pair.ids) == "<|begin|>the cat sat on the mat<|end|>"
    assert counted(pair) == [" on the mat<|end|>"]
    tokens, targets = batch([pair, whole], 80)
    n = len(pair.ids)
    assert tokens.shape == targets.shape == (2, 80) and tokens[0, : n - 1].tolist() == pair.ids[:-1]
    assert [t for t in targets[0].tolist() if t != -100] == [*own.encode(" on the mat"), own.eos]
    assert (targets[0, n - 1 :] == -100).all()


def test_a_step_is_that_of_transformers(directory):
    """Loss and gradient norm, over two micro-batches with different numbers of targets."""
    import torch
    from transformers import AutoModelForCausalLM

    encoder = Encoder(directory)
    rows = [encoder.row(row, "") for row in ROWS]
    tokens, targets = batch(rows, 64)
    trainer = Trainer(
        Options(model=str(directory), init="load", train_data="none", val_data="none"),
        seq_len=64, batch_size=2, total_batch_size=4 * 64, steps=3, sample_every=0,
    )  # fmt: skip
    before = finetune.validation_loss(trainer, rows, 64)
    loss = trainer.step(tokens, targets, counted=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ids = torch.zeros((4, 65), dtype=torch.long)
    labels = torch.full((4, 65), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, : len(row.ids)] = torch.where(torch.tensor(row.counts), ids[i, : len(row.ids)], -100)
    theirs = model(ids, labels=labels).loss
    theirs.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert loss == pytest.approx(theirs.item(), rel=1e-5) and before == pytest.approx(loss, rel=1e-6)
    assert trainer.last["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    plain = trainer.step(tokens, targets)
    counts = int((targets != -100).sum())
    again = trainer.step(tokens, targets, counted=True)
    assert plain < loss * counts / targets.size and again < loss
    with pytest.raises(Error, match="expected a target that counts"):
        Trainer(
            Options(model=str(directory), train_data="none", val_data="none"), seq_len=64, batch_size=4
        ).step(tokens, np.full_like(targets, -100), counted=True)


def test_every_row_once_per_epoch():
    rows = [Example([i], [True]) for i in range(7)]
    found = [row.ids[0] for rows_ in batches(rows, 3, 7, seed=5) for row in rows_]
    assert sorted(found[:7]) == sorted(found[7:14]) == sorted(found[14:]) == list(range(7))
    assert found[:7] != found[7:14]


def test_the_command(directory, tmp_path):
    data = tmp_path / "chats.jsonl"
    more = [{"messages": CHAT[:2]}, {"prompt": "the cat " * 90, "completion": "x"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS + more))
    words = [
        sys.executable,
        "-m",
        "llamac.finetune",
        directory,
        data,
        "--out",
        tmp_path / "out",
        "--val-data",
        data,
    ]
    flags = ["--epochs", "6", "--batch-size", "2", "--accumulation", "2", "--lr", "0.003", "--seq-len", "96"]
    result = subprocess.run([*words, *flags], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 conversations, ")
    assert {"1 skipped: without an answer", "1 skipped: longer than 96 tokens"} <= set(lines)
    losses = [float(line.split()[-1]) for line in lines if line.startswith("validation loss")]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]
    assert sum(line.startswith("step ") for line in lines) == 6
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    again = subprocess.run([*words, *flags], capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "not there yet" in again.stderr and len(again.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"messages": []}\n{"text": "x"}\n', ["line 2: expected", "completion", '"text"']),
        ('{"messages": [{"role": "user"}]}\n', ["line 1: expected"]),
        ("{\n", ["line 1: expected JSON"]),
        ("\n", ["found no lines"]),
        ('{"prompt": "a", "completion": "b"}\n' * 3, ["at most 1 tokens", "3 longer than 1 tokens"]),
    ],
)
def test_files_that_are_refused(directory, tmp_path, text, words):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(Error) as refused:
        finetune.read(path, Encoder(directory), 1)
    assert all(word in str(refused.value) for word in words), refused.value


def test_templates_that_cannot_be_masked(directory, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }} {{ messages[-1].content }}")
    with pytest.raises(Error, match=r"chat_template\.jinja: chat template: expected each answer behind"):
        Encoder(tmp_path).messages(CHAT)
