"""llamac.data.tokenizer: rank files, round trips, special tokens; tiktoken's tokens are tokenizers'."""

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hf_dirs import noise
from run import refused
from tiktoken.load import load_tiktoken_bpe

from llamac.base.errors import InputError
from llamac.data import read_bin, tokenizer, write_bin

BYTES = {bytes([i]): i for i in range(256)}
SOURCES = sorted(Path(random.__file__).parent.glob("[a-t]*.py"))[:60]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(tokenizers.Tokenizer, our Tokenizer through its rank file), trained on the same text."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    bpe, path = tokenizer.train_bpe(texts, 2000), tmp_path_factory.mktemp("bpe") / "tokenizer.tiktoken"
    tokenizer.save(path, tokenizer.train(texts, 2000))
    return bpe, tokenizer.load(path)


def test_equal_to_tokenizers(trained):
    """The rank file gives the tokens of the BPE it was made from: on its text, on other text, on noise."""
    bpe, ours = trained
    others = sorted(Path(random.__file__).parent.glob("asyncio/*.py"))
    assert SOURCES and others
    for path in [*SOURCES, *others]:
        text = path.read_text(encoding="utf-8")
        assert ours.encode(text) == bpe.encode(text).ids, path.name
    for seed in range(300):
        text = noise(seed, 1 + seed * 3)
        assert ours.encode(text) == bpe.encode(text).ids, repr(text)


@pytest.mark.parametrize("kind", ["trained", "llama3", pytest.param("gpt2", marks=pytest.mark.more)])
def test_transformers_has_the_same_tokens(request, tmp_path, kind):
    """AutoTokenizer beside a model's configuration: text, names of special tokens in it, and any ids."""
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":  # its split pattern comes with the number of ranks
        ranks = tokenizer.train([path.read_text(encoding="utf-8") for path in SOURCES[:9]], 600)
        while len(ranks) < tokenizer.GPT2_RANKS:
            ranks[b"\xff\xff" + len(ranks).to_bytes(4, "big")] = len(ranks)
        ours = tokenizer.Tokenizer(ranks, 0)
    else:
        found = request.getfixturevalue(kind)
        ours = found[1] if kind == "trained" else found
    tokenizer.export(tmp_path, ours)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size and theirs.bos_token_id == ours.bos
    assert theirs.pad_token_id == (128004 if kind == "llama3" else ours.bos)
    assert theirs.eos_token_id == (ours.eos or ours.bos)
    texts = [path.read_text(encoding="utf-8") for path in SOURCES[:20]]
    texts += [noise(seed, 1 + seed * 3) for seed in range(200)]
    texts += ["", " a  b .", *(f" {name}a{name}\n" for name in [*ours.special][:3])]
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == text, text[:60]
    for ids in np.random.default_rng(0).integers(0, ours.vocab_size, (50, 20)):
        assert theirs.decode(ids) == ours.decode(ids)


def test_split_pattern():
    """Llama 3's pattern, seen through a vocabulary of bytes and of every substring of a text."""
    text = "It's 12345 o'clock,  don't\n\n  WE'LL!?\n"
    pieces = ["It", "'s", " ", "123", "45", " o", "'clock", ",", " ", " don", "'t", "\n\n", " ", " WE", "'LL",
              "!?\n"]  # fmt: skip
    assert "".join(pieces) == text
    ranks = dict(BYTES)
    for length in range(2, len(text) + 1):
        for start in range(len(text) - length + 1):
            ranks.setdefault(text[start : start + length].encode(), len(ranks))
    ours = tokenizer.Tokenizer(ranks, 0)
    assert [ours.decode([i]) for i in ours.encode(text)] == pieces


def test_round_trip(trained):
    ours = trained[1]
    for seed in range(100):
        text = noise(seed, 1 + seed * 7)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("") == [] and ours.decode([]) == ""
    assert ours.bos not in ours.encode("<|endoftext|>")  # text is never a special token
    assert ours.decode([ours.bos, *ours.encode("a")]) == "<|endoftext|>a"
    assert ours.decode(np.array(ours.encode("naïve"), np.uint16)) == "naïve"


def test_decode_of_any_ids(trained):
    """A model may sample any id: bytes that are no UTF-8 and ids past the vocabulary are U+FFFD."""
    ours = trained[1]
    rng = random.Random(0)
    for _ in range(200):
        data = rng.randbytes(rng.randrange(40))
        assert ours.decode(ours.ranks[bytes([byte])] for byte in data) == data.decode("utf-8", "replace")
    assert ours.decode([ours.vocab_size, ours.ranks[b"a"], 10**6]) == "\ufffda\ufffd"


def test_rank_file(trained, tmp_path):
    ours = trained[1]
    assert (ours.n_ranks, ours.vocab_size, ours.bos) == (2000, 2001, 2000)
    tokenizer.save(tmp_path / "a.tiktoken", ours.ranks)
    content = (tmp_path / "a.tiktoken").read_bytes()
    assert tokenizer.load(tmp_path / "a.tiktoken").ranks == ours.ranks
    assert ours.hash == xxhash.xxh3_64_intdigest(content)
    assert load_tiktoken_bpe(str(tmp_path / "a.tiktoken")) == ours.ranks
    (tmp_path / "crlf.tiktoken").write_bytes(content.replace(b"\n", b"\r\n") + b"\r\n")
    assert tokenizer.load(tmp_path / "crlf.tiktoken").ranks == ours.ranks


def test_gpt2_split():
    """50,256 ranks are GPT-2's: its split pattern keeps a blank before a number and all digits together."""
    ranks = dict(BYTES)
    ranks[b" 1"], ranks[b"12"], ranks[b" 12"] = 256, 257, 258
    while len(ranks) < 50256:
        ranks[b"\xff\xff" + len(ranks).to_bytes(4, "big")] = len(ranks)
    gpt2 = tokenizer.Tokenizer(ranks, 0)
    assert (gpt2.vocab_size, gpt2.bos) == (50257, 50256)
    assert gpt2.encode(" 12") == [258]
    del ranks[max(ranks, key=ranks.get)]
    llama3 = tokenizer.Tokenizer(ranks, 0)  # by whose pattern blank and number are apart
    assert llama3.encode(" 12") == [32, 257]


@pytest.fixture(scope="module")
def llama3(tmp_path_factory) -> tokenizer.Tokenizer:
    """A file of 128,000 made-up ranks, as many as in Llama 3's tokenizer.model."""
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    ranks = dict(BYTES)
    while len(ranks) < 128000:
        ranks[b"\xff" + len(ranks).to_bytes(4, "big")] = len(ranks)
    tokenizer.save(path, ranks)
    return tokenizer.load(path)


def test_llama3_special_tokens(llama3):
    assert llama3.vocab_size == 128256 and len(llama3.special) == 256
    assert sorted(llama3.special.values()) == list(range(128000, 128256))
    published = {128000: "begin_of_text", 128001: "end_of_text", 128002: "reserved_special_token_0",
                 128003: "reserved_special_token_1", 128004: "finetune_right_pad_id",
                 128005: "reserved_special_token_2", 128006: "start_header_id", 128007: "end_header_id",
                 128008: "eom_id", 128009: "eot_id", 128010: "python_tag", 128011: "reserved_special_token_3",
                 128255: "reserved_special_token_247"}  # fmt: skip
    assert {f"<|{name}|>": id for id, name in published.items()}.items() <= llama3.special.items()
    assert (llama3.bos, llama3.eos) == (128000, 128001)
    text = "<|begin_of_text|>Hi<|eot_id|><|reserved_special_token_247|>"
    assert llama3.decode([128000, 72, 105, 128009, 128255]) == text
    assert llama3.encode("<|eot_id|>") == list(b"<|eot_id|>")


def malformed():
    """(name, how it spoils the lines of a good file, what the message says)."""
    a, new = base64.b64encode(b"a"), "line 258: expected a new token"
    byte = "expected a rank for every byte, found none for byte"
    rank = "expected a new token in base64 and rank"
    yield "empty", lambda lines: [], f"{byte} 0"
    yield "byte missing", lambda lines: lines[:255], f"{byte} 255"
    yield "no rank", lambda lines: [*lines[:9], a, *lines[10:]], f"line 10: {rank} 9"
    yield "rank skipped", lambda lines: [*lines, b"YWJj 258"], f"line 258: {rank} 257"
    yield "token twice", lambda lines: [*lines, lines[256][:-3] + b"257"], new
    yield "other file", lambda lines: [b"\xff\xfe\0\0"], "line 1: expected a new token"
    for name, last in (("no base64", b"=a 257"), ("base64 cut", b"YWJ 257"), ("no token", b" 257"),
                       ("rank twice", b"YWJj 256"), ("three words", b"YWJj 257 1"),
                       ("rank is no number", b"YWJj x")):  # fmt: skip
        yield name, lambda lines, last=last: [*lines, last], new


@pytest.mark.parametrize("spoil, message", [pytest.param(*case[1:], id=case[0]) for case in malformed()])
def test_malformed_rank_file(tmp_path, spoil, message):
    path = tmp_path / "tokenizer.tiktoken"
    tokenizer.save(path, BYTES | {b"ab": 256})
    path.write_bytes(b"\n".join(spoil(path.read_bytes().splitlines())))
    assert refused(tokenizer.load, path).startswith(f"{path}: {message}")


def test_find(tmp_path):
    """--tokenizer auto, FILE and none; a rank file that did not make the data is refused."""
    write_bin(tmp_path / "train_000.bin", np.zeros(9, np.uint32), 257)
    shard = read_bin(tmp_path / "train_000.bin")
    assert tokenizer.find("auto", [shard]) is None and tokenizer.find("none", [shard]) is None
    assert "missing: cannot open: No such file" in refused(tokenizer.find, str(tmp_path / "missing"), [shard])
    tokenizer.save(tmp_path / "tokenizer.model", BYTES | {b"ab": 256})
    assert tokenizer.find("auto", [shard]).n_ranks == 257
    tokenizer.save(tmp_path / "tokenizer.tiktoken", BYTES)
    found = tokenizer.find("auto", [shard])
    assert found.n_ranks == 256
    ranks = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")  # sentencepiece's, which is not read
    assert tokenizer.find("auto", [shard]).hash == tokenizer.load(tmp_path).hash == found.hash
    (tmp_path / "tokenizer.model").write_bytes(ranks)
    assert tokenizer.find(str(tmp_path / "tokenizer.model"), [shard]).n_ranks == 257
    write_bin(tmp_path / "train_000.bin", np.zeros(9, np.uint32), 257, found.hash)
    shard = read_bin(tmp_path / "train_000.bin")
    assert tokenizer.find("auto", [shard]).hash == found.hash
    with pytest.raises(InputError, match=r"tokenizer.model: expected the tokenizer that made .*train_000"):
        tokenizer.find(str(tmp_path / "tokenizer.model"), [shard])
    write_bin(tmp_path / "train_001.bin", np.zeros(9, np.uint32), 257, 1)
    with pytest.raises(InputError, match=r"tokenizer.tiktoken: .* made .*train_001.bin"):
        tokenizer.find("auto", [shard, read_bin(tmp_path / "train_001.bin")])


def test_an_exported_tokenizer_is_that_of_its_rank_file(trained, tmp_path):
    """Also for shards, questions and models: a checkpoint has the tokenizer.json alone."""
    tokenizer.save(tmp_path / tokenizer.RANK_FILE, trained[1].ranks)
    own = tokenizer.load(tmp_path / tokenizer.RANK_FILE)
    (tmp_path / "model").mkdir()
    tokenizer.export(tmp_path / "model", own)
    made = tokenizer.load(tmp_path / "model")
    assert made.ranks == own.ranks and made.hash != own.hash
    assert made.rank_hash == own.rank_hash == own.hash
    assert tokenizer.data_hash(made) == tokenizer.data_hash(own) == own.hash
    content = json.loads((tmp_path / "model/tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(content))
    changed = tokenizer.load(tmp_path / "model")
    assert tokenizer.data_hash(changed) == changed.hash  # no longer what export() writes


def test_training_is_repeatable():
    texts = [path.read_text(encoding="utf-8") for path in SOURCES[:20]]
    ranks = tokenizer.train(texts, 600)
    assert ranks == tokenizer.train(iter(texts), 600) and sorted(ranks.values()) == list(range(600))
    assert BYTES.keys() <= ranks.keys()
    assert "expected text that gives 600 tokens, found 256" in refused(tokenizer.train, ["x"], 600)


def test_gpt2_without_a_network(tmp_path, monkeypatch):
    """A folder without the ranks, and no way to get them: tiktoken's own error is a page long."""
    requests = pytest.importorskip("requests")

    def no_network(*_, **__):
        raise requests.exceptions.ConnectionError("Failed to resolve host")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    message = refused(tokenizer.gpt2_ranks)
    assert "gpt2" in message and "ConnectionError" in message
    assert message.count("TIKTOKEN_CACHE_DIR") == 2 and 'tiktoken.get_encoding("gpt2")' in message
