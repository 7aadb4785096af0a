"""Splits input files into blocks of documents, of about a megabyte, that a worker can process independently.

A block records where reading continues after it (`after`), so that an interrupted run continues there. The
blocks of an input do not depend on the number of workers.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import xxhash

from llamac.base.errors import InputError, first_line, requires
from llamac.base.files import flaw
from llamac.data import hub, megatron
from llamac.data.block import Block, Piece, field_names, values
from llamac.data.inputs import InputFile, Stream, open_seekable

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
_SPACE = re.compile(r"[ \t\r\n]*")
_parse_json = json.JSONDecoder().raw_decode
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """How documents are read. field: of the text; None: rows are wanted whole. split: of all of them, None:
    by hash, val_fraction of them validation. separator: what stands between those of a text file ("": a file
    is one). cuttable: whether the tokenizer's ids allow SAFE_CUT. stretches: parts of a text are held out,
    not the whole. articles: documents are WikiText's, of several rows or lines.
    """

    field: str | None = "text"
    split: str | None = None
    val_fraction: float = 0
    separator: str = ""
    cuttable: bool = True
    stretches: bool = False
    articles: bool = False


def split_of(content: bytes | memoryview, val_fraction: float) -> str:
    """Of a document, by the hash of its text or ids: the same text is always on the same side."""
    return "val" if xxhash.xxh3_64_intdigest(content, seed=VAL_SEED) < val_fraction * 2**64 else "train"


def blocks(files: list[InputFile], how: Reading, start: list[Any]) -> Iterator[Block]:
    """The blocks of the files from `start` on, which is the `after` of the block before, [0] at first."""
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
            size += _size(piece.text)
            if size >= BLOCK_BYTES:
                yield Block("pieces", file.path, held, [index, number], read=read, skipped=skipped)
                held, skipped, size = [], [], 0
    if held or skipped:
        yield Block("pieces", files[-1].path, held, [len(files)], skipped=skipped)


def _batches_of(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in lists of about BLOCK_BYTES."""
    held: list[T] = []
    size = 0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size >= BLOCK_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _size(text: Any) -> int:
    return len(text) if isinstance(text, str) else 1


def choose_field(files: list[InputFile], name: str | None) -> str:
    """The field of the text in files of rows, by their first blocks: `name`; None: "text" or, where no file
    has it, the only one with text. Raises InputError where there is none."""
    wanted = name or "text"
    found: dict[str, bool] = {}  # whether there is text in it
    for file in files:
        for block in islice(blocks([file], Reading(None), [0]), 1):
            names = field_names(block)
            if wanted in names:
                return wanted
            rows = [row for _, row, _ in values(block, None) if isinstance(row, dict)]
            for each in names:
                found[each] = found.get(each, False) or any(isinstance(row.get(each), str) for row in rows)
    texts = [each for each, is_text in found.items() if is_text]
    if name is None and len(texts) == 1:
        return texts[0]
    if found:
        some = ", ".join(list(found)[:20])
        raise InputError(f"{files[0].path}: expected a field {wanted}, found {some}: name it by --field")
    return wanted


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
            if too_long:
                end = chunk.find(b"\n") + 1
                offset += end or len(chunk)
                if not end:
                    continue
                chunk, line, too_long = chunk[end:], line + 1, False
            cut = chunk.rfind(b"\n") + 1
            if cut:
                content = rest + chunk[:cut]
                rest, offset = chunk[cut:], offset + len(content)
                yield Block("jsonl", file.path, content, [offset], line, stream.consumed(), skipped)
                line, skipped = line + content.count(b"\n"), []
            else:
                rest += chunk
            if len(rest) > MOST_DOCUMENT:
                skipped.append((file.path, line, TOO_LONG))
                offset, rest, too_long = offset + len(rest), b"", True
        if rest or skipped:
            yield Block("jsonl", file.path, rest, [offset + len(rest)], line, stream.consumed(), skipped)


# A JSON array


def _items(file: InputFile, how: Reading, row: int = 0) -> Iterator[Block]:
    """Blocks of the items of a JSON array, or of a sequence of JSON values, after the first `row`."""
    with Stream(file) as stream:
        items = islice(enumerate(_json_items(file.path, stream), 1), row, None)
        for held in _batches_of(items, lambda numbered: len(numbered[1])):
            content = b"\n".join(item for _, item in held)
            yield Block("jsonl", file.path, content, [held[-1][0]], held[0][0], stream.consumed())


class _JsonText:
    """The text of a JSON file, in memory from the place `at` on."""

    def __init__(self, path: str, stream: Stream):
        self.path, self.stream, self.number = path, stream, 1
        self.text, self.at = "", 0
        # An item that is not UTF-8 keeps its bytes, and is left out later on.
        self._decoder = codecs.getincrementaldecoder(ENCODING)("surrogateescape")

    def next(self) -> str:
        """The next character that is no white space; "": the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or not self._more():
                return self.text[self.at : self.at + 1]

    def item(self) -> bytes:
        """The next value as a line: in JSON, line ends stand between values only."""
        while True:
            try:
                _, end = _parse_json(self.text, self.at)
                if end < len(self.text) or not self._more():  # else "12" might be the begin of "123"
                    break
            except RecursionError:
                raise self.refusal("fewer levels of nesting") from None
            except ValueError:
                if not self._more():
                    raise self.refusal("a value") from None
        item, self.at = self.text[self.at : end], end
        self.number += 1
        return item.replace("\n", " ").replace("\r", " ").encode("utf-8", "surrogateescape")

    def refusal(self, expected: str) -> InputError:
        found = json.dumps(self.text[self.at : self.at + 40])
        return InputError(f"{self.path}: item {self.number}: expected JSON, {expected}, found {found}")

    def _more(self) -> bool:
        """Read on, as much as there is: a long item is parsed a few times only."""
        rest = self.text[self.at :]
        if len(rest) > MOST_DOCUMENT:
            raise InputError(f"{self.path}: item {self.number}: expected JSON, found an item {TOO_LONG}")
        chunk = self.stream.read(max(BLOCK_BYTES, len(rest)))
        new = self._decoder.decode(chunk, final=not chunk)
        if chunk or new:
            self.text, self.at = rest + new, 0
        return bool(chunk or new)


def _json_items(path: str, stream: Stream) -> Iterator[bytes]:
    """The items of an array, or the values of a text, each as a line."""
    text = _JsonText(path, stream)
    in_array = text.next() == "["
    text.at += in_array
    while text.next() not in (("]", "") if in_array else ("",)):
        yield text.item()
        if in_array and text.next() == ",":
            text.at += 1
        elif in_array and text.next() != "]":
            raise text.refusal("a comma or the array's end")
    if in_array:
        if text.next() != "]":
            raise text.refusal("the array's end")
        text.at += 1
        if text.next():
            raise text.refusal("nothing behind the array")


# Parquet and Arrow


def _column(file: InputFile, schema: Any, name: str) -> int:
    at = schema.get_field_index(name)
    if at < 0:
        names = ", ".join(schema.names[:20])
        raise InputError(f"{file.path}: expected a column {name}, found {names}: name it by --field")
    return at


def _parquet_batches(file: InputFile, table: Any, name: str | None, row: int) -> Iterator[tuple[int, Any]]:
    if name is not None:
        _column(file, table.schema_arrow, name)
    first = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if first + rows > row:
            at = first
            columns = None if name is None else [name]
            for batch in table.iter_batches(_ROWS, [group], columns=columns, use_threads=False):
                yield at, batch
                at += batch.num_rows
        first += rows


def _arrow_batches(file: InputFile, table: Any, name: str | None) -> Iterator[tuple[int, Any]]:
    columns = None if name is None else [_column(file, table.schema, name)]
    is_file = hasattr(table, "num_record_batches")
    found = (table.get_batch(i) for i in range(table.num_record_batches)) if is_file else table
    first = 0
    for batch in found:
        batch = batch if columns is None else batch.select(columns)
        _check_batch(batch)
        for at in range(0, batch.num_rows, _ROWS):
            yield first + at, batch.slice(at, _ROWS)
        first += batch.num_rows


def _batches(file: InputFile, name: str | None, row: int) -> Iterator[tuple[int, Any, int]]:
    """(first row, record batch of the column, bytes read) from the batch with `row`, or one before it, on."""
    pyarrow = requires("pyarrow", file.path)
    from pyarrow import parquet

    with open_seekable(file) as source:
        try:
            if file.kind == "parquet":
                table = parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
                found = _parquet_batches(file, table, name, row)
            else:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source)
                found = _arrow_batches(file, table, name)
            for at, batch in found:
                _ = batch.schema.names  # raises where one is not UTF-8
                yield at, batch, source.tell()
        except InputError:
            raise
        # Damaged files make pyarrow raise nearly anything: KeyError, UnicodeDecodeError, OverflowError ...
        except Exception as error:
            kind = file.kind.capitalize()
            raise InputError(f"{file.path}: expected {kind}: {first_line(error)}") from None


def _check_batch(batch: Any) -> None:
    """Whether offsets, types and lengths of a batch are what they should be: pyarrow reads outside of its
    memory otherwise. Texts that are not UTF-8 are none of its damages, but their rows'."""
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        # The first text that is not UTF-8 has hidden what follows it.
        for i in range(batch.num_rows):
            try:
                batch.slice(i, 1).validate(full=True)
            except pyarrow.ArrowInvalid as error:
                if "UTF8" not in str(error):
                    raise


def _tables(file: InputFile, how: Reading, row: int = 0) -> Iterator[Block]:
    """The column from `row` on, in batches put together to about BLOCK_BYTES."""
    found = (
        (max(at, row), batch.slice(max(0, row - at)), read)
        for at, batch, read in _batches(file, how.field, row)
        if at + batch.num_rows > row
    )
    for held in _batches_of(found, lambda each: each[1].nbytes):
        yield _table_block(file, [batch for _, batch, _ in held], held[0][0], held[-1][2])


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
    rows = hub.rows(file.path, str(how.field), start)
    rows = islice(rows, 0 if start else row, None)  # earlier versions wrote the row alone
    for held in _batches_of(enumerate(rows, row + 1), lambda numbered: _size(numbered[1][0])):
        pieces = [Piece(text, file.path, number, split=how.split) for number, (text, _) in held]
        number, (_, state) = held[-1]
        yield Block("pieces", file.path, pieces, [number, state])


_READERS: dict[str, Callable[..., Iterator[Block]]] = {
    "jsonl": _lines,
    "json": _items,
    "parquet": _tables,
    "arrow": _tables,
    "hub": _streamed,
    "megatron": lambda file, how, *place: megatron.blocks(file.path, BLOCK_BYTES // 4, *place),
}


# Text


def refusal(file: InputFile) -> str:
    """Why the file is not read as text, or "". Text is UTF-8, without NUL characters, and not empty."""
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
    """Pieces of at least `most` characters, cut at SAFE_CUT only: their tokens are those of the whole."""
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
    """The texts between separators. A separator of white space, such as a blank line, stays at the
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
    found: Iterable[tuple[Any, str]]
    if file.kind == "hub":
        found = ((text, "") for text, _ in hub.rows(file.path, str(how.field)))
    else:
        blocks_ = _READERS[file.kind](file, how)
        found = ((value, reason) for block in blocks_ for _, value, reason in values(block, how.field))
    for value, reason in found:
        if reason or not isinstance(value, str):
            raise InputError(f"{file.path}: expected rows of text, found {reason or type(value).__name__}")
        yield value


def whole_rows(files: list[InputFile]) -> Iterator[tuple[str, Any, str]]:
    """(file and line, row, "" or the reason to leave it out) of each row of JSON lines, arrays and tables."""
    for block in blocks(files, Reading(field=None), [0]):
        for path, line, reason in block.skipped:
            yield f"{path}: line {line}", None, reason
        for line, row, reason in values(block, None):
            yield f"{block.path}: line {line}", row, reason or flaw(row)


def _whole(file: InputFile, texts: Iterable[str]) -> str:
    parts, held = [], 0
    for text in texts:
        parts.append(text)
        held += len(text)
        if held > MOST_DOCUMENT:
            expected = f"a text of at most {MOST_DOCUMENT >> 20} MiB"
            why = "which this tokenizer cannot encode in parts: cut it by --separator"
            raise InputError(f"{file.path}: expected {expected}, found more, {why}")
    return "".join(parts)
