"""`python -m llamac.finetune DIR DATA.jsonl --out OUT` fine-tunes a model on answers.

DIR: a Hugging Face directory of a Llama, or a checkpoint. DATA: JSON lines, also compressed (.gz, .zst); a
line is a conversation, {"messages": [...]}, by the directory's chat template, or {"prompt": ...,
"completion": ...}. Only the tokens of answers count: the assistant's messages with what the template sets
behind them, and completions. A row of a batch is one conversation. --prepare FOLDER packs the conversations
into token files, on which ./train_llama3 trains.
docs/guides/finetune.md has examples.
"""

import argparse
import bisect
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from llamac import chat, tokenizer
from llamac.config import load_config
from llamac.data.documents import Block, Reading, blocks
from llamac.data.encode import MOST_NAMED, json_values
from llamac.data.inputs import find
from llamac.data.tokens import BEGINS_DOCUMENT, IGNORED, NO_TARGET, write_bin
from llamac.errors import InputError, printable, run

KNOWN = (
    '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}, '
    "both texts or both messages"
)


class NoConversation(InputError):
    """A line's value is not what is expected."""


@dataclass(frozen=True)
class Example:
    """ids: of the whole text. counts [n]: whether each is a part of an answer."""

    ids: list[int]
    counts: list[bool]


@dataclass
class Examples:
    """rows: in the order of the files. left_out: how many lines, by the reason."""

    rows: list[Example] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())


class Encoder:
    """Conversations as ids, by the tokenizer and the template of a directory."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tokenizer = tokenizer.load(self.directory)

    @cached_property
    def template(self) -> chat.Template:
        """The directory's. Raises InputError where it has none."""
        return chat.load(self.directory)

    def messages(self, messages: Sequence[dict[str, Any]]) -> Example:
        """What the template makes of a conversation. Raises InputError where it does not write conversations
        one message after another."""
        template, own = self.template, self.tokenizer
        text, answers = template.render_answers(messages, own)
        if answers and hasattr(own, "backend"):
            return _of_stretches(own, text, answers)
        ids = chat.encode(own, text)
        counts = [False] * len(ids)
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            begin = self._ids_before(messages[:i], ids)
            after = chat.encode(own, template.render(messages[: i + 1], own, answer_begins=False))
            if ids[: len(after)] != after:
                raise self._unordered(i + 1)
            counts[begin : len(after)] = [True] * (len(after) - begin)
        return Example(ids, counts)

    def answered(self, prompt: Sequence[dict[str, Any]], completion: Sequence[dict[str, Any]]) -> Example:
        """A conversation of which everything behind the prompt counts."""
        text = self.template.render([*prompt, *completion], self.tokenizer, answer_begins=False)
        ids = chat.encode(self.tokenizer, text)
        begin = self._ids_before(prompt, ids)
        return Example(ids, [i >= begin for i in range(len(ids))])

    def _ids_before(self, messages: Sequence[dict[str, Any]], ids: list[int]) -> int:
        """How many of a conversation's ids ask for the answer to its first messages."""
        before = chat.encode(self.tokenizer, self.template.render(messages, self.tokenizer))
        if ids[: len(before)] != before:
            raise self._unordered(len(messages) + 1)
        return len(before)

    def _unordered(self, number: int) -> InputError:
        expected = "expected each answer behind what asks for it, as one text"
        found = f"found another text for message {number}"
        return InputError(f"{self.template.path}: chat template: {expected}, {found}")

    def completion(self, prompt: str, completion: str) -> Example:
        """A prompt, its completion, the token that ends a document; before them the one that begins it."""
        own = self.tokenizer
        plain = own.encode
        end = own.bos if own.eos is None else own.eos
        before = [*([own.bos] if own.bos is not None else []), *plain(prompt)]
        answer = [*plain(completion), *([end] if end is not None else [])]
        return Example([*before, *answer], [False] * len(before) + [True] * len(answer))

    def row(self, row: Any, where: str) -> Example:
        """Of a line's value. Raises NoConversation."""
        messages, prompt, completion = (
            row.get(key) if isinstance(row, dict) else None for key in ("messages", "prompt", "completion")
        )
        if _are_messages(messages):
            return self.messages(messages)
        if _are_messages(prompt) and _are_messages(completion):
            return self.answered(prompt, completion)
        if isinstance(prompt, str) and isinstance(completion, str):
            return self.completion(prompt, completion)
        raise NoConversation(f"{where}: expected {KNOWN}, found {json.dumps(row)[:80]}")


def _of_stretches(own: Any, text: str, answers: list[tuple[int, int]]) -> Example:
    """Of a text whose answers are these characters: a token counts if it has one of them."""
    ids, places = chat.encode_with_places(own, text)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    counts = np.zeros(len(ids), bool)
    for begin, end in answers:
        counts |= (begins < end) & (ends > begin)
    return Example(ids, counts.tolist())


def _are_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))
        for each in value
    )


def _blocks(inputs: Sequence[str | Path]) -> Iterator[Block]:
    """Lines of the files that the inputs name. Raises InputError."""
    files = []
    for name in inputs:
        if Path(name).is_dir():
            raise InputError(f"{name}: expected files of JSON lines, found a folder: name '{name}/*.jsonl'")
        files += find(str(name), Path(), "jsonl")[0]
    return blocks(files, Reading(), [0])


def read(inputs: Sequence[str | Path], encoder: Encoder, longest: int, strict: bool = False) -> Examples:
    """The conversations in files or patterns. What is longer than `longest` tokens, or has no answer, is left
    out and counted. So are broken lines, which are also named; with `strict`, the first one raises
    InputError.
    """
    found = Examples()
    named = 0

    def leave_out(where: str, reason: str) -> None:
        nonlocal named
        if strict:
            raise InputError(f"{where}: {reason}: --strict is set; without it, such lines are left out")
        found.left_out[reason] += 1
        named += 1
        if named <= MOST_NAMED:
            print(printable(f"left out: {where}: {reason}"), flush=True)

    for block in _blocks(inputs):
        for path, line, reason in block.skipped:
            leave_out(f"{path}: line {line}", reason)
        for line, value, reason in json_values(block):
            where = f"{block.path}: line {line}"
            if reason:
                leave_out(where, reason)
                continue
            try:
                example = encoder.row(value, where)
            except NoConversation:
                leave_out(where, f"no {KNOWN}")
                continue
            except InputError as error:  # of the template, which may suit no line
                raise InputError(f"{where}: {error}") from None
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


def batch(rows: Sequence[Example], T: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens, targets: int32 [rows, T]; targets that do not count are -100."""
    tokens = np.zeros((len(rows), T), np.int32)
    targets = np.full((len(rows), T), IGNORED, np.int32)
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


def prepare(encoder: Encoder, folder: Path, splits: Mapping[str, Sequence[Example]], T: int) -> None:
    """FOLDER/SPLIT_000.bin of each split that has rows, and the tokenizer's files. The folder gets its name
    when it is whole.
    """
    own = encoder.tokenizer
    filler = next((id for id in (own.pad, own.eos, own.bos) if id is not None), 0)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        own.write_beside_tokens(partial)
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


def batches(rows: Sequence[Example], size: int, steps: int, seed: int) -> Iterator[list[Example]]:
    """The rows of each step: epoch after epoch, each in an order of its own."""
    left: list[int] = []
    epoch = 0
    for _ in range(steps):
        chosen: list[int] = []
        while len(chosen) < size:
            if not left:
                left = np.random.default_rng((seed, epoch)).permutation(len(rows)).tolist()
                epoch += 1
            taken = left[: size - len(chosen)]
            left = left[len(taken) :]
            chosen += taken
        yield [rows[i] for i in chosen]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llamac.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json, weights, tokenizer, chat template")
    add("data", nargs="+", metavar="DATA", help="files of JSON lines, or patterns in quotes")
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--out", type=Path, metavar="OUT", help="a new directory, for the checkpoint")
    result.add_argument("--prepare", type=Path, metavar="FOLDER", help="a new directory, for token files")
    add("--val-data", nargs="+", metavar="DATA", help="the same, whose loss is printed before and after")
    add("--strict", action="store_true", help="stop at the first broken line")
    add("--epochs", type=float, default=1.0, metavar="X", help="(1)")
    add("--batch-size", type=int, default=4, metavar="N", help="conversations per pass (4)")
    add("--accumulation", type=int, default=1, metavar="N", help="passes per step (1)")
    add("--seq-len", type=int, metavar="N", help="skip longer conversations (the model's, up to 2048)")
    add("--lr", type=float, default=2e-5, metavar="X", help="the largest learning rate (2e-5)")
    add("--warmup-steps", type=int, default=0, metavar="N", help="steps of linear warm-up (0)")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="AdamW's decay of the matrices (0)")
    add("--dtype", default="f32", choices=["f32", "bf16"], help="type of weights and activations (f32)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order (0)")
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
    for name in ("epochs", "batch_size", "accumulation"):
        if not getattr(args, name) > 0:
            raise InputError(
                f"--{name.replace('_', '-')}: expected a number above 0, found {getattr(args, name)}"
            )
    if (args.out or args.prepare).exists():
        raise InputError(f"{args.out or args.prepare}: expected a new directory, found one that exists")
    T = args.seq_len or min(2048, load_config(args.directory).max_position_embeddings)
    encoder = Encoder(args.directory)
    found = read(args.data, encoder, T, args.strict)
    _summary("training", found)
    validation: list[Example] = []
    if args.val_data:
        held_out = read(args.val_data, encoder, T, args.strict)
        _summary("validation", held_out)
        validation = held_out.rows
    size = args.batch_size * args.accumulation
    steps = math.ceil(args.epochs * len(found.rows) / size)
    if args.prepare:
        splits = {"train": found.rows} | ({"val": validation} if validation else {})
        return prepare(encoder, args.prepare, splits, T)
    from llamac.options import Options
    from llamac.trainer import Trainer

    trainer = Trainer(
        Options(model=args.directory, init="load", train_data="none", val_data="none"),
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
    for number, rows in enumerate(batches(found.rows, size, steps, args.seed), 1):
        loss = trainer.step(*batch(rows, T), counted=True)
        last = trainer.last
        print(f"step {number}/{steps}: loss {loss:.4f}, gradient norm {last['grad_norm']:.3f}", flush=True)
    if validation:
        print(f"validation loss {validation_loss(trainer, validation, T):.4f}")
    trainer.save(args.out)
    print(f"model {args.out}")


if __name__ == "__main__":
    run(main)
