"""A log as named metrics, for other tools. A metric has torchtitan's name if the meaning is the same (see its
torchtitan/components/metrics.py and trainer.py); the others have our own names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llamac.report.log import NOT_FLAGS, RunLog, points, unix_time

# Name: the log's column, its factor, whether the log has the sum over devices where the name means one.
STEP_METRICS = {
    "loss_metrics/global_avg_loss": ("loss", 1.0, False),
    "grad_norm": ("grad_norm", 1.0, False),
    "lr": ("lr", 1.0, False),
    "throughput(tps)": ("tokens_per_s", 1.0, True),
    "tflops": ("tflops", 1.0, True),
    "mfu(%)": ("mfu", 100.0, False),
    "time_metrics/end_to_end(s)": ("ms", 1e-3, False),
    # torchtitan logs what PyTorch's allocator holds, which is another quantity than what is in use here.
    "memory/in_use(GiB)": ("gpu_mem_gib", 1.0, False),
    "memory/process_peak(GiB)": ("rss_gib", 1.0, False),
    "memory/machine(GiB)": ("system_mem_gib", 1.0, False),
    "device/busy(%)": ("gpu_percent", 1.0, False),
    "device/power(W)": ("device.watts", 1.0, False),
    "device/temperature(C)": ("device.celsius", 1.0, False),
    "cpu(%)": ("cpu_percent", 1.0, False),
}
TOKENS = "n_tokens_seen"
# Name: event and field.
EVENT_METRICS = {
    "validation_metrics/loss": ("val", "loss"),
    "validation_metrics/bits_per_byte": ("val", "bits_per_byte"),
    "fp8/saturated_share": ("saturated", "share"),
}


@dataclass
class Row:
    """The values of a step. seconds: Unix time, from the run's start and the time in its steps."""

    step: int
    seconds: float
    numbers: dict[str, float]
    texts: dict[str, str]


def rows(log: RunLog, after: int = -1) -> Iterator[Row]:
    """In the order of steps, those behind `after`. Numbers that are not finite are left out. Rates are
    divided by the ranks in the log, 1 in a log that does not say."""
    first = int(np.searchsorted(log.columns["step"], after, side="right"))
    ranks = log.of_run("ranks")
    ranks = np.where(ranks >= 1, ranks, 1.0)[first:]
    columns = {
        name: log.columns[column][first:] * factor / (ranks if per_device else 1)
        for name, (column, factor, per_device) in STEP_METRICS.items()
    }
    columns[TOKENS] = log.tokens()[first:]
    known = {name: values.tolist() for name, values in columns.items() if np.isfinite(values).any()}
    steps, extra = log.columns["step"][first:], _extra(log, after)
    every = sorted({*steps.astype(int).tolist(), *extra})
    # What is between two steps has the time of the later one; what is behind all, that of the last.
    hours = np.append(log.hours()[first:], log.hours()[-1:])
    begin = _begin(log)
    for number, k in zip(every, np.searchsorted(steps, every).tolist()):
        found = extra.get(number, {})
        texts = {name: value for name, value in found.items() if isinstance(value, str)}
        if k < steps.size and steps[k] == number:
            found = {name: values[k] for name, values in known.items() if not math.isnan(values[k])} | found
        numbers = {name: value for name, value in found.items() if name not in texts}
        yield Row(number, begin + 3600 * float(hours[k]) if hours.size else begin, numbers, texts)


def _extra(log: RunLog, after: int) -> dict[int, dict]:
    """Numbers and texts of events that are no steps, by step."""
    found: dict[int, dict] = {}

    def add(step: int, name: str, value: float | str) -> None:
        if step > after:
            found.setdefault(step, {})[name] = value

    for name, (kind, field) in EVENT_METRICS.items():
        for step, value in zip(*points(log.of(kind), field)):
            add(step, name, value)
    for task in sorted({e["task"] for e in log.of("evaluation") if isinstance(e.get("task"), str)}):
        events = [e for e in log.of("evaluation") if e.get("task") == task]
        for field in ("accuracy", "accuracy_norm"):
            for step, value in zip(*points(events, field)):
                add(step, f"evaluation/{task}/{field}", value)
    for event in log.of("sample"):
        if type(event.get("step")) is int and isinstance(event.get("text"), str):
            add(event["step"], "sample", event["text"])
    return found


def _begin(log: RunLog) -> float:
    """Unix time of the first event that has one; 0 where none has."""
    times = (unix_time(event.get("time")) for event in log.events)
    return next(filter(math.isfinite, times), 0.0)


def configuration(log: RunLog) -> dict:
    """The flags of the run and its facts."""
    run = log.last("run")
    return {key: value for key, value in run.items() if key not in NOT_FLAGS} | log.flags()
