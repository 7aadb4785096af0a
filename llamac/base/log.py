"""Reads log.jsonl, the log of a run."""

from pathlib import Path
from typing import Any

from llamac.base.errors import InputError
from llamac.base.files import MOST_LOG, Kind, expect, parse_json, read_bytes

# The fields of each event that are drawn. No run has numbers beyond these, and an axis has no room for them.
MOST_STEPS, _LARGEST = 2**53, 1e100
_STEP = {"step": range(MOST_STEPS + 1)}
_NUMBER = (Kind(f"a number up to {_LARGEST:g}", lambda value: is_number(value)), None)
_KINDS = {
    "step": _STEP | dict.fromkeys(("loss", "lr", "tokens_per_s"), _NUMBER),
    "val": _STEP | {"loss": _NUMBER},
    "saturated": _STEP | {"share": _NUMBER},
    "evaluation": _STEP | {"accuracy": _NUMBER, "task": (str, None)},
    "run": {"parameters": _NUMBER, "tokens_per_step": _NUMBER, "device": (str, None)},
    "start": {"model": (str, None)},
}


def read_log(path: Path) -> list[dict]:
    """The events of a log.jsonl. A last line cut short by a run that still writes, or died, is left out."""
    lines = read_bytes(path, MOST_LOG).rstrip(b"\n").split(b"\n")
    events = []
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        try:
            event = parse_json(line, where)
        except InputError:
            event = None
        if isinstance(event, dict):
            kind = event.get("event")
            events.append(expect(event, _KINDS.get(kind if isinstance(kind, str) else "", {}), where))
        elif number < len(lines):
            found = line.decode("utf-8", errors="replace")[:60]
            raise InputError(f"{where}: expected a JSON object, found {found!r}")
    return events


def is_number(value: Any) -> bool:
    """Whether it is a finite number that an axis has room for."""
    return type(value) in (int, float) and abs(value) <= _LARGEST
