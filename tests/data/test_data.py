"""llamac.data: .bin files, the order of the data, the default text; test_prepare.py has the tool."""

import os
import shutil
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from run import refused, refuses, run_llamac

from llamac import _native
from llamac.base.errors import InputError
from llamac.data import Loader, permute, read_bin, tokenizer, write_bin
from llamac.data import command as tool
from llamac.data.documents import cut_text
from llamac.data.tokens import splitmix64


def shards(folder: Path, *lengths: int, vocab: int = 1000, seed: int = 0) -> list[np.ndarray]:
    """Random shards train_000.bin, … and their tokens."""
    rng = np.random.default_rng(seed)
    all_tokens = [rng.integers(0, vocab, n, dtype=np.uint32) for n in lengths]
    for i, tokens in enumerate(all_tokens):
        write_bin(folder / f"train_{i:03d}.bin", tokens, vocab)
    return all_tokens


# permute


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1009, 4095, 4096, 4097, 100_003])
def test_permute_is_a_bijection(size):
    everywhere = np.arange(size)
    permuted = permute(everywhere, size, 42, 3)
    assert np.array_equal(np.sort(permuted), everywhere)
    assert size < 20 or not np.array_equal(permuted, everywhere)


def test_permute_depends_on_seed_and_epoch():
    index = np.arange(1000)
    orders = [permute(index, 1000, seed, epoch) for seed in (0, 1, 2**63 - 1) for epoch in (0, 1, 2**40)]
    assert len({order.tobytes() for order in orders}) == len(orders)


def permute_as_specified(index: int, size: int, seed: int, epoch: int) -> int:
    """The definition, in Python's integers."""
    wrap = 2**64 - 1

    def mix(x):
        z = (x + 0x9E3779B97F4A7C15) & wrap
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        return z ^ (z >> 31)

    base = mix(seed ^ mix(epoch))
    half = next(h for h in range(1, 33) if 4**h >= size)
    x, mask = index, 2**half - 1
    while True:
        left, right = x >> half, x & mask
        for i in range(6):
            left, right = right, left ^ (mix(right ^ mix((base + i) & wrap)) & mask)
        x = left << half | right
        if x < size:
            return x


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000, 65537, 2**32 + 1, 2**62 - 57])
def test_permute_follows_its_definition(size):
    for index in {0, size // 3, size - 1}:
        for seed, epoch in ((0, 0), (42, 7), (2**63 - 1, 2**33)):
            assert permute([index], size, seed, epoch)[0] == permute_as_specified(index, size, seed, epoch)


def test_permute_known_values():
    # splitmix64 of seed 0 begins with e220a8397b1dcdaf in its author's program.
    assert splitmix64(np.uint64(0)) == 0xE220A8397B1DCDAF
    assert permute(np.arange(10), 10, 42, 0).tolist() == [1, 3, 9, 6, 2, 5, 4, 0, 7, 8]
    assert permute(np.arange(10), 10, 42, 1).tolist() == [5, 8, 3, 2, 0, 4, 9, 1, 6, 7]


# .bin files


@pytest.mark.parametrize("vocab, width", [(1000, 2), (1 << 16, 2), ((1 << 16) + 1, 4), (128256, 4)])
def test_bin_round_trip(tmp_path, vocab, width):
    tokens = np.array([0, 1, vocab - 1, 7], np.uint32)
    write_bin(tmp_path / "a.bin", tokens, vocab, 0xFEDCBA9876543210)
    shard = read_bin(tmp_path / "a.bin")
    assert (tmp_path / "a.bin").stat().st_size == 1024 + 4 * width
    assert np.array_equal(shard.tokens, tokens)
    assert (shard.vocab_size, shard.tokenizer_hash) == (vocab, 0xFEDCBA9876543210)
    header = np.fromfile(tmp_path / "a.bin", "<u4", 256)
    assert header[:3].tolist() == ([20240520, 1, 4] if width == 2 else [20240801, 7, 4])
    assert not header[4:6].any() and not header[8:].any()
    assert not list(tmp_path.glob("*.tmp"))


def test_bin_of_llm_c(tmp_path):
    """A file as llm.c writes it: nothing in the header but magic, version and count."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 3
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.array([5, 6, 50256], "<u2").tobytes())
    shard = read_bin(tmp_path / "a.bin")
    assert shard.tokens.tolist() == [5, 6, 50256] and shard.vocab_size == shard.tokenizer_hash == 0


def test_bin_longer_than_2_gib_tokens(tmp_path):
    """A sparse file of 2^32 + 5 tokens: the count's high half stands in word 5."""
    n = 2**32 + 5
    header = np.zeros(256, "<u4")
    header[[0, 1, 2, 5]] = 20240520, 1, 5, 1
    with open(tmp_path / "a.bin", "wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2 * n)
        file.seek(1024 + 2 * (n - 1))
        file.write(np.uint16(77).tobytes())
    assert len(read_bin(tmp_path / "a.bin").tokens) == n
    loader = Loader(str(tmp_path / "a.bin"), 4, 100, 1)
    assert loader.sequences == (n - 1) // 4
    assert loader.sequence(loader.sequences - 1).tolist() == [0, 0, 0, 0, 77]


def malformed():
    """(name, how it spoils a good file's bytes, what the message says)."""

    def word(index, value):
        return lambda data: data[: 4 * index] + np.uint32(value).tobytes() + data[4 * index + 4 :]

    yield "empty", lambda data: b"", "header: expected 1024 bytes, found 0"
    for cut in (1, 3, 4, 7, 8, 11, 12, 16, 20, 24, 28, 32, 1023):
        yield f"cut at {cut}", lambda data, cut=cut: data[:cut], f"header: expected 1024 bytes, found {cut}"
    yield "magic", word(0, 20240521), "header: expected magic"
    yield "version", word(1, 2), "header: expected magic"
    yield "version of the other width", word(1, 7), "header: expected magic"
    yield "no tokens", lambda data: data[:1024], "size: expected 1024"
    yield "last byte missing", lambda data: data[:-1], "size: expected 1024"
    yield "trailing byte", lambda data: data + b"\0", "size: expected 1024"
    yield "trailing token", lambda data: data + b"\0\0", "size: expected 1024"
    yield "count too small", word(2, 99), "size: expected 1024"
    yield "count too large", word(2, 101), "size: expected 1024"
    yield "count negative as int32", word(2, 0xFFFFFFFF), "size: expected 1024"
    yield "count beyond memory", word(5, 1), "size: expected 1024"
    yield "count whose bytes overflow 64 bits", word(5, 0x80000000), "size: expected 1024"
    yield "vocabulary", word(3, 1001), "vocabulary size: expected at most the model's 1000, found 1001"
    for index in (4, *range(8, 256, 13)):
        yield f"word {index}", word(index, 3), f"header word {index}: expected 0, found 3"


@pytest.mark.parametrize("spoil, message", [pytest.param(*case[1:], id=case[0]) for case in malformed()])
def test_malformed_bin(tmp_path, spoil, message):
    shards(tmp_path, 100)
    path = tmp_path / "train_000.bin"
    path.write_bytes(spoil(path.read_bytes()))
    given = 1, 42, 0, 0, 0, 1, *np.zeros((2, 1, 8), np.int32)
    for read, more in ((Loader, ()), (_native.micro_batch, given)):
        assert refused(read, str(path), 8, 1000, 1, *more).startswith(f"{path}: {message}")


@pytest.mark.parametrize("vocab", [1000, 70000])
def test_token_past_the_vocabulary(tmp_path, vocab):
    tokens = np.arange(100, dtype=np.uint32)
    tokens[37] = vocab
    write_bin(tmp_path / "a.bin", tokens, vocab)
    loader = Loader(str(tmp_path / "a.bin"), 8, vocab, 12)
    refuses(f"a.bin: token 37: expected an id below {vocab}, found {vocab}$", loader.micro_batch, 0, 0)


def test_a_shard_that_shrinks(tmp_path):
    shards(tmp_path, 100)
    loader = Loader(str(tmp_path / "train_000.bin"), 8, 1000, 4)
    os.truncate(tmp_path / "train_000.bin", 1024)
    refuses(r"train_000.bin: .*expected .* found 1024", loader.micro_batch, 0, 0)


def test_too_few_tokens(tmp_path):
    shards(tmp_path, 8)
    with pytest.raises(InputError, match=r"expected at least seq-len \+ 1 = 9 tokens in a file, found 8 in"):
        Loader(str(tmp_path / "*.bin"), 8, 1000, 1)
    refuses(r"nothing_.*: no such file", Loader, str(tmp_path / "nothing_*.bin"), 8, 1000, 1)
    shards(tmp_path, 9)
    assert Loader(str(tmp_path / "*.bin"), 8, 1000, 1).sequences == 1


# Loader


def naive_sequences(all_tokens: list[np.ndarray], T: int) -> list[list[int]]:
    return [t[i * T : i * T + T + 1].tolist() for t in all_tokens for i in range((len(t) - 1) // T)]


def test_sequences_over_shards(tmp_path):
    T = 16
    all_tokens = shards(tmp_path, 16 * 5, 16 * 5 + 1, 3, 0, 17, 16 * 4 + 7)
    loader = Loader(str(tmp_path / "train_*.bin"), T, 1000, 1)
    expected = naive_sequences(all_tokens, T)
    assert loader.sequences == len(expected) == 4 + 5 + 0 + 0 + 1 + 4
    assert loader.tokens == sum(map(len, all_tokens))
    assert [loader.sequence(i).tolist() for i in range(loader.sequences)] == expected


def test_shards_go_by_the_bytes_of_their_names(tmp_path):
    names = ["train_10.bin", "train_9.bin", "train_Z.bin", "train_a.bin", "train_é.bin"]
    for i, name in enumerate(names):
        write_bin(tmp_path / name, np.full(9, i, np.uint32), 1000)
    loader = Loader(str(tmp_path / "train_*.bin"), 8, 1000, 1)
    assert [int(loader.sequence(i)[0]) for i in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab", [1000, 70000])
@pytest.mark.parametrize("B, accum, world", [(1, 1, 1), (3, 2, 1), (2, 3, 4), (5, 1, 3)])
def test_micro_batches_follow_the_rule(tmp_path, vocab, B, accum, world):
    T, seed = 7, 123
    expected = naive_sequences(shards(tmp_path, 100, 60, 31, vocab=vocab), T)
    S = len(expected)
    loaders = [
        Loader(str(tmp_path / "*.bin"), T, vocab, B, accum, rank, world, seed) for rank in range(world)
    ]
    for step in range(6):  # several epochs
        for micro in range(accum):
            for rank, loader in enumerate(loaders):
                tokens, targets = loader.micro_batch(step, micro)
                assert tokens.shape == targets.shape == (B, T) and tokens.dtype == targets.dtype == np.int32
                for b in range(B):
                    p = ((step * accum + micro) * B + b) * world + rank
                    sequence = expected[permute_as_specified(p % S, S, seed, p // S)]
                    assert tokens[b].tolist() == sequence[:-1] and targets[b].tolist() == sequence[1:]


def test_stream_does_not_depend_on_the_devices(tmp_path):
    """Eight sequences per step, however divided, are the same set; an epoch visits each sequence once."""
    shards(tmp_path, 16 * 8 + 1)
    seen = {}
    for B, accum, world in ((8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8), (1, 4, 2)):
        loaders = [
            Loader(str(tmp_path / "*.bin"), 4, 1000, B, accum, rank, world, 5) for rank in range(world)
        ]
        rows = [
            sorted(row.tolist() for m in range(accum) for x in loaders for row in x.micro_batch(u, m)[0])
            for u in range(8)
        ]
        seen[B, accum, world] = rows
        epochs = [sorted(chain(*part)) for part in (rows[:4], rows[4:])]
        whole = sorted(x[:-1] for x in naive_sequences([loaders[0].shards[0].tokens], 4))
        assert epochs == [whole, whole]
    assert all(rows == seen[8, 1, 1] for rows in seen.values())
    assert seen[8, 1, 1][:4] != seen[8, 1, 1][4:]  # the epochs differ in order


# The default text


def text_of(pattern: Path, folder: Path) -> str:
    """All tokens of the shards, decoded with the tokenizer beside them."""
    made_with = tokenizer.load(folder / "tokenizer.tiktoken")
    out = []
    for path in sorted(pattern.parent.glob(pattern.name)):
        shard = read_bin(path)
        assert shard.tokenizer_hash == made_with.hash and shard.vocab_size == made_with.vocab_size
        out.append(made_with.decode(shard.tokens))
    return "".join(out)


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stdlib")
    assert "already there" not in run_llamac("data", "stdlib", "--out", out).stdout
    return out


def test_stdlib(stdlib):
    train, val = read_bin(stdlib / "train_000.bin"), read_bin(stdlib / "val_000.bin")
    assert train.vocab_size == 4096 and train.tokens.max() == 4095 and val.tokens.max() == 4095
    assert 0.04 < len(val.tokens) / len(train.tokens) < 0.1
    assert len(train.tokens) > 1_000_000
    assert np.unique(train.tokens).size > 3500  # nearly every token occurs: the tokenizer fits the text
    for shard, known in ((val, "class TarFile("), (train, "class OrderedDict(")):
        text = text_of(Path(shard.path), stdlib)
        assert text.startswith("<|endoftext|>") and known in text
    assert "class TarFile(" not in text_of(Path(train.path), stdlib)


@pytest.fixture
def library(tmp_path) -> Path:
    """Some modules of the standard library."""
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    for name in (
        "argparse",
        "tarfile",
        "subprocess",
        "doctest",
        "inspect",
        "typing",
        "csv",
        "pydoc",
        "turtle",
    ):
        source = Path(os.__file__).with_name(f"{name}.py")
        if source.exists():
            shutil.copy(source, folder)
    return folder


@pytest.mark.more
def test_stdlib_split_goes_by_name(tmp_path, library):
    """Taking packages away moves no other package to the other side."""
    (library / "test/test_x.py").write_text("left_out = 1\n")
    (library / "notutf8.py").write_bytes(b"x = '\xff'\n")
    flags = ("data", "stdlib", "--local", library, "--vocab-size", 1024, "--out")
    run_llamac(*flags, tmp_path / "a")
    (library / "inspect.py").unlink()
    (library / "doctest.py").unlink()
    run_llamac(*flags, tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        train, val = (text_of(folder / f"{split}_*.bin", folder) for split in ("train", "val"))
        assert "class ArgumentParser" in train and "class ArgumentParser" not in val
        assert "class TarFile" in val and "class TarFile" not in train
        assert "left_out" not in train + val and "notutf8" not in train + val
    (tmp_path / "none").mkdir()
    done = run_llamac("data", "stdlib", "--local", tmp_path / "none", "--out", tmp_path / "c", code=2)
    assert len(done.stderr.splitlines()) == 1


def test_llama3s_texts_have_a_begin_and_an_end(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < tokenizer.LLAMA3_RANKS:
        ranks[b"\xff" + len(ranks).to_bytes(4, "big")] = len(ranks)
    tokenizer.save(tmp_path / "tokenizer.model", ranks)
    (tmp_path / "a.txt").write_text("ab")
    named = ("--tokenizer", tmp_path / "tokenizer.model", "--val-fraction", 0)
    tool.main([str(word) for word in (tmp_path / "a.txt", "--out", tmp_path / "out", *named)])
    assert read_bin(tmp_path / "out/train_000.bin").tokens.tolist() == [128000, 97, 98, 128001]


@pytest.mark.parametrize("n_ranks", [256 + 775, tokenizer.GPT2_RANKS])  # Llama 3's and GPT-2's split pattern
def test_pieces_of_text_keep_the_tokens(n_ranks):
    """Wherever a file is cut. A vocabulary of all short strings of these characters would show a bad cut."""
    letters = [b" ", b"\n", b"\r", b";", b"a"]
    strings = [b"".join(parts) for n in (1, 2, 3, 4) for parts in product(letters, repeat=n)]
    ranks = {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *strings[5:]])}
    while len(ranks) < n_ranks:
        ranks[b"\xff" + len(ranks).to_bytes(4, "big")] = len(ranks)
    encoder = tokenizer.Tokenizer(ranks, 0)
    rng = np.random.default_rng(0)
    for _ in range(100):
        whole = b"".join(letters[i] for i in rng.integers(0, 5, 200))
        blocks = (whole[i : i + 5].decode() for i in range(0, len(whole), 5))
        pieces = list(cut_text(blocks, 1))
        assert len(pieces) > 2 and "".join(pieces).encode() == whole
        assert [i for piece in pieces for i in encoder.encode(piece)] == encoder.encode(whole.decode())


@pytest.mark.parametrize("tokens", [[1, 70000], [-1, 2], [[1, 2]]])
def test_tokens_that_a_file_cannot_hold(tmp_path, tokens):
    assert "expected token" in refused(write_bin, tmp_path / "t.bin", np.array(tokens), 50257)
    assert not list(tmp_path.iterdir())
