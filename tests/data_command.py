"""`llamac data` in the process of a test: to make a data set, to stop it, and to read what it wrote."""

import itertools
import os
import signal
from pathlib import Path

from llamac.data import command, prepare, read_bin


def make(*arguments: object) -> None:
    command.main([str(argument) for argument in arguments])


def tokens(out: Path, split: str = "train") -> list[int]:
    return [int(i) for path in sorted(out.glob(f"{split}_*.bin")) for i in read_bin(path).tokens]


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def stop_at(monkeypatch, stop: int, number: signal.Signals | None) -> None:
    """A signal to this process at that step of the preparation; None: an exception."""
    count, step = itertools.count(1), prepare.Run._step

    def stopping(run, workers):
        if next(count) == stop:
            if number is None:
                raise RuntimeError("crash")
            os.kill(os.getpid(), number)
        return step(run, workers)

    monkeypatch.setattr(prepare.Run, "_step", stopping)
