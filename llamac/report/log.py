"""A run's log.jsonl as columns: a million steps in seconds, and a live run's new lines alone."""

import gc
import itertools
import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llamac.errors import InputError
from llamac.files import excerpt, open_file, parse_json

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
_CHUNK = 4 << 20  # bytes that are parsed at once
_MOST_STEPS = 2**53


def _parser() -> Callable[[bytes], Any]:
    """orjson is five times as fast as the standard library; both read the same log."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads


class RunLog:
    """The events of OUT/log.jsonl. `columns[field]` holds a float64 per step, NaN where the log has no number;
    `events` are all others, each with `after`, the number of the last step before it (0: none)."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._loads = _parser()
        self._reset()

    def _reset(self) -> None:
        self._offset = self._lines = self._last_step = 0
        self._identity: tuple[int, int] | None = None
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
            file.seek(0)
            head = hash(file.read(256))
            inode = self.path.stat().st_ino
            if self._identity not in (None, (inode, head)) or end < self._offset:
                self._reset()
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
                    self._add(self._parse(lines, last=self._offset + size == end))
                    self._offset += size
                    if cut:
                        break
            finally:
                if enabled:
                    gc.enable()
            self._identity = (inode, head) if self._offset >= 256 else None
        if self._offset == start and not self._parts:
            return False
        for name, parts in self._parts.items():
            self.columns[name] = np.concatenate([self.columns[name], *parts])
        self._parts = {}
        self._order()
        return True

    def _parse(self, lines: list[bytes], last: bool) -> list[dict]:
        """The events of whole lines. A broken last line of the file is what a dying run left."""
        first, self._lines = self._lines + 1, self._lines + len(lines)
        try:
            found = self._loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) == len(lines) and all(type(event) is dict for event in found):
            return found
        events = []
        for number, line in enumerate(lines, first):
            where = f"{self.path}: line {number}"
            try:
                event = parse_json(line, where)
            except InputError:
                event = None
            if isinstance(event, dict):
                events.append(event)
            elif not (last and number == self._lines):
                text = line.decode("utf-8", errors="replace")[:60]
                raise InputError(f"{where}: expected a JSON object, found {text!r}")
        return events

    def _add(self, events: list[dict]) -> None:
        steps = [event for event in events if event.get("event") == "step"]
        if len(steps) < len(events):
            after = self._last_step
            for event in events:
                if event.get("event") == "step":
                    after = event.get("step", after)
                else:
                    self.events.append(event | {"after": after})
        if not steps:
            return
        number = self._column(steps, "step")
        if not np.all((number >= 0) & (number <= _MOST_STEPS) & (number == np.floor(number))):
            wrong = next(
                e.get("step") for e, n in zip(steps, number) if not (0 <= n <= _MOST_STEPS and n == int(n))
            )
            raise InputError(
                f"{self.path}: step: expected an integer from 0 to 2^53, found {excerpt(wrong)}"
            )
        self._last_step = int(number[-1])
        self._put("step", number)
        for name in STEP_FIELDS:
            self._put(name, self._column(steps, name))
        devices = [event.get("device") or {} for event in steps]
        if not all(type(device) is dict for device in devices):
            raise InputError(f"{self.path}: device: expected an object in each step that has it")
        for name in DEVICE_FIELDS:
            self._put(f"device.{name}", self._column(devices, name))
        self.skipped += [int(n) for event, n in zip(steps, number) if event.get("skipped") is True]

    def _put(self, name: str, values: np.ndarray) -> None:
        self._parts.setdefault(name, []).append(values)

    def _column(self, events: list[dict], name: str) -> np.ndarray:
        values = [event.get(name) for event in events]
        try:
            numbers = array("d", values)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            try:
                numbers = array("d", [math.nan if value is None else value for value in values])
            except (TypeError, OverflowError):
                wrong = next(v for v in values if v is not None and type(v) not in (int, float))
                raise InputError(
                    f"{self.path}: {name}: expected a number, found {excerpt(wrong)}"
                ) from None
        found = np.frombuffer(numbers)
        return np.where(np.isfinite(found), found, np.nan)

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

    def tokens(self) -> np.ndarray:
        """Tokens that were trained on at the end of each step; NaN where the log does not say."""
        step, per_step = self.columns["step"], np.full(self.columns["step"].size, np.nan)
        for event in self.of("run"):
            count = event.get("tokens_per_step")
            per_step[step > event["after"]] = count if type(count) in (int, float) else math.nan
        steps = np.diff(step, prepend=0.0)
        return np.cumsum(per_step * steps)

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
    chosen = sorted({round(k * (len(items) - 1) / (most - 1)) for k in range(most)})
    return list(itertools.compress(items, (k in set(chosen) for k in range(len(items)))))
