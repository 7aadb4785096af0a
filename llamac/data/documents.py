"""Splits input files into blocks of documents, of about a megabyte, that a worker can process independently.

A block records where reading continues after it (`after`), so that an interrupted run continues there. The
blocks of an input do not depend on the number of workers.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import xxhash

from llamac.data import hub
from llamac.data.inputs import InputFile, Stream, open_seekable, requires
from llamac.errors import InputError

BLOCK_BYTES = 1 << 20
MOST_DOCUMENT = 1 << 24  # bytes of one document that is not cut: workers hold it whole
STRETCH = 1 << 14  # characters of a lone text file that are held out together
ENCODING = "utf-8-sig"  # a byte-order mark at the beginning of a file is no part of its text
TOO_LONG = f"longer than {MOST_DOCUMENT >> 20} MiB"
VAL_SEED = 1
# No token of the known split patterns spans a line's end between two characters that are no white space, nor
# looks beyond it: text may be cut there without a change to its tokens.
SAFE_CUT = re.compile(r"(?<=\S)\n(?=\S)")
_HEADING = re.compile(r" = (?!=).* = \n?")  # of an article in WikiText; " = = " begins a section
_ROWS = 64  # of a table at a time


@dataclass
class Piece:
    """A document or a part of one: its text, or what stands where a text should be; whether the document
    begins and ends here; its split, None: by the hash of the text; where it comes from, with its line or row
    from 1.
    """

    text: Any
    path: str
    line: int = 0
    begins: bool = True
    ends: bool = True
    split: str | None = None


@dataclass
class Block:
    """Content by kind: pieces: of Piece; jsonl: bytes of whole lines; arrow: bytes in Arrow's stream format,
    of one column. `first`: the line or row that it begins with, from 1. `read`: bytes of the file so far, as
    it lies on disk. `skipped`: (path, line, reason) of documents that are left out already. `after`: [index
    of the file, place in it], where the place is a byte, a row, a number of pieces, or, of a stream, its
    number of rows and its state.
    """

    kind: str
    path: str
    content: Any
    after: list[Any]
    first: int = 1
    read: int = 0
    skipped: list[tuple[str, int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """How documents are read. split: of all of them, None: by hash, val_fraction of them validation.
    separator: what stands between those of a text file ("": a file is one). cuttable: whether the tokenizer's
    ids allow SAFE_CUT. stretches: parts of a text are held out, not the whole. articles: documents are
    WikiText's, of several rows or lines.
    """

    field: str = "text"
    split: str | None = None
    val_fraction: float = 0
    separator: str = ""
    cuttable: bool = True
    stretches: bool = False
    articles: bool = False


def split_of(content: bytes, val_fraction: float) -> str:
    """Of a document, by the hash of its text: the same text is always on the same side."""
    return "val" if xxhash.xxh3_64_intdigest(content, seed=VAL_SEED) < val_fraction * 2**64 else "train"


def blocks(files: list[InputFile], how: Reading, start: list[Any]) -> Iterator[Block]:
    """The blocks of the files, one after the other, from `start` on: the `after` of the block before, [0] at
    first.
    """
    held: list[Piece] = []
    skipped: list[tuple[str, int, str]] = []
    size = 0
    for index in range(start[0], len(files)):
        file, place = files[index], start[1:] if index == start[0] else []
        if file.kind != "text" and not how.articles:
            if held or skipped:
                yield Block("pieces", file.path, held, [index], skipped=skipped)
                held, skipped, size = [], [], 0
            for block in _READERS[file.kind](file, how, *place):
                block.after = [index, *block.after]
                yield block
            continue
        if file.kind == "text" and (reason := refusal(file)):
            if not file.optional:
                raise InputError(f"{file.path}: expected UTF-8 text, found a file that is not text: {reason}")
            skipped.append((file.path, 0, reason))
            continue
        for number, (piece, read) in enumerate(_pieces(file, how), 1):
            if place and number <= place[0]:
                continue
            held.append(piece)
            size += len(piece.text) if isinstance(piece.text, str) else 1
            if size >= BLOCK_BYTES:
                yield Block("pieces", file.path, held, [index, number], read=read, skipped=skipped)
                held, skipped, size = [], [], 0
    if held or skipped:
        yield Block("pieces", files[-1].path, held, [len(files)], skipped=skipped)


# JSON lines


def _lines(file: InputFile, how: Reading, offset: int = 0) -> Iterator[Block]:
    """Blocks of whole lines from the byte `offset` on. Where one ends depends on where it begins alone, so
    that a run that goes on there meets the same blocks. A line of more than MOST_DOCUMENT bytes is left out.
    """
    with Stream(file) as stream:
        line = 1 + stream.skip(offset)
        rest = b""
        skipped: list[tuple[str, int, str]] = []
        too_long = False  # within a line that is left out
        while chunk := stream.read(BLOCK_BYTES - len(rest) % BLOCK_BYTES):
            cut = chunk.rfind(b"\n") + 1
            if cut and too_long:
                begin = chunk.find(b"\n") + 1
                rest, offset, line, too_long = chunk[begin:], offset + begin, line + 1, False
            elif cut:
                content = rest + chunk[:cut]
                rest, offset = chunk[cut:], offset + len(content)
                yield Block("jsonl", file.path, content, [offset], line, stream.consumed(), skipped)
                line, skipped = line + content.count(b"\n"), []
            elif too_long:
                offset += len(chunk)
            else:
                rest += chunk
            if len(rest) > MOST_DOCUMENT:
                skipped.append((file.path, line, TOO_LONG))
                offset, rest, too_long = offset + len(rest), b"", True
        if rest or skipped:
            yield Block("jsonl", file.path, rest, [offset + len(rest)], line, stream.consumed(), skipped)


# Parquet and Arrow


def _column(file: InputFile, schema: Any, name: str) -> int:
    at = schema.get_field_index(name)
    if at < 0:
        names = ", ".join(schema.names[:20])
        raise InputError(f"{file.path}: expected a column {name}, found {names}: name it by --field")
    return at


def _parquet_batches(file: InputFile, name: str, row: int) -> Iterator[tuple[int, Any, int]]:
    pyarrow = requires("pyarrow", file.path)
    from pyarrow import parquet

    with open_seekable(file) as source:
        try:
            table = parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
            _column(file, table.schema_arrow, name)
            first = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if first + rows > row:
                    at = first
                    for batch in table.iter_batches(_ROWS, [group], columns=[name], use_threads=False):
                        yield at, batch, source.tell()
                        at += batch.num_rows
                first += rows
        except InputError:
            raise
        except (pyarrow.ArrowException, OSError, MemoryError, ValueError) as error:
            raise InputError(f"{file.path}: expected Parquet: {_first_line(error)}") from None


def _arrow_batches(file: InputFile, name: str, row: int) -> Iterator[tuple[int, Any, int]]:
    pyarrow = requires("pyarrow", file.path)
    with open_seekable(file) as source:
        try:
            magic = source.read(6)
            source.seek(0)
            ipc = pyarrow.ipc
            is_file = magic == b"ARROW1"
            table = ipc.open_file(source) if is_file else ipc.open_stream(source)
            column = _column(file, table.schema, name)
            found = (table.get_batch(i) for i in range(table.num_record_batches)) if is_file else table
            first = 0
            for batch in found:
                for at in range(0, batch.num_rows, _ROWS):
                    yield first + at, batch.slice(at, _ROWS).select([column]), source.tell()
                first += batch.num_rows
        except InputError:
            raise
        except (pyarrow.ArrowException, OSError, MemoryError, ValueError) as error:
            raise InputError(f"{file.path}: expected Arrow: {_first_line(error)}") from None


def _batches(file: InputFile, name: str, row: int) -> Iterator[tuple[int, Any, int]]:
    """(its first row, record batch of the column, bytes read) from the batch that holds `row` on, or before
    it.
    """
    pyarrow = requires("pyarrow", file.path)
    for at, batch, read in (_parquet_batches if file.kind == "parquet" else _arrow_batches)(file, name, row):
        try:
            batch.validate(full=True)  # its offsets lead to memory
        except pyarrow.ArrowException as error:
            raise InputError(f"{file.path}: row {at + 1}: {_first_line(error)}") from None
        yield at, batch, read


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _tables(file: InputFile, how: Reading, row: int = 0) -> Iterator[Block]:
    """The column from `row` on, in batches put together to about BLOCK_BYTES."""
    held: list[Any] = []
    first = size = read = 0
    for at, batch, read in _batches(file, how.field, row):
        if at + batch.num_rows <= row:
            continue
        batch = batch.slice(max(0, row - at))
        first = first if held else max(at, row)
        held.append(batch)
        size += batch.nbytes
        if size >= BLOCK_BYTES:
            yield _table_block(file, held, first, read)
            held, size = [], 0
    if held:
        yield _table_block(file, held, first, read)


def _table_block(file: InputFile, batches: list[Any], first: int, read: int) -> Block:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    rows = sum(batch.num_rows for batch in batches)
    return Block("arrow", file.path, sink.getvalue().to_pybytes(), [first + rows], first + 1, read)


# The hub


def _streamed(
    file: InputFile, how: Reading, row: int = 0, start: dict[str, Any] | None = None
) -> Iterator[Block]:
    """Blocks of rows of a stream, after its first `row`, behind which the state `start` is."""
    held: list[Piece] = []
    size = 0
    state = start
    rows = hub.rows(file.path, how.field, start)
    for text, state in islice(rows, 0 if start else row, None):  # earlier versions wrote the row alone
        row += 1
        held.append(Piece(text, file.path, row, split=how.split))
        size += len(text) if isinstance(text, str) else 1
        if size >= BLOCK_BYTES:
            yield Block("pieces", file.path, held, [row, state])
            held, size = [], 0
    if held:
        yield Block("pieces", file.path, held, [row, state])


_READERS: dict[str, Callable[..., Iterator[Block]]] = {
    "jsonl": _lines,
    "parquet": _tables,
    "arrow": _tables,
    "hub": _streamed,
}


# Text


def refusal(file: InputFile) -> str:
    """Why the file is not read as text, or "". It must be UTF-8 throughout, without NUL characters, and not
    empty.
    """
    if file.once:
        return ""
    characters = 0
    with Stream(file) as stream:
        try:
            for text in _characters(stream):
                characters += len(text)
                if "\0" in text:
                    return "contains NUL characters"
        except UnicodeDecodeError:
            return "not UTF-8"
    return "" if characters else "empty"


def _characters(stream: Stream) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(ENCODING)()
    while block := stream.read(BLOCK_BYTES):
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _check_length(rest: str, path: str, what: str) -> None:
    if len(rest) > MOST_DOCUMENT:
        raise InputError(f"{path}: expected {what} in {MOST_DOCUMENT >> 20} MiB of text, found none")


def cut_text(texts: Iterable[str], most: int, path: str = "text") -> Iterator[str]:
    """Pieces of at least `most` characters, but the last, whose tokens are those of the whole: cut at
    SAFE_CUT only.
    """
    rest = ""
    for text in texts:
        new = max(0, len(rest) - 1)  # what comes before has no safe cut, or is too short
        rest += text
        begin = 0
        for match in SAFE_CUT.finditer(rest, new):
            if match.end() - begin >= most:
                yield rest[begin : match.end()]
                begin = match.end()
        rest = rest[begin:]
        _check_length(rest, path, "the end of a line")
    if rest:
        yield rest


def _separated(texts: Iterable[str], separator: str, path: str) -> Iterator[str]:
    """What stands between separators. A separator of white space, such as a blank line, stays at the
    document's end; any other is left out, and so are documents of white space.
    """
    rest = ""
    blank = not separator.strip()
    for text in texts:
        *whole, rest = (rest + text).split(separator)
        yield from (part + separator if blank else part for part in whole if blank or part.strip())
        _check_length(rest, path, f"{separator!r}")
    if rest if blank else rest.strip():
        yield rest


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """WikiText's articles: each begins with a heading of the first level."""
    held: list[str] = []
    for line in lines:
        if not isinstance(line, str):
            raise InputError(f"expected rows of text, found {type(line).__name__}")
        if held and _HEADING.fullmatch(line):
            yield "".join(held)
            held = []
        if held or line.strip():
            held.append(line)
    if held:
        yield "".join(held)


def _pieces(file: InputFile, how: Reading) -> Iterator[tuple[Piece, int]]:
    """(piece, bytes of the file read) of a text, or of the articles of any file."""
    if file.kind != "text":
        for number, text in enumerate(_joined(_rows(file, how)), 1):
            yield Piece(text, file.path, number, split=how.split), 0
        return
    with Stream(file) as stream:
        texts = _guarded(file, _characters(stream))
        if how.articles:
            documents = _joined(_separated(texts, "\n", file.path))
        elif how.separator:
            documents = _separated(texts, how.separator, file.path)
        elif how.cuttable:
            most = STRETCH if how.stretches else BLOCK_BYTES
            for piece in _parts(file, how, cut_text(texts, most, file.path)):
                yield piece, stream.consumed()
            return
        else:
            documents = iter([_whole(file, texts)])
        for number, text in enumerate(documents, 1):
            yield Piece(text, file.path, number, split=how.split), stream.consumed()


def _parts(file: InputFile, how: Reading, texts: Iterator[str]) -> Iterator[Piece]:
    """The parts of one document: they are on the side of the first, but for stretches."""
    text, split, begins = next(texts, ""), how.split, True
    while text:
        following = next(texts, "")
        if begins and following and not split and not how.stretches:
            split = split_of(text.encode(), how.val_fraction)
        yield Piece(text, file.path, 0, begins, not following, split)
        text, begins = following, False


def _guarded(file: InputFile, texts: Iterator[str]) -> Iterator[str]:
    """Standard input cannot be read twice, so it has not been looked through before."""
    try:
        for text in texts:
            if "\0" in text:
                raise InputError(f"{file.path}: expected UTF-8 text, found NUL characters")
            yield text
    except UnicodeDecodeError:
        raise InputError(f"{file.path}: expected UTF-8 text, found other bytes") from None


def _rows(file: InputFile, how: Reading) -> Iterator[str]:
    """The texts of a stream, a table or JSON lines."""
    from llamac.data.encode import values

    if file.kind == "hub":
        yield from (text for text, _ in hub.rows(file.path, how.field))
        return
    for block in _READERS[file.kind](file, how):
        for _, value, reason in values(block, how.field):
            if reason or not isinstance(value, str):
                raise InputError(
                    f"{file.path}: expected rows of text, found {reason or type(value).__name__}"
                )
            yield value


def _whole(file: InputFile, texts: Iterable[str]) -> str:
    parts, held = [], 0
    for text in texts:
        parts.append(text)
        held += len(text)
        if held > MOST_DOCUMENT:
            why = "which this tokenizer cannot encode in parts: cut it by --separator"
            raise InputError(
                f"{file.path}: expected a text of at most {MOST_DOCUMENT >> 20} MiB, found more, {why}"
            )
    return "".join(parts)
