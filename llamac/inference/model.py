"""Inference with a model: continues prompts and computes the likelihood of texts.

The C model computes (llamac._native.Inference). This module finds the files of a directory and encodes text.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.arguments import Parser
from llamac.base.errors import InputError
from llamac.base.files import check_text, read_json
from llamac.base.folders import how_to_fetch
from llamac.base.native import native
from llamac.data import chat, tokenizer
from llamac.data.conversations import NoConversation, text_of
from llamac.data.tokens import IGNORED, as_ids
from llamac.model.checkpoint import find_model
from llamac.model.config import load_config

PART, DEVICE_PART = 512, 4096  # tokens of a prompt that a pass reads at most, on the host and on a GPU
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "fp16"}  # of config.json


def add_flags(parser: Parser) -> None:
    """How a model computes, of the commands that use one."""
    add = parser.add_argument
    known = ["auto", *DTYPES.values()]
    add("--dtype", default="auto", choices=known, help="type of the computation (config.json's)")
    add("--kernel", action="append", default=[], metavar="OP=NAME", help="as --kernel of train_llama3")


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_k: among so many likeliest (0: all). top_p: among the
    likeliest of these that have this share of the probability together. The same seed gives the same tokens;
    prompt i draws from numbers of its own."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number from 0 on"),
            ("top_k", 0 <= self.top_k < 2**31, "a number from 0 on"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("seed", 0 <= self.seed < 2**63, "a number from 0 on"),
        ):
            if not good:
                raise InputError(f"{name}: expected {expected}, found {getattr(self, name)}")


class TextModel:
    """The tokenizer, end tokens and chat template of a model's directory, or of the newest checkpoint of a
    run's output folder. template: the name of one of chat.TEMPLATES, instead of the directory's. Raises Error
    for bad input."""

    def __init__(self, directory: str | os.PathLike, template: str = ""):
        self.directory, self.named_template = find_model(directory), template
        if not self.directory.is_dir():
            fetched = how_to_fetch(str(directory))
            raise InputError(f"{directory}: expected a directory with config.json and weights{fetched}")
        self.config = load_config(str(self.directory))

    @cached_property
    def tokenizer(self) -> Any:
        """The directory's. Raises Error where it has none, or one with more tokens than the model."""
        return load_tokenizer(self.directory, self.config.vocab_size)

    @cached_property
    def stops(self) -> list[int]:
        """Ids that end an answer: generation_config.json's or config.json's, and the tokenizer's `end`."""
        settings = self.directory / "generation_config.json"
        kind = {"eos_token_id": (range(2**31), [range(2**31)], None)}
        given = read_json(settings, kind).get("eos_token_id") if settings.exists() else None
        ids = self.config.eos_token_id if given is None else given
        found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        try:
            own = self.tokenizer
        except InputError:  # prompts of ids need none
            return found
        more = [own.end] if own.end is not None else []
        if self.named_template:  # its end is a token of the tokenizer, or several of ordinary text
            end = chat.encode(own, self.template.end)
            more += end if len(end) == 1 else []
        return list(dict.fromkeys([*found, *more]))

    @cached_property
    def template(self) -> chat.Template:
        """Of conversations. Raises Error where there is none."""
        name = self.named_template
        return chat.named(name, self.tokenizer) if name else chat.load(self.directory)

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether conversations have a template."""
        try:
            return bool(self.template)
        except InputError:
            return False

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a prompt. bos: with what the tokenizer sets before a text, and the token that begins a
        document, where the tokenizer has one and has not set it."""
        return encode(self.tokenizer, text, bos)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the answer begins, by the chat template. Raises InputError."""
        read = []
        for i, message in enumerate(messages, 1):
            try:
                read.append({**message, "content": text_of(message.get("content"))})
            except NoConversation as error:
                raise InputError(f"message {i}: expected text, found {error}") from None
        return chat.encode(self.tokenizer, self.template.render(read, self.tokenizer)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is no UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(ids)


class Inference(TextModel):
    """The model of a directory: a checkpoint, the newest one of a run's output folder, or any Hugging Face
    directory of a Llama.

    dtype: of weights and activations: f32, bf16, fp16; auto is config.json's. context: tokens of a sequence
    at most, prompt and answer (None: the model's longest). sequences: generated at a time; each
    takes memory for `context` tokens. batch_tokens: for score() instead, tokens of a batch, padding included.
    template: as TextModel's. Raises Error for bad input, in one line.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        dtype: str = "auto",
        context: int | None = None,
        sequences: int = 1,
        batch_tokens: int = 0,
        kernels: Sequence[str] = (),
        template: str = "",
    ):
        super().__init__(directory, template)
        self.context = context or self.config.max_position_embeddings
        self.dtype = _dtype(self.directory) if dtype == "auto" else dtype
        if self.dtype not in DTYPES.values():
            raise InputError(f"dtype: expected auto, f32, bf16 or fp16, found {self.dtype}")
        for name, value in (("context", self.context), ("sequences", sequences)):
            if value < 1:
                raise InputError(f"{name}: expected a number from 1 on, found {value}")
        # A pass has as many rows as it gets tokens: of a part of one prompt, or one of each sequence.
        if batch_tokens:
            rows, cache = (max(1, batch_tokens // self.context), self.context), (0, 0)
        else:
            part = min(DEVICE_PART if native.computes_on_device() else PART, self.context)
            rows, cache = (math.ceil(sequences / part), part), (sequences, self.context)
        self._native = native.Inference(str(self.directory), self.dtype, *rows, *cache, list(kernels))
        for line in filter(None, self._native.warnings.split("\n")):
            warnings.warn(line, stacklevel=2)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        count: int = 256,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stops: Sequence[int] | None = None,
        made: Callable[[int, int], bool] | None = None,
        first: int = 0,
    ) -> list[list[int]]:
        """Ids that follow each prompt, of ids: up to `count`, or to the first of `stops` (None: the
        directory's), which belongs to them. made: called with a prompt's number and each of its tokens as
        soon as it is there; False ends that prompt's answer. sampling: of all prompts, or one per prompt.
        first: the number of the first prompt, by which prompts of one sampling draw random numbers."""
        if count < 1:
            raise InputError(f"count: expected a number from 1 on, found {count}")
        lists = [self._ids(prompt, f"prompt {i + 1}").tolist() for i, prompt in enumerate(prompts)]
        ends = self.stops if stops is None else list(stops)
        if isinstance(sampling, Sampling) or sampling is None:
            choices = [(sampling or Sampling(), first + i) for i in range(len(lists))]
        else:
            choices = [(s, 0) for s in sampling]
        if len(choices) != len(lists):
            raise InputError(f"sampling: expected one per prompt, {len(lists)}, found {len(choices)}")
        rows = [(s.temperature, s.top_k, s.top_p, s.seed, step) for s, step in choices]
        return self._native.generate(lists, count, ends, rows, made)

    def next_logits(self, tokens: Sequence[int], prompt: int) -> np.ndarray:
        """f32 [len(tokens) - prompt + 1, V]: logits after the first `prompt` tokens, and each later one."""
        return self._native.next_logits(self._ids(tokens, "tokens").tolist(), prompt)

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, likeliest: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """tokens, targets: [B, T]; -100 is a target that does not count. (losses f32 [B, T]: -ln of each
        target's probability, 0 where it does not count; likeliest bool [B, T]: whether no token is likelier).
        Only with batch_tokens, in all at most; T is at most the context.
        """
        rows = self._ids(tokens, "tokens", 2), self._ids(targets, "targets", 2, IGNORED)
        return self._native.score(*rows, likeliest)

    def _ids(self, ids: Any, what: str, rank: int = 1, none: int | None = None) -> np.ndarray:
        return as_ids(ids, what, self.config.vocab_size, rank, none)


class TextStream:
    """The text of ids that come one at a time, in whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._told = ""  # of _ids

    def add(self, id: int) -> str:
        """The text that this id adds; "" while a character is not whole."""
        self._ids.append(id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        return self._tell(text)

    def end(self) -> str:
        """The rest of the text; an incomplete character becomes U+FFFD."""
        return self._tell(self._decode(self._ids)) if self._ids else ""

    def _tell(self, text: str) -> str:
        # A decoder may treat a text's begin in a way of its own: the last tokens stay as the next one's.
        new = text[len(self._told) :]
        if len(self._ids) > 16 and new:
            self._ids = self._ids[-4:]
            self._told = self._decode(self._ids)
        else:
            self._told = text
        return new


def load_tokenizer(path: Path, vocab_size: int) -> Any:
    """The tokenizer of a directory or file. Raises Error if it has more tokens than the model."""
    found = tokenizer.load(path)
    if found.vocab_size > vocab_size:
        expected = f"a tokenizer of at most the model's {vocab_size} tokens"
        raise InputError(f"{found.path}: expected {expected}, found one of {found.vocab_size}")
    return found


def encode(own: Any, text: str, bos: bool = True) -> list[int]:
    """Inference.encode() by the tokenizer `own`."""
    check_text(text, "prompt")
    ids = own.encode_framed(text) if bos else own.encode(text)
    if len(ids) > 1 and ids[-1] == own.end:  # some append it; it does not belong to a prompt
        ids = ids[:-1]
    if bos and own.bos is not None and ids[:1] != [own.bos]:
        ids = [own.bos, *ids]
    return ids


def _dtype(directory: Path) -> str:
    """The type of the weights in config.json: dtype, before torch_dtype."""
    root = read_json(directory / "config.json", dict.fromkeys(("dtype", "torch_dtype"), (str, None)))
    found = root.get("dtype") or root.get("torch_dtype") or "float32"
    if found not in DTYPES:
        expected = " or ".join(DTYPES)
        raise InputError(
            f"{directory}/config.json: dtype: expected {expected}, found {json.dumps(found)}; "
            "--dtype f32 or bf16 takes it"
        )
    return DTYPES[found]
