"""Signals that end a run with a checkpoint: SIGHUP, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2.

Written twice on purpose: csrc/train/stop.cpp answers the same; tests/test_signals.py.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from llamac.training.ranks import world

_ANSWERED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_came: list[int] = []
_before: dict[int, Any] = {}  # what answered a signal before answer_signals()


class Stopped(Exception):
    """A signal ends the run: from micro-batches, validation and samples to what called train(). No error.

    run: the run, whose last finished step is to be saved. number: the signal.
    """

    def __init__(self, run: Any, number: int):
        super().__init__(signal.Signals(number).name)
        self.run, self.number = run, number


def answer_signals() -> None:
    """From now on the first of these signals is noted, the second answered by a line on stderr, and the third
    ends the process at once. A signal that is ignored, as nohup does it, stays ignored.
    """
    for number in _ANSWERED:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a library's own handler
            _before.setdefault(number, signal.signal(number, _on_signal))


def restore_signals() -> None:
    """Undo answer_signals(): the process that called train() goes on."""
    _came.clear()
    while _before:
        signal.signal(*_before.popitem())


@contextlib.contextmanager
def restored_on_error() -> Iterator[None]:
    """Decorates what answers signals: an error gives them back. Stopped does not: a checkpoint follows."""
    try:
        yield
    except Stopped:
        raise
    except BaseException:
        restore_signals()
        raise


def _on_signal(number: int, _frame: Any) -> None:
    _came.append(number)
    name = signal.Signals(number).name
    if len(_came) == 2:
        _say(f"{name}: the run is already ending, with a checkpoint; a third signal ends it at once")
    if len(_came) > 2:
        _say(f"{name}: third signal: ended at once; a checkpoint that was being written is lost")
        os._exit(128 + number)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"train_llama3.py: {text}\n".encode())


def came() -> int:
    """The signal that came first; 0: none."""
    return _came[0] if _came else 0


def check(run: Any) -> None:
    """Raise Stopped where a signal came. Not with several ranks: all of them must end after the same step."""
    if _came and world() == 1:
        raise Stopped(run, _came[0])


class Batches(list):
    """A step's micro-batches. A signal ends the step between two of them; the weights are as before."""

    def __init__(self, run: Any, batches: list):
        super().__init__(batches)
        self.run = run

    def __iter__(self) -> Iterator:
        for batch in super().__iter__():
            check(self.run)
            yield batch
