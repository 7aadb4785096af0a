"""Processes that encode blocks. The parent reads and writes; results return in the order of the blocks, for
any number of workers. Pipes carry blocks and ids as bytes. Workers are forked, so they share the tokenizer.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from llamac.base.errors import InputError

_AHEAD = 2  # blocks that a worker holds: one that it encodes, one that waits


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """N processes that each run work(payload). submit() hands one over, under a key; next() gives a finished
    (key, result). free() says whether a worker takes another one now.
    """

    def __init__(self, count: int, work: Callable[[Any], Any]):
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(count)]
        self._pipes = [parent for parent, _ in pairs]
        self._load = [0] * count
        ends = [end for pair in pairs for end in pair]
        self._processes = [
            context.Process(
                target=_run, args=(pair[1], [e for e in ends if e is not pair[1]], work), daemon=True
            )
            for pair in pairs
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def free(self) -> bool:
        return min(self._load) < _AHEAD

    def submit(self, key: Any, payload: Any) -> None:
        worker = self._load.index(min(self._load))
        self._load[worker] += 1
        try:
            self._pipes[worker].send((key, payload))
        except (BrokenPipeError, ConnectionResetError):
            self._died(worker)

    def next(self) -> tuple[Any, Any]:
        """The next result, waited for. Raises what the work raised."""
        ready = wait(self._pipes)[0]
        worker = self._pipes.index(ready)  # type: ignore[arg-type]
        try:
            key, result = self._pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            self._died(worker)
        self._load[worker] -= 1
        if isinstance(result, BaseException):
            raise result
        return key, result

    def _died(self, worker: int) -> None:
        self._processes[worker].join(5)
        code = self._processes[worker].exitcode
        why = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        raise ChildProcessError(
            f"a worker ended by {why}; the same command continues, with fewer --workers if memory ran out"
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _run(pipe: Connection, others: list[Connection], work: Callable[[Any], Any]) -> None:
    """In a worker. Ctrl-C is the parent's; where the parent is gone, the pipe is at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    waiting: SimpleQueue = SimpleQueue()
    # The parent never waits in send() for a worker that itself waits to hand over a result.
    threading.Thread(target=_receive, args=(pipe, waiting), daemon=True).start()
    while (task := waiting.get()) is not None:
        key, payload = task
        try:
            result = work(payload)
        except InputError as error:
            result = error
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send((key, result))
        except BrokenPipeError:
            break
    os._exit(0)


def _receive(pipe: Connection, waiting: SimpleQueue) -> None:
    try:
        while True:
            waiting.put(pipe.recv())
    except (EOFError, OSError):
        waiting.put(None)
