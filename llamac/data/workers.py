"""Processes that encode blocks; the parent reads and writes. They are forked, so they share the tokenizer."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from llamac.base.errors import InputError

_AHEAD = 2  # blocks per worker: one that it encodes, one that waits
_PR_SET_PDEATHSIG = 1
_work: Callable[[Any], Any]  # in a worker


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _begin(work: Callable[[Any], Any]) -> None:
    """In a worker. The parent handles Ctrl-C; the kernel ends the worker with the parent."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(payload: Any) -> Any:
    try:
        return _work(payload)
    except InputError:
        raise
    except Exception as error:  # of a class that the parent may not be able to make
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


class Workers:
    """Processes that each run work(payload). submit() queues a payload under a key; next() returns a finished
    (key, result). free() says whether a worker takes another payload now.
    """

    def __init__(self, count: int, work: Callable[[Any], Any]):
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(count, fork, _begin, (work,))
        self._most, self._running = _AHEAD * count, dict[Future, Any]()

    def free(self) -> bool:
        return len(self._running) < self._most

    def submit(self, key: Any, payload: Any) -> None:
        try:
            self._running[self._pool.submit(_call, payload)] = key
        except BrokenProcessPool:
            raise self._died() from None

    def next(self) -> tuple[Any, Any]:
        """Waits for a result. Raises the exception of the work."""
        done = next(iter(wait(self._running, return_when=FIRST_COMPLETED).done))
        try:
            return self._running.pop(done), done.result()
        except BrokenProcessPool:
            raise self._died() from None

    def _died(self) -> ChildProcessError:
        return ChildProcessError(
            "a worker was killed; the same command continues, with fewer --workers if memory ran out"
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
