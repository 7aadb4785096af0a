"""llamac.data.tokenizer_json and vocabulary: ids and texts are those of AutoTokenizer; what a directory says
is followed.
"""

import json
import random
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xxhash
from fuzz import twins
from hf_dirs import NAMES, noise, sentencepiece
from run import ROOT, refused, refuses, run_llamac
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llamac.base.errors import InputError
from llamac.data import documents, special_tokens, tokenizer, tokenizer_json, vocabulary

SOURCES = sorted(Path(random.__file__).parent.glob("[a-t]*.py"))[:30]
EXTRA = "Ünïcödé 漢字かな 한국어 🙂👩‍👩‍👧‍👦 café naïve Ελλάδα Привет עברית العربية हिन्दी ไทย ½ ² Ⅷ\n"
KINDS = ["llama3", "gpt2", "qwen2", "ignore_merges", "other_split", "metaspace", "prepended", "unigram"]


def corpus() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in SOURCES] + [EXTRA * 20]


def byte_level(split: str | None) -> Tokenizer:
    """Byte-level BPE with a split pattern; None: GPT-2's own step."""
    made = Tokenizer(models.BPE())
    if split is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("[call]", rstrip=True), "é", "é è"])
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=800, special_tokens=NAMES, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(corpus()[-8:], trainer)
    return made


def made_of(kind: str) -> tuple[Tokenizer, dict]:
    """(tokenizer, tokenizer_config.json without its class)."""
    end = {"__type": "AddedToken", "content": "<|end|>"}
    plain = {"bos_token": "<|begin|>", "eos_token": end, "pad_token": "<|pad|>"}
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if kind in ("metaspace", "prepended", "unigram"):
        made = unigram() if kind == "unigram" else sentencepiece(kind == "prepended", corpus())
        made.add_tokens([AddedToken(name, normalized=False) for name in ("▁▁▁▁", "<0x0A>", "x y")])
        made.add_tokens(["<plain>", "▁▁"])
        return made, named
    splits = {"gpt2": None, "qwen2": tokenizer_json.QWEN2_SPLIT, "other_split": r"\p{L}+|[^\p{L}]"}
    made = byte_level(splits.get(kind, tokenizer.LLAMA3_SPLIT))
    if kind == "ignore_merges":
        config = json.loads(made.to_str())
        config["model"]["ignore_merges"] = True
        made = Tokenizer.from_str(json.dumps(config))
    return made, plain


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory) -> Path:
    """A directory as transformers leaves it."""
    folder = tmp_path_factory.mktemp(request.param)
    made, settings = made_of(request.param)
    made.save(str(folder / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def chosen() -> list[str]:
    """What tokenizers are known to differ on."""
    found = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽👍🏿", "🙂🙂🙂 🙂", "☺️☺", "1️⃣#️⃣"]
    found += ["e\u0301a\u0308", "café", "cafe\u0301", "ﬁ ﬂ", "Å Å", "ẛ̣", "각 각", "\u017f'\u017f IT'\u017f"]
    found += ["a\r\nb\r\n", "\r\n\r\n", "\n\n\n a", "a\rb", " \n \n", "\u2028\u2029\u0085"]
    found += ["\u00a0a\u00a0", "\t\ta", "\0", "a\0b\0\0", "\x01\x02\x7f", "\ufeffa", "\ufffd\ufffe\uffff"]
    found += ["\u200b\u200d", "\U0010ffff", "ab1 " * 30_000, "🙂" * 30_000, " " * 120_000 + "x"]
    found += [120_000 * letter for letter in "aé1"]
    found += ["<|begin|>a<|end|>", "a <s> b</s>", "<tool>x<tool>", " [call]  b", "<|be<|begin|>gin|>",
              "▁a ▁▁ b"]  # fmt: skip
    found += ["", " ", "  a  b ", "It's we'LL I'M 'S", "12345 1 23 4567", "x=1;\n/path//to", "<0x41> <0x0A>"]
    found += ["_a__b", "go <plain> on", "<plain> on", "a▁▁▁▁b x y", "▁▁▁▁a    b", "a<0x0A>b", "né é è"]
    assert len(found) == 56
    return found


WORDS = ["\r\n", "<|end|>", "<s>", "<tool>", "[call]", "▁", "<unk>", " the", "import "]


def noises(count: int) -> list[str]:
    return [noise(seed, 1 + 2 * seed, WORDS) for seed in range(count)]


@pytest.mark.parametrize("count", [50, pytest.param(100, marks=pytest.mark.more)])
def test_ids_and_texts_are_those_of_auto_tokenizer(directory, count):
    """Random and 56 chosen strings: encoded, and decoded by the vocabulary alone."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = tokenizer.load(directory)
    kind = directory.name.rstrip("0123456789")
    assert (ours.fast is not None) == (kind in ("llama", "gpt", "qwen", "ignore_merges"))
    assert ours.vocab_size == len(theirs)
    for text in [*noises(count), *chosen()]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, repr(text[:80])
        assert ours.decode(ids) == theirs.decode(ids), repr(text[:80])


def test_what_the_directory_says(directory):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = tokenizer.load(directory)
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.hash == xxhash.xxh3_64_intdigest((directory / "tokenizer.json").read_bytes())
    assert tokenizer.load(directory / "tokenizer.json").hash == ours.hash


def test_cut_text_keeps_the_ids(directory):
    """Where the tokenizer says so, as llamac.data cuts it."""
    ours = tokenizer.load(directory)
    kind = directory.name.rstrip("0123456789")
    assert ours.cuttable == (kind in ("llama", "gpt", "qwen", "ignore_merges"))
    if ours.cuttable:
        for text in noises(100):
            text += "\nx\n\ny;\nz"
            pieces = list(documents.cut_text(iter([text]), 1))
            assert len(pieces) > 1 and "".join(pieces) == text
            assert [i for ids in ours.encode_arrays(pieces) for i in ids] == ours.encode(text)


def test_a_token_that_takes_the_space_before_it(tmp_path):
    """It would take the line's end before a cut: then texts stay whole, and the ids those of the whole."""
    token = {"id": 1505, "content": "[x]", "special": False, "single_word": False, "rstrip": False}
    for lstrip in (False, True):
        entry = token | {"normalized": False, "lstrip": lstrip}
        ours = tokenizer.load(small(tmp_path, lambda config: config["added_tokens"].append(entry)))  # noqa: B023
        parts = [*ours.encode("a\n"), *ours.encode("[x]")]
        assert ours.cuttable == (ours.encode("a\n[x]") == parts) == (not lstrip)


@cache
def small_json() -> str:
    return byte_level(tokenizer.LLAMA3_SPLIT).to_str()


def small(tmp_path: Path, change=None, settings: dict | None = None) -> Path:
    """A directory with a small byte-level tokenizer, changed."""
    config = json.loads(small_json())
    if change:
        change(config)
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_none_is_forced(tmp_path):
    """Without settings there is no bos, no eos, no pad; with one name for both, one token."""
    ours = tokenizer.load(small(tmp_path))
    assert (ours.bos, ours.eos, ours.pad) == (None, None, None)
    ours = tokenizer.load(small(tmp_path, settings={"bos_token": "<|end|>", "eos_token": "<|end|>"}))
    assert (ours.bos, ours.eos) == (ours.backend.token_to_id("<|end|>"), None)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    ours = tokenizer.load(tmp_path)
    assert (ours.bos, ours.eos) == (None, ours.backend.token_to_id("<|end|>"))


ENTRY = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TYPED = {"__type": "AddedToken", "content": "<end>", "rstrip": True}
LISTED = {"added_tokens_decoder": {"1505": ENTRY, "1500": {"content": "<|begin|>", "rstrip": True}}}
NAMED = {"bos_token": "<|begin|>", "eos_token": TYPED, "pad_token": "<fill>", "mask_token": "<new>"}
NAMED |= {"sep_token": None}
MORE = {"additional_special_tokens": ["<fill>", TYPED], "unk_token": "<unk>", "image_token": "<image>"}
MAP = {"eos_token": {"content": "<|end|>", "lstrip": True}, "mask_token": "<mask>", "bos_token": None}


@pytest.mark.parametrize(
    "files",
    [
        ({**LISTED, **NAMED}, MAP, {"<a>": 1507}),
        ({**NAMED, **MORE}, None, {"<a>": 1506, "<unk>": 1505, "<end>": 1507}),
        (NAMED, {**MAP, "additional_special_tokens": ["<a>", "<b>"]}, None),
        (MORE, {**MAP, "extra_special_tokens": [{"content": "<b>", "lstrip": True}]}, {"<mask>": 1505}),
        ({**NAMED, "extra_special_tokens": {"image_token": "<image>"}, "sep_token": None}, None, None),
        (None, {"cls_token": "<a>", **MAP}, {"<b>": 1505}),
    ],
)
def test_special_tokens_are_those_of_transformers(tmp_path, files):
    """Of every file that names them: their ids, flags and roles, and those that chat templates see."""
    transformers = pytest.importorskip("transformers")
    small(tmp_path)
    for name, content in zip(special_tokens.FILES, files, strict=True):
        if content is not None or name == "tokenizer_config.json":
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config.json" else {}
            (tmp_path / name).write_text(json.dumps(kind | (content or {})))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer.load(tmp_path)
    assert ours.names == theirs.special_tokens_map == special_tokens.read(tmp_path).names
    found = ours.backend.get_added_tokens_decoder()
    assert {id: repr(token) for id, token in found.items()} == {
        id: repr(token) for id, token in theirs.added_tokens_decoder.items()
    }
    text = "a<new>b<fill> <|begin|> c <|end|><end>  x<mask> <unk><image><a> <b>"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocab_size == len(theirs) and ours.pad == theirs.pad_token_id
    assert {ours.bos, ours.eos} - {None} == {theirs.bos_token_id, theirs.eos_token_id} - {None}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", [1]),
        ("tokenizer_config.json", {"bos_token": 5}),
        ("tokenizer_config.json", {"eos_token": {"id": 5}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": ENTRY}}),
        ("tokenizer_config.json", {"extra_special_tokens": "<a>"}),
        ("special_tokens_map.json", {"additional_special_tokens": [7]}),
        ("added_tokens.json", {"<a>": None}),
    ],
)
def test_special_tokens_that_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    refuses(f"{name}: .*expected .*, found", special_tokens.read, tmp_path)


def swap_merges(config: dict) -> None:
    """Another order of the merges: tokens are no longer made by the lowest rank."""
    merges = config["model"]["merges"]
    merges[3], merges[-3] = merges[-3], merges[3]


def lose_merge(config: dict) -> None:
    """A token that nothing makes any more."""
    del config["model"]["merges"][700]


@pytest.mark.parametrize("change, ignore", [(swap_merges, False), (lose_merge, True)])
def test_unusual_merges_keep_their_ids(tmp_path, change, ignore):
    """Whether tiktoken takes them is for it to prove; the ids are those of tokenizers either way."""

    def both(config):
        change(config)
        config["model"]["ignore_merges"] = ignore

    ours = tokenizer.load(small(tmp_path, both))
    for text in [*noises(100), *corpus()]:
        assert ours.encode(text) == ours.backend.encode(text, add_special_tokens=False).ids


def test_tiktoken_is_refused_where_pairs_are_missing(tmp_path):
    """The proof itself: with a pair that only tiktoken would join, ids would differ, so it is not used."""
    letters = {letter: i for i, letter in enumerate(tokenizer.byte_letters())}
    words = ["ab", "bc", "abc"]
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]  # "abc" alone gives a, bc: never abc

    def change(config):
        config["model"]["vocab"] = letters | {word: 256 + i for i, word in enumerate(words)}
        config["model"]["merges"] = merges
        config["added_tokens"] = []

    ours = tokenizer.load(small(tmp_path, change))
    assert ours.fast is None and ours.encode("abc") == [letters["a"], 257]


def test_a_million_spaces(tmp_path):
    """More than tiktoken's regular expressions take: tokenizers encodes it, of a rank file as well."""
    text = "a" + " " * 1_000_000 + "b"
    ours = tokenizer.load(small(tmp_path))
    assert ours.fast and ours.decode(ours.encode(text)) == text
    ranks = tokenizer.Tokenizer({bytes([byte]): byte for byte in range(256)}, 0)
    assert np.array_equal(ranks.encode_arrays([text])[0], np.frombuffer(text.encode(), np.uint8))


def test_characters_of_another_class(tmp_path, monkeypatch):
    """Where the two regular expressions differ on a character, its texts are left to tokenizers."""
    monkeypatch.setattr(tokenizer_json, "_odd_characters", lambda: "é-")
    ours = tokenizer.load(small(tmp_path))
    assert ours.fast.encode("café") is None and ours.fast.encode("a-b") is None
    assert ours.fast.encode("cafe") is not None
    assert ours.encode("café") == ours.backend.encode("café", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "expected JSON"),
        (b"{}", "expected a tokenizer.json"),
        (b"\xff", "expected JSON"),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "expected a vocabulary, found none"),
        (
            b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
            "expected ids below 4194304, found 4294967295",
        ),
    ],
)
def test_malformed(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert message in refused(tokenizer.load, tmp_path)


def test_a_decoder_that_is_neither(tmp_path):
    other = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    ours = tokenizer.load(small(tmp_path, lambda config: config.update(decoder=other)))
    with pytest.raises(InputError, match="decoder: expected a byte-level or sentencepiece-style one, found"):
        ours.write_beside_tokens(tmp_path)


def test_wordpiece(tmp_path):
    """BERT's: texts of tokens, [CLS] before a document and [SEP] behind it."""
    made = Tokenizer(models.WordPiece({"[CLS]": 0, "[SEP]": 1, "un": 2, "##do": 3, "do": 4}, unk_token="un"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.save(str(tmp_path / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    ours = tokenizer.load(tmp_path)
    assert (ours.bos, ours.eos, ours.encode("undo do")) == (0, 1, [2, 3, 4])
    assert ours.tokens == [b"[CLS]", b"[SEP]", b" un", b"do", b" do"]


@pytest.mark.program
def test_vocabulary_file(build, tmp_path, directory):
    """The C program reads what is written, and no part of it."""
    ours = tokenizer.load(directory)
    ours.write_beside_tokens(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
    path = tmp_path / vocabulary.FILE_NAME
    good = path.read_bytes()
    none = vocabulary.NONE
    words = [none if id is None else id for id in (ours.bos, ours.eos, ours.pad)]
    assert np.frombuffer(good[8:24], "<u4").tolist() == [ours.vocab_size, *words]
    assert vocabulary.tokenizer_hash(path) == ours.hash and good.endswith(b"".join(ours.tokens))
    contents = [good, *(good[:cut] for cut in (0, 63, 64, 100, len(good) - 1))]
    paths = [tmp_path / f"{k}.vocab" for k in range(len(contents))]
    for path, content in zip(paths, contents):
        path.write_bytes(content)
    accepted, *refused = twins.refusals_in_c(build / "read_inputs", "vocabulary", paths)
    assert accepted == "" and all(refused)


@pytest.mark.program
@pytest.mark.parametrize("kind", ["llama3", "metaspace"])
def test_the_program_decodes_its_samples(build, tmp_path, kind):
    """The same ids as text and as numbers; a model with another tokenizer.json is refused in one line."""
    made, settings = made_of(kind)
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((ROOT / "tests/models/scaled32.json").read_text()) | {"vocab_size": 2048}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text("".join(corpus()[:3]))
    run_llamac("data", tmp_path / "a.txt", "--tokenizer", tmp_path / "model", "--out", tmp_path / "d")
    command = [build / "train_llama3", "--model", tmp_path / "model"]
    flags = {"steps": 1, "batch-size": 1, "total-batch-size": 16, "seq-len": 16, "sample-every": 1}
    flags |= {"sample-tokens": 40, "sample-temperature": 3, "checkpoint-every": -1}
    flags |= {"train-data": tmp_path / "d/train_*.bin", "sample-prompt-ids": 5}  # printed as well
    command += [f"--{name}={value}" for name, value in flags.items()]
    samples = []
    for name in ("auto", "none"):
        out = tmp_path / name
        subprocess.run([*command, "--tokenizer", name, "--out", out], check=True, capture_output=True)
        events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        samples.append(next(event["text"] for event in events if event["event"] == "sample"))
    ids = [int(word) for word in samples[1].split()]
    assert len(ids) == 41 and samples[0] == tokenizer.load(tmp_path / "model").decode(ids)
    with open(tmp_path / "model/tokenizer.json", "a") as file:
        file.write("\n")
    done = subprocess.run([*command, "--out", tmp_path / "no"], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "model/tokenizer.json: expected the tokenizer of the data" in done.stderr
