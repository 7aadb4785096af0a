"""Tokens of any text: a file, or the UTF-8 files of a folder, each between its opening and closing token.

`python -m llamac.text INPUT --out DIR` writes to DIR: tokenizer.tiktoken, tokenizer.json and
tokenizer_config.json (the same for transformers), train_000.bin, … and val_000.bin, … Files are shuffled with
a fixed seed, the first --val-fraction of the tokens is validation. Needs as much memory as the longest
stretch of a text that has no line's end between two characters; files without such are read whole.
"""

import argparse
import codecs
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from llamac import tokenizer
from llamac.data import permute, write_shards
from llamac.errors import InputError, run

BLOCK_BYTES = 1 << 20
BATCH_PIECES = 64
ENCODING = "utf-8-sig"  # a byte-order mark at the beginning of a file is no part of its text
ORDER_SEED = 1
MOST_NAMED = 20  # files that are left out of a folder
# No token of the split patterns spans a line's end between two characters that are no white space, nor looks
# beyond it: text may be cut there without a change to its tokens.
SAFE_CUT = re.compile(r"(?<=\S)\n(?=\S)")


def refusal(path: Path) -> str:
    """Why the file is not read as text, or "". It must be UTF-8 throughout, without NUL characters, and not
    empty; JSON lines would be read with their keys and quotes.
    """
    if path.suffix in (".jsonl", ".ndjson"):
        return "JSON lines: there is no reader for them; write each document into a text file"
    decoder = codecs.getincrementaldecoder(ENCODING)()
    characters = 0
    with open(path, "rb") as file:
        try:
            while block := file.read(BLOCK_BYTES):
                text = decoder.decode(block)
                characters += len(text)
                if "\0" in text:
                    return "contains NUL characters"
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return "not UTF-8"
    return "" if characters else "empty"


def documents(source: Path, out: Path) -> list[Path]:
    """The text files of a folder in a fixed random order, hidden ones and what lies in `out` left out; or the
    one file.
    """
    if source.is_file():
        if reason := refusal(source):
            raise InputError(f"{source}: expected UTF-8 text, found a file that is no text: {reason}")
        return [source]
    if not source.is_dir():
        raise InputError(f"{source}: no such file or folder")
    files = [
        path for path in sorted(source.rglob("*")) if path.is_file() and out not in path.resolve().parents
    ]
    files = [path for path in files if not any(part[0] == "." for part in path.relative_to(source).parts)]
    refused = {path: reason for path in files if (reason := refusal(path))}
    for path, reason in list(refused.items())[:MOST_NAMED]:
        print(f"left out: {path}: {reason}")
    if len(refused) > MOST_NAMED:
        print(f"left out: {len(refused) - MOST_NAMED} more files")
    texts = [path for path in files if path not in refused]
    if not texts:
        raise InputError(f"{source}: expected UTF-8 text files, found none")
    print(f"{source}: {len(texts)} text files, {len(refused)} others left out")
    return [texts[int(i)] for i in permute(np.arange(len(texts)), len(texts), ORDER_SEED, 0)]


def pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces of about BLOCK_BYTES whose tokens are those of the whole."""
    rest = ""
    with open(path, encoding=ENCODING, newline="") as file:
        while block := file.read(BLOCK_BYTES):
            new = max(0, len(rest) - 1)  # what comes before has no safe cut
            rest += block
            cut = max((match.end() for match in SAFE_CUT.finditer(rest, new)), default=0)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    yield rest


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Makes the folder and those above it that are missing; where the block fails, removes what it made."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # Ctrl-C, too
        if missing:
            shutil.rmtree(missing[-1], ignore_errors=True)
        raise


def choose_tokenizer(arguments: argparse.Namespace, paths: list[Path]) -> tokenizer.Tokenizer:
    """The tokenizer asked for; its rank file is left beside the tokens."""
    file = arguments.out / "tokenizer.tiktoken"
    if arguments.vocab_size:
        texts = (piece for path in paths for piece in pieces(path))
        tokenizer.save(file, tokenizer.train(texts, arguments.vocab_size - 1))
    elif arguments.tokenizer == "gpt2":
        tokenizer.save(file, tokenizer.gpt2_ranks())
    else:
        tokenizer.save(file, tokenizer.load(arguments.tokenizer).ranks)
    encoder = tokenizer.load(file)
    tokenizer.export(arguments.out, encoder)
    return encoder


def spool(paths: list[Path], encoder: tokenizer.Tokenizer, file: Path) -> np.ndarray:
    """All tokens, through a file of uint32 on disk: memory-mapped [n]."""
    with open(file, "wb") as out:
        for path in paths:
            stream = pieces(path)
            out.write(np.uint32(encoder.bos).tobytes())
            while batch := list(islice(stream, BATCH_PIECES)):
                for ids in encoder.encode_batch(batch):
                    out.write(np.array(ids, np.uint32).tobytes())
            if encoder.eos is not None:
                out.write(np.uint32(encoder.eos).tobytes())
    return np.memmap(file, np.uint32, "r")


def write(arguments: argparse.Namespace, paths: list[Path]) -> None:
    """The tokenizer and the shards of these files."""
    encoder = choose_tokenizer(arguments, paths)
    temporary = arguments.out / "tokens.tmp"
    try:
        tokens = spool(paths, encoder, temporary)
        n_val = round(arguments.val_fraction * len(tokens))
        for split, part in (("val", tokens[:n_val]), ("train", tokens[n_val:])):
            write_shards(arguments.out, split, part, encoder.vocab_size, encoder.hash, arguments.shard_tokens)
            print(f"{split}: {len(part):,} tokens")
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input", type=Path, help="text file, or folder of text files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer", metavar="FILE|gpt2", help="rank file, such as Llama 3's tokenizer.model"
    )
    which.add_argument(
        "--vocab-size", type=int, metavar="N", help="train a tokenizer of N tokens on the text"
    )
    parser.add_argument(
        "--val-fraction", type=float, default=0.05, metavar="X", help="of the tokens; 0 for none"
    )
    parser.add_argument("--shard-tokens", type=int, default=1 << 27, metavar="N", help="at most, in one .bin")
    arguments = parser.parse_args()
    if not 0 <= arguments.val_fraction < 1 or arguments.shard_tokens < 1:
        raise InputError("expected --val-fraction from 0 to below 1 and --shard-tokens of at least 1")
    if arguments.vocab_size is not None and arguments.vocab_size < 257:
        raise InputError(f"--vocab-size: expected at least 256 bytes + 1, found {arguments.vocab_size}")

    paths = documents(arguments.input, arguments.out.resolve())
    with output_folder(arguments.out):
        write(arguments, paths)


if __name__ == "__main__":
    run(main)
