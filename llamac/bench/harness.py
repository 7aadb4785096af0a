"""What benchmarks share: programs that run with a limit of time, ways that take turns, ratios by round,
arguments, and files of results. Needs no torch.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamac.base.arguments import HelpFormatter
from llamac.base.files import write_text

STOPPED, NO_MEMORY = "the time was over", "out of memory"
Result = TypeVar("Result")


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def parser(description: str | None, **more: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, **more)


def write(out: Path, content: object, text: str) -> None:
    """The JSON of all numbers, and the markdown beside it under the same name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(content, indent=1) + "\n")
    write_text(out.with_suffix(".md"), text)


# Programs


@dataclass
class Finished:
    """A run of a program. failure: why it failed, or empty; text: its output; peak_gib: resident."""

    failure: str
    text: str = ""
    seconds: float = 0.0
    peak_gib: float = 0.0


def execute(
    command: Sequence[object],
    seconds: float = math.inf,
    folder: Path | None = None,
    console: Path | None = None,
    **environment: str,
) -> Finished:
    """Runs a program in the folder, for so many seconds at most. Its output goes to the end of `console`.
    The children of a program that is stopped end with it.
    """
    words, begin, ended = [str(word) for word in command], time.monotonic(), 0
    with open(console, "ab+") if console else tempfile.TemporaryFile() as output:
        start = output.seek(0, os.SEEK_END)
        how: Any = {"stdout": output, "stderr": output, "env": os.environ | environment}
        try:
            process = subprocess.Popen(words, cwd=folder, start_new_session=True, **how)
        except OSError as error:
            return Finished(f"{words[0]}: {error.strerror}")
        try:
            while not ended and time.monotonic() - begin < seconds:
                time.sleep(0.1)
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        finally:
            if not ended:
                os.killpg(process.pid, signal.SIGKILL)
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(start)
        text = output.read().decode(errors="replace")
    failure = failure_of(process.returncode, text) if ended else STOPPED
    return Finished(failure, text, time.monotonic() - begin, usage.ru_maxrss / 2**20)


def failure_of(code: int, text: str) -> str:
    """Why a program with this exit code and output failed; empty if it did not."""
    if code and re.search("out of memory|OutOfMemoryError", text):
        return NO_MEMORY
    if code < 0:
        return f"killed by signal {-code}"
    last = (text.strip().splitlines() or [""])[-1]
    return f"exit code {code}: {last}" if code else ""


# Turns


def take_turns(
    ways: Mapping[str, Callable[[], Result]], rounds: int, warm_up: int = 0
) -> dict[str, list[Result]]:
    """The results of each way by round, after rounds that do not count."""
    found: dict[str, list[Result]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name, way in ways.items():
            result = way()
            if number >= 0:
                found[name].append(result)
    return found


def ratio(first: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Median of first / other over the rounds that both have; None: they have none."""
    ratios = [first[number] / value for number, value in other.items() if number in first]
    return statistics.median(ratios) if ratios else None
