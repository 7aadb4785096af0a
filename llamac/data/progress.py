"""Progress of a run on stderr: a bar on a terminal, otherwise a line from time to time."""

import sys
import time

_TERMINAL_SECONDS, _LINE_SECONDS = 0.2, 30.0
_BAR = 24


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Progress:
    """`total`: bytes of all input files, None where it is not known. Rates leave out what an earlier run
    did.
    """

    def __init__(self, total: int | None, done: int = 0):
        self._total, self._first = total, done
        self._terminal = sys.stderr.isatty()
        self._begin = self._last = time.monotonic()
        self._width = 0

    def line(self, done: int, tokens: int, now: float) -> str:
        """The text: done of the total, tokens, and their rates since the begin."""
        seconds = max(now - self._begin, 1e-9)
        rate = (done - self._first) / seconds
        speed = f"{tokens:,} tokens, {rate / 1e6:.1f} MB/s"
        if not self._total:
            return f"{done / 1e6:,.0f} MB, {speed}"
        share = min(1.0, done / self._total)
        left = _clock((self._total - done) / rate) if rate > 0 and done <= self._total else "?"
        bar = f"[{'#' * round(share * _BAR):{_BAR}}] " if self._terminal else ""
        return f"{bar}{share:4.0%} of {self._total / 1e6:,.0f} MB, {speed}, {left} left"

    def show(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._last < (_TERMINAL_SECONDS if self._terminal else _LINE_SECONDS):
            return
        self._last = now
        text = self.line(done, tokens, now)
        if self._terminal:
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal and self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)
