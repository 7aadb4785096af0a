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
    """`total`: bytes of all input files, None where it is not known. `done`, `tokens`: what an earlier run
    did, which rates leave out.
    """

    def __init__(self, total: int | None, done: int = 0, tokens: int = 0):
        self._total, self._first, self._first_tokens = total, done, tokens
        self._terminal = sys.stderr.isatty()
        self._begin = self._last = time.monotonic()
        self._width = 0

    def line(self, done: int, tokens: int, documents: int, now: float) -> str:
        """The text: done of the total, tokens, and bytes per second; without a total, documents, tokens, and
        tokens per second.
        """
        seconds = max(now - self._begin, 1e-9)
        if not self._total:
            speed = (tokens - self._first_tokens) / seconds
            return f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s"
        rate = (done - self._first) / seconds
        share = min(1.0, done / self._total)
        left = _clock((self._total - done) / rate) if rate > 0 and done <= self._total else "?"
        bar = f"[{'#' * round(share * _BAR):{_BAR}}] " if self._terminal else ""
        size = f"{self._total / 1e6:,.0f} MB"
        return f"{bar}{share:4.0%} of {size}, {tokens:,} tokens, {rate / 1e6:.1f} MB/s, {left} left"

    def show(self, done: int, tokens: int, documents: int) -> None:
        now = time.monotonic()
        if now - self._last < (_TERMINAL_SECONDS if self._terminal else _LINE_SECONDS):
            return
        self._last = now
        text = self.line(done, tokens, documents, now)
        if self._terminal:
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal and self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)
