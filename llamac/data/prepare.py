"""Makes shards from sources of documents: reads, passes blocks to workers, collects ids in order, and writes.

The order is that of the inputs; with a mix, each document is taken from the source that is furthest behind
its share of the training tokens. Both depend only on the inputs, not on the workers. The state is written to
disk every few seconds, so the same command continues an interrupted run.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.errors import InputError, printable
from llamac.base.files import read_json
from llamac.data.block import Block
from llamac.data.documents import Reading, blocks
from llamac.data.encode import MOST_NAMED, Encoded, Encoder, encode_block
from llamac.data.inputs import InputFile
from llamac.data.megatron import index_path
from llamac.data.progress import Progress
from llamac.data.shards import FORMAT, INDEX, PARTIAL, STATE, ShardWriter, write_json
from llamac.data.tokenizer_json import SETTINGS
from llamac.data.tokens import read_bin, token_dtype
from llamac.data.workers import Workers

SPLITS = ("train", "val")
_SIZE = range(2**63)
_COUNTS = {str: _SIZE}
_FEED = {"after": [object], "used": _SIZE, "counted": bool, "open": bool, "given": _SIZE, "documents": _SIZE}
_STATE_KIND = {
    "fingerprint": str,
    "writers": {split: {"shards": [_SIZE], "held": _SIZE} for split in SPLITS},
    "feeds": [_FEED],
    "documents": _COUNTS,
    "left_out": _COUNTS,
    "text_bytes": _SIZE,
}
_SPLIT = {"shards": [_SIZE], "documents": _SIZE, "tokens": _SIZE}
_INDEX_KIND = {
    "fingerprint": str,
    "splits": {split: _SPLIT for split in SPLITS},
    "sources": [{"name": str, "mix": (float, None), "train_tokens": _SIZE}],
    "left_out": _COUNTS,
    "mix_ended_by": (str, None),
}
_SAVE_SECONDS = 10.0


@dataclass
class Source:
    """Inputs that are read one after another. weight: share of the training tokens; None: no mix."""

    name: str
    files: list[InputFile]
    reading: Reading
    weight: float | None = None
    refused: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Settings:
    """Of a run. val_tokens: the first tokens are validation, whatever their documents. mix_tokens: a mix has
    so many training tokens, and sources begin again; 0: it ends with the first that has no more documents.
    """

    out: Path
    workers: int
    shard_tokens: int
    val_tokens: int = 0
    strict: bool = False
    mix_tokens: int = 0


def _rounds(source: Source, start: list[Any]) -> Iterator[Block]:
    """The blocks of a source from `start` on, again and again. The index of a file goes on counting, with one
    for the end of each round."""
    files = len(source.files) + 1
    done, index = divmod(start[0], files)
    place = start[1:]
    while True:
        is_empty = index == 0
        for block in blocks(source.files, source.reading, [index, *place]):
            is_empty = False
            block.after[0] += done * files
            yield block
        if is_empty:
            return
        done, index, place = done + 1, 0, []


class _Feed:
    """A source while it is read: the blocks of the workers in order, and the progress in the first one."""

    def __init__(self, source: Source, state: dict[str, Any], repeats: bool):
        self.source = source
        self.after: list[Any] = state.get("after", [0])
        self.used: int = state.get("used", 0)  # pieces of the first block that are written
        self.counted: bool = state.get("counted", False)  # whether what it left out is
        self.open: bool = state.get("open", False)  # whether a document continues in the next block
        self.given: int = state.get("given", 0)  # training tokens
        self.documents: int = state.get("documents", 0)
        self.more = True
        once = blocks(source.files, source.reading, self.after)
        self.blocks = once if source.weight is None or not repeats else _rounds(source, self.after)
        self.waiting: deque[tuple[int, Block]] = deque()
        self._bytes = np.cumsum([0, *(file.bytes or 0 for file in source.files)])

    def bytes_read(self) -> int:
        """Of the files as they lie there, up to what is written."""
        done, index = divmod(self.after[0], len(self._bytes))
        read = self.waiting[0][1].read if self.waiting else 0
        return int(done * self._bytes[-1] + self._bytes[index]) + read

    def state(self) -> dict[str, Any]:
        names = ("after", "used", "counted", "open", "given", "documents")
        return {name: getattr(self, name) for name in names}


class Run:
    """One data set that is being made."""

    def __init__(self, settings: Settings, sources: list[Source], encoder: Any, fingerprint: str):
        self.settings, self.sources, self.encoder, self.fingerprint = settings, sources, encoder, fingerprint
        self.folder = settings.out / PARTIAL
        self.dtype = token_dtype(encoder.vocab_size)
        self.writers = {
            split: ShardWriter(
                self.folder, split, self.dtype, encoder.vocab_size, encoder.hash, settings.shard_tokens
            )
            for split in SPLITS
        }
        state = load_state(settings.out, fingerprint)
        self.resumed = bool(state)
        for split, writer in self.writers.items():
            if state:
                writer.restore(state["writers"][split])
        self.documents: Counter = Counter(state.get("documents", {}))
        self.left_out: Counter = Counter(state.get("left_out", {}))
        self.text_bytes: int = state.get("text_bytes", 0)
        feeds = state.get("feeds", [{}] * len(sources))
        self.feeds = [_Feed(*each, settings.mix_tokens > 0) for each in zip(sources, feeds)]
        self._results: dict[int, Encoded] = {}
        self._sent = self._named = 0
        self._ended_by = ""
        self._saved = time.monotonic()
        for path, reason in [] if self.resumed else [each for source in sources for each in source.refused]:
            self.left_out[reason.partition(":")[0]] += 1
            self._note(path, reason)

    def make(self, stopped: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Makes the data set; returns its index. If stopped(), saves and raises KeyboardInterrupt."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are what is parallel
        self.encoder.encode_arrays(["a"])  # what it prepares once, the workers share
        work = _Work(self.sources, self.encoder, self.dtype)
        workers = Workers(self.settings.workers, work)
        total = None if self.settings.mix_tokens else _total_bytes(self.sources)
        progress = Progress(total, self._bytes_read(), self._tokens())
        try:
            while self._step(workers):
                if stopped():
                    self.save()
                    raise KeyboardInterrupt
                progress.show(self._bytes_read(), self._tokens(), self.documents.total())
        finally:
            progress.close()
            workers.close()
        return self._finish()

    # reading

    def _fill(self, workers: Workers) -> None:
        """Submits blocks while a worker takes one. The window bounds the memory: a block has megabytes."""
        window = 3 * self.settings.workers + 2 * len(self.feeds)
        while workers.free():
            open_feeds = [feed for feed in self.feeds if feed.more]
            if not open_feeds or sum(len(feed.waiting) for feed in self.feeds) >= window:
                return
            mixed = open_feeds[0].source.weight is not None
            feed = min(open_feeds, key=lambda f: len(f.waiting)) if mixed else open_feeds[0]
            block = next(feed.blocks, None)
            if block is None:
                feed.more = False
                continue
            workers.submit(self._sent, (self.feeds.index(feed), block))
            feed.waiting.append(
                (self._sent, Block(block.kind, block.path, None, block.after, read=block.read))
            )
            self._sent += 1

    def _step(self, workers: Workers) -> bool:
        """Write what one source has next; False: there is nothing more."""
        self._fill(workers)
        feed = self._choose()
        if feed is None:
            return False
        if not feed.waiting and feed.more:
            self._results.update([workers.next()])
            return True
        key, block = feed.waiting[0]
        while key not in self._results:
            self._results.update([workers.next()])
            self._fill(workers)
        self._take(feed, self._results[key], block)
        if feed.after == block.after:
            del self._results[key]
            feed.waiting.popleft()
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.save()
        return True

    def _choose(self) -> _Feed | None:
        left = [feed for feed in self.feeds if feed.more or feed.waiting]
        if not left or left[0].source.weight is None:
            return left[0] if left else None
        mixed = [feed for feed in self.feeds if feed.source.weight is not None]
        total = sum(feed.given for feed in mixed)
        behind = [(feed.source.weight or 0) * total - feed.given for feed in mixed]
        open_feed = next((feed for feed in left if feed.open), None)
        if self.settings.mix_tokens and total >= self.settings.mix_tokens and not open_feed:
            return None
        feed = open_feed or mixed[int(np.argmax(behind))]
        if feed not in left:
            self._ended_by = feed.source.name
            return None
        return feed

    # writing

    def _take(self, feed: _Feed, found: Encoded, block: Block) -> None:
        """Write a block's pieces: all of them, or with a mix one document."""
        again = block.after[0] > len(feed.source.files)
        if again and not feed.given:
            raise InputError(f"{feed.source.name}: expected training documents to repeat, found none")
        if not feed.counted and not again:
            self.left_out.update(found.left_out)
            for path, line, reason in found.named:
                self._note(f"{path}: line {line}" if line else path, reason)
            feed.counted = True
        mixed = feed.source.weight is not None
        begin, end = feed.used, len(found.ends)
        if mixed and begin < end:
            lasts = np.flatnonzero(found.last[begin:])
            end = begin + int(lasts[0]) + 1 if len(lasts) else end
        shards = [len(writer.shards) for writer in self.writers.values()]
        if not (again and found.val[begin:end].any()):  # validation is not repeated
            feed.given += self._write(found, begin, end)
            feed.documents += int(found.begins[begin:end].sum())
        feed.open = not bool(found.last[end - 1]) if end > begin else feed.open
        feed.used = end
        if end == len(found.ends):
            feed.after, feed.used, feed.counted = block.after, 0, False
            self.text_bytes += found.text_bytes
        if shards != [len(writer.shards) for writer in self.writers.values()]:
            self.save()

    def _write(self, found: Encoded, begin: int, end: int) -> int:
        """Pieces begin .. end-1 to their splits; how many training tokens they are."""
        given = 0
        val = found.val[begin:end]
        edges = (
            [begin, *(begin + 1 + np.flatnonzero(val[1:] != val[:-1])).tolist(), end] if end > begin else []
        )
        for a, b in pairwise(edges):
            ids = found.ids[int(found.ends[a - 1]) if a else 0 : int(found.ends[b - 1])]
            split = "val" if found.val[a] else "train"
            self.documents[split] += int(found.begins[a:b].sum())
            if self.settings.val_tokens:
                due = max(0, self.settings.val_tokens - self.writers["val"].tokens)
                self.writers["val"].append(ids[:due])
                ids = ids[due:]
            self.writers[split].append(ids)
            given += len(ids) if split == "train" else 0
        return given

    def _note(self, where: str, reason: str) -> None:
        if self.settings.strict:
            raise InputError(f"{where}: {reason}: --strict is set; without it, such documents are left out")
        self._named += 1
        if self._named <= MOST_NAMED:
            print(printable(f"left out: {where}: {reason}"), flush=True)

    def _bytes_read(self) -> int:
        return sum(feed.bytes_read() for feed in self.feeds)

    def _tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    # the end

    def save(self) -> None:
        """Everything that a later run needs to continue from here."""
        self._saved = time.monotonic()
        state = {
            "fingerprint": self.fingerprint,
            "writers": {split: writer.state() for split, writer in self.writers.items()},
            "feeds": [feed.state() for feed in self.feeds],
            "documents": self.documents,
            "left_out": self.left_out,
            "text_bytes": self.text_bytes,
        }
        write_json(self.folder / STATE, state)

    def _finish(self) -> dict[str, Any]:
        for writer in self.writers.values():
            writer.finish()
        train, val = self.writers["train"], self.writers["val"]
        if train.tokens + val.tokens == 0:
            (self.folder / STATE).unlink(missing_ok=True)  # there is nothing to continue
            why = ", ".join(f"{n} left out: {reason}" for reason, n in self.left_out.most_common(3))
            names = ", ".join(source.name for source in self.sources[:3])
            raise InputError(f"{names}: expected documents, found none{': ' if why else ''}{why}")
        if train.tokens == 0 and not any(source.reading.split for source in self.sources):
            self._all_to_train()
        return self._index()

    def _all_to_train(self) -> None:
        """So few documents that all of them were held out."""
        val = self.writers["val"]
        for index in range(len(val.shards)):
            os.replace(val.path(index), self.writers["train"].path(index))
        self.writers["train"].shards, val.shards = val.shards, []
        self.documents["train"], self.documents["val"] = self.documents["val"], 0

    def _index(self) -> dict[str, Any]:
        encoder = self.encoder
        special = {name: getattr(encoder, name) for name in ("bos", "eos", "pad")}
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "tokenizer": {"xxh3": f"{encoder.hash:016x}", "vocab_size": encoder.vocab_size} | special,
            "splits": {
                split: {"documents": self.documents[split], "tokens": writer.tokens, "shards": writer.shards}
                for split, writer in self.writers.items()
            },
            "sources": [
                {
                    "name": f.source.name,
                    "mix": f.source.weight,
                    "documents": f.documents,
                    "train_tokens": f.given,
                }
                for f in self.feeds
            ],
            "mix_ended_by": self._ended_by or None,
            "left_out": dict(self.left_out.most_common()),
            "text_bytes": self.text_bytes,
        }


class _Work:
    """The work of a worker on (source, block)."""

    def __init__(self, sources: list[Source], encoder: Encoder, dtype: np.dtype):
        self._readings = [source.reading for source in sources]
        self._encoder, self._dtype = encoder, dtype

    def __call__(self, task: tuple[int, Block]) -> Encoded:
        source, block = task
        return encode_block(block, self._readings[source], self._encoder, self._dtype)


def _total_bytes(sources: list[Source]) -> int | None:
    sizes = [file.bytes for source in sources for file in source.files]
    return None if None in sizes else sum(size or 0 for size in sizes)


def fingerprint(settings: Settings, sources: list[Source], tokenizer: Any) -> str:
    """A hash of the inputs with size and time, of how they are read, and of the tokenizer."""
    inputs = [
        [source.name, source.weight, asdict(source.reading), [_identity(file) for file in source.files]]
        for source in sources
    ]
    value = [FORMAT, inputs, tokenizer, settings.shard_tokens, settings.val_tokens]
    value += [settings.mix_tokens] if settings.mix_tokens else []
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _identity(file: InputFile) -> list[Any]:
    if file.kind == "hub":
        return [file.path]
    if file.once:
        return [file.path, os.getpid(), time.time()]  # no later input is known to be the same
    status = os.stat(file.path)
    index = [os.stat(index_path(file.path)).st_mtime_ns] if file.kind == "megatron" else []
    return [os.path.abspath(file.path), file.kind, status.st_size, status.st_mtime_ns, *index]


def load_state(out: Path, expected: str) -> dict[str, Any]:
    """The state that a stopped run of the same inputs left; {}: none."""
    path = out / PARTIAL / STATE
    if not path.exists():
        return {}
    try:
        state = read_json(path, _STATE_KIND)
    except InputError:
        return {}
    if state["fingerprint"] != expected:
        return {}
    for split in SPLITS:
        whole, held = len(state["writers"][split]["shards"]), state["writers"][split]["held"]
        endings = [(number, (".bin",)) for number in range(whole)] + [(whole, (".bin", ".tmp"))] * bool(held)
        for number, ends in endings:
            if not any((out / PARTIAL / f"{split}_{number}{end}").is_file() for end in ends):
                return {}  # it was stopped while it renamed them
    return state


def is_made(out: Path, expected: str) -> dict[str, Any] | None:
    """The index of a finished data set of the same inputs whose shards are all there."""
    try:
        index = read_json(out / INDEX, _INDEX_KIND)
    except InputError:
        return None
    if index["fingerprint"] != expected:
        return None
    for split in SPLITS:
        counts = index["splits"][split]["shards"]
        try:
            found = [len(read_bin(out / name).tokens) for name in shard_names(split, len(counts))]
        except InputError:
            return None
        if found != counts:
            return None
    return index


def shard_names(split: str, count: int) -> list[str]:
    """In an order that is also that of their bytes."""
    width = max(3, len(str(count - 1)))
    return [f"{split}_{index:0{width}d}.bin" for index in range(count)]


def publish(out: Path, index: dict[str, Any]) -> None:
    """Rename everything from the partial folder into place, the index last; older shards are removed."""
    (out / INDEX).unlink(missing_ok=True)
    partial = out / PARTIAL
    kept: set[str] = set()
    for split in SPLITS:
        names = shard_names(split, len(index["splits"][split]["shards"]))
        for number, name in enumerate(names):
            os.replace(partial / f"{split}_{number}.bin", out / name)
        kept |= set(names)
        for stale in out.glob(f"{split}_*.bin"):
            if stale.name not in kept:
                stale.unlink()
    for path in _other_files(partial):
        os.replace(path, out / path.name)
    write_json(out / INDEX, index)
    shutil.rmtree(partial)


def _other_files(partial: Path) -> Iterator[Path]:
    """The tokenizer's."""
    for path in sorted(partial.iterdir()):
        if path.name in SETTINGS or (path.name.startswith("tokenizer") and path.suffix != ".tmp"):
            yield path
