"""Data sets with a name in llamac: their origin, and how their files are read.

A local copy of a data set's files, in the hub's format, replaces the download (`--local`).
"""

import re
import sysconfig
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from llamac.base.errors import InputError
from llamac.base.files import write_whole
from llamac.data import hub
from llamac.data.documents import Reading, refusal
from llamac.data.inputs import InputFile, find
from llamac.data.prepare import Source
from llamac.data.tokens import permute

_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_VAL = re.compile(r"(^|[^a-z])(val|valid|validation)([^a-z]|$)", re.IGNORECASE)
_TEST = re.compile(r"(^|[^a-z])test([^a-z]|$)", re.IGNORECASE)
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """hub: NAME or NAME:CONFIG; url: of a text file instead. has_val: whether it comes with a
    validation split. separator: of a text file of it. val_tokens, tokenizer, vocab_size: where
    the flags say nothing.
    """

    about: str
    hub: str = ""
    url: str = ""
    has_val: bool = False
    separator: str = ""
    articles: bool = False
    val_tokens: int = 0
    tokenizer: str = ""
    vocab_size: int = 0  # of a tokenizer that is trained on it


def _wikitext(size: str) -> Recipe:
    hub_name = f"Salesforce/wikitext:wikitext-{size}-raw-v1"
    return Recipe(f"articles of Wikipedia, WikiText-{size}", hub_name, has_val=True, articles=True)


RECIPES = {
    "stdlib": Recipe("sources of Python's standard library: every machine has them", vocab_size=4096),
    "tinyshakespeare": Recipe(
        "Tiny Shakespeare, in paragraphs; the first 32,768 tokens are validation, as in llm.c",
        url=_SHAKESPEARE, separator="\n\n", val_tokens=32768, tokenizer="gpt2",
    ),
    "tinystories": Recipe(
        "TinyStories", "roneneldan/TinyStories", has_val=True, separator=END_OF_TEXT
    ),
    "wikitext-2": _wikitext("2"),
    "wikitext-103": _wikitext("103"),
    "c4": Recipe("C4, English", "allenai/c4:en", has_val=True),
    "fineweb-edu": Recipe(
        "FineWeb-Edu, the sample of 10 billion tokens", "HuggingFaceFW/fineweb-edu:sample-10BT"
    ),
}  # fmt: skip


def sources(name: str, label: str, reading: Reading, out: Path, local: str | None) -> list[Source]:
    """The sources of a named data set: validation, if any, then training. label: the user's name for it."""
    recipe = RECIPES[name]
    how = replace(reading, separator=reading.separator or recipe.separator, articles=recipe.articles)
    refused: list[tuple[str, str]] = []
    if name == "stdlib":
        train, val = _stdlib(Path(local or sysconfig.get_path("stdlib")))
    elif local:
        files, refused = find(local, out)
        val = [file for file in files if recipe.has_val and _VAL.search(Path(file.path).name)]
        train = [file for file in files if file not in val and not _TEST.search(Path(file.path).name)]
        if not train:
            raise InputError(f"{local}: expected files of {name}, found none for training")
    elif recipe.hub:
        val = [hub.describe(recipe.hub, "validation")] if recipe.has_val else []
        train = [hub.describe(recipe.hub, "train")]
    else:
        val, train = [], [_downloaded(name, recipe.url, out)]
    found = [Source(label, train, replace(how, split="train" if val else how.split), refused=refused)]
    if val:
        found.insert(0, Source(f"{label} (validation)", val, replace(how, split="val")))
    return found


def _downloaded(name: str, url: str, out: Path) -> InputFile:
    """The text beside the tokens, where a second run finds it."""
    path = out / f"{name}.txt"
    if not path.exists():
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                content = answer.read()
        except OSError as error:
            raise InputError(f"{name}: cannot download {url}: {error}; --local FILE takes a copy") from None
        out.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return InputFile(str(path), "text")


# The sources of the Python standard library: real text that every machine has

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


def _packages(root: Path) -> dict[str, list[Path]]:
    """The library's files by the name of their top-level package or module, without underscores around it."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not LEFT_OUT.fullmatch(parts[0]) and not LEFT_OUT_ANYWHERE & set(parts):
            groups.setdefault(parts[0].removesuffix(".py").strip("_"), []).append(path)
    return groups


def _stdlib(root: Path) -> tuple[list[InputFile], list[InputFile]]:
    """(training, in an order of its own; validation): the library's files that are UTF-8 and not empty.
    Validation consists of whole top-level packages, chosen only by name, so that every machine holds out the
    same ones.
    """
    train: list[InputFile] = []
    val: list[InputFile] = []
    groups = _packages(root)
    for name in sorted(groups):
        found = [InputFile(str(path), "text") for path in groups[name]]
        is_val = xxhash.xxh3_64_intdigest(name.encode(), seed=VAL_SEED) < VAL_FRACTION * 2**64
        (val if is_val else train).extend(file for file in found if not refusal(file))
    if not train or not val:
        raise InputError(f"{root}: expected the sources of the Python standard library, found too few")
    return [train[int(i)] for i in permute(np.arange(len(train)), len(train), ORDER_SEED, 0)], val
