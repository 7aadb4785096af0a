"""Calls a function in a helper process, with limits on time and memory: for code that comes with files, such
as the chat template of a model, whose loops may be endless.
"""

import atexit
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llamac.base.errors import InputError

SECONDS, BYTES = 10.0, 2 << 30  # of the processor, per call; of the address space


class _Helper:
    """The process, which starts at the first call. Threads take turns."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: Any = None

    def ask(self, request: bytes) -> tuple[bytes, int]:
        """(the answer's line, exit status); the process ends without an answer where it reaches a limit."""
        with self.lock:
            process: Any = self.process or subprocess.Popen(
                [sys.executable, "-c", "from llamac.base import limited; limited.serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self.process = process
            try:
                process.stdin.write(request)
                process.stdin.flush()
                if answer := process.stdout.readline():
                    return answer, 0
            except BrokenPipeError:
                pass
            except BaseException:  # such as Ctrl-C: the answer would be the next call's
                process.kill()
                self.process = None
                raise
            return b"", self.close()

    def close(self) -> int:
        """Its exit status."""
        process, self.process = self.process, None
        if process is None:
            return 0
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


_helper = _Helper()
os.register_at_fork(after_in_child=lambda: globals().update(_helper=_Helper()))
atexit.register(lambda: _helper.close())


def call(where: str, function: Callable, *arguments: Any) -> Any:
    """The result, as JSON, of a function of a module or bound to an object that can be pickled. Raises the
    InputError that it raises, or one that begins with `where` if it reaches a limit.
    """
    answer, status = _helper.ask(pickle.dumps((SECONDS, function, arguments)))
    if status == -signal.SIGPROF:
        raise InputError(f"{where}: expected a result within {SECONDS:g} seconds, found none: endless loops?")
    if not answer:
        raise InputError(f"{where}: expected a result, found that its process ended with status {status}")
    value, refusal = json.loads(answer)
    if refusal:
        raise InputError(refusal)
    return value


def serve() -> None:
    """The loop of the helper process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and with it this process
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    while True:
        try:
            seconds, function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process in any operation
        try:
            answer = json.dumps([function(*arguments), ""])
        except (InputError, MemoryError) as error:
            answer = json.dumps([None, str(error) or "out of memory"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
