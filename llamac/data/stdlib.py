"""Tokens of the source code of the Python standard library: real text that every machine has.

`llamac data stdlib` writes tokenizer.tiktoken (byte-level BPE of the training part), tokenizer.json
and tokenizer_config.json (the same for transformers), train_000.bin, val_000.bin. Validation consists of
whole top-level packages, chosen only by name, so that every machine holds out the same ones.
"""

import re
import sysconfig
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.errors import InputError
from llamac.base.files import read_text
from llamac.data import tokenizer
from llamac.data.tokens import permute, read_bin, write_shards

# Left out at the top: what is not the library's own (site-packages), what is generated or nearly identical
# (tables, encodings), and what some systems or newer versions do not have.
LEFT_OUT = re.compile(
    r"site-packages|dist-packages|ensurepip|lib-dynload|config-.*|_sysconfigdata.*|sitecustomize.py|encodings"
    r"|pydoc_data|locale.py|stringprep.py|msilib|lib2to3|distutils|idlelib|turtledemo|__phello__"
)
LEFT_OUT_ANYWHERE = {"test", "tests", "idle_test", "entities.py"}
VAL_FRACTION = 0.07  # of the names
VAL_SEED = 31  # gives a mixed 6% of the bytes, of which fewer lines than usual recur in the training part
ORDER_SEED = 1


def sources(root: Path) -> dict[str, list[Path]]:
    """The library's files by the name of their top-level package or module, without underscores around it."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not LEFT_OUT.fullmatch(parts[0]) and not LEFT_OUT_ANYWHERE & set(parts):
            groups.setdefault(parts[0].removesuffix(".py").strip("_"), []).append(path)
    return groups


def held_out(name: str) -> bool:
    """Whether this package is validation text."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed=VAL_SEED) < VAL_FRACTION * 2**64


def read(paths: list[Path]) -> list[str]:
    """Texts of the files that are UTF-8 and not empty."""
    texts = []
    for path in paths:
        try:
            text = read_text(path)
        except InputError:
            continue
        if text.strip():
            texts.append(text)
    return texts


def ready(out: Path, vocab_size: int) -> str | None:
    """The counts of a finished data set; None where a part is missing, damaged or of another tokenizer."""
    try:
        shards = {split: read_bin(out / f"{split}_000.bin") for split in ("train", "val")}
        made_with = tokenizer.load(out / "tokenizer.tiktoken").hash
    except InputError:
        return None
    if any((shard.vocab_size, shard.tokenizer_hash) != (vocab_size, made_with) for shard in shards.values()):
        return None
    return ", ".join(f"{len(shard.tokens):,} {split} tokens" for split, shard in shards.items())


def build(out: Path, root: Path, vocab_size: int) -> None:
    """Train the tokenizer, tokenise both parts, write them."""
    groups = sources(root)
    val = read([path for name in sorted(groups) if held_out(name) for path in groups[name]])
    train = read([path for name in sorted(groups) if not held_out(name) for path in groups[name]])
    if not train or not val:
        raise InputError(f"{root}: expected the sources of the Python standard library, found too few")
    train = [train[int(i)] for i in permute(np.arange(len(train)), len(train), ORDER_SEED, 0)]

    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out / "tokenizer.tiktoken", tokenizer.train(train, vocab_size - 1))
    bpe = tokenizer.load(out / "tokenizer.tiktoken")
    tokenizer.export(out, bpe)
    for split, texts in (("val", val), ("train", train)):
        write_shards(out, split, bpe.encode_documents(texts), bpe.vocab_size, bpe.hash)
        print(f"{split}: {len(texts)} files, {sum(map(len, texts)):,} characters")


def prepare(out: Path, root: Path | None, vocab_size: int, force: bool) -> None:
    """The data set in `out`, unless it is there already. root: of the library, None: this Python's."""
    found = None if force else ready(out, vocab_size)
    if not found:
        build(out, root or Path(sysconfig.get_path("stdlib")), vocab_size)
    elif not (out / "tokenizer_config.json").exists():  # a data set of an earlier version
        tokenizer.export(out, tokenizer.load(out / "tokenizer.tiktoken"))
    print(f"{out}: {found or ready(out, vocab_size)}{', already there' if found else ''}")
