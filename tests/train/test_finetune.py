"""llamac finetune: which tokens count, loss and gradient norm of transformers, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hf_dirs import write_directory
from run import run_llamac

from llamac import Error, Trainer
from llamac.data import chat, documents, read_bin, tokenizer
from llamac.data.conversations import KNOWN
from llamac.data.tokens import BEGINS_DOCUMENT, NO_TARGET
from llamac.inference.model import TextModel
from llamac.model import checkpoint
from llamac.training import finetune
from llamac.training.finetune import Encoder, Example, batch, batches, packed

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
    tokens, targets = batch([pair, whole], 80)
    n = len(pair.ids)
    assert tokens.shape == targets.shape == (2, 80) and tokens[0, : n - 1].tolist() == pair.ids[:-1]
    assert [t for t in targets[0].tolist() if t != -100] == [*own.encode(" on the mat"), own.eos]
    assert (targets[0, n - 1 :] == -100).all()


def test_generation_blocks_are_what_counts(directory, tmp_path):
    """With the masks of transformers, also where they are not what stands behind the question."""
    from transformers import AutoTokenizer

    with_template(directory, tmp_path, GENERATION)
    template = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template
    theirs = template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ours = Encoder(tmp_path).messages(CHAT)
    assert ours == Example(theirs["input_ids"], [mask == 1 for mask in theirs["assistant_masks"]])
    assert 0 < sum(ours.counts) < len(ours.ids)
    text = template(CHAT, tokenize=False, add_generation_prompt=True)
    assert chat.load(tmp_path).render(CHAT, Encoder(tmp_path).tokenizer) == text


def test_a_step_is_that_of_transformers(directory):
    """Loss and gradient norm, over two micro-batches with different numbers of targets."""
    import torch
    from transformers import AutoModelForCausalLM

    encoder = Encoder(directory)
    rows = [encoder.row(row) for row in ROWS]
    tokens, targets = batch(rows, 64)
    trainer = Trainer(
        model=directory,
        init="load",
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
        Trainer(model=directory, seq_len=64, batch_size=4).step(
            tokens, np.full_like(targets, -100), counted=True
        )


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


@pytest.mark.program
def test_packed_conversations_train_as_each_alone(directory, tmp_path, train):
    """./train_llama3 on what --prepare writes: the loss over the targets that count, its gradient, and the
    validation loss, whatever the micro-batches; another --seq-len and missing masks are told."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder = tmp_path / "sft"
    flags = ("--val-data", data, "--seq-len", 64, "--prepare", folder)
    made = run_llamac("finetune", directory, data, *flags)
    encoder = Encoder(directory)
    rows = [encoder.row(row) for row in ROWS]
    S = len(read_bin(folder / "train_000.bin").tokens) // 64
    assert f"{folder}: train: {S} sequences of 64 tokens" in made.stdout and len(rows) > S
    wanted, norm = mean_of_transformers(directory, rows)
    flags = ["--model", directory, "--train-data", f"{folder}/train_*.bin", "--dtype", "f32", "--steps", "1"]
    flags += ["--val-data", f"{folder}/val_*.bin", "--sample-every", "0", "--checkpoint-every", "-1"]
    flags += ["--seq-len", "64", "--total-batch-size", str(64 * S), "--val-every", "1"]
    for B in (S, 1):
        out = tmp_path / f"out_{B}"
        train(*flags, "--out", out, "--batch-size", str(B), "--document-mask", "on")
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        step = next(event for event in log if event["event"] == "step")
        assert step["loss"] == pytest.approx(wanted, rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
        before = next(event for event in log if event["event"] == "val")
        assert before["step"] == 0 and before["loss"] == pytest.approx(wanted, rel=1e-5)
    plain = train(*flags, "--out", tmp_path / "plain", "--batch-size", "1")
    assert "packed documents see those before them" in plain.stdout + plain.stderr
    flags[flags.index("--seq-len") + 1] = "32"
    refused = train(*flags, "--out", tmp_path / "none", "--batch-size", "1", code=2)
    assert "packed for --seq-len 32, found 64" in refused.stderr


def test_every_row_once_per_epoch():
    rows = [Example([i], [True]) for i in range(7)]
    found = [row.ids[0] for rows_ in batches(rows, 3, 21, seed=5) for row in rows_]
    assert sorted(found[:7]) == sorted(found[7:14]) == sorted(found[14:]) == list(range(7))
    assert found[:7] != found[7:14]
    assert [len(rows_) for rows_ in batches(rows, 3, 7, seed=5)] == [3, 3, 1]


def test_the_command(directory, tmp_path):
    data = tmp_path / "chats.jsonl"
    more = [{"messages": CHAT[:2]}, {"prompt": "the cat " * 90, "completion": "x"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS + more))
    words = ["finetune", directory, data, "--val-data", data, "--out", tmp_path / "out", "--epochs", 6]
    words += ["--batch-size", 2, "--accumulation", 2, "--lr", 0.003, "--seq-len", 96]
    result = run_llamac(*words)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("training: 4 conversations, ")
    assert lines[1] == "training: left out: 1 without an answer, 1 longer than 96 tokens"
    losses = [float(line.split()[-1]) for line in lines if line.startswith("validation loss")]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]
    assert sum(line.startswith("step ") for line in lines) == 6
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    again = run_llamac(*words, code=2).stderr
    assert "expected a new directory" in again and len(again.splitlines()) == 1


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
    with pytest.raises(Error) as refused:
        finetune.read([path], Encoder(directory), 1)
    assert all(word in str(refused.value) for word in words), refused.value


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
    with pytest.raises(Error, match="No space left"):
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
    assert encoder.template.render(messages, None, False, tools) == text
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
    parts = "content with parts that are no text"
    assert len(found.rows) == 1 and found.left_out == {"refused by the chat template": 3, parts: 1}
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("line 1: " + f"{tmp_path}/chat_template.jinja: chat template: not this")
    assert "found another text for message" in told[1] and "one that renders tools" in told[2]
    path.write_text(json.dumps({"messages": [{**TURNS[0], "id": 5, "name": None}, *TURNS[1:]]}) + "\n")
    with pytest.raises(Error, match=r'line 1: message: expected keys .* found "id": --ignore-keys id trains'):
        finetune.read([path], encoder, 999)
    assert len(finetune.read([path], Encoder(tmp_path, ignored=["id"]), 999).rows) == 1


def test_many_turns_take_a_few_renderings(directory, tmp_path, monkeypatch):
    encoder = Encoder(with_template(directory, tmp_path, CHATML))
    counted, render = [], chat.Template.render_answers
    monkeypatch.setattr(
        chat.Template, "render_answers", lambda *args, **how: counted.append(1) or render(*args, **how)
    )
    assert len(answers(encoder, {"messages": [*TURNS[2:]] * 40})) == 40 and len(counted) < 8


def test_a_rank_files_tokens_by_characters():
    """Tokens of parts of a character have the whole."""
    own = tokenizer.Tokenizer({bytes([byte]): byte for byte in range(256)}, 0)
    ids, places = chat.encode_with_places(own, "aé🙂<|endoftext|>b")
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


def test_generation_ends_where_answers_do(directory, tmp_path, monkeypatch, capsys):
    """The template's own end of a turn goes into generation_config.json of the checkpoint and beside packed
    files; a short epoch draws each row once."""
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with_template(directory, tmp_path, CHATML.replace("<|end|>", "<|system|>"))
    config = json.loads((tmp_path / "config.json").read_text())
    end = Encoder(tmp_path).tokenizer.backend.token_to_id("<|system|>")
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(3)))
    words = ["finetune", str(tmp_path), str(data)]
    drawn, make = [], finetune.batch
    monkeypatch.setattr(finetune, "batch", lambda rows, *how: drawn.append(len(rows)) or make(rows, *how))
    for way, out in (("--out", tmp_path / "out"), ("--prepare", tmp_path / "sft")):
        monkeypatch.setattr("sys.argv", [*words, way, str(out), "--batch-size", "8", "--seq-len", "96"])
        finetune.main()
        settings = json.loads((out / "generation_config.json").read_text())
        assert settings["eos_token_id"] == [config["eos_token_id"], end]
        told = capsys.readouterr().out
        assert f"generation_config.json: eos_token_id: {end} (<|system|>) added" in told
    assert drawn == [3]
    assert TextModel(tmp_path / "out").stops == [config["eos_token_id"], end]
    assert checkpoint.check(tmp_path / "out").state == "complete"
    packed_data = str(tmp_path / "sft/train_*.bin")
    trainer = Trainer(tmp_path, train_data=packed_data, seq_len=96, batch_size=1, document_mask="on", steps=1)
    trainer.save(tmp_path / "again")  # whose settings are those of the data
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == settings
    new = ["--out", str(tmp_path / "no"), "--batch-size", "8"]
    wrong = ("--seq-len", "0", "at least 1"), ("--warmup-steps", "2", "at most the run's 1")
    for flag, value, least in wrong:
        monkeypatch.setattr("sys.argv", [*words, *new, flag, value])
        with pytest.raises(Error, match=f"{flag}: expected .*{least}"):
            finetune.main()
