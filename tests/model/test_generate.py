"""llamac.inference, chat, generate: transformers' logits and greedy ids; the command, what it refuses."""

import io
import json
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hf_dirs import TEXT, WINDOWS, YARN, write_directory, write_weights
from hf_float64 import compute_in_double
from run import ROOT, flags, refused, refuses, run_llamac

from llamac import Error
from llamac.base import limited
from llamac.base.dtypes import TABLE
from llamac.base.errors import CONTROL, printable
from llamac.base.tolerance import FORWARD, violation
from llamac.data import chat, tokenizer
from llamac.inference import generate
from llamac.inference.model import Inference, Sampling, TextStream
from llamac.model.checkpoint import find_model

MODELS = ROOT / "tests/models"
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model"))


SHAPES = ["tied-gqa", "untied-mha", "scaled32", "windows", "qwen2", "qwen3", "phi3", "olmo2", "gpt2"]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, tmp_path_factory) -> Path:
    windows = request.param == "windows"
    config = json.loads((MODELS / f"{'tied-gqa' if windows else request.param}.json").read_text())
    folder = write_weights(tmp_path_factory.mktemp(request.param), config)
    if windows:
        types = {"layer_types": ["sliding_attention", "full_attention"], "rope_scaling": YARN}
        (folder / "config.json").write_text(json.dumps(config | WINDOWS | types))
    return folder


def transformers_model(directory: Path, dtype: str = "float32"):
    import torch
    from transformers import AutoModelForCausalLM

    more = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **more)


def some_ids(count: int, V: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


# The same as transformers


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp16"])
def test_logits_with_the_cache(shape, dtype, monkeypatch):
    """Of a prompt and of each token after it, beside those of a whole pass in float64."""
    import torch

    model = Inference(shape, dtype=dtype)
    tokens = some_ids(50, model.config.vocab_size)
    theirs = transformers_model(shape, TABLE[dtype].torch)
    with torch.no_grad():
        baseline = theirs(torch.tensor([tokens])).logits[0].double().numpy()
        compute_in_double(monkeypatch, sys.modules[type(theirs).__module__])
        exact = transformers_model(shape, "float64")
        exact.load_state_dict(theirs.state_dict())  # the weights in dtype; rotary frequencies stay double
        truth = exact(torch.tensor([tokens])).logits[0].numpy()
    for prompt in (1, 23, 50):
        found = model.next_logits(tokens, prompt)
        wanted = slice(prompt - 1, None)
        assert found.shape == (51 - prompt, model.config.vocab_size)
        assert violation(found, baseline[wanted], truth[wanted], dtype, FORWARD) == ""


def test_greedy_ids(shape):
    import torch

    model, theirs = Inference(shape), transformers_model(shape)
    prompt = some_ids(9, model.config.vocab_size)
    wanted = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert model.generate([prompt], 40, GREEDY, stops=[])[0] == wanted[0, len(prompt) :].tolist()


def test_prompts_longer_than_a_pass(shape, monkeypatch):
    monkeypatch.setattr("llamac.inference.model.PART", 7)
    parts, whole = Inference(shape), Inference(shape, sequences=3)
    prompts = [some_ids(n, 97, n) for n in (1, 7, 8, 20, 31)]
    monkeypatch.undo()
    assert parts.generate(prompts, 12, GREEDY, []) == whole.generate(prompts, 12, GREEDY, [])
    assert whole.generate(prompts, 12, GREEDY, []) == Inference(shape).generate(prompts, 12, GREEDY, [])


def test_the_prompt_is_encoded_as_transformers_does(directory):
    from transformers import AutoTokenizer

    theirs, model = AutoTokenizer.from_pretrained(directory), Inference(directory)
    assert model.encode(TEXT) == theirs(TEXT)["input_ids"]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " the cat? <b>&\n"},
        {"role": "assistant", "content": "🙂"},
        {"role": "user", "content": "why"},
    ]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.load(directory).render(messages)[0] == wanted
    assert model.encode_chat(messages) == theirs(wanted, add_special_tokens=False)["input_ids"]
    parts = [{"type": "text", "text": " the cat? "}, {"type": "text", "text": "<b>&\n"}]
    in_parts = [messages[0], {"role": "user", "content": parts}, *messages[2:]]
    assert model.encode_chat(in_parts) == model.encode_chat(messages)
    answer = chat.load(directory).render(messages, answer_begins=False)[0]
    assert answer == theirs.apply_chat_template(messages, tokenize=False) and wanted.startswith(answer)


def test_templates_have_what_transformers_gives_them(directory, tmp_path):
    from transformers import AutoTokenizer

    source = (
        "{%- for m in messages %}\n  {%- if loop.index0 > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ m | tojson(sort_keys=True) }}"
        " {{ strftime_now('%Y') }}{{ eos_token }}\n{% endfor %}"
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    messages = [{"role": "user", "content": f"<é> {i} '"} for i in range(4)]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert chat.load(tmp_path).render(messages)[0] == theirs
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    refuses(r"chat_template\.jinja: chat template: no system message", chat.load(tmp_path).render, messages)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "expected a chat template" in refused(chat.load, tmp_path)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source, words",
    [
        (ENDLESS, "within 0.5 seconds"),
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[0].a.b }}", "no attribute"),
    ],
)
def test_templates_have_limits(monkeypatch, source, words):
    """In a thread, too, and with a template after it."""
    template = chat.Template(Path("t.jinja"), source, {})
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(limited, "SECONDS", 0.5 if source == ENDLESS else limited.SECONDS)
        with pytest.raises(Error, match=rf"^t\.jinja: chat template: .*{words}"):
            pool.submit(template.render, [{}]).result()
    assert chat.Template(Path(), "{{ messages }}", {}).render([{"é": [1]}])[0] == "[{'é': [1]}]"


def test_no_control_character_of_an_answer_reaches_the_terminal(directory, capsys):
    """In text it is escaped, in JSON as JSON does."""
    session = generate.Session(generate._parser().parse_args([str(directory)]))
    told = "a\x1b[2J\x9b\u202e\x7f\r\tb\n"
    session.text.decode = lambda ids: told
    model = SimpleNamespace(generate=lambda *_, **__: [[5, 6]])
    session.load = lambda *_, **__: model
    assert session.stream(SimpleNamespace(generate=lambda *args: args[4](0, 5)), [1], 2, sys.stdout) == told
    assert capsys.readouterr().out == "a\\x1b[2J\\xc2\\x9b\\xe2\\x80\\xae\\x7f\\x0d\tb\n"
    generate.answer_file(session, {"p: line 1": "x"}, sys.stdout)
    line = capsys.readouterr().out
    assert json.loads(line)["text"] == told and not CONTROL.search(line[:-1])


# The command


def command(directory: Path, *arguments: str, stdin: str = "", code: int = 0) -> str:
    found = run_llamac("generate", directory, *arguments, code=code, input=stdin)
    return found.stdout if code == 0 else found.stderr


def test_the_command(directory, tmp_path):
    model = Inference(directory)
    sampling = Sampling(0.9, 20, 0.9, 4)
    flags = ["--tokens", "30", "--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--seed", "4"]
    prompts = ["the cat", "déjà vu 🙂", "x" * 30]
    ids = [model.encode(prompt) for prompt in prompts]
    wanted = model.generate(ids, 30, sampling)
    texts = [model.decode(ids[:-1] if ids[-1] in model.stops else ids) for ids in wanted]
    assert command(directory, "--prompt", prompts[0], *flags) == printable(texts[0]) + "\n"
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(rows)
    for name, stdin in (("prompts.txt", ""), ("prompts.jsonl", ""), ("-", "\n".join(prompts))):
        where = name if name == "-" else str(tmp_path / name)
        found = command(directory, "--prompts", where, "--batch", "2", *flags, stdin=stdin)
        answers = [json.loads(line) for line in found.splitlines()]
        assert [row["prompt"] for row in answers] == prompts
        assert [row["text"] for row in answers] == texts
        assert [row["tokens"] for row in answers] == [len(ids) for ids in wanted]
    asked = model.encode_chat([{"role": "user", "content": "hello"}])
    answer = model.generate([asked], 30, GREEDY)[0]
    text = model.decode(answer[:-1] if answer[-1] in model.stops else answer)
    greedy = ["--chat", "--tokens", "30", "--temperature", "0"]
    assert command(directory, "--prompt", "hello", *greedy) == printable(text) + "\n"
    assert command(directory, *greedy, stdin="hello\n").startswith(printable(text) + "\n")
    # Without --tokens, as many as fit.
    rest = ",".join(map(str, model.generate([[1] * 100], 29, GREEDY, [])[0]))
    greedy = ("--temperature", "0", "--ignore-end")
    assert command(directory, "--prompt-ids", ",".join(["1"] * 100), *greedy) == rest + "\n"
    ids = ",".join(map(str, model.generate([[1, 2, 3]], 5, GREEDY, [])[0]))
    assert command(directory, "--prompt-ids", "1,2,3", "--tokens", "5", *greedy) == ids + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "x", "--temperature", "-1"], ["temperature", "found -1"]),
        (["--prompt", "x", "--top-p", "0"], ["top_p", "found 0"]),
        (["--prompt", "x", "--context", "129"], ["--context", "at most 128", "found 129"]),
        (["--prompt", "the cat " * 100], ["--prompt: ", "room for 1 token", "context of 128"]),
        (["--prompt", "x", "--tokens", "0"], ["--tokens", "found 0"]),
        (["--prompt-ids", "1,b"], ["--prompt-ids", "1,b"]),
        (["--prompt-ids", "1,,2"], ["--prompt-ids", "1,,2"]),
        (["--prompt-ids", "4000"], ["prompt 1", "ids from 0 to", "found 4000"]),
        (["--prompt", "x", "--system", "y"], ["--system", "--chat"]),
        (["--prompt", "x", "--template", "chatml"], ["--template", "--chat"]),
        (["--prompts", "missing.txt"], ["missing.txt", "cannot open"]),
        (["--prompts", "-"], ["-: expected a prompt per line"]),
        (["--prompt", "\udcff"], ["prompt: expected text in UTF-8"]),
        (["--prompt", "\udcff", "--chat"], ["conversation: expected text in UTF-8"]),
    ],
)
def test_what_the_command_refuses(directory, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.argv", ["generate", str(directory), *map(str, arguments)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    said = refused(generate.main)
    assert all(word in said for word in words), said


def test_a_conversation_in_another_encoding(directory, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generate", str(directory), "--chat"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\n".encode("latin-1")), "utf-8"))
    assert "conversation: expected text in UTF-8" in refused(generate.main)


def test_a_refusal_is_a_line_and_an_exit_code(directory):
    lines = command(directory, "--prompt-ids", "x", code=2).strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("llamac generate: "), lines


def test_without_a_prompt_a_document_begins(directory):
    greedy = ("--temperature", "0", "--tokens", "5")
    assert command(directory, *greedy) == command(directory, "--prompt", "", *greedy) != "\n"


@pytest.mark.program
def test_the_newest_checkpoint_of_a_run(train, data, tmp_path, monkeypatch):
    """As --resume auto takes it: a damaged one is passed over."""
    train(*flags(data, tmp_path))
    first, second = sorted(tmp_path.glob("step_*"))
    assert find_model(tmp_path) == second and find_model(first) == first
    text = run_llamac("generate", tmp_path, "--prompt-ids", "1,2", "--tokens", "3").stdout
    assert text == run_llamac("generate", second, "--prompt-ids", "1,2", "--tokens", "3").stdout != ""
    with open(second / "model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.warns(UserWarning, match=f"{second} is damaged: .*; {first} is used instead"):
        assert Inference(tmp_path).directory == first
    (first / "manifest.json").unlink()
    refuses(f"{tmp_path}: expected a complete checkpoint, found none: {second} is d", find_model, tmp_path)


def test_a_terminal_shows_how_to_chat(directory):
    """A line of help and a prompt sign before each message; other input gets neither (test_the_command)."""
    terminal, other = pty.openpty()
    words = [sys.executable, "-m", "llamac", "chat", directory, "--tokens", "2", "--temperature", "0"]
    process = subprocess.Popen(words, cwd=ROOT, stdin=other, stdout=subprocess.PIPE, text=True)
    os.write(terminal, b"hello\n\x04")
    said, _ = process.communicate(timeout=100)
    os.close(terminal)
    os.close(other)
    help, *lines = said.splitlines()
    assert help.startswith("Type a message") and "Ctrl-D" in help and process.returncode == 0
    assert [line.startswith("> ") for line in lines] == [True, True]


def test_a_chat_without_a_template_ends_at_once(directory, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    said = run_llamac("chat", tmp_path, code=2, stdin=subprocess.DEVNULL).stderr
    assert "expected a chat template" in said and "take --template chatml or llama3" in said


def test_files_of_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\r\n')
    found = generate.read_prompts(str(path))
    assert found == {f"{path}: line 1": "a", f"{path}: line 3": [{"role": "user", "content": "b"}]}
    for text, words in (
        ('{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl: line 2: expected JSON"),
        ('{"text": "a"}\n', r'p\.jsonl: line 1: expected {"prompt": TEXT}'),
        ('{"messages": [5]}\n', r"p\.jsonl: line 1: messages\[0\]: expected an object, found 5"),
    ):
        path.write_text(text)
        with pytest.raises(Error, match=words):
            generate.read_prompts(str(path))
    path.write_bytes(b'{"prompt": "a"}\n\xff\n')
    assert "line 2: expected UTF-8" in refused(generate.read_prompts, str(path))


def test_directories_that_are_refused(directory, tmp_path):
    assert "expected a directory" in refused(Inference, tmp_path / "missing")
    for load in (Inference, tokenizer.load):
        assert "`hf download meta-llama/Llama-3" in refused(load, "meta-llama/Llama-3.2-1B")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    model = Inference(tmp_path)
    assert "expected a tokenizer in the directory" in refused(model.encode, "x")
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "int8"}))
    assert "config.json: dtype: expected float32" in refused(Inference, tmp_path)
    small = write_weights(tmp_path / "small", json.loads((MODELS / "tied-gqa.json").read_text()))
    (small / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    assert "at most the model's 97 tokens" in refused(Inference(small).encode, "x")


def test_stops(directory, tmp_path):
    model = Inference(directory)
    end = model.tokenizer.backend.token_to_id("<|end|>")
    assert model.stops == [end]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Inference(tmp_path).stops == [7, 9, end]


def test_text_that_streams(directory):
    """Pieces are whole characters, and together the text."""
    model = Inference(directory)
    for text in (TEXT, "🙂" * 40, "a\ufffdb" * 9, "é" * 50):
        ids = model.encode(text, bos=False)
        for cut in (ids, ids[:-1]):
            stream = TextStream(model.decode)
            pieces = [stream.add(id) for id in cut]
            last = stream.end()
            assert "".join(pieces) + last == model.decode(cut)
            if "\ufffd" not in text:
                assert not any("\ufffd" in piece for piece in pieces)


def test_a_conversation(directory):
    """Each answer is one of the conversation so far."""
    args = generate._parser().parse_args([str(directory), "--chat", "--tokens", "12", "--temperature", "0"])
    session, out = generate.Session(args), io.StringIO()
    generate.talk(session, ["hello\n", "\n", "and?\n"], out)
    model = Inference(directory)
    messages = []
    for line in ("hello", "and?"):
        messages.append({"role": "user", "content": line})
        ids = model.generate([model.encode_chat(messages)], 12, GREEDY)[0]
        text = model.decode(ids[:-1] if ids[-1] in model.stops else ids)
        messages.append({"role": "assistant", "content": text})
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert out.getvalue() == "".join(printable(answer) + "\n" for answer in answers)


@pytest.mark.parametrize("flags, context", [(["--context", "64"], 64), ([], 50)])
def test_a_conversation_that_outgrows_the_context(directory, monkeypatch, flags, context):
    """The answers before that are printed; the last may be cut off."""
    monkeypatch.setattr(generate, "TALK_TOKENS", 50)
    args = generate._parser().parse_args([str(directory), "--chat", "--ignore-end", *flags])
    out = io.StringIO()
    with pytest.raises(Error, match=f"conversation: expected at most {context} tokens, the context, found"):
        generate.talk(generate.Session(args), ["hello\n", "and?\n"], out)
    assert out.getvalue().endswith("\n")


def test_prompts_are_checked_before_the_first_answer(directory, tmp_path):
    """All of them; and the answers do not depend on --batch."""
    path = tmp_path / "p.txt"
    path.write_text("the cat\n\nthe moon\n" + "the cat " * 20 + "\n")
    found = {command(directory, "--prompts", str(path), "--ignore-end", "--batch", n) for n in ("1", "3")}
    assert len(found) == 1
    lengths = {json.loads(line)["tokens"] for line in found.pop().splitlines()}
    assert len(lengths) == 1
    path.write_text("the cat\n\n" + "the cat " * 100 + "\n")
    done = run_llamac("generate", directory, "--prompts", path, "--batch", "1", code=2)
    assert done.stdout == ""
    assert f"{path}: line 3: expected a prompt that leaves room for 1 tokens" in done.stderr
    path = tmp_path / "p.jsonl"
    messages = [[{"role": "user", "content": [{"type": kind, kind: "x"}]}] for kind in ("text", "image_url")]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    said = run_llamac("generate", directory, "--prompts", path, code=2).stderr
    found = "expected text, found content other than text"
    assert said == f"llamac generate: {path}: line 2: message 1: {found}\n"


def test_memory_is_allocated_for_what_is_needed(directory, tmp_path, monkeypatch):
    asked = []

    class Spy(Inference):
        def __init__(self, directory, dtype, context, sequences, **others):
            asked.append((context, sequences))
            super().__init__(directory, dtype, context, sequences, **others)

    monkeypatch.setattr(generate, "Inference", Spy)
    (tmp_path / "p.txt").write_text("the cat\nthe moon\n")
    ids, two = ["--prompt-ids", "1,2,3"], ["--prompts", str(tmp_path / "p.txt")]
    for more in (ids, [*ids, "--context", "100"], [*two, "--context", "100"]):
        monkeypatch.setattr("sys.argv", ["generate", str(directory), "--tokens", "5", *more])
        generate.main()
    assert asked == [(7, 1), (100, 1), (100, 2)]
