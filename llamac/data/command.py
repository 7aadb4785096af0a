"""`llamac data INPUT... --tokenizer FILE --out DIR` writes token files for training.

INPUT is a list of files, folders, patterns, - (standard input), hub:NAME[:CONFIG] (a data set of the Hugging
Face hub), or names of the list below. Formats are text, JSON lines, Parquet and Arrow, also compressed (.gz,
.zst), folders that the datasets library wrote, and data sets of Megatron-LM (the prefix of .bin and .idx).
docs/training.md, "Your own text", explains every flag.
"""

import argparse
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamac.base.arguments import Parser, check_least
from llamac.base.errors import InputError
from llamac.data import hub, megatron, prepare, recipes, tokenizer
from llamac.data.block import values
from llamac.data.documents import Reading, blocks, choose_field
from llamac.data.encode import UnknownTokenizer
from llamac.data.inputs import KINDS, find
from llamac.data.prepare import Run, Settings, Source
from llamac.data.shards import PARTIAL, STATE
from llamac.data.vocabulary import MOST_TOKENS
from llamac.data.workers import cores

VAL_FRACTION, SHARD_TOKENS = 0.05, 1 << 27
MOST_TRAINING_BYTES = 128 << 20  # of text, for a tokenizer
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
_HUB = "hub:"  # before a data set's name in an input


def _parser() -> Parser:
    names = "\n".join(f"  {name:16} {recipe.about}" for name, recipe in recipes.RECIPES.items())
    parser = Parser("data", __doc__, epilog=f"names of data sets:\n{names}")
    add = parser.add_argument
    add("input", nargs="*", help="inputs; NAME=INPUT names one for --mix")
    parser.path("--out", "folder of the shards (for a data set's name: data/NAME)", "DIR")
    add("--dataset", metavar="NAME[:CONFIG]", help="the same as the input hub:NAME[:CONFIG] (needs datasets)")
    add("--split", default="train", metavar="S", help="split of --dataset or of a folder of several (train)")
    add("--local", metavar="PATH", help="local copy of the named data set's files, instead of a download")
    field = "field or column of the text, in JSON lines and tables (text, or the only one with text)"
    add("--field", metavar="F", help=field)
    add("--format", default="auto", choices=["auto", *KINDS], help="format, if file names do not show it")
    what = r"string between documents of a text file, \n: line end (default: a file is one document)"
    add("--separator", metavar="S", help=what)
    which = parser.add_mutually_exclusive_group().add_argument
    which("--tokenizer", metavar="PATH|gpt2", help="tokenizer.json, directory of a model, rank file")
    which(
        "--vocab-size",
        type=int,
        metavar="N",
        help="train a tokenizer of N tokens on the text; of Megatron's ids: there are N",
    )
    parser.number("--val-fraction", f"share of documents to hold out by their hash; 0: none ({VAL_FRACTION})")
    parser.integer("--val-tokens", "hold out the first N tokens instead")
    add("--mix", nargs="+", metavar="NAME=X", help="shares of the training tokens, for example a=0.7 b=0.3")
    parser.integer("--mix-tokens", "size of the mix; sources begin again (else it ends where the first does)")
    parser.integer("--shard-tokens", "largest number of tokens per file", SHARD_TOKENS)
    parser.integer("--workers", "number of processes; does not change the result", cores())
    parser.switch("--strict", "stop at the first unreadable document")
    parser.switch("--force", "make the data set again if it exists")
    return parser


def _check(a: argparse.Namespace) -> None:
    """Numbers and combinations. Raises InputError."""
    fraction = VAL_FRACTION if a.val_fraction is None else a.val_fraction
    if not 0 <= fraction < 1:
        raise InputError(f"--val-fraction: expected 0 to below 1, found {fraction:g}")
    check_least(a, shard_tokens=1, workers=1, val_tokens=0, vocab_size=1, mix_tokens=1)
    if a.mix_tokens and not a.mix:
        raise InputError("--mix-tokens: expected --mix NAME=SHARE, found none")
    if not a.input and not a.dataset:
        known = ", ".join(recipes.RECIPES)
        raise InputError(f"expected an input: files, folders, -, --dataset NAME, or {known}")
    if a.out is None:
        if a.dataset or len(a.input) != 1 or a.input[0] not in recipes.RECIPES:
            raise InputError("expected --out DIR, where the shards go")
        a.out = Path("data") / a.input[0]
    if a.input.count("-") > 1:
        raise InputError("-: expected once, found twice")


def _is_name(text: str) -> bool:
    return text in recipes.RECIPES and not Path(text).exists()


def _sources(a: argparse.Namespace, reading: Reading) -> list[Source]:
    """The sources of the arguments, with the weights of a mix."""
    found: list[Source] = []
    for argument in [*a.input, *([_HUB + a.dataset] if a.dataset else [])]:
        named = None if Path(argument).exists() else _NAMED.fullmatch(argument)
        name, target = (named[1], named[2]) if named else (argument, argument)
        if _is_name(target):
            found += recipes.sources(target, name, reading, a.out, a.local)
            continue
        if target.startswith(_HUB):
            dataset = target.removeprefix(_HUB)
            label = name if named else dataset.partition(":")[0]
            found.append(Source(label, [hub.describe(dataset, a.split)], reading))
            continue
        files, refused = find(target, a.out, a.format, a.split)
        rows = [file for file in files if file.kind not in ("text", "megatron") and not file.once]
        field = choose_field(rows, a.field) if rows else reading.field
        if field != reading.field:
            print(f"{name}: the text is the field {field!r}")
        found.append(Source(name, files, replace(reading, field=field), refused=refused))
    if a.mix:
        return _mixed(found, a)
    only = [file for source in found for file in source.files]
    if len(only) == 1 and only[0].kind == "text" and not reading.separator and not found[0].reading.separator:
        found[0].reading = replace(found[0].reading, stretches=True)
    return found


def _mixed(sources: list[Source], a: argparse.Namespace) -> list[Source]:
    weights: dict[str, float] = {}
    for entry in a.mix:
        name, _, text = entry.rpartition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            weights[name] = 0
        if not name or not 0 < weights[name] < float("inf"):
            raise InputError(f"--mix {entry}: expected NAME=SHARE with a share above 0")
    trained = [source.name for source in sources if source.reading.split != "val"]
    if sorted(weights) != sorted(trained):
        expected = f"a share of each of {', '.join(trained)}"
        raise InputError(f"--mix: expected {expected}, found {', '.join(weights)}")
    if a.mix_tokens and any(file.once for source in sources for file in source.files):
        raise InputError("--mix-tokens: expected files, which can be repeated, found standard input")
    total = sum(weights.values())
    for source in sources:
        source.weight = weights[source.name] / total if source.name in weights else None
    return sources


def _texts(sources: list[Source]) -> Iterator[str]:
    """The texts of all documents but validation's, for a tokenizer: at most MOST_TRAINING_BYTES."""
    left = MOST_TRAINING_BYTES
    for source in (source for source in sources if source.reading.split != "val"):
        for block in blocks(source.files, source.reading, [0]):
            pieces = (piece.text for piece in block.content) if block.kind == "pieces" else None
            for text in pieces or (value for _, value, _ in values(block, source.reading.field)):
                if isinstance(text, str) and left > 0:
                    left -= len(text)
                    yield text
            if left <= 0:
                return


def _tokenizer(a: argparse.Namespace, name: str) -> Any:
    """The tokenizer that is named; None: it is to be trained."""
    if a.vocab_size:
        return None
    named = a.tokenizer or (recipes.RECIPES[name].tokenizer if name in recipes.RECIPES else "")
    if not named:
        raise InputError("expected --tokenizer PATH, or --vocab-size N to train one, found neither")
    return tokenizer.of_ranks(tokenizer.gpt2_ranks()) if named == "gpt2" else tokenizer.load(named)


def _of_ids(a: argparse.Namespace, sources: list[Source], encoder: Any) -> Any:
    """The tokenizer for the sources. Where --vocab-size stands for it: None if it is to be trained."""
    files = [file for source in sources for file in source.files]
    indexed = [file.path for file in files if file.kind == "megatron"]
    if encoder is None and indexed:
        if len(indexed) < len(files):
            raise InputError(f"{indexed[0]}: expected --tokenizer, whose ids it has: there is text beside it")
        if a.vocab_size > MOST_TOKENS:
            raise InputError(f"--vocab-size: expected at most {MOST_TOKENS}, found {a.vocab_size}")
        return UnknownTokenizer(a.vocab_size)
    if encoder is None:
        if any(file.once for file in files):
            expected = "expected files, which are read once more after the tokenizer is trained on them"
            help = "save it in a file, or name a --tokenizer"
            raise InputError(f"--vocab-size: {expected}, found standard input: {help}")
        if a.vocab_size < 257:
            raise InputError(f"--vocab-size: expected at least 256 bytes + 1, found {a.vocab_size}")
        return None
    marks = {encoder.bos, encoder.eos} - {None}
    for path in indexed:
        ids = megatron.first_document(path)
        if len(ids) and marks and ids[0] != encoder.bos and ids[-1] not in marks:
            print(f"{path}: documents have no bos or eos at their ends: --document-mask cannot find them")
    return encoder


@contextmanager
def _partial_folder(out: Path) -> Iterator[None]:
    """The folder of a run that is not done, and those above it. A run that is stopped leaves what it needs to
    continue. So does one that bad input or a lost connection ends; before its first state it leaves nothing.
    """
    missing = [path for path in (out, *out.parents) if not path.exists()]
    (out / PARTIAL).mkdir(parents=True, exist_ok=True)
    try:
        yield
    except InputError as error:
        if (out / PARTIAL / STATE).exists():
            kept = f"{out / PARTIAL} keeps the finished part, and the same command continues it"
            raise InputError(f"{error}; {kept}") from None
        shutil.rmtree(missing[-1] if missing else out / PARTIAL, ignore_errors=True)
        raise


class _Signals:
    """The first signal while shards are written ends the run between two blocks, any other one at once."""

    def __init__(self) -> None:
        self.number, self.inside = 0, False
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._received) for number in numbers}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: Any) -> None:
        is_first, self.number = not self.number, number
        if not (self.inside and is_first):
            raise KeyboardInterrupt

    def end(self, out: Path) -> None:
        """Print the state of the folder; exit as a program does that a signal ends."""
        is_kept = (out / PARTIAL / STATE).exists()
        how = "the same command continues from here" if is_kept else "no shard was written"
        number = self.number or signal.SIGINT
        print(f"llamac data: stopped by {signal.Signals(number).name}: {how}", file=sys.stderr)
        sys.exit(128 + number)


def _make(
    a: argparse.Namespace,
    settings: Settings,
    sources: list[Source],
    encoder: Any,
    print_: str,
    signals: _Signals,
) -> dict[str, Any]:
    """Make the data set, or continue it."""
    partial = a.out / PARTIAL
    if not prepare.load_state(a.out, print_):
        for path in partial.iterdir():
            path.unlink()
        if encoder is None:
            tokenizer.save(partial / "tokenizer.tiktoken", tokenizer.train(_texts(sources), a.vocab_size - 1))
    encoder = encoder or tokenizer.load(partial / "tokenizer.tiktoken")
    encoder.write_beside_tokens(partial)
    making = Run(settings, sources, encoder, print_)
    if making.resumed:
        print(f"{a.out}: continues after {sum(w.tokens for w in making.writers.values()):,} tokens")
    signals.inside = True
    index = making.make(lambda: signals.number != 0)
    signals.inside = False
    prepare.publish(a.out, index)
    return index


def _summary(out: Path, index: dict[str, Any]) -> None:
    for split, made in index["splits"].items():
        shards = len(made["shards"])
        counted = f"{made['documents']:,} documents, {made['tokens']:,} tokens"
        print(f"{out}: {split}: {counted}, {shards} shard{'' if shards == 1 else 's'}")
    if index["left_out"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in index["left_out"].items())
        print(f"{out}: left out: {reasons}")
    mixed = [source for source in index["sources"] if source.get("mix") is not None]
    total = sum(source["train_tokens"] for source in mixed)
    for source in mixed:
        share = source["train_tokens"] / max(total, 1)
        print(f"{out}: mix: {source['name']}: {source['train_tokens']:,} tokens, {share:.3f} of them")
    if index.get("mix_ended_by"):
        print(f"{out}: mix: ended where {index['mix_ended_by']} had no more documents")


def main(arguments: list[str] | None = None) -> None:
    a = _parser().parse_args(arguments)
    _check(a)
    name = next((argument for argument in a.input if _is_name(argument)), "")
    if name and not a.tokenizer:
        a.vocab_size = a.vocab_size or recipes.RECIPES[name].vocab_size
    encoder = _tokenizer(a, name)
    separator = (a.separator or "").replace("\\n", "\n")
    fraction = VAL_FRACTION if a.val_fraction is None else a.val_fraction
    cuttable = encoder is None or encoder.cuttable
    val_tokens = a.val_tokens
    if val_tokens is None:
        val_tokens = recipes.RECIPES[name].val_tokens if name and a.val_fraction is None else 0
    if a.mix_tokens and val_tokens:
        raise InputError("--mix-tokens: expected --val-fraction, found --val-tokens, which would be repeated")
    reading = Reading(a.field or "text", None, 0 if val_tokens else fraction, separator, cuttable)
    sources = _sources(a, reading)
    encoder = _of_ids(a, sources, encoder)
    settings = Settings(a.out, a.workers, a.shard_tokens, val_tokens, a.strict, a.mix_tokens or 0)
    print_ = prepare.fingerprint(settings, sources, a.vocab_size or encoder.hash)
    if not a.force and (index := prepare.is_made(a.out, print_)):
        _summary(a.out, index)
        print(f"{a.out}: already there")
        return None
    signals = _Signals()
    try:
        with _partial_folder(a.out):
            index = _make(a, settings, sources, encoder, print_, signals)
        _summary(a.out, index)
    except KeyboardInterrupt:
        signals.end(a.out)
    finally:
        signals.restore()
    return None
