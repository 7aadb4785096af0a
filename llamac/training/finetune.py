"""`llamac finetune DIR DATA.jsonl --out OUT` fine-tunes a model on answers.

DIR: a Hugging Face directory of a Llama, a checkpoint, or a run's output folder. DATA: JSON lines, a JSON
array, Parquet or Arrow, also compressed (.gz, .zst). A row is a conversation, {"messages": [...]}, by the
model's chat template or that of --template, or {"prompt": ..., "completion": ...}. Only the tokens of answers
count. The conversations are packed into token files in OUT/tokens, on which the program train_llama3 trains:
every flag of `./train_llama3 --help` works here, too.
docs/guides/finetune.md has examples and further forms of rows.
"""

import bisect
import math
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.arguments import Parser, check_least, split_list
from llamac.base.errors import InputError, printable
from llamac.base.files import read_json
from llamac.data import chat
from llamac.data.conversations import Conversation, NoConversation, of_row
from llamac.data.documents import whole_rows
from llamac.data.encode import MOST_NAMED
from llamac.data.inputs import InputFile, find
from llamac.data.shards import write_json
from llamac.data.tokens import BEGINS_DOCUMENT, NO_TARGET, read_bin, write_bin
from llamac.inference.model import TextModel
from llamac.training import program

GENERATION = "generation_config.json"
# Flags of the program: values unless the command line has others; those that it must not have.
DEFAULTS = {"batch-size": 4, "lr": 2e-5, "warmup-steps": 0, "weight-decay": 0.0, "sample-every": 0}
OWN = {"model", "init", "train-data", "val-data", "tokenizer", "document-mask", "seq-len", "out"}
OWN |= {"config", "list-kernels"}
# Without --seq-len, a sequence has at most so many tokens, and a multiple of so many.
MOST_TOKENS, MULTIPLE = 2048, 16


@dataclass(frozen=True)
class Example:
    """counts [n]: whether each id is part of an answer. ends: special tokens that end an answer."""

    ids: list[int]
    counts: list[bool]
    ends: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass
class Examples:
    """rows: in the order of the files. left_out: how many lines, by the reason."""

    rows: list[Example] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())


class Encoder(TextModel):
    """Conversations as ids, by the tokenizer and the template of a model. last_only: only the last answer of
    a conversation counts. ignored: keys of messages that are dropped."""

    def __init__(
        self, directory: str | Path, template: str = "", last_only: bool = False, ignored: Sequence[str] = ()
    ):
        super().__init__(directory, template)
        self.last_only, self.ignored = last_only, ignored

    @cached_property
    def _special(self) -> set[int]:
        return self.tokenizer.special_ids

    def conversation(self, given: Conversation) -> Example:
        """Answers are what {% generation %} blocks write; of a template without them, what it writes for the
        messages that count, behind what asks for them. Raises InputError: chat.Refused where the template
        does not write the conversation, or one message after another."""
        template, messages, own = self.template, given.messages, self.tokenizer
        if given.tools and not template.names("tools"):
            raise chat.Refused(f"{template.path}: chat template: expected one that renders tools")
        text, answers = template.render(messages, own, answer_begins=False, tools=given.tools)
        wanted = [i for i, counts in enumerate(given.trained) if counts]
        assistants = sum(message["role"] == "assistant" for message in messages)
        if given.prompt:
            first = template.turns(text, messages, [given.prompt], own, given.tools)[0][0]
            answers = [(first, len(text))]
        elif not answers:
            answers = template.turns(text, messages, wanted, own, given.tools)
        elif len(wanted) < assistants:
            turns = template.turns(text, messages, wanted, own, given.tools)
            answers = [(a, b) for a, b in answers if any(a < end and b > begin for begin, end in turns)]
        return self._of_stretches(text, answers)

    def _of_stretches(self, text: str, answers: Sequence[tuple[int, int]]) -> Example:
        """Of a text whose answers are these characters: a token counts if it has one of them."""
        ids, places = self.tokenizer.encode_with_places(text)
        begins, ends = places.T
        counts = np.zeros(len(ids), bool)
        closing: set[int] = set()
        # Sorted, but for tokens without characters of their own.
        firsts = np.searchsorted(np.maximum.accumulate(ends), [begin for begin, _ in answers], "right")
        pasts = np.searchsorted(np.maximum.accumulate(begins), [end for _, end in answers], "left")
        for (begin, end), first, past in zip(answers, firsts, pasts):
            b, e = begins[first:past], ends[first:past]
            counts[first:past] |= (b < end) & (e > begin)
            last = begin + len(text[begin:end].rstrip())
            closing |= {ids[first + i] for i in np.flatnonzero((b < last) & (e >= last))} & self._special
        return Example(ids, counts.tolist(), frozenset(closing))

    def completion(self, prompt: str, completion: str) -> Example:
        """A prompt, its completion, the token that ends a document; before them the one that begins it."""
        own = self.tokenizer
        before = [*([own.bos] if own.bos is not None else []), *own.encode(prompt)]
        closing = [own.end] if own.end is not None else []
        answer = [*own.encode(completion), *closing]
        counts = [False] * len(before) + [True] * len(answer)
        return Example([*before, *answer], counts, frozenset(closing))

    def row(self, row: Any) -> Example:
        """Of a row's value. Raises NoConversation, chat.Refused, and InputError where every row would."""
        found = of_row(row, lambda key: self.template.names(key), self.ignored, self.last_only)
        return self.completion(*found) if isinstance(found, tuple) else self.conversation(found)


def _files(inputs: Sequence[str | Path]) -> list[InputFile]:
    """The files that the inputs name. Raises InputError."""
    files = []
    for name in inputs:
        if Path(name).is_dir():
            raise InputError(f"{name}: expected files of JSON lines, found a folder: name '{name}/*.jsonl'")
        files += find(str(name), Path())[0]
    # A name that says nothing is taken for JSON lines.
    return [replace(file, kind="jsonl") if file.kind == "text" else file for file in files]


def read(inputs: Sequence[str | Path], encoder: Encoder, longest: int, strict: bool = False) -> Examples:
    """The conversations in files or patterns. Those longer than `longest` tokens, or without an answer, are
    left out and counted. So are broken rows and those that the template refuses, which are also named;
    with `strict`, the first one raises InputError.
    """
    found = Examples()
    named = 0

    def leave_out(where: str, reason: str, detail: str = "") -> None:
        nonlocal named
        if strict:
            told = f"{where}: {detail or reason}"
            raise InputError(f"{told}: --strict is set; without it, such lines are left out")
        found.left_out[reason] += 1
        named += 1
        if named <= MOST_NAMED:
            print(printable(f"left out: {where}: {detail or reason}"), flush=True)

    for where, value, reason in whole_rows(_files(inputs)):
        if reason:
            leave_out(where, reason)
            continue
        try:
            example = encoder.row(value)
        except NoConversation as error:
            leave_out(where, str(error))
        except chat.Refused as error:
            leave_out(where, "refused by the chat template", str(error))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        else:
            if len(example.ids) > longest:
                found.left_out[f"longer than {longest} tokens"] += 1
            elif not any(example.counts[1:]):
                found.left_out["without an answer"] += 1
            else:
                found.rows.append(example)
    if not found.rows:
        names = ", ".join(map(str, inputs[:3]))
        why = found.reasons or "no lines"
        raise InputError(f"{names}: expected conversations of at most {longest} tokens, found {why}")
    return found


def packed(rows: Sequence[Example], T: int, filler: int, multiple: int = 1) -> np.ndarray:
    """Sequences of T tokens that hold the rows whole, as tokens with marks: uint32 [sequences * T + 1], for
    the last sequence's last target. The longest rows come first, each into the sequence where it leaves the
    least room ("best fit decreasing"); what is left is filled. multiple: of the number of sequences."""
    sequences: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (tokens that are free, sequence), sorted
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        at = bisect.bisect_left(room, (len(row.ids), 0))
        free, number = room.pop(at) if at < len(room) else (T, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(row)
        if free > len(row.ids):
            bisect.insort(room, (free - len(row.ids), number))
    sequences += [[]] * (-len(sequences) % multiple)
    words = np.full((len(sequences), T), filler | NO_TARGET, np.uint32)
    for number, held in enumerate(sequences):
        at = 0
        for row in held:
            end = at + len(row.ids)
            words[number, at:end] = row.ids
            words[number, at:end][~np.array(row.counts)] |= NO_TARGET
            words[number, at] |= BEGINS_DOCUMENT | NO_TARGET
            at = end
        words[number, at : at + 1] |= BEGINS_DOCUMENT
    return np.append(words, np.uint32(filler | NO_TARGET))


def prepare(
    encoder: Encoder, folder: Path, splits: Mapping[str, Sequence[Example]], T: int, batch_size: int = 1
) -> None:
    """FOLDER/SPLIT_000.bin of each split, and files that precede the model's in checkpoints: the tokenizer's,
    generation_config.json, the template of --template. The folder gets its name when it is whole. batch_size:
    of the program, which validates on whole batches.
    """
    own = encoder.tokenizer
    filler = next((id for id in (own.pad, own.eos, own.bos) if id is not None), 0)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        own.write_beside_tokens(partial)
        write_json(partial / GENERATION, generation_settings(encoder, splits["train"]))
        if encoder.named_template:
            (partial / "chat_template.jinja").write_text(encoder.template.source, encoding="utf-8")
            settings = partial / "tokenizer_config.json"
            found = read_json(settings) if settings.exists() else {}
            if found.get("split_special_tokens"):  # else transformers would split the end of a message
                write_json(settings, found | {"split_special_tokens": False})
        for split, rows in splits.items():
            words = packed(rows, T, filler, batch_size if split == "val" else 1)
            held = sum(len(row.ids) for row in rows) / (len(words) - 1)
            write_bin(partial / f"{split}_000.bin", words, encoder.config.vocab_size, own.hash, packed=T)
            print(f"{folder}: {split}: {len(words) // T:,} sequences of {T} tokens, {held:.1%} full")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def generation_settings(encoder: Encoder, rows: Sequence[Example]) -> dict[str, Any]:
    """The content of generation_config.json, with the tokens that end these answers."""
    path, config = encoder.directory / GENERATION, encoder.config
    names = ("bos_token_id", "eos_token_id")
    settings = read_json(path) if path.exists() else {name: getattr(config, name) for name in names}
    given = settings.get("eos_token_id", config.eos_token_id)
    stops = given if isinstance(given, list) else [] if given is None else [given]
    new = sorted(frozenset().union(*(row.ends for row in rows)) - set(stops))
    if not any(row.ends for row in rows):
        print("answers end with no special token: the model learns no end, and generation stops at --tokens")
    if new:
        settings["eos_token_id"] = [*stops, *new]
        ends = ", ".join(f"{id} ({encoder.tokenizer.decode([id])})" for id in new)
        print(f"{GENERATION}: eos_token_id: {ends} added, which ends answers")
    return {name: value for name, value in settings.items() if value is not None}


def _parser() -> Parser:
    parser = Parser("finetune", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer; or a run's output folder")
    add("data", nargs="+", metavar="DATA", help="files of JSON lines, or patterns in quotes")
    result = parser.add_mutually_exclusive_group(required=True).add_argument
    result("--out", type=Path, metavar="OUT", help="a new directory, for the run")
    what = "a new directory, for token files; the training command is printed, not called"
    result("--prepare", type=Path, metavar="FOLDER", help=what)
    add("--val-data", nargs="+", metavar="DATA", help="the same, for validation")
    chat.add_flag(parser)
    parser.switch("--strict", "stop at the first broken line")
    parser.switch("--last-turn-only", "only the last answer of a conversation counts")
    add("--ignore-keys", default="", metavar="A,B", help="keys of messages to train without")
    parser.number("--epochs", "passes over the data, unless --steps is given (1)", 1.0)
    parser.integer("--accumulation", "micro-batches per step, unless --total-batch-size is given (1)", 1)
    what = f"tokens per sequence; skips longer conversations (the longest one's, up to {MOST_TOKENS})"
    parser.integer("--seq-len", what)
    program.add_flags(parser, OWN)
    return parser


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _resolved(command: list[str]) -> dict[str, Any]:
    """The flags of a command of the program, as it resolves them; it exits where one is wrong."""
    done = subprocess.run([*command, "--print-config"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return tomllib.loads(done.stdout)


def _make_tokens(encoder: Encoder, args: Namespace, folder: Path, batch_size: int) -> None:
    """The token files of the rows in args.data and args.val_data."""
    limit = args.seq_len or min(MOST_TOKENS, encoder.config.max_position_embeddings)
    splits = {}
    for split, data in (("train", args.data), ("val", args.val_data)):
        if data:
            found = read(data, encoder, limit, args.strict)
            splits[split] = found.rows
            answers = sum(sum(row.counts[1:]) for row in found.rows)
            print(f"{split}: {len(found.rows):,} conversations, {answers:,} tokens of answers")
            if found.left_out:
                print(f"{split}: left out: {found.reasons}")
    longest = max(len(row.ids) for rows in splits.values() for row in rows)
    T = args.seq_len or min(limit, -(-longest // MULTIPLE) * MULTIPLE)
    prepare(encoder, folder, splits, T, batch_size)


def _run_flags(args: Namespace, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The program's flags that follow from the token files. options: the other flags, resolved."""
    B, T = options["batch-size"], read_bin(folder / "train_000.bin").packed
    count = {path.name[:-8]: (len(read_bin(path).tokens) - 1) // T for path in folder.glob("*_000.bin")}
    per_step = options["total-batch-size"] // T or B * options["devices"] * args.accumulation
    flags: dict[str, Any] = {f"{split}-data": f"{escape(str(folder))}/{split}_*.bin" for split in count}
    flags |= {"seq-len": T, "total-batch-size": per_step * T, "val-steps": max(1, count.get("val", 0) // B)}
    return flags | {"steps": max(1, math.ceil(args.epochs * count["train"] / per_step))}


def main() -> None:
    args = _parser().parse_args()
    check_least(args, accumulation=1, seq_len=1)
    if not 0 < args.epochs < math.inf:
        raise InputError(f"--epochs: expected a number above 0, found {args.epochs}")
    ignored = split_list("--ignore-keys", args.ignore_keys)
    encoder = Encoder(args.directory, args.template, args.last_turn_only, ignored)
    command = [program.find(), *_words(DEFAULTS), *args.flags, f"--model={encoder.directory}", "--init=load"]
    command += ["--document-mask=on", *([f"--out={args.out}"] if args.out else [])]
    options = _resolved(command)
    target, folder = args.prepare or args.out, args.prepare or args.out / "tokens"
    if target.exists() and (args.prepare or options["resume"] == "none"):
        help = "" if args.prepare else "; --resume auto continues the run in it"
        raise InputError(f"{target}: expected a new directory, found one that exists{help}")
    if not folder.exists():
        _make_tokens(encoder, args, folder, options["batch-size"])
    # Of a flag that is given twice, the program takes the last value, which is the command line's.
    command[1:1] = _words(_run_flags(args, folder, options))
    if args.prepare:
        print(f"this command trains on them:\n{shlex.join(command)}")
        return
    sys.stdout.flush()
    os.execv(command[0], command)
