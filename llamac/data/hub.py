"""Data sets of the Hugging Face hub, streamed row by row with `datasets`; nothing is kept on disk."""

from collections.abc import Iterator
from typing import Any

from llamac.data.inputs import InputFile, requires
from llamac.errors import InputError


def describe(name: str, config: str | None, split: str) -> InputFile:
    """An input: NAME, or NAME:CONFIG, and the split behind a @."""
    return InputFile(f"{name}{':' + config if config else ''}@{split}", "hub")


def rows(path: str, field: str) -> Iterator[Any]:
    """The field of each row. Raises InputError: no library, no network, no such data set, split or field."""
    name, _, split = path.rpartition("@")
    name, _, config = name.partition(":")
    datasets = requires("datasets", path)
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=True)
        for number, row in enumerate(data, 1):
            if field not in row:
                found = f"{', '.join(row)}: name it by --field"
                raise InputError(f"{path}: row {number}: expected a field {field}, found {found}")
            yield row[field]
    except InputError:
        raise
    except Exception as error:  # datasets, huggingface_hub and the network have dozens
        lines = str(error).splitlines() or [type(error).__name__]
        help = "without a network, fetch its files on another machine and name them"
        raise InputError(f"{path}: cannot read it from the hub: {lines[0][:200]}; {help}") from None
