"""Byte-level BPE tokenizers in tiktoken's rank format: lines of `base64(token bytes) rank`, ranks 0 .. n-1.

Special tokens follow the ranks. 128,000 ranks are Llama 3's tokenizer.model and get Llama 3's special tokens;
any other file gets one, <|endoftext|>, as in GPT-2.
"""

import base64
import binascii
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import xxhash

from llamac.base.errors import InputError
from llamac.base.files import read_bytes, write_whole
from llamac.base.folders import how_to_fetch
from llamac.data import tokenizer_json, vocabulary
from llamac.data.bpe import GPT2_SPLIT, LLAMA3_SPLIT, byte_letters, encode_fast, rank_file, rank_hash
from llamac.data.tokens import Shard

RANK_FILE = "tokenizer.tiktoken"
LLAMA3_RANKS, GPT2_RANKS = 128000, 50256
_LLAMA3_NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}


def special_tokens(n_ranks: int) -> dict[str, int]:
    """Special tokens and their ids behind n_ranks ordinary tokens."""
    if n_ranks != LLAMA3_RANKS:
        return {"<|endoftext|>": n_ranks}
    unnamed = (i for i in range(256) if i not in _LLAMA3_NAMED)
    reserved = {i: f"reserved_special_token_{k}" for k, i in enumerate(unnamed)}
    return {f"<|{name}|>": LLAMA3_RANKS + i for i, name in sorted({**_LLAMA3_NAMED, **reserved}.items())}


class Tokenizer:
    """Text to token ids and back; load() makes one. In our data `bos` stands before each document, and
    `eos`, where that is another token, behind it: Llama 3's <|begin_of_text|> and <|end_of_text|>;
    elsewhere <|endoftext|> alone. `pad` fills a batch's short rows. `hash` is XXH3_64 of the rank file's
    bytes, as the .bin headers hold it."""

    cuttable = True  # as JsonTokenizer's

    def __init__(self, ranks: dict[bytes, int], hash: int, path: Path | None = None):
        self.ranks, self.n_ranks, self.path = ranks, len(ranks), path
        self.special = special_tokens(self.n_ranks)
        self.vocab_size = self.n_ranks + len(self.special)
        llama3 = self.n_ranks == LLAMA3_RANKS
        self.bos = self.special["<|begin_of_text|>" if llama3 else "<|endoftext|>"]
        self.eos = self.special["<|end_of_text|>"] if llama3 else None
        self.end = self.bos if self.eos is None else self.eos  # follows a document
        self.hash = hash
        self.pad = self.special["<|finetune_right_pad_id|>"] if llama3 else self.bos
        self.split = GPT2_SPLIT if self.n_ranks == GPT2_RANKS else LLAMA3_SPLIT
        self._encoding = tiktoken.Encoding(
            "llamac", pat_str=self.split, mergeable_ranks=ranks, special_tokens=self.special
        )
        self._backend: Any = None
        by_id = {rank: token for token, rank in ranks.items()}
        self._bytes = by_id | {rank: name.encode() for name, rank in self.special.items()}

    @property
    def special_ids(self) -> set[int]:
        return set(self.special.values())

    @cached_property
    def rank_hash(self) -> int:
        """XXH3_64 of the rank file that save() writes: `hash`, unless the file was written otherwise."""
        return rank_hash(self.ranks)

    @property
    def tokens(self) -> list[bytes]:
        """Bytes of each id."""
        return [self._bytes[id] for id in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Token ids of text; the names of special tokens in it are ordinary text."""
        return self._encoding.encode_ordinary(text)

    def encode_framed(self, text: str) -> list[int]:
        """encode(), with what the tokenizer sets around a text: nothing."""
        return self.encode(text)

    def encode_with_places(self, text: str) -> tuple[list[int], np.ndarray]:
        """encode(), but names of special tokens are these tokens; and where in the text each token begins and
        ends, in characters: [n, 2]."""
        ids = self._encoding.encode(text, allowed_special="all")
        letters = np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80  # a byte that begins a character
        before = np.concatenate([[0], np.cumsum(letters)])
        ends = np.cumsum([0, *(len(self._bytes[id]) for id in ids)])  # tokens have the bytes of the text
        inside = ~np.append(letters, True)[ends[:-1]]
        return ids, np.stack([before[ends[:-1]] - inside, before[ends[1:]]], 1)

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """encode() of each text: uint32 [n]."""
        found = ((text, encode_fast(self._encoding, text)) for text in texts)
        return [self._encode_slowly(text) if ids is None else ids for text, ids in found]

    def _encode_slowly(self, text: str) -> np.ndarray:
        if self._backend is None:
            self._backend = _backend(self)
            self._backend.encode_special_tokens = True
        return np.array(self._backend.encode(text).ids, np.uint32)

    @property
    def names(self) -> dict[str, str]:
        """Texts of the special tokens by their roles, as in tokenizer_config.json."""
        by_id = {id: name for name, id in self.special.items()}
        return {"bos_token": by_id[self.bos], "eos_token": by_id[self.end], "pad_token": by_id[self.pad]}

    def write_beside_tokens(self, folder: Path) -> None:
        """The rank file, and export()."""
        save(folder / RANK_FILE, self.ranks)
        export(folder, self)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. Bytes that are no UTF-8, and ids past the vocabulary, become U+FFFD."""
        return b"".join(self._bytes.get(int(i), b"\xff") for i in ids).decode("utf-8", errors="replace")


def save(path: str | Path, ranks: dict[bytes, int]) -> None:
    """Write a rank file; renamed into place when whole."""
    write_whole(path, rank_file(ranks))


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if not line:
            continue
        try:
            text, rank = line.split(b" ")
            token = base64.b64decode(text, validate=True)
            if rank != b"%d" % len(ranks) or not token or token in ranks:
                raise ValueError
        except (ValueError, binascii.Error):
            expected = f"a new token in base64 and rank {len(ranks)}"
            raise InputError(f"{path}: line {number}: expected {expected}, found {line[:60]!r}") from None
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise InputError(f"{path}: expected a rank for every byte, found none for byte {missing[0]}")
    return ranks


def of_ranks(ranks: dict[bytes, int]) -> Tokenizer:
    """The tokenizer of ranks, as if they had been read from the file that save() writes."""
    return Tokenizer(ranks, rank_hash(ranks))


def data_hash(own: Any) -> int:
    """The hash in shards: of the tokenizer's file; if export() made it from a rank file, of the rank file."""
    # Only export() sets this flag: other tokenizers need no comparison, which takes seconds.
    if isinstance(own, Tokenizer) or not own.ranks or not own.special_tokens.split:
        return own.hash
    exported = json.loads(_backend(of_ranks(own.ranks)).to_str())
    return own.rank_hash if exported == own.model else own.hash


def load(path: str | Path) -> Any:
    """The tokenizer of a tokenizer.json, of a vocabulary file with tokenizer.json beside it, of a rank file
    (tokenizer.tiktoken, or Llama 3's tokenizer.model), or of a directory with one of these: a JsonTokenizer
    or a Tokenizer. Raises InputError.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_directory(path)
    elif not path.exists():
        raise InputError(f"{path}: cannot open: No such file or directory{how_to_fetch(str(path))}")
    content = read_bytes(path)
    if path.suffix == ".json":
        return tokenizer_json.load(path)
    if path.suffix == ".vocab":
        hash, found = vocabulary.tokenizer_hash(path), tokenizer_json.load(path.parent)
        if hash != found.hash:
            raise InputError(f"{found.path}: expected the tokenizer of {path.name} (XXH3_64 {hash:016x})")
        return found
    # A message of protocol buffers begins with this byte; base64 has none such.
    if path.suffix == ".model" and content[:1] == b"\n":
        way = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it"
        other = f"sentencepiece's: name its tokenizer.json, {way}"
        raise InputError(f"{path}: expected a rank file, found {other}")
    return Tokenizer(_read_ranks(path, content), xxhash.xxh3_64_intdigest(content), path)


def _in_directory(folder: Path) -> Path:
    names = ("tokenizer.json", RANK_FILE, "tokenizer.model")
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if not found:
        expected = f"a tokenizer in the directory, one of {', '.join(names)}"
        raise InputError(f"{folder}: expected {expected}, found none")
    return found


def find(setting: str, shards: list[Shard]) -> Any:
    """The tokenizer of --tokenizer for these shards: a file as load() takes it; auto: tokenizer.tiktoken,
    tokenizer.vocab or tokenizer.model beside the first, if there; none: None. Raises InputError if one was
    made with another."""
    if setting == "none":
        return None
    folder = Path(shards[0].path).parent
    beside = [folder / name for name in (RANK_FILE, "tokenizer.vocab", "tokenizer.model")]
    paths = [path for path in beside if path.exists()] if setting == "auto" else [Path(setting)]
    if not paths:
        return None
    tokenizer = load(paths[0])
    for shard in shards:
        if shard.tokenizer_hash not in (0, tokenizer.hash):
            expected = f"the tokenizer that made {shard.path} (XXH3_64 {shard.tokenizer_hash:016x})"
            raise InputError(f"{paths[0]}: expected {expected}, found {tokenizer.hash:016x}")
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a third one, in tiktoken's order: by the rank of the third one."""
    pairs = []
    for token, rank in ranks.items():
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += [(rank, ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
    return [(a, b) for *_, a, b in sorted(pairs)]


def _splitter(pattern: str) -> Any:
    """Splits by the pattern, then spells bytes as letters."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, letters])


def _backend(tokenizer: Tokenizer) -> Any:
    """The same tokenizer as a tokenizers.Tokenizer."""
    from tokenizers import Tokenizer as Bpe
    from tokenizers import decoders, models

    letter = {byte: letter for letter, byte in byte_letters().items()}
    word = {token: "".join(letter[byte] for byte in token) for token in tokenizer.ranks}
    vocabulary = {word[token]: rank for token, rank in tokenizer.ranks.items()}
    merges = [(word[a], word[b]) for a, b in _merges(tokenizer.ranks)]
    bpe = Bpe(models.BPE(vocabulary, merges, ignore_merges=True))
    bpe.pre_tokenizer = _splitter(tokenizer.split)
    bpe.decoder = decoders.ByteLevel()
    names = sorted(tokenizer.special, key=tokenizer.special.__getitem__)
    bpe.add_special_tokens(names)
    return bpe


def export(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and tokenizer_config.json, with which transformers.AutoTokenizer encodes and
    decodes as the tokenizer does: the names of special tokens are ordinary text, and none is added."""
    bpe = _backend(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.names,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    texts = {"tokenizer.json": bpe.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}
    for name, text in texts.items():
        write_whole(Path(folder) / name, text.encode())


def train_bpe(texts: Iterable[str], n_ranks: int):
    """A byte-level BPE (tokenizers.Tokenizer) trained on texts, with Llama 3's split pattern."""
    from tokenizers import Tokenizer as Bpe
    from tokenizers import models, pre_tokenizers, trainers

    bpe = Bpe(models.BPE())
    bpe.pre_tokenizer = _splitter(LLAMA3_SPLIT)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_ranks, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def train(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Ranks of train_bpe(). Raises InputError where the text is too short to give that many."""
    letters = byte_letters()
    vocabulary = train_bpe(texts, n_ranks).get_vocab()
    if len(vocabulary) != n_ranks:
        found = f"found {len(vocabulary)}: use more text, or a smaller --vocab-size"
        raise InputError(f"tokenizer: expected text that gives {n_ranks} tokens, {found}")
    return {bytes(letters[letter] for letter in token): rank for token, rank in vocabulary.items()}


def gpt2_ranks() -> dict[bytes, int]:
    """GPT-2's ranks by tiktoken, which downloads them or reads TIKTOKEN_CACHE_DIR. Raises InputError."""
    try:
        return tiktoken.get_encoding("gpt2")._mergeable_ranks
    except (OSError, ValueError) as error:  # no connection; a download that is damaged
        reason = type(error).__name__ if isinstance(error, OSError) else error
        fill = "TIKTOKEN_CACHE_DIR=DIR python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'"
        raise InputError(
            f"tokenizer gpt2: cannot download its ranks ({reason}); without a network, set "
            f"TIKTOKEN_CACHE_DIR to a folder that `{fill}` filled on another machine"
        ) from None
