"""The log of a run: OUT/log.jsonl with one event per line, and the same on the console."""

import json
import math
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from llamac import __version__
from llamac.errors import printable
from llamac.spikes import Spike
from llamac.version import commit

_COLUMNS = (
    f"{'step':>13}  {'loss':>8}  {'grad norm':>9}  {'lr':>8}  {'ms':>8}  {'tokens/s':>9}  "
    f"{'TFLOP/s':>8}  {'% of peak':>9}  {'mem GiB':>7}  {'time left':>9}"
)


def _finite(value):
    """JSON has no NaN and no infinity: they are logged as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def utc_time() -> str:
    """2026-11-23T09:05:07.042Z, as the C program writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration(seconds: float) -> str:
    """12 s, 3:05 or 7:02:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def system_mem_gib() -> float | None:
    """Memory in use on the machine, without what the kernel would give back; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = {key: float(value.split()[0]) for key, value in (line.split(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) / 2**20


class Log:
    """Writes the events of one run into the folder `out`; None: nothing, nowhere. `tokens` is those of a
    step over all devices, `peak_tflops` the devices' peak together, None where unknown. `every`: steps
    per line on the console, besides the first and the last one."""

    def __init__(
        self,
        out: str | Path | None,
        *,
        steps: int,
        tokens: int,
        flops_per_token: float,
        peak_tflops: float | None = None,
        every: int = 1,
        console: TextIO | None = None,
    ):
        path = Path(os.devnull)
        if out is not None:
            Path(out).mkdir(parents=True, exist_ok=True)
            path = Path(out) / "log.jsonl"
        # A log that is there is of the run that this one goes on from: OutputFolder.prepare() sees to it.
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.console = self.file if out is None else console or sys.stdout
        self.steps, self.tokens, self.flops_per_token, self.peak = steps, tokens, flops_per_token, peak_tflops
        self.every = every
        self.clocks = time.perf_counter(), time.process_time()  # at the last step
        self.typical_ms = 0.0  # running mean: one slow step does not move the time left
        self.used: list[tuple[float, dict]] = []  # (ms, what it took of the machine) of every step
        self.before_write: Callable[[], None] | None = (
            None  # raises where the folder is not the run's any more
        )

    def event(self, event: str, **fields) -> None:
        """One line of log.jsonl."""
        if self.before_write:
            self.before_write()
        values = {"event": event, "time": utc_time()} | {key: _finite(value) for key, value in fields.items()}
        self.file.write(json.dumps(values, ensure_ascii=False) + "\n")

    def print(self, line: str) -> None:
        try:
            print(printable(line), file=self.console, flush=True)
        except OSError:  # closed: log.jsonl goes on, and what the stream still holds goes nowhere
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.console.fileno())

    def run(
        self,
        device: str,
        parameters: int,
        ranks: int = 1,
        origin: str = "fresh",
        source: str | None = None,
    ) -> None:
        """What the run is, besides its configuration. ranks: processes, each with a device. origin: fresh
        (random weights), or loaded or resumed from the folder `source`.
        """
        self.event(
            "run",
            host=socket.gethostname(),
            device=device,
            version=__version__,
            commit=commit(),
            origin=origin,
            **{"from": source},
            parameters=parameters,
            ranks=ranks,
            tokens_per_step=self.tokens,
        )

    def start(self, configuration: dict) -> None:
        """The resolved configuration (such as Options.to_dict()), and the heading of the table of steps."""
        self.event("start", **configuration)
        self.print(_COLUMNS)

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        ms: float,
        gpu_mem_gib: float = 0.0,
        gpu_percent: float | None = None,
    ) -> None:
        """One step: loss in nats a token, gradient norm before clipping, milliseconds it took.

        gpu_percent: of the time that the GPU was busy. The log adds this process's memory at its peak, the
        machine's in use, and cpu_percent, this process's since the last step; 100 is one core.
        """
        speed = self.tokens / ms * 1e3
        tflops = speed * self.flops_per_token / 1e12
        mfu = tflops / self.peak if self.peak else None
        then, self.clocks = self.clocks, (time.perf_counter(), time.process_time())
        elapsed, cpu = (now - before for now, before in zip(self.clocks, then))
        rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the largest so far
        event = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "ms": ms,
            "tokens_per_s": speed,
        }
        use = {
            "gpu_mem_gib": gpu_mem_gib,
            "gpu_percent": gpu_percent,
            "rss_gib": rss_kib / 2**20,
            "system_mem_gib": system_mem_gib(),
            "cpu_percent": 100 * cpu / max(elapsed, 1e-9),
        }
        self.event("step", **event, tflops=tflops, mfu=mfu, **use)
        self.used.append((ms, use))
        first, last = not self.typical_ms, step == self.steps
        self.typical_ms = 0.9 * self.typical_ms + 0.1 * ms if self.typical_ms else ms
        if not first and not last and step % self.every:
            return
        left = duration((self.steps - step) * self.typical_ms / 1e3)
        memory = gpu_mem_gib or rss_kib / 2**20  # the device's, or where the CPU computes the process's
        of_peak = f"{100 * mfu:.1f}" if mfu is not None else "-"
        self.print(
            f"{f'{step}/{self.steps}':>13}  {loss:8.4f}  {grad_norm:9.4f}  {lr:8.2e}  {ms:8.1f}  "
            f"{speed:9.0f}  {tflops:8.3f}  {of_peak:>9}  {memory:7.2f}  {left:>9}"
        )

    def spike(self, step: int, s: Spike) -> None:
        self.event("spike", step=step, **asdict(s))
        text = f"spike: {s.quantity} {s.found:.4f}, expected about {s.expected:.4f}, at most {s.allowed:.4f}"
        self.print(f"{f'{step}/{self.steps}':>13}  {text}")

    def val(self, step: int, loss: float) -> None:
        """Validation loss, in nats a token."""
        self.event("val", step=step, loss=loss)
        self.print(f"{f'{step}/{self.steps}':>13}  {loss:8.4f}  validation")

    def evaluation(
        self, step: int, task: str, accuracy: float, accuracy_norm: float | None, questions: int
    ) -> None:
        """Shares of a task's questions that are answered right; accuracy_norm: by the choices' lengths."""
        values = {"accuracy": accuracy, "accuracy_norm": accuracy_norm, "questions": questions}
        self.event("evaluation", step=step, task=task, **values)
        by_length = "" if accuracy_norm is None else f", {accuracy_norm:.4f} by length"
        text = f"{accuracy:8.4f}  accuracy{by_length}: {task}, {questions:,} questions"
        self.print(f"{f'{step}/{self.steps}':>13}  {text}")

    def sample(self, step: int, text: str) -> None:
        self.event("sample", step=step, text=text)
        self.print(f"--- sample at step {step}\n{text}\n---")

    def checkpoint(self, step: int, path: str | Path, ms: float) -> None:
        """ms: what training stood still for."""
        self.event("checkpoint", step=step, path=str(path), ms=ms)
        self.print(f"{f'{step}/{self.steps}':>13}  checkpoint {path}")

    def print_usage(self) -> None:
        """What the steps took of the machine, in one line: the most memory, the mean of percentages."""
        if not self.used:
            return

        def most(key: str) -> str:
            return f"{max(use[key] or 0.0 for _, use in self.used):.1f} GiB"

        def mean(key: str) -> str | None:
            known = [(ms, use[key]) for ms, use in self.used if use[key] is not None]
            return f"{sum(ms * x for ms, x in known) / sum(ms for ms, _ in known):.0f}%" if known else None

        gpu = [f"GPU memory {most('gpu_mem_gib')}"] if self.used[-1][1]["gpu_mem_gib"] else []
        gpu += [f"GPU {mean('gpu_percent')} busy"] if mean("gpu_percent") else []
        rest = [
            f"process {most('rss_gib')}",
            f"system {most('system_mem_gib')}",
            f"CPU {mean('cpu_percent')}",
        ]
        self.print("used: " + ", ".join(gpu + rest))

    def close(self) -> None:
        self.file.close()
