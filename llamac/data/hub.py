"""Data sets of the Hugging Face hub, streamed row by row with `datasets`; nothing is kept on disk."""

from collections.abc import Iterator
from typing import Any

from llamac.base.errors import InputError, first_line, requires
from llamac.data.inputs import InputFile


def describe(dataset: str, split: str) -> InputFile:
    """An input: NAME, or NAME:CONFIG, and the split behind a @."""
    return InputFile(f"{dataset}@{split}", "hub")


def rows(path: str, field: str, state: dict[str, Any] | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(field, state of the stream after it) of each row; `state`: of an earlier stream, which goes on. Files
    of the data set that lie before a state are not read again. Raises InputError: no library, no network, no
    such data set, split or field.
    """
    name, _, split = path.rpartition("@")
    name, _, config = name.partition(":")
    datasets = requires("datasets", path)
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=True)
        if data.column_names is not None:  # else only the rows say which fields there are
            _check_field(path, field, data.column_names)
            data = data.select_columns(field)  # the others, which may be images, are not decoded
        if state:
            data.load_state_dict(state)
        for row in data:
            _check_field(path, field, list(row))
            yield row[field], data.state_dict()
    except InputError:
        raise
    except Exception as error:  # datasets, huggingface_hub and the network have dozens
        help = "without a network, fetch its files on another machine and name them"
        raise InputError(f"{path}: cannot read it from the hub: {first_line(error)}; {help}") from None


def _check_field(path: str, field: str, names: list[str]) -> None:
    if field not in names:
        raise InputError(f"{path}: expected a field {field}, found {', '.join(names)}: name it by --field")
