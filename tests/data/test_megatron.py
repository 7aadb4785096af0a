"""llamac data: data sets of Megatron-LM. The last test compares write() with megatron-core, if installed."""

import io
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from data_command import content, make, stop_at, tokens
from run import refused

from llamac.base.errors import InputError
from llamac.data import documents, megatron, tokenizer

TYPES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
SIZES = np.random.default_rng(0).integers(1, 60, 200).tolist()


def ids(sizes: list[int], seed: int = 0, below: int = 127) -> list[np.ndarray]:
    """Documents of these sizes and a 0 at the end."""
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(1, below, n), 0) for n in sizes]


def write(prefix: Path, found: list[np.ndarray], dtype: str = "uint16", parts: int = 1) -> Path:
    """The documents, each of `parts` sequences."""
    sequences = [part for document in found for part in np.array_split(document.astype(dtype), parts)]
    Path(f"{prefix}.bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    sizes = np.array([len(part) for part in sequences], np.int32)
    places = (np.cumsum(sizes, dtype=np.int64) - sizes) * np.dtype(dtype).itemsize
    bounds = np.arange(len(found) + 1, dtype=np.int64) * parts
    counts = np.array([len(sizes), len(bounds)], np.int64).tobytes()
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([TYPES[dtype]]) + counts
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + places.tobytes() + bounds.tobytes())
    return prefix


def cut(found: list[int]) -> list[tuple[int, ...]]:
    """The documents in tokens."""
    ends = [i + 1 for i, token in enumerate(found) if token == 0]
    return [tuple(found[a:b]) for a, b in zip([0, *ends], ends)]


@pytest.mark.parametrize("dtype, name", list(zip(TYPES, ["web", "web.idx", "web.bin", "", "w*", "web"])))
def test_every_type_and_name(tmp_path, dtype, name):
    """One result for all types, names and numbers of sequences; the ids stay as they are."""
    found = ids([*SIZES, 3000])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "llamac.bin").write_bytes(b"none of Megatron's")
    write(tmp_path / "web", found)
    write(tmp_path / "in" / "web", found, dtype, parts=2)
    flags = ["--vocab-size", 200, "--shard-tokens", 5000]
    make(tmp_path / "web", *flags, "--out", tmp_path / "o", "--workers", 1)
    shards = content(tmp_path / "o")
    del shards["index.json"]
    make(tmp_path / "in" / name, *flags, "--out", tmp_path / "p", "--workers", 2)
    assert {name: held for name, held in content(tmp_path / "p").items() if name in shards} == shards
    made = [cut(tokens(tmp_path / "o", split)) for split in ("train", "val")]
    order = [tuple(document.tolist()) for document in found]
    assert sorted(made[0] + made[1]) == sorted(order) and all(made)
    assert [document for document in order if document in made[0]] == made[0]
    counted = json.loads((tmp_path / "o" / "index.json").read_text())["splits"]
    assert [counted[split]["documents"] for split in ("train", "val")] == [len(part) for part in made]


MIX = ["--mix", "a=30", "b=70"]


@pytest.mark.parametrize(
    "mix, stop, crash",
    [([], 20, False), (MIX, 60, True), ([*MIX, "--mix-tokens", 30_000], 700, False)],
)
def test_stopped_and_continued(tmp_path, monkeypatch, mix, stop, crash):
    """Also within documents of several blocks, which stay on one side."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(megatron, "_SOME", 30)
    found = {"a": ids([*SIZES, 3000, 500, 499, 1], 1, 60), "b": ids([700, *SIZES, *SIZES], 2, 60)}
    named = [f"{name}={write(tmp_path / name, each)}" for name, each in found.items()]
    flags = [*named, "--vocab-size", 200, "--shard-tokens", 2000, "--val-fraction", 0.2, "--workers", 2, *mix]
    make(*flags, "--out", tmp_path / "whole")
    stop_at(monkeypatch, stop, None if crash else signal.SIGINT)
    with pytest.raises(RuntimeError if crash else SystemExit):
        make(*flags, "--out", tmp_path / "o")
    make(*flags, "--out", tmp_path / "o")
    assert content(tmp_path / "o") == content(tmp_path / "whole")
    known = {tuple(document.tolist()) for each in found.values() for document in each}
    train, val = (cut(tokens(tmp_path / "o", split)) for split in ("train", "val"))
    assert set(train) | set(val) <= known and not set(train) & set(val) and train and val
    assert mix or set(train) | set(val) == known


def test_a_mix_repeats_sources(tmp_path, capsys):
    """With --mix-tokens, shares of the tokens hold to the end, and validation is not repeated."""
    first, second = ids(SIZES[:40], 1, 60), [document + 60 * (document > 0) for document in ids(SIZES, 2, 60)]
    named = [f"a={write(tmp_path / 'a', first)}", f"b={write(tmp_path / 'b', second)}"]
    flags = [*named, "--vocab-size", 200, "--out", tmp_path / "o", "--mix", "a=3", "b=1"]
    make(*flags, "--mix-tokens", 10_000)
    train, val = (cut(tokens(tmp_path / "o", split)) for split in ("train", "val"))
    size = sum(map(len, train))
    of_first = [document for document in train if document[0] < 61 and len(document) > 1]
    assert 10_000 <= size < 10_061 and abs(sum(map(len, of_first)) / size - 0.75) < 0.01
    once = list(dict.fromkeys(of_first))
    assert len(of_first) > 3 * len(once) and of_first == (once * 20)[: len(of_first)]
    assert len(val) == len(set(val)) > 0
    sources = json.loads((tmp_path / "o" / "index.json").read_text())["sources"]
    assert sum(source["documents"] for source in sources) == len(train) + len(val)
    make(*flags)
    assert "mix: ended where a had no more documents" in capsys.readouterr().out
    assert sum(map(len, cut(tokens(tmp_path / "o")))) < 10_000
    with pytest.raises(InputError, match="a: expected training documents to repeat, found none"):
        make(*flags, "--mix-tokens", 10_000, "--val-fraction", 0.999)


def test_a_tokenizer(tmp_path, capsys):
    """Its hash is in the shards, its ids are all that there may be; ends that it does not know are named."""
    ranks = tmp_path / "tokenizer.tiktoken"
    tokenizer.save(ranks, {bytes([i]): i for i in range(256)})
    flags = ["--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0]
    found = ids(SIZES)
    make(write(tmp_path / "a", found), *flags)
    assert "documents have no bos or eos at their ends" in capsys.readouterr().out
    found = [np.append(document, 256) for document in found] + [np.array([], int)]
    make(write(tmp_path / "a", found), *flags)
    said = capsys.readouterr().out
    assert "bos" not in said and f"left out: {tmp_path}/a.bin: line {len(found)}: empty" in said
    assert tokens(tmp_path / "o") == np.concatenate(found).tolist()
    assert json.loads((tmp_path / "o/index.json").read_text())["tokenizer"]["vocab_size"] == 257
    found[7][2] = 257
    with pytest.raises(InputError, match=r"a.bin: document 8: expected ids .* 0 to 256, found 257"):
        make(write(tmp_path / "a", found), *flags[:2], "--out", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def at(offset: int, value: bytes):
    return lambda content: content[:offset] + value + content[offset + len(value) :]


N = 5  # sequences
BAD = {  # the file, what becomes of it, message
    "magic": (".idx", at(0, b"TNTIDX\0\0"), "header: expected magic b'MMIDIDX.* version 1, found b'TNTIDX"),
    "version": (".idx", at(9, b"\2"), "header: expected magic .* version 1, found .* version 2"),
    "no header": (".idx", lambda held: held[:20], "header: expected 34 bytes, found 20"),
    "float": (".idx", at(17, b"\7"), "type of the tokens: expected integers, found float32"),
    "type": (".idx", at(17, b"\11"), "type of the tokens: expected integers, found the code 9"),
    "short": (".idx", lambda held: held[:-1], "size: expected 142 bytes for 5 .* 6 .*, found 141"),
    "many": (".idx", at(25, b"\xff"), "size: expected .* bytes"),
    "modes": (".idx", lambda held: held + bytes(N), "content: expected a data set of text, found a multi"),
    "negative": (".idx", at(34, b"\xff" * 4), "sequence 0: expected 0 .* at least 0, found 0 and -1"),
    "place": (".idx", at(34 + 4 * N + 8, b"\7"), "sequence 1: expected 8 as first byte .*, found 7 and"),
    "far": (".idx", at(34 + 4 * N + 15, b"\x7f"), "sequence 1: expected 8 as first byte"),
    "order": (".idx", at(34 + 12 * N + 8, b"\5"), "document boundaries: expected numbers that rise from 0"),
    "first": (".idx", at(34 + 12 * N, b"\1"), "document boundaries: expected numbers that rise from 0 to 5"),
    "last": (".idx", at(34 + 20 * N, b"\4"), "document boundaries: expected the last to be 5.*, found 4"),
    "missing": (".idx", None, "expected Megatron's .*a.bin and .*a.idx, found .*a.bin$"),
    "short .bin": (".bin", lambda held: held[:-2], "size: expected 40 bytes, .*a.idx, found 38"),
    "long .bin": (".bin", lambda held: held + b"\0", "size: expected 40 bytes, .*a.idx, found 41"),
    "missing .bin": (".bin", None, "expected Megatron's .*a.bin and .*a.idx, found .*a.idx$"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_files(tmp_path, monkeypatch, name):
    ending, damage, message = BAD[name]
    path = Path(f"{write(tmp_path / 'a', ids([3] * N))}{ending}")
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    for chunk in (1 << 16, 1):
        monkeypatch.setattr(megatron, "_CHUNK", chunk)
        said = refused(make, tmp_path / "a", "--vocab-size", 200, "--out", tmp_path / "new" / "o")
        assert re.search(f"a({ending}|.idx): {message}", said) and not (tmp_path / "new").exists(), said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "a b.txt --vocab-size 300",
            "a.bin: expected --tokenizer, whose ids it has: there is text beside it",
        ),
        ("a --vocab-size 8388608", "--vocab-size: expected at most 4194304, found 8388608"),
        ("a --vocab-size 20", "a.bin: document 1: expected ids of the tokenizer, 0 to 19, found"),
        ("a --vocab-size 200 --mix a=-1", "--mix a=-1: expected NAME=SHARE with a share above 0"),
        ("a --vocab-size 200 --mix-tokens 9", "--mix-tokens: expected --mix NAME=SHARE"),
        (
            "a=- --vocab-size 200 --mix a=1 --mix-tokens 9",
            "--mix-tokens: expected files, which can be repeated",
        ),
        ("b.txt a=- --vocab-size 300", "--vocab-size: expected files, .* found standard input: save it in"),
        (
            "a --vocab-size 200 --mix a=1 --mix-tokens 9 --val-tokens 9",
            "--mix-tokens: expected --val-fraction",
        ),
        ("- --format megatron --vocab-size 200", "-: expected the prefix of Megatron's .bin and .idx"),
        ("wikitext-2 --local a --vocab-size 200", "a.bin: expected text, found token ids of Megatron"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(Path("a"), ids([30]))
    Path("b.txt").write_text("text")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"text"))))
    said = refused(make, *arguments.split(), "--out", "o")
    assert re.search(message, said) and not Path("o").exists(), said


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_megatron_writes_the_same(tmp_path, dtype, parts):
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    found = ids(SIZES)
    builder = theirs.IndexedDatasetBuilder(f"{tmp_path}/a.bin", dtype=np.dtype(dtype).type)
    for document in found:
        builder.add_document(torch.tensor(document), [len(part) for part in np.array_split(document, parts)])
    builder.finalize(f"{tmp_path}/a.idx")
    write(tmp_path / "b", found, dtype, parts)
    for ending in (".bin", ".idx"):
        assert Path(f"{tmp_path}/a{ending}").read_bytes() == Path(f"{tmp_path}/b{ending}").read_bytes()
    make(tmp_path / "a", "--vocab-size", 200, "--out", tmp_path / "o", "--val-fraction", 0)
    assert tokens(tmp_path / "o") == np.concatenate(found).tolist()
