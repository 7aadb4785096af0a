"""llamac serve: OpenAI's client, the chat page in a browser, batches, ends of answers, refused requests."""

import http.client
import json
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from hf_dirs import TEMPLATE, write_directory
from run import ROOT, refuses

from llamac import Error
from llamac.inference.model import Inference, Sampling
from llamac.serve import command
from llamac.serve.engine import Engine, Request, StopTexts

# Imported where they are used: each of pytest's workers reads this file, and one runs it.
pytestmark = pytest.mark.skipif(
    not (find_spec("openai") and find_spec("fastapi")), reason="needs openai, fastapi"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONTEXT = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = write_directory(tmp_path_factory.mktemp("serve") / "small")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def address(directory):
    command = [sys.executable, "-m", "llamac", "serve", directory, "--port", "0", "--context", str(CONTEXT)]
    command += ["--template", "chatml"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    found = re.match(r"small: chat at (http://127\.0\.0\.1:\d+), ", process.stdout.readline())
    yield found[1]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) in (0, 130, -signal.SIGINT)


@pytest.fixture(scope="module")
def client(address):
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(directory):
    return Inference(directory, context=CONTEXT, sequences=3, template="chatml")


def greedy(model, ids: list[int], count: int) -> str:
    made = model.generate([ids], count, Sampling(temperature=0))[0]
    return model.decode([id for id in made if id not in model.stops])


def test_a_chat(client, model):
    messages = [{"role": "user", "content": "the cat"}]
    ids = model.encode_chat(messages)
    given = {"model": "small", "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == greedy(model, ids, 12)
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens <= 12
    chunks = list(
        client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content and chunks[-1].usage == answer.usage
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason


def test_texts(client, model):
    """Several prompts, choices and samplings of one request; the same seed gives the same answer."""
    prompts = ["the cat sat", "a", "on the mat the dog"]
    given = {"model": "small", "max_tokens": 10}
    found = client.completions.create(prompt=prompts, temperature=0, **given).choices
    assert [choice.text for choice in found] == [greedy(model, model.encode(p), 10) for p in prompts]
    assert [choice.index for choice in found] == [0, 1, 2]
    ids = client.completions.create(prompt=model.encode(prompts[0]), temperature=0, **given)
    assert ids.choices[0].text == found[0].text
    drawn = [client.completions.create(prompt="a", seed=5, n=2, **given).choices for _ in range(2)]
    assert [c.text for c in drawn[0]] == [c.text for c in drawn[1]] and drawn[0][0].text != drawn[0][1].text
    top = client.completions.create(prompt="a", temperature=2, extra_body={"top_k": 1}, **given)
    assert top.choices[0].text == greedy(model, model.encode("a"), 10)


def test_stop_texts(client, model):
    whole = greedy(model, model.encode("the cat sat"), 16)
    stop = whole[3:6]
    given = {
        "model": "small",
        "prompt": "the cat sat",
        "temperature": 0,
        "max_tokens": 16,
        "stop": [stop, "%"],
    }
    choice = client.completions.create(**given).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True)]
    assert "".join(pieces) == choice.text


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_texts_in_pieces(size):
    text, stops = "one\n\nUser: two", ["\n\nUser:", "zzz"]
    cases = ((text, ("one", True)), ("one\n\nUse", ("one\n\nUse", False)), ("a zzz b\n\nUser:", ("a ", True)))
    for given, expected in cases:
        found, parts = StopTexts(stops), ""
        for at in range(0, len(given), size):
            piece, ended = found.add(given[at : at + size])
            parts += piece
            if ended:
                break
        assert (parts + found.end(), ended) == expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt: expected a text, texts, or token ids"),
        ({"prompt": [1, 10**6]}, "prompt: expected ids from 0 to "),
        ({"prompt": "a", "max_tokens": CONTEXT + 1}, f"at most the context, {CONTEXT}, found "),
        ({"prompt": "a", "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"prompt": "a", "logprobs": 2}, "logprobs: Input should be None"),
        ({"prompt": "a", "unknown": 2}, "unknown: Extra inputs are not permitted"),
        ({}, "prompt: Field required"),
    ],
)
def test_what_is_refused(address, fields, message):
    body = json.dumps({"max_tokens": 2} | fields).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    if message is None:
        return urllib.request.urlopen(request).close()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    assert message in json.loads(refused.value.read())["error"]["message"]


def slow_model(batches: list[list[int]], begun: threading.Event, go: threading.Event) -> SimpleNamespace:
    """Stands in for Inference: answers with the prompt's first id until told to end."""

    def generate(prompts, count, samplings, stops, made):
        batches.append([prompt[0] for prompt in prompts])
        begun.set()
        running = set(range(len(prompts)))
        for _ in range(count):
            go.wait(10)
            running = {i for i in running if made(i, prompts[i][0])}
            if not running:
                return

    config = SimpleNamespace(vocab_size=100)
    return SimpleNamespace(
        config=config, context=50, stops=[], generate=generate, decode=lambda ids: "x" * len(ids)
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_leaves_its_place(stream):
    """The engine is told to end its answer, which would take minutes."""
    from llamac.serve.api import Server, application

    begun, go = threading.Event(), threading.Event()
    engine = Engine(slow_model([], begun, go), 1)
    server = Server(application(engine, "small"), "127.0.0.1", 0, "small")
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    connection = http.client.HTTPConnection(*server.servers[0].sockets[0].getsockname())
    body = json.dumps({"prompt": [1], "max_tokens": 40, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert begun.wait(20)
    (request,) = engine._running
    assert not request.cancelled
    connection.close()
    while not request.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    told, server.should_exit = request.cancelled, True
    go.set()
    thread.join()
    assert told


def test_requests_that_wait_form_one_batch():
    """As many as fit beside each other; one that is cancelled takes no place."""
    batches, begun, go = [], threading.Event(), threading.Event()
    engine, ends = Engine(slow_model(batches, begun, go), 3), {}

    def request(id: int, count: int = 2, length: int = 1) -> Request:
        return Request([id] * length, count, Sampling(), lambda _, end: end and ends.__setitem__(id, end))

    first = request(1, 40)
    engine.submit([first])
    begun.wait(10)
    gone = request(2)
    engine.submit([gone, request(3), request(4, 40), request(5, 2, 30), request(6), request(7)])
    gone.cancelled = first.cancelled = True
    go.set()
    deadline = time.monotonic() + 10
    while len(ends) < 7 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.close()
    # 5 with 30 tokens does not fit beside 4, which makes 40 in a context of 50.
    assert batches == [[1], [3, 4, 6], [5, 7]] and first.tokens == 1
    assert ends == {1: "stop", 2: "stop"} | dict.fromkeys((3, 4, 5, 6, 7), "length")


def test_any_number_of_cancelled_requests():
    """Each wakes the engine, which still answers."""
    go = threading.Event()
    go.set()
    engine, ends = Engine(slow_model([], threading.Event(), go), 1), queue.Queue()
    for cancelled in (*[True] * sys.getrecursionlimit(), False):
        engine.submit([Request([1], 1, Sampling(), lambda _, end: ends.put(end), cancelled=cancelled)])
        assert ends.get(timeout=10) == ("stop" if cancelled else "length")
    engine.close()


def test_an_error_reaches_all_of_a_batch():
    def generate(*_):
        raise Error("no memory")

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9), context=9, generate=generate, decode=str)
    engine, told = Engine(model, 2), []
    engine.submit([Request([1], 1, Sampling(), lambda *end: told.append(end)) for _ in range(2)])
    deadline = time.monotonic() + 10
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.close()
    assert [str(error) for _, error in told] == ["no memory"] * 2


@pytest.mark.skipif(CHROMIUM is None, reason="it is not installed: apt-get install chromium")
def test_the_page(address, model, tmp_path):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"{address}/?q=the+cat"]
    for _ in range(10):  # the browser's clock may run ahead of a busy machine's answer
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        if 'data-answers="1"' in dom:
            break
    body = dom[dom.find("<main") : dom.find("</main>")]
    assert 'data-answers="1"' in dom and "<title>small</title>" in dom and 'class="error"' not in body, body
    assert '<p class="user">the cat</p><p class="assistant">' in dom
    assert not re.search(r'(src|href)="', dom), "it needs nothing from elsewhere"


def test_the_command_refuses(directory, tmp_path, monkeypatch):
    refused = {"--port: expected": [directory, "--port", 70000], "none: expected a dir": [tmp_path / "none"]}
    for message, words in refused.items():
        monkeypatch.setattr("sys.argv", ["llamac serve", *map(str, words)])
        refuses(message, command.main)
