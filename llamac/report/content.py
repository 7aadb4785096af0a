"""The content of a report as JSON: curves, samples, events, configuration, differences."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from llamac import __version__
from llamac.base.errors import InputError
from llamac.base.log import is_number
from llamac.profile import profile as profiles
from llamac.report.log import NOT_FLAGS, RunLog, points, spread
from llamac.report.reduce import Curve, difference, kept, rounded, stretches
from llamac.report.summary import live, rank_events, readings_of, summary

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
# Of each rank.
RANK_READINGS = (
    "device.clock_mhz",
    "device.celsius",
    "device.watts",
    "gpu_percent",
    "gpu_mem_gib",
    "cpu_percent",
    "rss_gib",
)
_MOST_SAMPLES, _MOST_TEXT, _MOST_EVENTS, _MOST_READINGS, _MOST_OPERATIONS = 12, 4000, 100, 100, 24


def report(runs: dict[str, RunLog]) -> dict:
    """The whole content, by the label of each run."""
    first = next(iter(runs.values()))
    return {
        "generated": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "runs": [_run(label, log, None if log is first else first) for label, log in runs.items()],
        "configuration": _configuration(runs),
    }


def _run(label: str, log: RunLog, first: RunLog | None) -> dict:
    """first: the run whose loss is subtracted; None: none."""
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
    validation, evaluations = points(log.of("val"), "loss"), _evaluations(log)
    if not validation[0]:
        missing.append("validation: the run had none")
    more: dict[str, Curve] = {"validation": validation, "saturated": points(log.of("saturated"), "share")}
    for task, rows in evaluations.items():
        more[f"evaluation {task}"] = [row[0] for row in rows], [100 * row[1] for row in rows]
    if first:
        loss = difference((step, log.columns["loss"]), (first.columns["step"], first.columns["loss"]))
        curves |= {"loss_difference": _curve(*loss, smoothed=True)} if loss[0].size else {}
        more["validation_difference"] = difference(validation, points(first.of("val"), "loss"))
    for name, found in more.items():
        if len(found[0]):
            curves[name] = _curve(np.asarray(found[0]), np.asarray(found[1]), smoothed=False)
    profile, problem = _profile(log.path.parent / "profile.json")
    return {
        "label": label,
        "summary": summary(log),
        "live": live(log),
        "axis": _axis(log),
        "curves": curves,
        "ranks": _ranks(log),
        "evaluations": evaluations,
        "samples": _samples(log),
        "events": _events(log),
        "profile": profile,
        "missing": missing + ([f"profile: {problem}"] if problem else []),
    }


def _curve(step: np.ndarray, values: np.ndarray, smoothed: bool) -> dict:
    """Steps and values: the extremes and, of a smoothed curve of more points, means over equal stretches."""
    chosen = kept(values)
    curve = {"raw": [step[chosen].astype(int).tolist(), rounded(values[chosen])], "smoothed": smoothed}
    if smoothed and chosen.size < values.size:
        at, means = stretches(step), stretches(values)
        curve["mean"] = [at.round().astype(int).tolist(), rounded(means)]
    return curve


def _ranks(log: RunLog) -> dict | None:
    """Readings of each rank, [step][rank], at some steps; None for one rank."""
    events = spread(rank_events(log), _MOST_READINGS)
    if not events:
        return None
    readings = {name: [rounded(readings_of(event, name)) for event in events] for name in RANK_READINGS}
    hosts = [str(rank.get("host", "")) if isinstance(rank, dict) else "" for rank in events[-1]["ranks"]]
    return {
        "steps": [event["step"] for event in events],
        "hosts": hosts,
        "readings": {name: by_step for name, by_step in readings.items() if any(map(any, by_step))},
    }


def _axis(log: RunLog) -> dict:
    """Tokens and hours at some of the steps; the page interpolates between them."""
    n = log.columns["step"].size
    chosen = np.unique(np.linspace(0, max(n - 1, 0), min(n, 1000)).astype(int))
    axis = {"step": log.columns["step"][chosen].astype(int).tolist()}
    for name, values in (("tokens", log.tokens()), ("hours", log.hours())):
        axis[name] = rounded(values[chosen], 8) if np.isfinite(values).all() else []
    return axis


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


# Profile


def _profile(path: Path) -> tuple[dict | None, str]:
    """The time of each operation and its lower limit; or None, and why."""
    if not path.exists():
        return None, "the run had no --profile"
    try:
        profile = profiles.read(path)
    except InputError as error:
        return None, str(error)
    ms = 1e3 / profile.steps
    rows = []
    for row in sorted(profile.rows, key=lambda row: -row.seconds)[:_MOST_OPERATIONS]:
        least = profiles.limit(profile, row)
        rows.append(
            {
                "name": profiles.label(row),
                "category": profiles.category(row.operation),
                "ms": round(row.seconds * ms, 5),
                "share": round(row.seconds / profile.seconds, 5),
                "calls": round(row.calls / profile.steps, 2),
                "limit_ms": round(least[0] * ms, 5) if least else None,
                "by": least[1] if least else "",
            }
        )
    return {
        "title": profiles.headline(profile),
        "rows": rows,
        "others": max(0, len(profile.rows) - _MOST_OPERATIONS),
        "shares": [
            [name, round(seconds * ms, 5), round(seconds / profile.seconds, 5)]
            for name, seconds in profiles.shares(profile).items()
            if seconds > 0
        ],
        "advice": profiles.advice(profile),
    }, ""


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
    for k, event in enumerate(runs[:_MOST_EVENTS]):
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
    names = [key for key in after if key not in (*NOT_FLAGS, "resume") and after[key] != before.get(key)]
    changes = [f"{name}: {_text(before.get(name))} → {_text(after[name])}" for name in names]
    return f" · changed: {', '.join(changes)}" if changes else ""


# Configuration


def _configuration(runs: dict[str, RunLog]) -> list[list]:
    """Flag, whether the runs differ in it, the value of each run; the run's own facts first."""
    facts = ("device", "host", "version", "commit", "parameters", "ranks", "tokens_per_step")
    tables = []
    for log in runs.values():
        run = log.last("run")
        tables.append({key: run[key] for key in facts if key in run} | log.flags())
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows = []
    for name in names:
        texts = [_text(table[name]) if name in table else "" for table in tables]
        rows.append([name, len(set(texts)) > 1, *texts])
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
