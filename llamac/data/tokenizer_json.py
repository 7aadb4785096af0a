"""Tokenizers of Hugging Face's tokenizer.json, with the settings in the same directory.

Only tokenizer.json determines the ids, as in transformers' PreTrainedTokenizerFast. tiktoken, which is
several times as fast, encodes byte-level BPE with a known split pattern if `_Fast` proves that the ids are
the same.
"""

import json
import re
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import xxhash

from llamac.base.errors import InputError, first_line
from llamac.base.files import MOST_JSON, parse_json, read_bytes
from llamac.data import special_tokens, vocabulary
from llamac.data.bpe import GPT2_SPLIT, LLAMA3_SPLIT, byte_letters, encode_fast, rank_hash
from llamac.data.vocabulary import MOST_TOKENS, Vocabulary

QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = (GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT)
# Of a BPE, with which tiktoken would have other ids.
_ODD_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
# What a directory may hold beside tokenizer.json; goes with the tokens, and from there into checkpoints.
SETTINGS = (*special_tokens.FILES, "chat_template.jinja", "chat_template.json")


class JsonTokenizer:
    """Text to token ids and back. `bos`, `eos` and `pad` are ids, or None where the directory names none:
    `bos` stands before each document in our data, `eos` behind it, one alone where both are the same token.
    `hash` is XXH3_64 of tokenizer.json's bytes, `model` its content. `cuttable`: text may be cut where
    SAFE_CUT says so without a change to its ids.
    """

    def __init__(self, path: Path, content: bytes):
        import tokenizers

        self.path, self.content = path, content
        self.hash = xxhash.xxh3_64_intdigest(content)
        self.model: dict[str, Any] = parse_json(content, str(path), {})
        try:
            self.backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of no class of its own; a panic of Rust is no Exception
            raise InputError(f"{path}: expected a tokenizer.json: {first_line(error)}") from None
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens = special_tokens.read(path.parent, self.model)
        self.names = self.special_tokens.names
        self._add_tokens()
        self.backend.encode_special_tokens = self.special_tokens.split
        roles = [self.names.get(role) for role in ("bos_token", "eos_token", "pad_token")]
        if not any(roles[:2]):  # BERT's documents begin with [CLS] and end with [SEP]
            roles[:2] = self.names.get("cls_token"), self.names.get("sep_token")
        bos, eos, self.pad = (None if name is None else self.backend.token_to_id(name) for name in roles)
        self.bos, self.eos = (eos, None) if bos == eos else (bos, eos)
        self.end = self.bos if self.eos is None else self.eos  # follows a document
        self.vocab_size = max(self.backend.get_vocab().values(), default=-1) + 1
        if self.vocab_size < 1:
            raise InputError(f"{path}: expected a vocabulary, found none")
        if self.vocab_size > MOST_TOKENS:  # which are held by their ids
            raise InputError(f"{path}: expected ids below {MOST_TOKENS}, found {self.vocab_size - 1}")

    def _add_tokens(self) -> None:
        """Those of the directory, as transformers adds them to tokenizer.json's."""
        from tokenizers import AddedToken

        self.backend.add_tokens([AddedToken(**token) for token in self.special_tokens.listed])
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        others = [token for token in self.special_tokens.others if token["content"] not in known]
        self.backend.add_tokens([AddedToken(**token) for token in others])

    @cached_property
    def fast(self) -> "_Fast | None":
        """tiktoken's encoding of most texts, where it has the same ids."""
        return _Fast.of(self)

    @property
    def special_ids(self) -> set[int]:
        return set(self.backend.get_added_tokens_decoder())

    @cached_property
    def ranks(self) -> dict[bytes, int] | None:
        """Ids of the ordinary tokens, where they are byte-level and 0 .. n-1, as in a rank file."""
        added, letters = self.backend.get_added_tokens_decoder(), byte_letters()
        words = {word: id for word, id in self.backend.get_vocab().items() if id not in added}
        if sorted(words.values()) != list(range(len(words))) or not letters.keys() >= set("".join(words)):
            return None
        return {bytes(letters[letter] for letter in word): id for word, id in words.items()}

    @cached_property
    def rank_hash(self) -> int | None:
        """XXH3_64 of the rank file with the same ordinary tokens, where one can have them."""
        return rank_hash(self.ranks) if self.ranks else None

    @property
    def tokens(self) -> list[bytes]:
        """Bytes of each id."""
        return self.vocabulary.tokens

    @property
    def cuttable(self) -> bool:
        added = self.backend.get_added_tokens_decoder().values()
        takes_more = any(token.lstrip or "\n" in token.content for token in added)
        return split_pattern(self.model) is not None and not takes_more

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone. Names of special tokens are these, unless split_special_tokens."""
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """encode() of each text: uint32 [n]."""
        found: list[np.ndarray | None] = [None] * len(texts)
        if self.fast:
            found = [self.fast.encode(text) for text in texts]
        slow = [i for i, ids in enumerate(found) if ids is None]
        if slow:
            encoded = self.backend.encode_batch_fast([texts[i] for i in slow], add_special_tokens=False)
            for i, encoding in zip(slow, encoded):
                found[i] = np.array(encoding.ids, np.uint32)
        return found  # type: ignore[return-value]

    def encode_framed(self, text: str) -> list[int]:
        """encode(), with what the tokenizer sets around a text, as transformers."""
        return self.backend.encode(text).ids

    def encode_with_places(self, text: str) -> tuple[list[int], np.ndarray]:
        """encode(), but names of special tokens are always these; and where in the text each token begins and
        ends, in characters: [n, 2]."""
        before, self.backend.encode_special_tokens = self.backend.encode_special_tokens, False
        try:
            found = self.backend.encode(text, add_special_tokens=False)
            return found.ids, np.array(found.offsets, np.int64).reshape(-1, 2)
        finally:
            self.backend.encode_special_tokens = before

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes of each id. Raises InputError if the decoder is not byte-level or sentencepiece's."""
        return _vocabulary(self)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. Bytes that are no UTF-8, and ids past the vocabulary, become U+FFFD."""
        return self.vocabulary.decode(ids).decode("utf-8", errors="replace")

    def write_beside_tokens(self, folder: Path) -> None:
        """The directory's files and the vocabulary file."""
        files = {"tokenizer.json": self.content}
        files |= {n: read_bytes(self.path.parent / n) for n in SETTINGS if (self.path.parent / n).exists()}
        for name, content in files.items():
            if self.path.parent.resolve() != folder.resolve():
                (folder / name).write_bytes(content)
        vocabulary.write(folder / vocabulary.FILE_NAME, self.vocabulary)


def load(path: str | Path) -> JsonTokenizer:
    """The tokenizer of a tokenizer.json, or of a directory with one. Raises InputError."""
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    return JsonTokenizer(path, read_bytes(path, MOST_JSON))


def split_pattern(config: dict[str, Any]) -> str | None:
    """The pattern by which a byte-level BPE splits its text, if it is one of the known; no normalizer."""
    split = config.get("pre_tokenizer") or {}
    steps = split.get("pretokenizers", [split]) if isinstance(split, dict) else []
    if config.get("normalizer") or not steps or any(step.get("add_prefix_space") for step in steps):
        return None
    if [step.get("type") for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True):
        return GPT2_SPLIT
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex", True):
        return None
    pattern = (steps[0].get("pattern") or {}).get("Regex")
    isolated = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
    return pattern if isolated and pattern in _SPLITS else None


class _Fast:
    """tiktoken with the merges of a tokenizer.json. Both join, among the adjacent pairs of a word, the one
    that comes first; tokenizers takes pairs that are listed, tiktoken any that make a token. They give the
    same ids if

    - tokens are made in the order of the merges (here by construction: tiktoken's rank is that order), and
      the merges of one token follow one another;
    - each token t gives t alone when tokenizers merges its own bytes. For say that tiktoken were the first to
      join an unlisted pair (c, d) to t. No merge has crossed t's edges yet, so t's own bytes alone would have
      come to (c, d) as well; no pair is left there, and t would give (c, d).

    Texts with the name of an added token, and those with a character that the two regular expressions class
    differently (their Unicode versions differ), are left to tokenizers.
    """

    def __init__(self, encoding: tiktoken.Encoding, ids: np.ndarray, names: list[str], odd: str):
        self._encoding, self._ids = encoding, ids
        self._identity = bool((ids == np.arange(len(ids))).all())
        patterns = [*map(re.escape, names), *([f"[{re.escape(odd)}]"] if odd else [])]
        self._other = re.compile("|".join(patterns)) if patterns else None

    @classmethod
    def of(cls, tokenizer: JsonTokenizer) -> "_Fast | None":
        """None where the ids might differ."""
        config, pattern = tokenizer.model, split_pattern(tokenizer.model)
        model = config.get("model") or {}
        if pattern is None or model.get("type") != "BPE" or any(model.get(name) for name in _ODD_SETTINGS):
            return None
        added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
        words = _words_in_order(model, added)
        if words is None or not _merge_to_themselves(model, words):
            return None
        letters = byte_letters()
        ranks = {bytes(letters[letter] for letter in word): rank for rank, word in enumerate(words)}
        odd = _odd_characters()
        if len(ranks) != len(words) or len(odd) > 5000:
            return None
        encoding = tiktoken.Encoding(
            "llamac", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"\0" * 9: 2**31}
        )
        ids = np.array([model["vocab"][word] for word in words], np.uint32)
        found = tokenizer.backend.get_added_tokens_decoder().values()
        skipped = tokenizer.backend.encode_special_tokens
        names = sorted(token.content for token in found if not (skipped and token.special))
        return cls(encoding, ids, names, odd)

    def encode(self, text: str) -> np.ndarray | None:
        """uint32 [n]; None: not this text."""
        if self._other and self._other.search(text):
            return None
        ranks = encode_fast(self._encoding, text)
        return ranks if ranks is None or self._identity else self._ids[ranks]


def _words_in_order(model: dict[str, Any], added: set[str]) -> list[str] | None:
    """The words in the order in which merges make them, bytes first; None if there is no single order."""
    letters = byte_letters()
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not letters.keys() <= vocabulary.keys():
        return None
    order = dict.fromkeys(sorted(letters, key=vocabulary.__getitem__))
    last = ""
    for merge in model.get("merges", ()):
        word = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        if word in order and word != last:
            return None
        if word not in vocabulary or not set(word) <= letters.keys():
            return None
        order[last := word] = None
    unmade = [word for word in vocabulary if word not in order and word not in added]
    return None if unmade and model.get("ignore_merges") else list(order)


def _merge_to_themselves(model: dict[str, Any], words: list[str]) -> bool:
    """Whether each word's letters are merged to the word; see _Fast."""
    import tokenizers

    plain = {"version": "1.0", "added_tokens": [], "model": model | {"ignore_merges": False}}
    bare = tokenizers.Tokenizer.from_str(json.dumps(plain))
    return all(len(word.ids) == 1 for word in bare.encode_batch_fast(words, add_special_tokens=False))


@cache
def _odd_characters() -> str:
    """Characters that tiktoken's and tokenizers' regular expressions put into different classes."""
    from tokenizers import Regex, pre_tokenizers

    every = [chr(i) for i in (*range(0xD800), *range(0xE000, 0x110000))]
    texts = [
        "".join(every[i : i + 1024]) for i in range(0, len(every), 1024)
    ]  # a long text takes quadratic time
    single = {bytes([byte]): byte for byte in range(256)}
    odd: set[str] = set()
    for pattern in (r"\p{L}", r"\p{N}", r"\s", r"(?i:[strevmld])"):
        theirs = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks=single, special_tokens={})
        split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), behavior="removed", invert=True)
        for text in texts:
            found = bytes(theirs.encode_ordinary(text)).decode()
            odd |= set(found) ^ {c for piece, _ in split.pre_tokenize_str(text) for c in piece}
    return "".join(sorted(odd))


def _vocabulary(tokenizer: JsonTokenizer) -> Vocabulary:
    """The bytes that each id adds to a text, by the steps of the decoder."""
    backend, decoder = tokenizer.backend, tokenizer.model.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    convert, drops = _converter(tokenizer, steps)
    tokens = [b""] * tokenizer.vocab_size
    for id in backend.get_vocab().values():
        tokens[id] = convert(backend.id_to_token(id))  # which has been normalized, as an added token may be
    return Vocabulary(tokens, tokenizer.hash, tokenizer.bos, tokenizer.eos, tokenizer.pad, drops)


def _converter(tokenizer: JsonTokenizer, steps: list[dict[str, Any]]):
    """(word to bytes, what decoding drops at a text's begin) of a decoder's steps."""
    path, kinds = tokenizer.path, [step.get("type") for step in steps]
    if kinds == ["WordPiece"]:
        prefix, added = steps[0].get("prefix", "##"), {t["content"] for t in tokenizer.model["added_tokens"]}

        def joined(word: str) -> bytes:  # BERT's: a word that another follows has a space before it
            if word in added:
                return word.encode()
            return (word.removeprefix(prefix) if word.startswith(prefix) else " " + word).encode()

        return joined, vocabulary.DROP_FIRST
    unknown = set(kinds) - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        names = ", ".join(str(kind) for kind in kinds)
        raise InputError(f"{path}: decoder: expected a byte-level or sentencepiece-style one, found {names}")
    if "ByteLevel" in kinds:
        letters = byte_letters()

        def spelled(word: str) -> bytes:  # an added token with another character is its own text
            return bytes(letters[c] for c in word) if letters.keys() >= set(word) else word.encode()

        return spelled, 0
    space = next((s.get("replacement", "▁") for s in steps if s["type"] == "Metaspace"), None)
    replaced = [
        ((s.get("pattern") or {}).get("String", ""), s.get("content", ""))
        for s in steps
        if s["type"] == "Replace"
    ]
    replaced = [pair for pair in replaced if pair[0]] + ([(space, " ")] if space else [])
    fallback = re.compile("<0x([0-9A-Fa-f]{2})>") if "ByteFallback" in kinds else None
    strip = any(s["type"] == "Strip" and s.get("start", 0) > 0 and s.get("content") == " " for s in steps)
    first = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)

    def convert(word: str) -> bytes:
        byte = fallback.fullmatch(word) if fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            word = word.replace(old, new)
        return word.encode()

    return convert, vocabulary.DROP_FIRST if first else vocabulary.DROP_SPACE if strip else 0
