"""The figures of a run: those above the charts and in the table of runs, and the state of a live run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llamac.base.log import is_number
from llamac.report.log import RunLog, points, unix_time
from llamac.report.plot import short
from llamac.report.reduce import smooth

Row = tuple[str, str, float | None]  # name, text, number
_RECENT = 100  # steps


def duration(seconds: float) -> str:
    """12 s, 3:05 or 7:02:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def summary(log: RunLog) -> list[Row]:
    """Without the figures that the log does not have."""
    start, run = log.last("start"), log.last("run")
    step, tokens = log.columns["step"], log.tokens()[-1:]
    rows: list[Row] = []

    def text(name: str, found: str) -> None:
        if found:
            rows.append((name, found, None))

    def number(name: str, value: Any, form: Callable[[float], str] = "{:.4f}".format) -> None:
        """Of a number, or of the last of an array."""
        if isinstance(value, np.ndarray):
            value = float(value[-1]) if value.size else None
        if is_number(value):
            rows.append((name, form(value), value))

    text("model", Path(str(start.get("model", ""))).name)
    number("parameters", run.get("parameters"), short)
    text("device", str(run.get("device", "")))
    planned = start.get("steps")
    of = f" of {planned:,}" if type(planned) is int and step.size and planned != step[-1] else ""
    number("steps", step, lambda last: f"{last:,.0f}{of}")
    number("tokens", tokens, short)
    if is_number(run.get("tokens_per_epoch")) and run["tokens_per_epoch"] > 0:
        number("epochs", tokens / run["tokens_per_epoch"], "{:.3g}".format)
    number("training loss", smooth(log.columns["loss"]))
    validated, losses = points(log.of("val"), "loss")
    number("validation loss", np.array(losses))
    if losses:
        number("best validation loss", min(losses))
        number("best at step", validated[losses.index(min(losses))], "{:,}".format)
    number("best bits per byte", min(points(log.of("val"), "bits_per_byte")[1], default=None))
    number("tokens/s (median)", _median(log.columns["tokens_per_s"]), "{:,.0f}".format)
    number("MFU (median)", 100 * _median(log.columns["mfu"]), "{:.1f}%".format)
    number("time in steps", 3600 * log.hours(), duration)
    number("wall time", _wall_seconds(log), duration)
    number("energy of the GPUs, kWh", _kwh(log), "{:.3g}".format)
    return rows


def live(log: RunLog) -> dict:
    """The state of a run at its last event, in seconds; None: not known. updated: Unix time; step: the usual
    time of one; pause: the longest for validation, evaluation, a sample or a checkpoint; left: the steps to
    come."""
    ms, step = log.columns["ms"][-_RECENT:], log.columns["step"]
    usual = _median(ms) / 1e3
    pauses = [
        unix_time(event.get("time")) - unix_time(event["before"])
        for kind in ("val", "evaluation", "sample", "checkpoint")
        for event in log.of(kind)
    ]
    planned: Any = log.last("start").get("steps")
    left = max(0, planned - step.max(initial=0)) * usual if is_number(planned) else math.nan
    values = {
        "updated": unix_time(log.time),
        "step": usual,
        "pause": max(filter(math.isfinite, pauses), default=0.0),
        "left": left,
    }
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def _wall_seconds(log: RunLog) -> float:
    """From the start to the last event, without the time between an interruption and its resume."""
    runs = log.of("run")
    begins = [unix_time(event.get("time")) for event in runs]
    ends = [unix_time(text) for text in (*(event["before"] for event in runs[1:]), log.time)]
    return sum(end - begin for begin, end in zip(begins, ends)) if begins else math.nan


def _kwh(log: RunLog) -> float:
    """Of all ranks' GPUs in the steps. A step without a reading counts with the mean of the others."""
    watts, steps = log.columns["device.watts"], log.columns["step"]
    if np.nanmax(log.of_run("ranks"), initial=1) > 1:
        events = rank_events(log)
        sums = np.array([readings_of(event, "device.watts").sum() for event in events])
        known = np.isfinite(sums)
        at = np.array([event["step"] for event in events])[known]
        watts = np.interp(steps, at, sums[known]) if at.size else np.full(steps.size, np.nan)
    known = np.isfinite(watts)
    if not known.any():
        return math.nan
    return float(np.where(known, watts, watts[known].mean()) @ np.nan_to_num(log.columns["ms"])) / 3.6e9


def rank_events(log: RunLog) -> list[dict]:
    """The well-formed events `ranks`."""
    return [e for e in log.of("ranks") if type(e.get("step")) is int and isinstance(e.get("ranks"), list)]


def readings_of(event: dict, name: str) -> np.ndarray:
    """Of each rank in an event `ranks`, NaN where there is none; name: a key, or device.KEY."""
    found = []
    for rank in event["ranks"]:
        for key in name.split("."):
            rank = rank.get(key) if isinstance(rank, dict) else None
        found.append(float(rank) if is_number(rank) else math.nan)
    return np.array(found)
