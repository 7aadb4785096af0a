"""A run's log.jsonl as columns: reads a million steps in seconds, and only the new lines of a live run."""

import gc
import itertools
import json
import math
from array import array
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.errors import InputError
from llamac.base.files import MOST_LOG, excerpt, open_file, parse_json

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
_CHUNK = 128 << 10  # bytes that are parsed at once: their objects fit into a core's cache
_MOST_STEPS = 2**53
_STEP = (b'{"event":"step",', b'{"event": "step",')  # as C and Python write it
_DEVICE = attrgetter(*DEVICE_FIELDS)


def _decoder() -> tuple[Callable[[bytes], Any], Callable[[Any], tuple]] | None:
    """What reads the line of a step into its fields alone, with their types checked, and what makes a tuple
    of them; None without msgspec, with which a million steps take a fourth of the time."""
    try:
        import msgspec
    except ImportError:
        return None
    numbers = [(name, float | None, None) for name in STEP_FIELDS]
    device = msgspec.defstruct(
        "Device", [(name, float | None, None) for name in DEVICE_FIELDS], frozen=True, gc=False
    )
    more: list[tuple] = [("skipped", bool, False), ("device", device, device())]
    step = msgspec.defstruct("Step", [("step", int), *numbers, *more], gc=False)
    return msgspec.json.Decoder(step).decode, msgspec.structs.astuple


def _is_number(value: Any) -> bool:
    """A number that float64 can hold."""
    return type(value) in (int, float) and abs(value) < 2**1023


class RunLog:
    """The events of OUT/log.jsonl. `columns[field]` holds a float64 per step, NaN where the log has no
    number; `events` are all others, each with `after`, the number of the last step before it (0: none)."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._decoder = _decoder()
        self._reset()

    def _reset(self) -> None:
        self._offset = self._lines = self._last_step = 0
        self._inode, self._head = 0, b""  # what the log was when it was last read
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
                    if not self._add_fast(lines):
                        self._add(self._parse(lines, last=self._offset + size == end))
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

    def _parse(self, lines: list[bytes], last: bool) -> list[dict]:
        """The events of whole lines. A broken last line of the file is what a dying run left."""
        try:
            found = json.loads(b"[" + b",".join(lines) + b"]")  # faster than line by line
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(lines) and all(type(event) is dict for event in found):
            return found
        events = []
        for number, line in enumerate(lines, self._lines + 1):
            where = f"{self.path}: line {number}"
            try:
                event = parse_json(line, where)
            except InputError:
                event = None
            if isinstance(event, dict):
                events.append(event)
            elif not (last and number == self._lines + len(lines)):
                text = line.decode("utf-8", errors="replace")[:60]
                raise InputError(f"{where}: expected a JSON object, found {text!r}")
        return events

    def _add_fast(self, lines: list[bytes]) -> bool:
        """Adds lines in the form that llamac writes; False, and nothing added, if one is not."""
        if self._decoder is None:
            return False
        decode, as_tuple = self._decoder
        steps, others = [], []
        for line in lines:
            if line.startswith(_STEP):
                steps.append(line)
            else:
                others.append((len(steps), line))
        try:
            found = list(map(decode, steps))
            events = [(count, parse_json(line, "")) for count, line in others]
        except (ValueError, RecursionError):  # msgspec's errors and InputError are among them
            return False
        if not all(type(event) is dict and event.get("event") != "step" for _, event in events):
            return False
        if not all(0 <= step.step <= _MOST_STEPS for step in found):
            return False
        for count, event in events:
            self.events.append(event | {"after": found[count - 1].step if count else self._last_step})
        if found:
            *columns, skipped, devices = zip(*map(as_tuple, found))
            columns += zip(*map(_DEVICE, devices))
            self._put([self._numbers(name, values) for name, values in zip(self.columns, columns)])
            self.skipped += itertools.compress(columns[0], skipped)
        return True

    def _add(self, events: list[dict]) -> None:
        steps = [event for event in events if event.get("event") == "step"]
        for event in steps:
            step, device = event.get("step"), event.get("device", {})
            if type(step) is not int or not 0 <= step <= _MOST_STEPS:
                raise InputError(
                    f"{self.path}: step: expected an integer from 0 to 2^53, found {excerpt(step)}"
                )
            if type(device) is not dict:
                raise InputError(f"{self.path}: device: expected an object, found {excerpt(device)}")
        after = self._last_step
        for event in events:
            if event.get("event") == "step":
                after = event["step"]
            else:
                self.events.append(event | {"after": after})
        if steps:
            devices = [event.get("device", {}) for event in steps]
            columns = self._columns(steps, ("step", *STEP_FIELDS)) + self._columns(devices, DEVICE_FIELDS)
            self._put(columns)
            self.skipped += [event["step"] for event in steps if event.get("skipped") is True]

    def _put(self, columns: list[np.ndarray]) -> None:
        for name, values in zip(self.columns, columns):
            self._parts.setdefault(name, []).append(values)
        self._last_step = int(columns[0][-1])

    def _columns(self, events: list[dict], names: tuple[str, ...]) -> list[np.ndarray]:
        """The numbers of these fields, NaN where there is none."""
        return [self._numbers(name, tuple(event.get(name) for event in events)) for name in names]

    def _numbers(self, name: str, values: tuple) -> np.ndarray:
        if values[0] is None and values.count(None) == len(values):
            return np.full(len(values), np.nan)
        try:
            numbers = array("d", values)
        except (TypeError, OverflowError):
            try:
                numbers = array("d", [math.nan if value is None else value for value in values])
            except (TypeError, OverflowError):
                wrong = next(v for v in values if v is not None and not _is_number(v))
                raise InputError(f"{self.path}: {name}: expected a number, found {excerpt(wrong)}") from None
        found = np.frombuffer(numbers)
        return found if np.isfinite(found).all() else np.where(np.isfinite(found), found, np.nan)

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

    def of_run(self, key: str) -> np.ndarray:
        """For each step, a number of the event `run` before it; NaN where that has none. A resumed run may
        have another number."""
        step = self.columns["step"]
        values = np.full(step.size, np.nan)
        for event in self.of("run"):
            value = event.get(key)
            values[step > event["after"]] = value if _is_number(value) else math.nan
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


def points(events: list[dict], field: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a field of events that have a step; the last one of each step."""
    found = {
        e["step"]: float(e[field])
        for e in events
        if type(e.get("step")) is int
        and 0 <= e["step"] <= _MOST_STEPS
        and type(e.get(field)) in (int, float)
        and abs(e[field]) < 1e100
    }
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def spread(items: list, most: int) -> list:
    """At most so many of the items, the first and the last among them, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
