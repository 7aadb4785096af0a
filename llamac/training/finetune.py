"""`llamac finetune DIR DATA.jsonl --out OUT` fine-tunes a model on answers.

DIR: a Hugging Face directory of a Llama, or a checkpoint. DATA: JSON lines, a JSON array, Parquet or Arrow,
also compressed (.gz, .zst). A row is a conversation, {"messages": [...]}, by the directory's chat template,
or {"prompt": ..., "completion": ...}. Only the tokens of answers count: the assistant's messages with what
the template sets behind them, and completions. A row of a batch is one conversation. --prepare FOLDER packs
the conversations into token files, on which ./train_llama3 trains.
docs/guides/finetune.md has examples and further forms of rows.
"""

import bisect
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.arguments import Parser, check_least
from llamac.base.errors import InputError, printable
from llamac.base.files import read_json
from llamac.data import chat, tokenizer
from llamac.data.conversations import Conversation, NoConversation, of_row
from llamac.data.documents import whole_rows
from llamac.data.encode import MOST_NAMED
from llamac.data.inputs import InputFile, find
from llamac.data.tokens import BEGINS_DOCUMENT, IGNORED, NO_TARGET, write_bin
from llamac.model.config import load_config

GENERATION = "generation_config.json"


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


class Encoder:
    """Conversations as ids, by the tokenizer and the template of a directory. last_only: only the last answer
    of a conversation counts. ignored: keys of messages that are dropped."""

    def __init__(self, directory: str | Path, last_only: bool = False, ignored: Sequence[str] = ()):
        self.directory = Path(directory)
        self.last_only, self.ignored = last_only, ignored
        self.tokenizer = tokenizer.load(self.directory)

    @cached_property
    def template(self) -> chat.Template:
        """The directory's. Raises InputError where it has none."""
        return chat.load(self.directory)

    @cached_property
    def _special(self) -> set[int]:
        own = self.tokenizer
        return set(
            own.backend.get_added_tokens_decoder() if hasattr(own, "backend") else own.special.values()
        )

    def messages(self, messages: Sequence[dict[str, Any]]) -> Example:
        """What the template makes of a conversation. Raises InputError."""
        trained = [message.get("role") == "assistant" for message in messages]
        return self.conversation(Conversation(list(messages), trained))

    def conversation(self, given: Conversation) -> Example:
        """Answers are what {% generation %} blocks write; of a template without them, what it writes for the
        messages that count, behind what asks for them. Raises InputError: chat.Refused where the template
        does not write the conversation, or one message after another."""
        template, messages, own = self.template, given.messages, self.tokenizer
        if given.tools and not template.names("tools"):
            raise chat.Refused(f"{template.path}: chat template: expected one that renders tools")
        text, answers = template.render_answers(messages, own, tools=given.tools)
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
        ids, places = chat.encode_with_places(self.tokenizer, text)
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


def batch(rows: Sequence[Example], T: int, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """tokens, targets: int32 [rows, T], at least `size` rows; targets that do not count are -100."""
    tokens = np.zeros((max(size, len(rows)), T), np.int32)
    targets = np.full_like(tokens, IGNORED)
    for i, row in enumerate(rows):
        n = len(row.ids) - 1
        tokens[i, :n] = row.ids[:-1]
        targets[i, :n] = np.where(row.counts[1:], row.ids[1:], IGNORED)
    return tokens, targets


def packed(rows: Sequence[Example], T: int, filler: int) -> np.ndarray:
    """Sequences of T tokens that hold the rows whole, as tokens with marks: uint32 [sequences * T + 1], for
    the last sequence's last target. The longest rows come first, each into the sequence where it leaves the
    least room ("best fit decreasing"); what is left is filled."""
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
    encoder: Encoder, folder: Path, splits: Mapping[str, Sequence[Example]], T: int, generation: str = ""
) -> None:
    """FOLDER/SPLIT_000.bin of each split that has rows, the tokenizer's files, and generation_config.json
    where it is not the model's. The folder gets its name when it is whole.
    """
    own = encoder.tokenizer
    filler = next((id for id in (own.pad, own.eos, own.bos) if id is not None), 0)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        own.write_beside_tokens(partial)
        if generation:
            (partial / GENERATION).write_text(generation, encoding="utf-8")
        for split, rows in splits.items():
            words = packed(rows, T, filler)
            held = sum(len(row.ids) for row in rows) / (len(words) - 1)
            write_bin(partial / f"{split}_000.bin", words, own.vocab_size, own.hash, packed=T)
            print(f"{folder}: {split}: {len(words) // T:,} sequences of {T} tokens, {held:.1%} full")
        partial.rename(folder)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def batches(rows: Sequence[Example], size: int, total: int, seed: int) -> Iterator[list[Example]]:
    """The rows of each step, `total` in all: epoch after epoch, each in an order of its own."""
    left: list[int] = []
    epoch = 0
    for first in range(0, total, size):
        chosen: list[int] = []
        while len(chosen) < min(size, total - first):
            if not left:
                left = np.random.default_rng((seed, epoch)).permutation(len(rows)).tolist()
                epoch += 1
            taken = left[: min(size, total - first) - len(chosen)]
            left = left[len(taken) :]
            chosen += taken
        yield [rows[i] for i in chosen]


def generation_settings(encoder: Encoder, rows: Sequence[Example]) -> str:
    """generation_config.json with the tokens that end these answers; "" if the directory's has them."""
    path = encoder.directory / GENERATION
    config = load_config(encoder.directory)
    names = ("bos_token_id", "eos_token_id")
    settings = read_json(path) if path.exists() else {name: getattr(config, name) for name in names}
    given = settings.get("eos_token_id", config.eos_token_id)
    stops = given if isinstance(given, list) else [] if given is None else [given]
    new = sorted(frozenset().union(*(row.ends for row in rows)) - set(stops))
    if not any(row.ends for row in rows):
        print("answers end with no special token: the model learns no end, and generation stops at --tokens")
    if not new:
        return ""
    settings["eos_token_id"] = [*stops, *new]
    ends = ", ".join(f"{id} ({encoder.tokenizer.decode([id])})" for id in new)
    print(f"{GENERATION}: eos_token_id: {ends} added, which ends answers")
    return json.dumps({name: value for name, value in settings.items() if value is not None}, indent=2) + "\n"


def _parser() -> Parser:
    parser = Parser("finetune", __doc__)
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer, chat template")
    add("data", nargs="+", metavar="DATA", help="files of JSON lines, or patterns in quotes")
    result = parser.add_mutually_exclusive_group(required=True).add_argument
    result("--out", type=Path, metavar="OUT", help="a new directory, for the checkpoint")
    result("--prepare", type=Path, metavar="FOLDER", help="a new directory, for token files")
    add("--val-data", nargs="+", metavar="DATA", help="the same, whose loss is printed before and after")
    parser.switch("--strict", "stop at the first broken line")
    parser.switch("--last-turn-only", "only the last answer of a conversation counts")
    add("--ignore-keys", default="", metavar="A,B", help="keys of messages to train without")
    parser.number("--epochs", "(1)", 1.0)
    parser.integer("--batch-size", "conversations per pass (4)", 4)
    parser.integer("--accumulation", "passes per step (1)", 1)
    parser.integer("--seq-len", "skip longer conversations (the model's, up to 2048)")
    parser.number("--lr", "the largest learning rate (2e-5)", 2e-5)
    parser.integer("--warmup-steps", "steps of linear warm-up (0)", 0)
    parser.number("--weight-decay", "AdamW's decay of the matrices (0)", 0.0)
    add("--dtype", default="f32", choices=["f32", "bf16"], help="type of weights and activations (f32)")
    parser.integer("--seed", "seed of the order (0)", 0)
    add("--recompute", default="none", metavar="LIST", help="as --recompute of train_llama3; saves memory")
    return parser


def validation_loss(trainer: Any, rows: Sequence[Example], T: int) -> float:
    """Mean over all targets that count."""
    size, losses, count = trainer.options.batch_size, 0.0, 0
    for first in range(0, len(rows), size):
        tokens, targets = batch(rows[first : first + size], T)
        losses += trainer.validate(tokens, targets) * targets.size
        count += int((targets != IGNORED).sum())
    return losses / count


def _summary(split: str, found: Examples) -> None:
    answers = sum(sum(row.counts[1:]) for row in found.rows)
    print(f"{split}: {len(found.rows):,} conversations, {answers:,} tokens of answers")
    if found.left_out:
        print(f"{split}: left out: {found.reasons}")


def main() -> None:
    args = _parser().parse_args()
    if not Path(args.directory).is_dir():
        raise InputError(f"{args.directory}: expected a directory with config.json and weights")
    check_least(args, batch_size=1, accumulation=1, seq_len=1)
    if not 0 < args.epochs < math.inf:
        raise InputError(f"--epochs: expected a number above 0, found {args.epochs}")
    if (args.out or args.prepare).exists():
        raise InputError(f"{args.out or args.prepare}: expected a new directory, found one that exists")
    T = args.seq_len or min(2048, load_config(args.directory).max_position_embeddings)
    ignored = [key for key in args.ignore_keys.split(",") if key]
    encoder = Encoder(args.directory, args.last_turn_only, ignored)
    found = read(args.data, encoder, T, args.strict)
    _summary("training", found)
    validation: list[Example] = []
    if args.val_data:
        held_out = read(args.val_data, encoder, T, args.strict)
        _summary("validation", held_out)
        validation = held_out.rows
    generation = generation_settings(encoder, found.rows)
    if args.prepare:
        splits = {"train": found.rows} | ({"val": validation} if validation else {})
        return prepare(encoder, args.prepare, splits, T, generation)
    size = args.batch_size * args.accumulation
    total = round(args.epochs * len(found.rows))  # conversations; the last step has what is left of them
    steps = max(1, math.ceil(total / size))
    if args.warmup_steps > steps:
        raise InputError(
            f"--warmup-steps: expected at most the run's {steps} steps, found {args.warmup_steps}"
        )
    from llamac.training.trainer import Trainer

    trainer = Trainer(
        model=args.directory,
        init="load",
        seq_len=T,
        batch_size=args.batch_size,
        total_batch_size=size * T,
        steps=steps,
        lr=args.lr,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        dtype=args.dtype,
        recompute=args.recompute,
        sample_every=0,
    )
    if validation:
        print(f"validation loss {validation_loss(trainer, validation, T):.4f}")
    if generation:
        trainer.carry(GENERATION, generation)
    for number, rows in enumerate(batches(found.rows, size, max(1, total), args.seed), 1):
        loss = trainer.step(*batch(rows, T, size), counted=True)
        last = trainer.last
        print(f"step {number}/{steps}: loss {loss:.4f}, gradient norm {last['grad_norm']:.3f}", flush=True)
    if validation:
        print(f"validation loss {validation_loss(trainer, validation, T):.4f}")
    trainer.save(args.out)
    print(f"model {args.out}")
