"""A run's log.jsonl as columns: reads a million steps in seconds, and only the new lines of a live run."""

import gc
import itertools
import math
from array import array
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from llamac.base.errors import InputError, requires
from llamac.base.files import MOST_LOG, open_file, parse_json
from llamac.base.log import MOST_STEPS, is_number

STEP_FIELDS = (
    "loss",
    "grad_norm",
    "lr",
    "ms",
    "tokens_per_s",
    "tflops",
    "mfu",
    "gpu_mem_gib",
    "gpu_percent",
    "rss_gib",
    "system_mem_gib",
    "cpu_percent",
)
DEVICE_FIELDS = ("watts", "celsius")  # within the object `device` of a step
NOT_FLAGS = ("event", "time", "after", "before")  # of the fields of an event `start`
_CHUNK = 128 << 10  # bytes that are parsed at once: their objects fit into a core's cache
_STEP = (b'{"event":"step",', b'{"event": "step",')  # as C and Python write it
_DEVICE = attrgetter(*DEVICE_FIELDS)


def _step_type() -> Any:
    """The fields of a step's line that a report reads, with their types."""
    msgspec = requires("msgspec", "llamac report")
    number = float | None
    device = msgspec.defstruct("Device", [(name, number, None) for name in DEVICE_FIELDS], gc=False)
    step = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]
    numbers = [(name, number, None) for name in STEP_FIELDS]
    more: list[tuple] = [
        ("skipped", bool, False),
        ("time", str, ""),
        ("device", device, msgspec.field(default_factory=device)),
    ]
    return msgspec.defstruct("Step", [("step", step), *numbers, *more], gc=False)


def _numbers(values: tuple) -> np.ndarray:
    """float64, NaN for None."""
    if values.count(None) == len(values):
        return np.full(len(values), np.nan)
    if None in values:
        values = tuple(math.nan if value is None else value for value in values)
    return np.frombuffer(array("d", values))


class RunLog:
    """The events of OUT/log.jsonl. `columns[field]` holds a float64 per step, NaN where the log has no
    number; `events` are all others, each with `after`, the number of the last step before it (0: none), and
    `before`, the time of the line before it. `time` is that of the last line."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._type = _step_type()
        self._reset()

    def _reset(self) -> None:
        self._offset = self._lines = self._last_step = 0
        self._inode, self._head = 0, b""  # what the log was when it was last read
        self.time: Any = ""
        self._parts: dict[str, list[np.ndarray]] = {}
        self.events: list[dict] = []
        self.skipped: list[int] = []
        self.columns = {
            name: np.empty(0) for name in ("step", *STEP_FIELDS, *(f"device.{k}" for k in DEVICE_FIELDS))
        }

    def update(self) -> bool:
        """Reads what was written since the last call; whether there was anything. A line without its end is
        left for the next call. A log that another one replaced, or that a resumed run cut, is read anew."""
        with open_file(self.path) as file:
            end = file.seek(0, 2)
            if end > MOST_LOG:
                raise InputError(f"{self.path}: expected at most {MOST_LOG} bytes, found {end}")
            file.seek(0)
            head = file.read(256)
            inode = self.path.stat().st_ino
            if self._inode not in (0, inode) or not head.startswith(self._head) or end < self._offset:
                self._reset()
            self._inode, self._head = inode, head
            start = file.seek(self._offset)
            enabled = gc.isenabled()
            gc.disable()  # millions of small objects, none of them in a cycle
            try:
                while lines := file.readlines(_CHUNK):
                    cut = not lines[-1].endswith(b"\n")
                    if cut:
                        lines.pop()
                    if not lines:
                        break
                    size = sum(map(len, lines))
                    self._add(lines, is_last=self._offset + size == end)
                    self._lines += len(lines)
                    self._offset += size
                    if cut:
                        break
            finally:
                if enabled:
                    gc.enable()
        if self._offset == start and not self._parts:
            return False
        for name, parts in self._parts.items():
            self.columns[name] = np.concatenate([self.columns[name], *parts])
        self._parts = {}
        self._order()
        return True

    def _add(self, lines: list[bytes], is_last: bool) -> None:
        """Adds whole lines. is_last: they end the file, where a run that died may have left a broken line."""
        import msgspec

        decode = msgspec.json.Decoder(self._type).decode
        steps: list[Any] = []
        after = self._last_step
        for number, line in enumerate(lines, self._lines + 1):
            event: Any = None
            try:
                if line.startswith(_STEP):
                    step = decode(line)
                else:
                    event = parse_json(line, "")
                    if type(event) is not dict:
                        raise InputError("no object")
                    step = msgspec.convert(event, self._type) if event.get("event") == "step" else None
            except msgspec.ValidationError as error:
                raise InputError(f"{self.path}: line {number}: {error}") from None
            except (msgspec.DecodeError, InputError):
                if is_last and number == self._lines + len(lines):
                    break
                text = line.decode("utf-8", errors="replace")[:60]
                raise InputError(
                    f"{self.path}: line {number}: expected a JSON object, found {text!r}"
                ) from None
            if step is None:
                self.events.append(event | {"after": after, "before": self.time})
                self.time = event.get("time")
            else:
                steps.append(step)
                after, self.time = step.step, step.time
        if steps:
            *columns, skipped, _, devices = zip(*map(msgspec.structs.astuple, steps))
            columns += zip(*map(_DEVICE, devices))
            for name, values in zip(self.columns, columns):
                self._parts.setdefault(name, []).append(_numbers(values))
            self.skipped += itertools.compress(columns[0], skipped)
            self._last_step = after

    def _order(self) -> None:
        """Steps in ascending order, each one once: the last that was written."""
        step = self.columns["step"]
        if step.size < 2 or np.all(np.diff(step) > 0):
            return
        _, kept = np.unique(step[::-1], return_index=True)
        kept = step.size - 1 - kept
        self.columns = {name: values[kept] for name, values in self.columns.items()}

    def of(self, kind: str) -> list[dict]:
        """The other events of a kind."""
        return [event for event in self.events if event.get("event") == kind]

    def last(self, kind: str) -> dict:
        """The last event of a kind; empty where there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})

    def flags(self) -> dict:
        """Of the last start of the run."""
        return {key: value for key, value in self.last("start").items() if key not in NOT_FLAGS}

    def of_run(self, key: str) -> np.ndarray:
        """Per step, a number of the last event `run` before it (a resume may change it); NaN for none."""
        step = self.columns["step"]
        values = np.full(step.size, np.nan)
        for event in self.of("run"):
            value = event.get(key)
            values[step > event["after"]] = value if is_number(value) else math.nan
        return values

    def tokens(self) -> np.ndarray:
        """Tokens that were trained on at the end of each step; NaN where the log does not say."""
        return np.cumsum(self.of_run("tokens_per_step") * np.diff(self.columns["step"], prepend=0.0))

    def hours(self) -> np.ndarray:
        """Hours of optimizer steps at the end of each step, without what lies between them."""
        return np.cumsum(np.nan_to_num(self.columns["ms"])) / 3.6e6


def read(out: str | Path) -> RunLog:
    """The log of a run's folder, or of a log.jsonl. Raises InputError if it has no event."""
    path = Path(out)
    log = RunLog(path / "log.jsonl" if path.is_dir() else path)
    log.update()
    if not log.events and not log.columns["step"].size:
        raise InputError(f"{log.path}: expected the log of a run, found no event")
    return log


def unix_time(text: Any) -> float:
    """Unix time of an event's time; NaN where there is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return math.nan


def points(events: list[dict], field: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a field of events that have a step; the last one of each step."""
    found = {
        e["step"]: float(e[field])
        for e in events
        if type(e.get("step")) is int and 0 <= e["step"] <= MOST_STEPS and is_number(e.get(field))
    }
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def spread(items: list, most: int) -> list:
    """At most so many of the items, the first and the last among them, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
