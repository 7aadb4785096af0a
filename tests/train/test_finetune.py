"""llamac finetune: which tokens count, loss and gradient norm of transformers, runs of the program, and
what is refused."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import TEXT, write_directory
from run import bits, end, events, refused, run_llamac, until

from llamac import Error, Trainer
from llamac.data import chat, documents, read_bin, tokenizer
from llamac.data.conversations import KNOWN
from llamac.data.tokens import BEGINS_DOCUMENT, IGNORED, NO_TARGET
from llamac.inference.model import TextModel
from llamac.training import finetune
from llamac.training.finetune import Encoder, Example, packed

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

# The answers without their first line, and the token that ends them.
GENERATION = """{{ bos_token }}{% for message in messages %}
<|{{ message.role }}|>{% if message.role == "assistant" %}
thinks
{% generation %}
{{ message.content | trim }}<|end|>
{% endgeneration %}
{% else %}{{ message.content | trim }}<|end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>thinks
{% endif %}"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"))


def test_answers_count(directory):
    encoder = Encoder(directory)
    own, whole = encoder.tokenizer, encoder.row(ROWS[0])
    assert answers(encoder, ROWS[0]) == ["on the mat<|end|>", "the moon 🙂<|end|>"]
    begin = "<|begin|><|system|>be brief<|end|><|user|>the cat?<|end|><|assistant|>"
    assert own.decode(whole.ids).startswith(begin)
    pair = encoder.row(ROWS[1])
    assert own.decode(pair.ids) == "<|begin|>the cat sat on the mat<|end|>"
    assert answers(encoder, ROWS[1]) == [" on the mat<|end|>"]
    counted = [id for id, counts in zip(pair.ids, pair.counts) if counts]
    assert counted == [*own.encode(" on the mat"), own.eos]


def test_generation_blocks_are_what_counts(directory, tmp_path):
    """With the masks of transformers, also where they are not what stands behind the question."""
    from transformers import AutoTokenizer

    with_template(directory, tmp_path, GENERATION)
    template = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template
    theirs = template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ours = Encoder(tmp_path).row({"messages": CHAT})
    assert ours == Example(theirs["input_ids"], [mask == 1 for mask in theirs["assistant_masks"]])
    assert 0 < sum(ours.counts) < len(ours.ids)
    text = template(CHAT, tokenize=False, add_generation_prompt=True)
    assert chat.load(tmp_path).render(CHAT, Encoder(tmp_path).tokenizer)[0] == text


def mean_of_transformers(directory: Path, rows: list[Example]) -> tuple[float, float]:
    """Loss over all targets that count, each conversation by itself, and its gradient's norm; float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    count, total = sum(sum(row.counts[1:]) for row in rows), 0.0
    for row in rows:
        ids = torch.tensor([row.ids])
        labels = torch.where(torch.tensor([row.counts]), ids, -100)
        loss = model(ids, labels=labels).loss * sum(row.counts[1:]) / count
        loss.backward()
        total += loss.item()
    return total, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def test_a_step_is_that_of_transformers(directory):
    """Loss and gradient norm, over two micro-batches with different numbers of targets."""
    encoder = Encoder(directory)
    rows = [encoder.row(row) for row in ROWS]
    tokens, targets = np.zeros((4, 64), np.int32), np.full((4, 64), IGNORED)
    for i, row in enumerate(rows):
        tokens[i, : len(row.ids) - 1] = row.ids[:-1]
        targets[i, : len(row.ids) - 1] = np.where(row.counts[1:], row.ids[1:], IGNORED)
    trainer = Trainer(
        model=directory,
        init="load",
        seq_len=64, batch_size=2, total_batch_size=4 * 64, steps=3, sample_every=0,
    )  # fmt: skip
    loss = trainer.step(tokens, targets, counted=True)
    wanted, norm = mean_of_transformers(directory, rows)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert trainer.last["grad_norm"] == pytest.approx(norm, rel=1e-4)
    plain = trainer.step(tokens, targets)
    counts = int((targets != IGNORED).sum())
    again = trainer.step(tokens, targets, counted=True)
    assert plain < loss * counts / targets.size and again < loss
    with pytest.raises(Error, match="expected a target that counts"):
        Trainer(model=directory, seq_len=64, batch_size=4).step(
            tokens, np.full_like(targets, IGNORED), counted=True
        )


def test_packing():
    """Every row whole, once, in one sequence; marks; few sequences."""
    rng = np.random.default_rng(0)
    lengths = [20, 20, *rng.integers(2, 20, 60).tolist()]
    rows = [Example([i] * n, [bool(j % 2) for j in range(n)]) for i, n in enumerate(lengths)]
    words = packed(rows, 20, filler=77)
    sequences = words[:-1].reshape(-1, 20)
    assert len(sequences) <= 1.1 * sum(lengths) / 20 + 1
    found = {}
    for sequence in sequences:
        for part in np.split(sequence, np.flatnonzero(sequence & BEGINS_DOCUMENT)[1:]):
            ids = (part & (BEGINS_DOCUMENT - 1)).tolist()
            counts = ((part & NO_TARGET) == 0).tolist()
            assert part[0] & BEGINS_DOCUMENT and not counts[0]
            if ids[0] == 77:
                assert set(ids) == {77} and not any(counts)
            else:
                assert ids[0] not in found
                found[ids[0]] = Example(ids, counts)
    assert found == dict(enumerate(rows)) and words[-1] & NO_TARGET
    more = packed(rows, 20, filler=77, multiple=50)
    assert len(more) % (50 * 20) == 1 and (more[: len(words) - 1] == words[:-1]).all()
    assert set(more[len(words) :].tolist()) <= {77 | NO_TARGET, 77 | NO_TARGET | BEGINS_DOCUMENT}


def rows_file(folder: Path, rows: list[dict]) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.more
@pytest.mark.program
def test_packed_conversations_train_as_each_alone(build, directory, tmp_path, train):
    """The loss over the targets that count, its gradient, and the validation loss, whatever the
    micro-batches; another --seq-len and missing masks are told."""
    data = rows_file(tmp_path, ROWS * 2)
    encoder = Encoder(directory)
    rows = [encoder.row(row) for row in ROWS * 2]
    wanted, norm = mean_of_transformers(directory, rows)
    more = ["--checkpoint-every", -1, "--steps", 1, "--seq-len", 64]
    S = len(packed(rows, 64, 0)) // 64
    assert 1 < S < len(rows)
    for B, accumulation in ((1, S), (S + 1, 1)):  # validation fills its last batch
        words = ["--out", tmp_path / f"{B}", "--batch-size", B, "--val-data", data, *more]
        made = run_llamac("finetune", directory, data, *words, "--accumulation", accumulation, cwd=build)
        assert f"tokens: train: {S} sequences of 64 tokens" in made.stdout
        (step,) = events(tmp_path / f"{B}", "step")
        before, _ = events(tmp_path / f"{B}", "val")
        assert before["step"] == 0 and before["loss"] == pytest.approx(wanted, rel=1e-5)
        if B <= S:
            assert step["loss"] == pytest.approx(wanted, rel=1e-5)
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    folder = tmp_path / "1/tokens"
    flags = ["--model", directory, "--train-data", f"{folder}/train_*.bin", "--sample-every", "0"]
    flags += ["--steps", "1", "--batch-size", "1", "--checkpoint-every", "-1", "--seq-len", "64"]
    plain = train(*flags, "--out", tmp_path / "plain")
    assert "packed documents see those before them" in plain.stdout + plain.stderr
    refused = train(*flags, "--seq-len", "32", "--out", tmp_path / "none", code=2)
    assert "packed for --seq-len 32, found 64" in refused.stderr


@pytest.mark.more
@pytest.mark.program
def test_the_command(build, directory, tmp_path):
    """Steps of whole epochs, the program's flags and defaults of fine-tuning; what a second run is told."""
    data = rows_file(
        tmp_path, [*ROWS, {"messages": CHAT[:2]}, {"prompt": "the cat " * 90, "completion": "x"}]
    )
    words = ["finetune", "--lr", 0.003, directory, data, "--val-data", data, "--epochs", 6, "--seq-len", 96]
    words += ["--accumulation", 2, "--batch-size=1", "--out", tmp_path / "out"]
    lines = run_llamac(*words, cwd=build).stdout.splitlines()
    assert lines[0].startswith("train: 4 conversations, ")
    assert lines[1] == "train: left out: 1 without an answer, 1 longer than 96 tokens"
    assert lines[-2:] == [f"llamac chat {tmp_path}/out", f"llamac report {tmp_path}/out"]
    sequences = len(read_bin(tmp_path / "out/tokens/train_000.bin").tokens) // 96
    first, *_, last = events(tmp_path / "out", "val")
    assert last["loss"] < 0.8 * first["loss"] and last["step"] == 3 * sequences
    (start,) = events(tmp_path / "out", "start")
    assert (start["lr"], start["warmup-steps"], start["weight-decay"]) == (0.003, 0, 0)
    again = run_llamac(*words, code=2, cwd=build).stderr
    assert "expected a new directory" in again and len(again.splitlines()) == 1
    wrong = run_llamac(*words[:-1], tmp_path / "new", "--lr", "-1", code=2, cwd=build).stderr
    assert wrong.startswith("train_llama3: --lr: ") and not (tmp_path / "new").exists()
    # Sequences of the longest conversation; the command that is printed.
    data = rows_file(tmp_path, ROWS)
    told = run_llamac("finetune", directory, data, "--prepare", tmp_path / "sft", cwd=build).stdout
    longest = max(len(Encoder(directory).row(row).ids) for row in ROWS)
    T = read_bin(tmp_path / "sft/train_000.bin").packed
    assert T % 16 == 0 and T - 16 < longest <= T < 128
    assert f"--seq-len={T} " in told.splitlines()[-1] and "--document-mask=on" in told.splitlines()[-1]


SAID = {"the cat?": "sat on the mat", "why": "said the moon"}


@pytest.mark.program
def test_from_text_to_a_chat(build, tmp_path, train):
    """A tokenizer and a model of our own, which have neither a template nor markers; transformers encodes
    conversations with the saved ones as we do. A run that is interrupted and resumed has the same bits."""
    from transformers import AutoTokenizer

    text, data, model, base = (tmp_path / name for name in ("text.txt", "data", "model", "base"))
    text.write_text((TEXT + "\n\n") * 50)
    run_llamac("data", text, "--vocab-size", 280, "--separator", r"\n\n", "--out", data)
    sizes = ("--depth", 2, "--channels", 64, "--ffn", 128, "--context", 256)
    run_llamac("model", *sizes, "--tokenizer", data, "--out", model)
    flags = {"model": model, "train-data": f"{data}/train_*.bin", "out": base, "steps": 3, "seq-len": 32}
    train(*(f"--{name}={value}" for name, value in flags.items()), "--sample-every=0")
    assert run_llamac("chat", base, "--template", "chatml", "--tokens", 3, input="why\n").stdout

    pairs = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in SAID.items()]
    rows = rows_file(tmp_path, [{"messages": pair} for pair in pairs])
    words = ["finetune", base, rows, "--template", "chatml", "--epochs", 150, "--batch-size", 2, "--lr", 5e-3]
    whole, out = tmp_path / "whole", tmp_path / "out"
    told = run_llamac(*words, "--out", whole, cwd=build).stdout
    assert "model learns no end" not in told and told.splitlines()[-2] == f"llamac chat {whole}"
    command = [sys.executable, "-m", "llamac", *map(str, words), "--out", out, "--resume", "auto"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": build}
    with subprocess.Popen(command, **pipes) as process:
        until(lambda: out.joinpath("log.jsonl").exists() and len(events(out, "step")) > 5, process)
        process.send_signal(signal.SIGINT)
        end(process, 128 + signal.SIGINT)
    assert 5 < len(events(out, "step")) < 150
    subprocess.run(command, **pipes, check=True)
    assert bits(out) == bits(whole)

    asked = "".join(f"{question}\n" for question in SAID)
    first, _ = run_llamac("chat", whole, "--temperature", 0, "--tokens", 30, input=asked).stdout.splitlines()
    assert first == SAID["the cat?"]
    own = TextModel(whole)
    ids = AutoTokenizer.from_pretrained(own.directory).apply_chat_template(
        [*pairs[0], {"role": "user", "content": "why"}], add_generation_prompt=True, return_dict=False
    )
    assert own.encode_chat([*pairs[0], {"role": "user", "content": "why"}]) == ids
    assert own.tokenizer.end in ids and own.stops == [own.tokenizer.end]


def test_named_templates(directory, tmp_path):
    """Markers that the tokenizer has are these tokens, and the one that ends a message ends answers; the
    template precedes the directory's."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    settings = json.loads((directory / "config.json").read_text())
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((directory / "tokenizer_config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": made.get_vocab_size()}))
    encoder = Encoder(tmp_path, "chatml")
    assert answers(encoder, {"messages": CHAT}) == ["on the mat<|im_end|>\n", "the moon 🙂<|im_end|>\n"]
    end = made.token_to_id("<|im_end|>")
    assert encoder.row({"messages": CHAT}).ends == {end} and encoder.stops[-1] == end
    assert encoder.encode_chat(CHAT[:1])[0] == made.token_to_id("<|im_start|>")
    encoder = Encoder(directory, "llama3")
    assert answers(encoder, {"messages": CHAT}) == ["on the mat<|end|>", "the moon 🙂<|end|>"]
    text = encoder.template.render(CHAT[1:2], encoder.tokenizer)[0]
    user, assistant = (f"<|start_header_id|>{who}<|end_header_id|>\n\n" for who in ("user", "assistant"))
    assert text == f"<|begin|>{user}the cat?<|end|>{assistant}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"messages": [{"role": "user"}]}\n', ['found 1 no {"messages"']),
        ("{\n", ["found 1 broken JSON"]),
        ("\n", ["found no lines"]),
        ('{"prompt": "a", "completion": "b"}\n' * 3, ["at most 1 tokens", "3 longer than 1 tokens"]),
    ],
)
def test_files_that_are_refused(directory, tmp_path, text, words):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    said = refused(finetune.read, [path], Encoder(directory), 1)
    assert all(word in said for word in words), said


def test_broken_lines_of_several_files(directory, tmp_path, monkeypatch, capsys):
    """Counted, and the first ones named, with file and line; strict ends at the first, as the command does in
    either data. Patterns, compressed files.
    """
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(documents, "MOST_DOCUMENT", 500)
    monkeypatch.setattr(finetune, "MOST_NAMED", 3)
    good = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "a.jsonl").write_bytes(good[0] + b"{broken\n\n{broken\n" + good[1])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' + good[2] + b"x" * 501))
    (tmp_path / "c.json.zst").write_bytes(zstandard.compress(good[3]))
    encoder = Encoder(directory)
    inputs = [f"{tmp_path}/*.jsonl*", tmp_path / "c.json.zst"]
    found = finetune.read(inputs, encoder, 96)
    assert found.rows == [encoder.row(row) for row in ROWS]
    assert found.left_out == {"broken JSON": 2, f"no {KNOWN}": 1, documents.TOO_LONG: 1}
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"left out: {tmp_path}/a.jsonl: line 2: broken JSON"
    assert said[1] == f"left out: {tmp_path}/a.jsonl: line 4: broken JSON"
    assert said[2].startswith(f"left out: {tmp_path}/b.jsonl.gz: line 1: no {{") and len(said) == 3
    ended = r"a\.jsonl: line 2: broken JSON: --strict is set; without it"
    with pytest.raises(Error, match=ended):
        finetune.read(inputs, encoder, 96, strict=True)
    monkeypatch.setattr(finetune, "Encoder", lambda *_: encoder)  # another one takes a second
    monkeypatch.setattr(finetune, "_resolved", lambda _: {"batch-size": 4, "resume": "none"})
    words = ["finetune", str(directory), "--prepare", str(tmp_path / "sft"), "--strict"]
    whole, broken = f"{tmp_path}/c.json.zst", f"{tmp_path}/a.jsonl"
    for data in ([broken], [whole, "--val-data", broken]):
        monkeypatch.setattr("sys.argv", [*words, *data])
        with pytest.raises(Error, match=ended):
            finetune.main()
    with pytest.raises(Error, match=r"expected files of JSON lines, found a folder: name '.*/\*\.jsonl'$"):
        finetune.read([tmp_path], encoder, 96)


def test_a_failed_prepare_leaves_nothing(directory, tmp_path, monkeypatch):
    encoder = Encoder(directory)
    splits = {"train": [encoder.row(row) for row in ROWS]}

    def full(path, *_, **__):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(finetune, "write_bin", full)
    with pytest.raises(OSError, match="No space left"):
        finetune.prepare(encoder, tmp_path / "sft", splits, 64)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "sft.partial").mkdir()  # of a run that was killed
    finetune.prepare(encoder, tmp_path / "sft", splits, 64)
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]
    assert (tmp_path / "sft" / "train_000.bin").exists()


def with_template(directory: Path, folder: Path, template: str, **settings) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((directory / name).read_bytes())
    known = json.loads((directory / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(known | settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def answers(encoder: Encoder, row: dict) -> list[str]:
    """Texts of the stretches that count."""
    example = encoder.row(row)
    edges = np.flatnonzero(np.diff([False, *example.counts, False])).reshape(-1, 2)
    return [encoder.tokenizer.decode(example.ids[a:b]) for a, b in edges]


CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
CHATML = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
THINKS = CHATML.replace("assistant\n{% e", "assistant\n<think>\n{% e")
STRIPS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1].lstrip('\\n') }}",
)
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}\n{% else %}A: {{ m.content | trim }}"
    "{{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
UNMARKED = CHATML.replace("m.content }}", "m.content }}{{ m.content | length }}")  # marks change the text
TURNS = [
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "\non <think>x</think> the mat"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "<think>y</think>the moon "},
]
FIRST, SECOND = "\non <think>x</think> the mat<|end|>\n", "<think>y</think>the moon <|end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [FIRST, SECOND]),
        (THINKS, [FIRST, SECOND.removeprefix("<think>")]),
        (STRIPS, ["the mat<|end|>\n", SECOND]),
        (SPACED, ["on <think>x</think> the mat<|end|>\n", "<think>y</think>the moon<|end|>\n"]),
        (BRACKETS, ["on <think>x</think> the mat<|end|>", "<think>y</think>the moon<|end|>"]),
        (UNMARKED, [FIRST.replace("mat", "mat28"), SECOND.replace("moon ", "moon 25")]),
    ],
)
def test_answers_by_their_characters(directory, tmp_path, template, expected):
    """Answers that begin with a line's end, generation prompts that end with a space or begin to think, turns
    whose thoughts are stripped: of templates that write eos_token, which special_tokens_map.json names."""
    with_template(directory, tmp_path, template, eos_token="<|user|>")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    encoder = Encoder(tmp_path)
    assert [text.lstrip(" ") for text in answers(encoder, {"messages": TURNS})] == expected
    end = encoder.tokenizer.backend.token_to_id("<|end|>")
    assert encoder.row({"messages": TURNS}).ends == {end}


def said(*texts: str) -> list[dict]:
    return [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts)]


PARTS = {"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}
CALL = {"from": "function_call", "value": '{"name": "f"}'}
ALPACA = {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]}
FORMS = [
    ({"messages": [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]}, [SECOND]),
    ({"messages": [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]}, [SECOND]),
    ({"messages": [TURNS[0], {**TURNS[1], "loss_mask": 0}, TURNS[2], {**TURNS[3], "weight": 1}]}, [SECOND]),
    ({"prompt": TURNS[:3], "completion": TURNS[3:]}, [SECOND]),
    ({"system": "x", "conversations": said("a", "b")}, ["b<|end|>\n"]),
    (ALPACA, ["d<|end|>\n", "b<|end|>\n"]),
    ({"messages": [TURNS[0], PARTS]}, ["ab<|end|>\n"]),
    (
        {"conversations": [*said("a"), CALL]},
        ['[{"type": "function", "function": {"name": "f"}}]<|end|>\n'],
    ),
    ({"messages": TURNS[:1]}, []),
]


def test_forms_and_masks_of_rows(directory, tmp_path):
    with_template(directory, tmp_path, CHATML)
    encoder = Encoder(tmp_path)
    for row, expected in FORMS:
        assert answers(encoder, row) == expected, row
    assert answers(Encoder(tmp_path, last_only=True), {"messages": TURNS}) == [SECOND]
    marked = [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]
    with_template(directory, tmp_path, GENERATION)
    both = answers(Encoder(tmp_path), {"messages": TURNS})
    assert len(both) == 2 and answers(Encoder(tmp_path), {"messages": marked}) == both[1:]
    assert answers(Encoder(tmp_path, last_only=True), {"messages": TURNS}) == both[1:]


def test_a_template_gets_what_transformers_gives_it(directory, tmp_path):
    """Tools, calls without a content, reasoning: the text of apply_chat_template."""
    from transformers import AutoTokenizer

    source = "{{ tools | tojson(sort_keys=true) if tools else '-' }}" + CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}"
    )
    with_template(directory, tmp_path, source)
    function = {"name": "f", "arguments": {"a": 1}}
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "12", "name": "f"},
        {"role": "assistant", "content": "it is 12", "thinking": "hm"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template
    theirs = template(messages, tools=tools)["input_ids"]
    encoder = Encoder(tmp_path)
    # As `llamac generate` renders messages, which no reader of rows has seen.
    text = template(messages, tools=tools, tokenize=False)
    assert encoder.template.render(messages, None, False, tools)[0] == text
    row = {"messages": messages, "tools": json.dumps(tools)}
    assert encoder.row(row).ids == theirs == encoder.row({**row, "tools": tools}).ids
    assert len(answers(encoder, row)) == 2 and "it is 12hm<|end|>" in answers(encoder, row)[1]


@pytest.mark.parametrize(
    "row, reason",
    [
        (r'{"prompt": "\ud800", "completion": "x"}', "no Unicode"),
        (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "no Unicode"),
        ('{"messages": ' + "[" * 600 + "]" * 600 + "}", "more than 32 levels of nesting"),
    ],
)
def test_rows_that_json_takes_and_no_tokenizer(directory, tmp_path, row, reason):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + row)
    found = finetune.read([tmp_path / "a.jsonl"], Encoder(directory), 96)
    assert len(found.rows) == 1 and found.left_out == {reason: 1}


def test_rows_that_are_left_out(directory, tmp_path, capsys):
    """Those that the template refuses or cannot mask, and tools that it does not render; another key of a
    message ends the run."""
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    changing = "{{ messages[-1].content if messages[0].content == 'last' }}"
    encoder = Encoder(with_template(directory, tmp_path, refusing + changing + CHATML))
    path = tmp_path / "x.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}, *TURNS[1:]]} for text in ("no", "last", "a")]
    rows += [{"messages": TURNS, "tools": [{"name": "f"}]}, {"messages": [{**TURNS[0], "content": [5]}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = finetune.read([path], encoder, 999)
    others = {"refused by the chat template": 3, "content other than text": 1}
    assert len(found.rows) == 1 and found.left_out == others
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("line 1: " + f"{tmp_path}/chat_template.jinja: chat template: not this")
    assert "found another text for message" in told[1] and "one that renders tools" in told[2]
    path.write_text(json.dumps({"messages": [{**TURNS[0], "id": 5, "name": None}, *TURNS[1:]]}) + "\n")
    with pytest.raises(Error, match=r'line 1: message: expected keys .* found "id": --ignore-keys id trains'):
        finetune.read([path], encoder, 999)
    assert len(finetune.read([path], Encoder(tmp_path, ignored=["id"]), 999).rows) == 1


def test_many_turns_take_a_few_renderings(directory, tmp_path, monkeypatch):
    encoder = Encoder(with_template(directory, tmp_path, CHATML))
    counted, render = [], chat.Template.render
    monkeypatch.setattr(
        chat.Template, "render", lambda *args, **how: counted.append(1) or render(*args, **how)
    )
    assert len(answers(encoder, {"messages": [*TURNS[2:]] * 40})) == 40 and len(counted) < 8


def test_a_rank_files_tokens_by_characters():
    """Tokens of parts of a character have the whole."""
    own = tokenizer.Tokenizer({bytes([byte]): byte for byte in range(256)}, 0)
    ids, places = own.encode_with_places("aé🙂<|endoftext|>b")
    assert ids[:3] == [97, 0xC3, 0xA9] and ids[-2:] == [256, 98]
    assert places.tolist() == [[0, 1], [1, 2], [1, 2], *[[2, 3]] * 4, [3, 16], [16, 17]]


@pytest.mark.parametrize("kind", ["json", "parquet", "arrow"])
def test_kinds_of_files(directory, tmp_path, kind):
    """The same rows as JSON lines have them."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    called = {"role": "assistant", "tool_calls": calls}
    rows = [{"messages": TURNS, "id": 1}, {"messages": [TURNS[0], called]}]
    encoder = Encoder(with_template(directory, tmp_path, CHATML))
    path = tmp_path / f"x.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "json":
        path.write_text(json.dumps(rows, indent=2))
    elif kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    assert finetune.read([path], encoder, 999).rows == [encoder.row(row) for row in rows]
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(Error, match=r"x\.csv: expected .*, found CSV: .* writes JSON lines"):
        finetune.read([tmp_path / "x.csv"], encoder, 999)


def test_generation_ends_where_answers_do(directory, tmp_path, capsys):
    """The template's own end of a turn goes into generation_config.json, and from there into checkpoints."""
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with_template(directory, tmp_path, CHATML.replace("<|end|>", "<|system|>"))
    encoder, folder = Encoder(tmp_path), tmp_path / "sft"
    end = encoder.tokenizer.backend.token_to_id("<|system|>")
    finetune.prepare(encoder, folder, {"train": [encoder.row({"messages": TURNS})]}, 96)
    assert f"eos_token_id: {end} (<|system|>) added" in capsys.readouterr().out
    shards = str(folder / "train_*.bin")
    trainer = Trainer(tmp_path, train_data=shards, seq_len=96, batch_size=1, document_mask="on", steps=0)
    trainer.save(tmp_path / "out")
    assert TextModel(tmp_path / "out").stops == [encoder.config.eos_token_id, end]
