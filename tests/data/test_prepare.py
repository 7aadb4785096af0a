"""llamac data: every kind of input, the order, mixes, stopping and going on, names of data sets,
bad input.
"""

import gzip
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from data_command import content, make, stop_at, tokens
from run import ROOT, refused, refuses, run_llamac

from llamac.base.errors import InputError
from llamac.data import documents, hub, inputs, prepare, progress, read_bin, recipes, tokenizer

RANKS = {bytes([i]): i for i in range(256)} | {b"ab": 256, b" the": 257}


def texts(count: int, seed: int = 0, most: int = 400) -> list[str]:
    """Documents of every length, with characters of every width."""
    rng = random.Random(seed)
    words = ["ab", " the", "é", "漢字", "🙂", "\n", " ", "x\r\n", "<|endoftext|>", "\0"]
    return ["d" + "".join(rng.choice(words) for _ in range(rng.randrange(most))) for _ in range(count)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.tiktoken"
    tokenizer.save(path, RANKS)
    return path


def lines(found: list[str], name: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, name: text}).encode() + b"\n" for i, text in enumerate(found))


def stories(out: Path, split: str) -> list[str]:
    return tokenizer.load(out / "tokenizer.tiktoken").decode(tokens(out, split)).split("<|endoftext|>")[1:]


def expected(found: list[str]) -> list[int]:
    """The definition: each document between bos (its only special token) and the next."""
    ours = tokenizer.Tokenizer(RANKS, 0)
    return [i for text in found for i in [ours.bos, *ours.encode(text)]]


def tables(folder: Path, found: list[str]) -> dict[str, Path]:
    """The documents as Parquet and Arrow, and as `datasets` lays them out."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"id": list(range(len(found))), "text": found})
    parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    (folder / "b.parquet.gz").write_bytes(gzip.compress((folder / "a.parquet").read_bytes()))
    with pa.OSFile(str(folder / "c.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    saved = folder / "dict" / "train"
    saved.mkdir(parents=True)
    for part, rows in enumerate((table.slice(0, 13), table.slice(13))):
        name = str(saved / f"data-{part:05d}-of-00002.arrow")
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(rows)
    files = [{"filename": f"data-{part:05d}-of-00002.arrow"} for part in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    (saved / "dataset_info.json").write_text("{}")
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return {name: folder / name for name in ("a.parquet", "b.parquet.gz", "c.arrow", "dict", "dict/train")}


def test_every_kind_of_input(tmp_path, ranks, monkeypatch):
    """The same documents give the same shards, however they are stored."""
    zstandard = pytest.importorskip("zstandard")
    found = texts(50)
    raw = lines(found)
    packed = {"a.jsonl": raw, "a.ndjson": raw, "a.json": raw, "a.jsonl.gz": gzip.compress(raw)}
    packed["two.json.gz"] = gzip.compress(raw[:500]) + gzip.compress(raw[500:])
    packed["a.jsonl.zst"] = zstandard.compress(raw[:700]) + zstandard.compress(raw[700:])
    packed["no_end.jsonl"] = raw.rstrip(b"\n")
    objects = [{"id": i, "text": text} for i, text in enumerate(found)]
    array = json.dumps(objects, indent=1).encode()
    packed |= {"array.json": b"\n" + array, "marked.json": b"\xef\xbb\xbf" + array, "a.jsonlines": raw}
    packed |= {"array.jsonl": json.dumps(objects, ensure_ascii=False).encode()}
    each = [json.dumps(item, indent=1).encode() for item in objects]
    packed["objects.json.gz"] = gzip.compress(b"\n".join(each))
    packed["blank.jsonl"] = raw.replace(b"\n", b"\r\n\n")
    paths = {name: tmp_path / name for name in packed}
    for name, path in paths.items():
        path.write_bytes(packed[name])
    paths |= tables(tmp_path, found)
    first = None
    for number, path in enumerate(paths.values()):
        out = tmp_path / f"out_{number}"
        make(path, "--tokenizer", ranks, "--out", out, "--val-fraction", 0, "--workers", 1)
        assert tokens(out) == expected(found), path
        assert not (out / "partial").exists()
        first = first or read_bin(out / "train_000.bin").tokenizer_hash
        assert read_bin(out / "train_000.bin").tokenizer_hash == first == tokenizer.load(ranks).hash
    for kind, data in (("auto", raw), ("jsonl", packed["a.jsonl.gz"]), ("auto", array), ("json", array)):
        stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdin", stdin)
        out = tmp_path / f"stdin_{kind}_{len(data)}"
        make("-", "--tokenizer", ranks, "--out", out, "--val-fraction", 0, "--format", kind)
        assert tokens(out) == expected(found)


def test_folders_and_patterns(tmp_path, ranks, capsys):
    """Files by their names; what is no text is named and left out; hidden files and the output are no
    input.
    """
    found = [text.replace("\0", "") for text in texts(6)]
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    for i in (0, 1):
        (source / f"{i}.txt").write_bytes(found[i].encode())
    (source / "2.jsonl").write_bytes(lines(found[2:4]))
    (source / "3.json").write_text('{\n "a": 1\n}')  # has no text
    (source / "3.csv").write_text("a,b\n")
    (source / "sub" / "4.txt.gz").write_bytes(gzip.compress(found[4].encode()))
    (source / "sub" / "5.txt").write_bytes(b"\xef\xbb\xbf" + found[5].encode())  # the mark is no text
    bad = {"x": b"\xff\xfe", "y": b"a\0b", "z": b"", "x.gz": b"text", ".hidden": b"hidden"}
    for name, raw in bad.items():
        (source / name).write_bytes(raw)
    out = source / "out"
    for _ in range(2):  # what the first run left is no input
        make(source, "--tokenizer", ranks, "--out", out, "--val-fraction", 0, "--force")
        assert tokens(out) == expected(found)
    said = capsys.readouterr().out
    for line in (
        f"left out: {source / 'x'}: not UTF-8",
        f"left out: {source / 'x.gz'}: expected gzip, as its name says, found something else",
        f"left out: {source / 'y'}: contains NUL characters",
        f"left out: {source / 'z'}: empty",
    ):
        assert line in said.splitlines()
    make(f"{source}/**/[25].*", "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0)
    assert tokens(tmp_path / "o") == expected([*found[2:4], found[5]])


@pytest.mark.parametrize("val", [pytest.param(0.0, marks=pytest.mark.more), 0.3])
def test_the_workers_change_nothing(tmp_path, ranks, monkeypatch, val):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 3000)
    (tmp_path / "a.jsonl").write_bytes(lines(texts(300)))
    made = []
    for workers in (1, 2, 5):
        out = tmp_path / str(workers)
        flags = ("--workers", workers, "--shard-tokens", 5000, "--val-fraction", val)
        make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", out, *flags)
        made.append(content(out))
    assert made[0] == made[1] == made[2] and len(made[0]) > 8


def test_documents_longer_and_shorter_than_a_shard(tmp_path, ranks):
    found = ["a", "ab" * 500, "", "b" * 2000, "ab"]
    (tmp_path / "a.jsonl").write_bytes(lines(found))
    flags = ("--shard-tokens", 7, "--val-fraction", 0)
    make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o", *flags)
    lengths = [len(read_bin(path).tokens) for path in sorted((tmp_path / "o").glob("train_*.bin"))]
    assert set(lengths[:-1]) == {7} and 1 <= lengths[-1] <= 7
    assert tokens(tmp_path / "o") == expected([text for text in found if text])
    index = json.loads((tmp_path / "o" / "index.json").read_text())
    assert index["splits"]["train"]["shards"] == lengths and index["left_out"] == {"empty": 1}


def test_long_text_is_cut_without_a_change(tmp_path, ranks, monkeypatch):
    """Wherever a block ends, in text and in a document that a worker cuts."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 500)
    monkeypatch.setattr("llamac.data.encode.BLOCK_BYTES", 200)
    monkeypatch.setattr("llamac.data.encode._BATCH", 100)
    rng = random.Random(1)
    text = "".join(rng.choice(["ab", " the", "\n", "\r", ";", " ", "é"]) for _ in range(5000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"ab")
    (tmp_path / "c.jsonl").write_bytes(lines([text]))
    make(tmp_path / "?.*", "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0)
    assert tokens(tmp_path / "o") == expected([text, "ab", text])


def test_validation_goes_by_the_text(tmp_path, ranks):
    """A document is on the same side in any file, at any place, and about the fraction of them is held
    out.
    """
    found = [f"document {i}" for i in range(1000)]
    (tmp_path / "a.jsonl").write_bytes(lines(found))
    (tmp_path / "b.jsonl").write_bytes(lines([*found[::-1], *found]))
    (tmp_path / "c.txt").write_text("|".join(found))
    held = []
    for name, more in (("a.jsonl", ()), ("b.jsonl", ()), ("c.txt", ("--separator", "|"))):
        out = tmp_path / name[0]
        make(tmp_path / name, "--tokenizer", ranks, "--out", out, "--val-fraction", 0.2, *more)
        train, val = (set(stories(out, split)) for split in ("train", "val"))
        assert not train & val and train | val == set(found)
        held.append(val)
    assert held[0] == held[1] == held[2] and 150 < len(held[0]) < 250


def test_a_lone_text_is_held_out_in_stretches(tmp_path, ranks):
    text = "".join(f"line {i}\n" for i in range(60_000))
    (tmp_path / "a.txt").write_text(text)
    make(tmp_path / "a.txt", "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0.2)
    train, val = tokens(tmp_path / "o"), tokens(tmp_path / "o", "val")
    assert sorted([*train, *val]) == sorted(expected([text])) and 0.1 < len(val) / len(train) < 0.5
    make(tmp_path / "a.txt", "--tokenizer", ranks, "--out", tmp_path / "p", "--val-tokens", 1000)
    assert len(tokens(tmp_path / "p", "val")) == 1000
    assert tokens(tmp_path / "p", "val") + tokens(tmp_path / "p") == expected([text])


def test_a_single_document_is_trained_on(tmp_path, ranks):
    """Whatever its hash says."""
    for i in range(8):
        (tmp_path / "a.jsonl").write_bytes(lines([f"one {i}"]))
        make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0.9)
        assert tokens(tmp_path / "o") == expected([f"one {i}"]) and not list((tmp_path / "o").glob("val*"))


def test_mix(tmp_path, ranks, monkeypatch, capsys):
    """Shares hold all the way, each source keeps its order, it ends with the first that has no more, the
    index has it.
    """
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    sources = {"web": texts(300, 1), "code": texts(150, 2)}
    sources = {n: [n + text.replace("<|endoftext|>", "") for text in x] for n, x in sources.items()}
    for name, found in sources.items():
        (tmp_path / f"{name}.jsonl").write_bytes(lines(found))
    made = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        named = [f"{name}={tmp_path / name}.jsonl" for name in sources]
        flags = ("--workers", workers, "--val-fraction", 0, "--mix", "web=0.7", "code=0.3")
        make(*named, "--tokenizer", ranks, "--out", out, *flags)
        made.append(content(out))
    assert made[0] == made[1]
    index = json.loads(made[0]["index.json"])
    assert [source["mix"] for source in index["sources"]] == [0.7, 0.3]
    assert index["mix_ended_by"] in sources and "mix: ended where" in capsys.readouterr().out
    ours = tokenizer.load(ranks)
    found = stories(tmp_path / "1", "train")
    for name in sources:
        taken = [text for text in found if text.startswith(name)]
        assert taken == sources[name][: len(taken)]
    sizes = np.array([len(ours.encode(text)) + 1 for text in found])
    web = np.array([text.startswith("web") for text in found])
    share = np.cumsum(sizes * web) / np.cumsum(sizes)
    assert abs(share[100:] - 0.7).max() < 0.05
    given = {source["name"]: source["train_tokens"] for source in index["sources"]}
    assert given["web"] == int(sizes[web].sum())


@pytest.mark.parametrize(
    "mix, stop, crash",
    [
        pytest.param(False, 1, True, marks=pytest.mark.more),
        (True, 4, False),
        pytest.param(False, 9, True, marks=pytest.mark.more),
        (True, 9, True),
    ],
)
def test_stopped_and_continued(tmp_path, ranks, monkeypatch, capsys, mix, stop, crash):
    """Ctrl-C, or a death without a word: the same command goes on, to the same bytes; whole shards are
    kept.
    """
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    (tmp_path / "a.jsonl").write_bytes(b"broken\n" + lines(texts(100, 1)))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(texts(100, 2))))
    (tmp_path / "c.txt").write_bytes("\n".join(text.replace("\0", "") for text in texts(100, 3)).encode())
    named = [f"{path.name[0]}={path}" for path in sorted(tmp_path.glob("?.*"))]
    flags = ["--tokenizer", ranks, "--shard-tokens", 2000, "--val-fraction", 0.2, "--workers", 2]
    flags += ["--mix", "a=1", "b=2", "c=1"] if mix else []
    make(*named, *flags, "--out", tmp_path / "whole")
    stop_at(monkeypatch, stop * (10 if mix else 2), None if crash else signal.SIGINT)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError if crash else SystemExit) as ended:
        make(*named, *flags, "--out", out)
    assert crash or ended.value.code == 130
    assert [path.name for path in out.iterdir()] == ["partial"]  # nothing looks whole
    kept = {path.name: path.stat().st_ino for path in (out / "partial").glob("*.bin")}
    assert crash or "the same command continues from here" in capsys.readouterr().err
    whole = json.loads((out / "partial" / "state.json").read_text())["writers"] if kept else {}
    make(*named, *flags, "--out", out)
    assert content(out) == content(tmp_path / "whole")
    for split, writer in whole.items():
        for number in range(len(writer["shards"])):
            assert (out / f"{split}_{number:03d}.bin").stat().st_ino == kept[f"{split}_{number}.bin"]
    assert stop < 9 or sum(len(writer["shards"]) for writer in whole.values()) > 2


def test_another_command_begins_anew(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    (tmp_path / "a.jsonl").write_bytes(lines(texts(100, 1)))
    stop_at(monkeypatch, 5, signal.SIGTERM)
    flags = (tmp_path / "a.jsonl", "--tokenizer", ranks, "--shard-tokens", 1000, "--out", tmp_path / "o")
    with pytest.raises(SystemExit) as ended:
        make(*flags)
    assert ended.value.code == 143
    make(*flags, "--val-fraction", 0)
    assert tokens(tmp_path / "o") == expected(texts(100, 1))


def test_ctrl_c_of_the_program(tmp_path, ranks):
    """A process group that gets SIGINT, as from a terminal: workers included, one line, exit code 130."""
    (tmp_path / "a.jsonl").write_bytes(lines(texts(8_000, 1)))
    command = [sys.executable, "-m", "llamac", "data", tmp_path / "a.jsonl", "--tokenizer", ranks]
    command += ["--workers", "2", "--shard-tokens", "20000", "--out", tmp_path / "o"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and not list((tmp_path / "o").glob("partial/train_1.bin")):
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and len(said.splitlines()) == 1 and "continues from here" in said
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "continues after" in done.stdout
    subprocess.run([*command[:-1], tmp_path / "p"], cwd=ROOT, check=True, capture_output=True)
    assert content(tmp_path / "o") == content(tmp_path / "p")


def test_already_there(tmp_path, ranks, capsys):
    """A finished data set is left alone; a damaged one is made again, to the same bytes."""
    (tmp_path / "a.jsonl").write_bytes(lines(texts(30)))
    flags = (tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o", "--shard-tokens", 500)
    make(*flags)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    make(*flags)
    assert "already there" in capsys.readouterr().out
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "o").iterdir()}
    whole, shard = content(tmp_path / "o"), tmp_path / "o/train_001.bin"
    # An earlier version did not write the index.
    for damage in (lambda: os.truncate(shard, shard.stat().st_size - 1), (tmp_path / "o/index.json").unlink):
        damage()
        make(*flags)
        assert "already there" not in capsys.readouterr().out and content(tmp_path / "o") == whole
    (tmp_path / "a.jsonl").write_bytes(lines(texts(3)))
    make(*flags)
    assert "already there" not in capsys.readouterr().out
    assert set(path.name for path in (tmp_path / "o").glob("*.bin")) < before.keys()  # older shards are gone


def test_a_line_without_end(tmp_path, ranks):
    """300 MiB without a line's end: it is left out, and memory does not grow with it."""
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.write(lines(["one"]))
        file.seek(300 << 20, os.SEEK_CUR)
        file.write(b"\n" + lines(["two"]))
    # By the process itself: those who wait for it also count what its parent held before it.
    measured = "import atexit, resource, sys; from pathlib import Path; from llamac.__main__ import main\n"
    measured += "status = Path('/proc/self/status')\n"
    measured += "children = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
    measured += "atexit.register(lambda: print(status.read_text(), 'of workers:', children(), 'kB'))\n"
    measured += "sys.argv.insert(1, 'data'); main()"
    command = [sys.executable, "-c", measured, tmp_path / "a.jsonl", "--tokenizer", ranks]
    command += ["--out", tmp_path / "o", "--val-fraction", "0", "--workers", "1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path / 'a.jsonl'}: line 2: longer than 16 MiB" in said
    assert tokens(tmp_path / "o") == expected(["one", "two"])
    found = re.findall(r"(?:VmHWM|of workers):\s+(\d+) kB", said)
    assert len(found) == 2 and max(map(int, found)) < 400 << 10


def test_lines_between_long_ones(tmp_path, monkeypatch):
    """Each line is in a block, with its number, or too long; from any block on, the blocks are the same."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    monkeypatch.setattr(documents, "MOST_DOCUMENT", 300)
    rng = random.Random(1)
    found = {i: b"x" * rng.choice([1, 1, 9, 30, 500, 801]) for i in range(1, 400)}
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(found.values()))
    file = inputs.InputFile(str(tmp_path / "a.jsonl"), "jsonl")
    read = partial(documents._lines, file, documents.Reading())
    blocks = list(read())
    kept = {b.first + i: line for b in blocks for i, line in enumerate(b.content.split(b"\n")) if line}
    assert kept == {i: line for i, line in found.items() if len(line) < 300}
    assert [i for b in blocks for _, i, _ in b.skipped] == [i for i in found if i not in kept]
    for i, block in enumerate(blocks, 1):
        assert list(read(*block.after)) == blocks[i:]


# Names of data sets: files of the hub's format, made here


def write_parquet(path: Path, **columns: list) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def test_tinystories(tmp_path, ranks):
    write_parquet(tmp_path / "hub/train-00000-of-00002-2d5a.parquet", text=["Once.", "Twice."])
    write_parquet(tmp_path / "hub/train-00001-of-00002-5852.parquet", text=["Thrice."])
    write_parquet(tmp_path / "hub/validation-00000-of-00001-869c.parquet", text=["The end."])
    make("tinystories", "--local", tmp_path / "hub", "--tokenizer", ranks, "--out", tmp_path / "o")
    assert stories(tmp_path / "o", "train") == ["Once.", "Twice.", "Thrice."]
    assert stories(tmp_path / "o", "val") == ["The end."]
    (tmp_path / "txt").mkdir()
    text = "\nOnce.\n<|endoftext|>\nTwice.\n<|endoftext|>\n"
    (tmp_path / "txt/TinyStoriesV2-GPT4-train.txt").write_text(text)
    (tmp_path / "txt/TinyStoriesV2-GPT4-valid.txt").write_text("\nThe end.\n<|endoftext|>\n")
    make("tinystories", "--local", tmp_path / "txt", "--tokenizer", ranks, "--out", tmp_path / "p")
    assert stories(tmp_path / "p", "train") == ["\nOnce.\n", "\nTwice.\n"]
    assert stories(tmp_path / "p", "val") == ["\nThe end.\n"]


@pytest.mark.parametrize("size", ["2", "103"])
def test_wikitext(tmp_path, ranks, size):
    """Rows are lines; an article begins with a heading of the first level."""
    one = ["", " = Valkyria = \n", "", " Text . \n", " = = Section = = \n", " More . \n"]
    two = [" = Robert Boulter = \n", " He = is = an actor . \n", ""]
    folder = tmp_path / f"wikitext-{size}-raw-v1"
    write_parquet(folder / "train-00000-of-00001.parquet", text=one + two)
    write_parquet(folder / "validation-00000-of-00001.parquet", text=two)
    write_parquet(folder / "test-00000-of-00001.parquet", text=["not this"])
    make(f"wikitext-{size}", "--local", folder, "--tokenizer", ranks, "--out", tmp_path / "o")
    articles = ["".join(one), "".join(two)]
    assert stories(tmp_path / "o", "train") == articles and stories(tmp_path / "o", "val") == articles[1:]
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "wiki.train.raw").write_text("".join(row or " \n" for row in one + two))
    (raw / "wiki.valid.raw").write_text("".join(two))
    make(f"wikitext-{size}", "--local", raw, "--tokenizer", ranks, "--out", tmp_path / "p")
    assert len(stories(tmp_path / "p", "train")) == 2 and stories(tmp_path / "p", "val") == articles[1:]


def test_c4(tmp_path, ranks):
    rows = [{"text": f"page {i}", "timestamp": "2019-04-25T12:57:54Z", "url": "x"} for i in range(6)]
    for name, part in (("c4-train.00000-of-01024", rows[:5]), ("c4-validation.00000-of-00008", rows[5:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / "en").mkdir(exist_ok=True)
        (tmp_path / "en" / f"{name}.json.gz").write_bytes(gzip.compress(text.encode()))
    make("c4", "--local", tmp_path / "en", "--tokenizer", ranks, "--out", tmp_path / "o")
    assert stories(tmp_path / "o", "train") == [f"page {i}" for i in range(5)]
    assert stories(tmp_path / "o", "val") == ["page 5"]


def test_fineweb_edu(tmp_path, ranks):
    """No validation split: documents are held out by their hash."""
    pages = [f"page {i}" for i in range(200)]
    write_parquet(tmp_path / "sample/10BT/000_00000.parquet", text=pages, id=pages, score=[3.5] * 200)
    flags = ("--val-fraction", 0.3, "--tokenizer", ranks, "--out", tmp_path / "o")
    make("fineweb-edu", "--local", tmp_path / "sample", *flags)
    assert sorted(stories(tmp_path / "o", "train") + stories(tmp_path / "o", "val")) == sorted(pages)
    assert 30 < len(stories(tmp_path / "o", "val")) < 90


def test_tinyshakespeare(tmp_path, monkeypatch):
    """Paragraphs, the first tokens for validation, GPT-2's tokenizer; a stand-in for its ranks, which it
    downloads.
    """
    text = "First Citizen:\nBefore we proceed\n\nAll:\nSpeak, speak.\n\n\n\nlast"
    (tmp_path / "input.txt").write_text(text, encoding="utf-8-sig")  # the mark is no part of it
    monkeypatch.setattr(tokenizer, "gpt2_ranks", lambda: RANKS)
    make("tinyshakespeare", "--local", tmp_path / "input.txt", "--out", tmp_path / "o", "--val-tokens", 40)
    val, train = tokens(tmp_path / "o", "val"), tokens(tmp_path / "o")
    assert len(val) == 40 and recipes.RECIPES["tinyshakespeare"].val_tokens == 32768
    marked = "<|endoftext|>" + text.replace("\n\n", "\n\n<|endoftext|>")
    assert tokenizer.load(tmp_path / "o" / "tokenizer.tiktoken").decode([*val, *train]) == marked


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What is asked of the hub, which has three rows in each split of every data set."""
    datasets = pytest.importorskip("datasets")
    found = []

    def load_dataset(name, config, split, streaming):
        found.append((name, config, split, streaming))
        rows = [{"text": f"{split} {i}", "n": i} for i in range(3)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return found


def test_names_of_the_hub(tmp_path, ranks, asked, monkeypatch):
    """Rows as `datasets` streams them, and what a name of ours asks the hub for. Fields are checked also
    where only the rows name them.
    """
    flags = ("--tokenizer", ranks, "--workers", 1)
    dev = ("--dataset", "some/set:small", "--split", "dev")
    make(*dev, *flags, "--val-fraction", 0, "--out", tmp_path / "o")
    assert stories(tmp_path / "o", "train") == ["dev 0", "dev 1", "dev 2"]
    make("tinystories", *flags, "--out", tmp_path / "p")
    assert stories(tmp_path / "p", "val") == [f"validation {i}" for i in range(3)]
    assert stories(tmp_path / "p", "train") == [f"train {i}" for i in range(3)]
    assert asked == [
        ("some/set", "small", "dev", True),
        ("roneneldan/TinyStories", None, "validation", True),
        ("roneneldan/TinyStories", None, "train", True),
    ]
    with pytest.raises(InputError, match="some/set@train: expected a field body, found text, n: name it by"):
        make("--dataset", "some/set", "--field", "body", *flags, "--out", tmp_path / "q")
    datasets = pytest.importorskip("datasets")
    bare = datasets.IterableDataset.from_generator(lambda: iter([{"body": "x"}]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: bare)
    with pytest.raises(InputError, match="some/set@train: expected a field text, found body: name it by"):
        make("--dataset", "some/set", *flags, "--out", tmp_path / "q")


def test_a_stream_goes_on_after_a_row(asked):
    """Where a state of earlier versions, which is the row alone, says so."""
    (block,) = documents.blocks([hub.describe("some/set", "train")], documents.Reading(), [0, 2])
    assert [piece.text for piece in block.content] == ["train 2"]


def test_mix_of_the_hub(tmp_path, ranks, asked):
    """Data sets with a name in llamac and any others get the names that the user gives them."""
    named = ("a=c4", "b=fineweb-edu", "d=hub:some/set:small", "--dataset", "other/set")
    shares = ("a=1", "b=1", "d=1", "other/set=1")
    make(*named, "--mix", *shares, "--tokenizer", ranks, "--val-fraction", 0, "--out", tmp_path / "o")
    assert sorted(stories(tmp_path / "o", "train")) == [f"train {i}" for i in range(3) for _ in range(4)]
    assert stories(tmp_path / "o", "val") == [f"validation {i}" for i in range(3)]
    index = json.loads((tmp_path / "o" / "index.json").read_text())
    found = {source["name"]: source["mix"] for source in index["sources"]}
    assert found == {"a (validation)": None, "a": 0.25, "b": 0.25, "d": 0.25, "other/set": 0.25}
    assert asked[2:] == [
        ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True),
        ("some/set", "small", "train", True),
        ("other/set", None, "train", True),
    ]


def test_a_lost_connection(tmp_path, ranks, monkeypatch):
    """The same command continues, to the same bytes, and does not read whole files of the data set again."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(prepare, "_SAVE_SECONDS", 0)
    found, read, lost = texts(120, 1), [], [100]

    def rows(files):
        for file in files:
            for i in range(file, file + 20):
                if i in lost:
                    raise ConnectionError("reset by peer")
                read.append(i)
                yield {"text": found[i]}

    def load_dataset(*_, **__):
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(0, 120, 20))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    flags = ("hub:some/set", "--tokenizer", ranks, "--shard-tokens", 3000, "--workers", 2, "--out")
    refuses(r"read it from the hub: reset by peer; .*, and the same command", make, *flags, tmp_path / "o")
    lost.clear()
    state = json.loads((tmp_path / "o" / "partial" / "state.json").read_text())
    row = state["feeds"][0]["after"][1]
    read.clear()
    make(*flags, tmp_path / "o")
    assert 20 < row < 100 and read == list(range(row // 20 * 20, 120))
    make(*flags, tmp_path / "p")
    assert content(tmp_path / "o") == content(tmp_path / "p")


def test_bad_input_late(tmp_path, ranks, monkeypatch, capsys):
    """What was prepared before it is kept, where there is any."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(prepare, "_SAVE_SECONDS", 0)
    found = texts(200, 1)
    (tmp_path / "a.jsonl").write_bytes(lines(found[:100]) + b"{broken\n" + lines(found[100:]))
    flags = (tmp_path / "a.jsonl", "--tokenizer", ranks, "--val-fraction", 0, "--workers", 1, "--out")
    kept = f"{tmp_path / 'o' / 'partial'} keeps the finished part, and the same command continues it"
    with pytest.raises(InputError, match=f"line 101: broken JSON: --strict is set; .*; {re.escape(kept)}$"):
        make(*flags, tmp_path / "o", "--strict")
    make(*flags, tmp_path / "o")
    assert "continues after" in capsys.readouterr().out
    make(*flags, tmp_path / "p")
    assert content(tmp_path / "o") == content(tmp_path / "p") and tokens(tmp_path / "o") == expected(found)
    (tmp_path / "a.jsonl").write_bytes(b"{broken\n")
    refuses(r"expected documents, found none: 1 left out: broken JSON$", make, *flags, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_hub_without_a_network(tmp_path, ranks):
    pytest.importorskip("datasets")  # conftest.py sets HF_HUB_OFFLINE
    with pytest.raises(InputError, match=r"no/where@train: cannot read it .*; without a network, fetch"):
        make("--dataset", "no/where", "--tokenizer", ranks, "--out", tmp_path / "new" / "o")
    assert not (tmp_path / "new").exists()


# Bad input


@pytest.mark.parametrize(
    "library, name", [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst"), ("datasets", "")]
)
def test_a_library_that_is_missing(tmp_path, ranks, monkeypatch, library, name):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, library, None)
    what = [tmp_path / name] if name else ["--dataset", "x"]
    with pytest.raises(InputError, match=f"needs {library}, which is not installed: pip install {library}$"):
        make(*what, "--tokenizer", ranks, "--out", tmp_path / "o")


BAD = {
    "gzip.jsonl": (gzip.compress(b"{}"), "expected JSON lines, as its name says, found gzip"),
    "text.gz": (b"text", "expected gzip, as its name says, found something else"),
    "zst.jsonl.gz": (b"\x28\xb5\x2f\xfd12", "expected gzip, as its name says, found Zstandard"),
    "text.parquet": (b"text", "expected Parquet, as its name says, found something else"),
    "cut.parquet": (b"PAR1", "expected Parquet: "),
    "text.arrow": (b"text", "expected Arrow, as its name says, found something else"),
    "parquet.txt": (b"PAR1", "expected UTF-8 text, as its name says, found Parquet"),
    "bytes.txt": (b"\xff\xff", "expected UTF-8 text, found a file that is not text: not UTF-8"),
    "nul.txt": (b"a\0", "expected UTF-8 text, found a file that is not text: contains NUL characters"),
    "cut.jsonl.gz": (None, "expected gzip, found damaged data"),
    "cut.jsonl.zst": (None, "expected Zstandard, found damaged data"),
    "x.csv": (b"a,b", "expected text, JSON lines, Parquet or Arrow, found CSV: "),
    "x.tsv.gz": (gzip.compress(b"a"), "expected text, JSON lines, Parquet or Arrow, found TSV: "),
    "text.json": (b"text", "expected JSON lines or a JSON array, found other text"),
    "cut.json": (b'[{"text": "a"}, {"te', "item 2: expected JSON, a value, found"),
    "no_comma.json": (b'[{"text": "a"} {"text": "b"}]', "item 2: expected JSON, a comma or the array's end"),
    "more.json": (b'[{"text": "a"}] {"text": "b"}', "item 2: expected JSON, nothing behind the array"),
    "deep.json": (b"[" * 100_000, "item 1: expected JSON, fewer levels of nesting"),
    "broken.jsonl": (b"{\n[1]\n{}\n", "expected documents, found none: 1 left out: broken JSON, 1 left out:"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_what_its_name_says(tmp_path, ranks, name):
    data, message = BAD[name]
    if name == "cut.jsonl.gz":
        data = gzip.compress(lines(texts(200)))[:-9]
    elif name == "cut.jsonl.zst":
        data = pytest.importorskip("zstandard").compress(lines(texts(200)))[:-3]
    (tmp_path / name).write_bytes(data)
    said = refused(make, tmp_path / name, "--tokenizer", ranks, "--out", tmp_path / "new" / "o")
    assert said.startswith(f"{tmp_path / name}: {message}") and not (tmp_path / "new").exists()


def arrow(columns: dict) -> bytes:
    pa = pytest.importorskip("pyarrow")
    sink, table = io.BytesIO(), pa.table(columns)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_that_are_not_utf8(tmp_path, ranks, capsys, kind):
    pa = pytest.importorskip("pyarrow")
    column = pa.array([b"one", b"\xff", b"three"]).view(pa.string())
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        write_parquet(path, text=column)
    else:
        path.write_bytes(arrow({"text": column}))
    make(path, "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0)
    assert tokens(tmp_path / "o") == expected(["one", "three"])
    assert f"left out: {path}: line 2: not UTF-8" in capsys.readouterr().out


def test_damaged_tables_are_refused(tmp_path):
    """In a process of its own: pyarrow reads past its memory, and raises nearly anything."""
    found = texts(40)
    good = arrow({"text": found, "turns": [[{"role": "user", "content": text}] for text in found]})
    program = """if True:
        import random, sys
        from pathlib import Path
        from llamac.data import documents, inputs
        from llamac.data.block import values
        from llamac.base.errors import InputError
        good, path, refused = Path(sys.argv[1]).read_bytes(), sys.argv[1] + ".arrow", 0
        for seed in range(400):
            rng, bad = random.Random(seed), bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(bad) // 8) * 8
                bad[at + 3] ^= rng.choice([0x7F, 0x80, 0x40])
            Path(path).write_bytes(bad)
            for field in ("text", None):
                try:
                    for block in documents.blocks([inputs.describe(path)], documents.Reading(field), [0]):
                        list(values(block, field))
                except InputError:
                    refused += 1
        print(refused)
    """
    (tmp_path / "good").write_bytes(good)
    command = [sys.executable, "-c", program, tmp_path / "good"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 10, done.stderr[-500:]


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/x.arrow", "a/x.arrow", "..", ""])
def test_a_data_set_that_names_files_elsewhere(tmp_path, ranks, name):
    (tmp_path / "set").mkdir()
    (tmp_path / "x.arrow").write_bytes(arrow({"text": ["x"]}))
    (tmp_path / "set/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (tmp_path / "set/dataset_info.json").write_text("{}")
    wanted = r"state\.json: _data_files\[0\]\.filename: expected the name of a file in its folder"
    with pytest.raises(InputError, match=wanted):
        make(tmp_path / "set", "--tokenizer", ranks, "--out", tmp_path / "o")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_the_field_of_the_text(tmp_path, ranks, capsys, kind):
    """The only one with text, unless there is `text`; else the message names those that there are."""

    def write(name, **columns):
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            write_parquet(path, **columns)
        else:
            lines = "\n".join(map(json.dumps, rows))
            path.write_text(json.dumps(rows) if kind == "json" else lines)
        return path

    flags = ("--tokenizer", ranks, "--val-fraction", 0, "--out", tmp_path / "o", "--force")
    one = write("one", id=[1, 2], body=["a", "b"])
    make(one, *flags)
    assert tokens(tmp_path / "o") == expected(["a", "b"])
    assert f"{one}: the text is the field 'body'\n" in capsys.readouterr().out
    make(write("text", title=["x"], text=["a"]), *flags)
    assert tokens(tmp_path / "o") == expected(["a"]) and "the text is" not in capsys.readouterr().out
    two = write("two", title=["x"], body=["a"])
    for more, wanted in (([], "text"), (["--field", "content"], "content")):
        refused = rf"two\.{kind}: expected a field {wanted}, found title, body: name it by --field"
        for own in (flags[:2], ("--vocab-size", 300)):
            with pytest.raises(InputError, match=refused):
                make(two, *own, *more, "--out", tmp_path / "p")


def test_broken_lines(tmp_path, ranks, capsys):
    """Counted and named with file and line; --strict ends at the first."""
    path = tmp_path / "a.jsonl"
    rows = [b'{"text": "a"}', b"{broken", b'{"body": "x"}', b'{"text": null}', b'{"text": 5}']
    rows += [b'{"text": "\\ud800"}', b"", b'{"text": ""}']  # half of a pair; nothing
    path.write_bytes(b"\n".join([*rows, b"[" * 100_000, b'{"text": "\xff"}', b'{"text": "b"}']))
    flags = (path, "--tokenizer", ranks, "--val-fraction", 0)
    make(*flags, "--out", tmp_path / "o")
    assert tokens(tmp_path / "o") == expected(["a", "b"])
    said = capsys.readouterr().out
    reasons = {2: "broken JSON", 3: "no field 'text'", 4: "no text", 5: "int instead of text",
               6: "no Unicode"}  # fmt: skip
    reasons |= {8: "empty", 9: "broken JSON", 10: "broken JSON"}
    for line, reason in reasons.items():
        assert f"left out: {path}: line {line}: {reason}\n" in said
    assert "left out: 3 broken JSON, 1 no field 'text', 1 no text, 1 int instead of text" in said
    with pytest.raises(InputError, match=r"a.jsonl: line 2: broken JSON: --strict is set; without it, such"):
        make(*flags, "--strict", "--out", tmp_path / "p")
    assert not (tmp_path / "p").exists()


VOCAB = ["--vocab-size", 300]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected an input: files, folders, -, --dataset NAME, or stdlib, "),
        (["missing.txt"], "expected --tokenizer PATH, or --vocab-size N"),
        (["missing.txt", *VOCAB], "missing.txt: no such file or folder, and no pattern"),
        (["empty", *VOCAB], "empty: expected files of text, JSON lines, .* found none"),
        (["good.txt", "--vocab-size", 200], "--vocab-size: expected at least 256"),
        (["good.txt", "--vocab-size", 5000, "--out", "new/o"], "expected text that gives 4999 tokens"),
        (["good.txt", "--tokenizer", "missing"], "missing: cannot open: No such file"),
        (["good.txt", "--tokenizer", "good.txt"], "good.txt: line 1: expected a new token in base64"),
        (["good.txt", "--tokenizer", "empty"], "empty: expected a tokenizer in the directory"),
        (["good.txt", "--tokenizer", "bad.json"], "bad.json: expected a tokenizer.json"),
        (["good.txt", "--tokenizer", "sp.model"], "sp.model: expected a rank file, found sentencepiece's"),
        (["good.txt", *VOCAB, "--val-fraction", 1], "--val-fraction: expected 0 to below 1"),
        (["good.txt", *VOCAB, "--workers", 0], "--workers: expected at least 1, found 0"),
        (["good.txt", *VOCAB, "--mix", "a=1"], "--mix: expected a share of each of good.txt"),
        (["good.txt", *VOCAB, "--mix", "a=x"], "--mix a=x: expected NAME=SHARE"),
        (["c4", "--local", "empty", *VOCAB], "empty: expected files"),
        (["table.parquet", "--field", "text", *VOCAB], "table.parquet: expected a field text, found body"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("some text\n")
    Path("empty").mkdir()
    Path("bad.json").write_text("{}")
    Path("sp.model").write_bytes(b"\n\x0e\n\x05<unk>")
    write_parquet(Path("table.parquet"), body=["x"])
    before = sorted(tmp_path.rglob("*"))
    assert re.search(message, refused(make, "--out", "o", *arguments))
    assert sorted(tmp_path.rglob("*")) == before
    assert "expected --out DIR" in refused(make, "good.txt")


def test_exit_code(tmp_path):
    done = run_llamac("data", "none.txt", "--vocab-size", 300, "--out", tmp_path / "o", code=2)
    assert len(done.stderr.splitlines()) == 1 and "none.txt: no such file" in done.stderr


def test_a_worker_that_dies(tmp_path, ranks, monkeypatch):
    """Out of memory, for one: a line that says so, and what is done is kept."""
    monkeypatch.setattr(prepare, "encode_block", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    (tmp_path / "a.jsonl").write_bytes(lines(texts(3)))
    with pytest.raises(ChildProcessError, match="a worker was killed; the same command continues"):
        make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o")
    monkeypatch.undo()
    make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o", "--val-fraction", 0)
    assert tokens(tmp_path / "o") == expected(texts(3))


class Odd(Exception):
    """That pickle cannot make again."""

    def __init__(self, number: int, word: str):
        super().__init__(f"{number} {word}")


def test_a_worker_that_fails(tmp_path, ranks, monkeypatch):
    """Its error arrives, whatever its class."""

    def fail(*_):
        raise Odd(7, "pieces")

    monkeypatch.setattr(prepare, "encode_block", fail)
    (tmp_path / "a.jsonl").write_bytes(lines(texts(3)))
    with pytest.raises(RuntimeError, match="Odd: 7 pieces"):
        make(tmp_path / "a.jsonl", "--tokenizer", ranks, "--out", tmp_path / "o")


@pytest.mark.parametrize("total", [1_000_000, None])
def test_progress(capsys, total):
    """A line now and then where stderr is no terminal; rates leave out the part of an earlier run."""
    shown = progress.Progress(total, 500_000, 1_000_000)
    shown._bar.mininterval = shown._bar.delay = 0
    shown.show(750_000, 1_500_000, 12)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ("750k/1.00M" in said and "1,500,000 tokens" in said) if total else "1.50M/?" in said, said
    assert "12 documents" in said and shown._bar.initial == (500_000 if total else 1_000_000)
    shown.close()
    assert capsys.readouterr().err.endswith("\r")


def test_a_stream_knows_how_much_it_read(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"line\n" * 100))
    with inputs.Stream(inputs.describe(str(tmp_path / "a.txt.gz"))) as stream:
        assert stream.skip(12) == 2 and stream.readline() == b"ne\n"
        assert stream.consumed() == (tmp_path / "a.txt.gz").stat().st_size
