"""The content of a report as JSON: curves, samples, events, configuration, differences."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from llamac import __version__
from llamac.base.log import is_number
from llamac.report.log import RunLog, points, spread
from llamac.report.plot import short
from llamac.report.profile import picture
from llamac.report.reduce import kept, rounded, smooth

# Of each curve: the log's field, and why a log may not have it.
CURVES = {
    "loss": ("loss", ""),
    "lr": ("lr", ""),
    "grad_norm": ("grad_norm", ""),
    "tokens_per_s": ("tokens_per_s", ""),
    "mfu": ("mfu", "MFU: the peak of the device is not known"),
    "tflops": ("tflops", ""),
    "gpu_mem_gib": ("gpu_mem_gib", "GPU memory: the run computed on the CPU"),
    "rss_gib": ("rss_gib", "memory of the process"),
    "system_mem_gib": ("system_mem_gib", "memory of the machine"),
    "gpu_percent": ("gpu_percent", "GPU use: no GPU, or no NVML or ROCm SMI"),
    "cpu_percent": ("cpu_percent", ""),
    "watts": ("device.watts", "power: no GPU, or its driver does not say"),
    "celsius": ("device.celsius", "temperature: no GPU, or its driver does not say"),
}
_SMOOTHED = CURVES.keys() - {"lr", "gpu_mem_gib", "rss_gib", "system_mem_gib"}
_PERCENT = ("mfu",)  # logged as a share
_MOST_SAMPLES, _MOST_TEXT, _MOST_EVENTS, _MOST_RUNS_EVENTS = 12, 4000, 100, 100


def report(runs: dict[str, RunLog]) -> dict:
    """The whole content, by the label of each run."""
    return {
        "generated": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "runs": [_run(label, log) for label, log in runs.items()],
        "configuration": _configuration(runs),
    }


def duration(seconds: float) -> str:
    """12 s, 3:05 or 7:02:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _run(label: str, log: RunLog) -> dict:
    step = log.columns["step"]
    curves, missing = {}, []
    for name, (column, reason) in CURVES.items():
        values = log.columns[column] * (100 if name in _PERCENT else 1)
        if name == "gpu_mem_gib":
            values = np.where(values > 0, values, np.nan)
        if np.isfinite(values).any():
            curves[name] = _curve(step, values, name in _SMOOTHED)
        elif reason:
            missing.append(reason)
    validation = points(log.of("val"), "loss")
    if not validation[0]:
        missing.append("validation: the run had none")
    result: dict[str, Any] = {
        "label": label,
        "summary": _summary(log, validation),
        "axis": _axis(log),
        "curves": curves,
        "validation": validation,
        "saturated": points(log.of("saturated"), "share"),
        "evaluations": _evaluations(log),
        "samples": _samples(log),
        "events": _events(log),
        "missing": missing,
    }
    result["profile"], problem = picture(log.path.parent / "profile.json")
    return result | ({"profile_missing": problem} if problem else {})


def _curve(step: np.ndarray, values: np.ndarray, smoothed: bool) -> dict:
    """Raw and smoothed points, each as steps and values."""

    def reduced(of: np.ndarray) -> list[list]:
        chosen = kept(of)
        return [step[chosen].astype(int).tolist(), rounded(of[chosen])]

    curve = {"raw": reduced(values)}
    if smoothed and step.size > 1:
        curve["smooth"] = reduced(smooth(values))
    return curve


def _axis(log: RunLog) -> dict:
    """Tokens and hours at some of the steps; the page interpolates between them."""
    n = log.columns["step"].size
    chosen = np.unique(np.linspace(0, max(n - 1, 0), min(n, 1000)).astype(int))
    axis = {"step": log.columns["step"][chosen].astype(int).tolist()}
    for name, values in (("tokens", log.tokens()), ("hours", log.hours())):
        axis[name] = rounded(values[chosen], 8) if np.isfinite(values).all() else []
    return axis


def _summary(log: RunLog, validation: tuple[list[int], list[float]]) -> list[list[str]]:
    """Names and texts of the figures above the charts."""
    start, run = log.last("start"), log.last("run")
    step, loss, speed = (log.columns[name] for name in ("step", "loss", "tokens_per_s"))
    rows = [["model", Path(str(start.get("model", ""))).name]]
    if type(run.get("parameters")) is int:
        rows.append(["parameters", short(run["parameters"])])
    rows.append(["device", str(run.get("device", ""))])
    if step.size:
        planned = start.get("steps")
        of = f" of {planned:,}" if type(planned) is int and planned != step[-1] else ""
        rows.append(["steps", f"{int(step[-1]):,}{of}"])
        tokens = log.tokens()[-1]
        if math.isfinite(tokens):
            rows.append(["tokens", short(tokens)])
        rows.append(["training loss", _number(smooth(loss)[-1])])
    if validation[0]:
        least = min(range(len(validation[0])), key=lambda k: validation[1][k])
        rows.append(["validation loss", f"{validation[1][-1]:.4f}"])
        if least != len(validation[0]) - 1:
            rows.append(["best", f"{validation[1][least]:.4f} at step {validation[0][least]:,}"])
    if np.isfinite(speed).any():
        rows.append(["tokens/s (median)", f"{np.nanmedian(speed):,.0f}"])
    mfu = log.columns["mfu"]
    if np.isfinite(mfu).any():
        rows.append(["MFU (median)", f"{100 * np.nanmedian(mfu):.1f}%"])
    if step.size:
        rows.append(["time in steps", duration(3600 * log.hours()[-1])])
    return [row for row in rows if row[1]]


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else ""


def _evaluations(log: RunLog) -> dict[str, list[list]]:
    """By task: step, accuracy, accuracy by normalized likelihood, questions."""
    tasks: dict[str, list[list]] = {}
    for event in log.of("evaluation"):
        task, step = event.get("task"), event.get("step")
        numbers = [_finite(event.get(name)) for name in ("accuracy", "accuracy_norm", "questions")]
        if isinstance(task, str) and type(step) is int and numbers[0] is not None:
            tasks.setdefault(task, []).append([step, *numbers])
    return {task: sorted(rows, key=lambda row: row[0]) for task, rows in sorted(tasks.items())}


def _finite(value: Any) -> float | None:
    return value if is_number(value) else None


def _samples(log: RunLog) -> list[list]:
    """Step and text; of many, some over the whole run."""
    found = [
        [e["step"], e["text"][:_MOST_TEXT]]
        for e in log.of("sample")
        if type(e.get("step")) is int and isinstance(e.get("text"), str)
    ]
    return spread(found, _MOST_SAMPLES)


# Events


def _events(log: RunLog) -> list[list]:
    """Step, time, kind, text. Of each kind at most _MOST_EVENTS, evenly spaced over the run."""
    rows: list[list] = []
    rows += spread([[n, "", "skipped", "not finite: AdamW wrote nothing"] for n in log.skipped], _MOST_EVENTS)
    kinds = {"spike": _spike_text, "checkpoint": _checkpoint_text}
    for kind, describe in kinds.items():
        found = [e for e in log.of(kind) if type(e.get("step")) is int]
        rows += [[e["step"], str(e.get("time", "")), kind, describe(e)] for e in spread(found, _MOST_EVENTS)]
    runs, starts = log.of("run"), log.of("start")
    for k, event in enumerate(runs[:_MOST_RUNS_EVENTS]):
        kind = "resume" if event.get("origin") == "resumed" else "start"
        text = " · ".join(str(event[key]) for key in ("device", "host", "version", "from") if event.get(key))
        if k and k < len(starts):
            text += _changed(starts[k - 1], starts[k])
        rows.append([event["after"], str(event.get("time", "")), kind, text])
    return sorted(rows, key=lambda row: row[0])


def _spike_text(event: dict) -> str:
    found, expected, allowed = (_finite(event.get(key)) for key in ("found", "expected", "allowed"))
    if found is None or expected is None or allowed is None:
        return str(event.get("quantity", ""))
    return f"{event.get('quantity', '')} {found:.4g}, expected about {expected:.4g}, at most {allowed:.4g}"


def _checkpoint_text(event: dict) -> str:
    ms = _finite(event.get("ms"))
    pause = "" if ms is None else f", training stood still for {ms:,.0f} ms"
    return f"{event.get('path', '')}{pause}"


def _changed(before: dict, after: dict) -> str:
    """Flags that a resumed run has other values of."""
    ignored = {"time", "after", "event", "resume"}
    names = [key for key in after if key not in ignored and after[key] != before.get(key)]
    changes = [f"{name}: {_text(before.get(name))} → {_text(after[name])}" for name in names]
    return f" · changed: {', '.join(changes)}" if changes else ""


# Configuration


def _configuration(runs: dict[str, RunLog]) -> list[list]:
    """Flag, whether the runs differ in it, the value of each run; the run's own facts first."""
    facts = ("device", "host", "version", "commit", "parameters", "ranks", "tokens_per_step")
    tables = []
    for log in runs.values():
        run, start = log.last("run"), log.last("start")
        table = {key: run[key] for key in facts if key in run}
        tables.append(table | {k: v for k, v in start.items() if k not in ("event", "time", "after")})
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        texts = [_text(table[name]) if name in table else "" for table in tables]
        rows.append([name, len(set(texts)) > 1, *texts])
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
