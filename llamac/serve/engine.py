"""Answers requests in batches: those that wait while one batch is answered form the next one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamac.base.errors import InputError
from llamac.data.tokens import as_ids
from llamac.inference.model import Inference, Sampling, TextStream


@dataclass(eq=False)
class Request:
    """A prompt to continue by at most `count` tokens. tell: called in the engine's thread with each piece of
    text; the last call has the reason of the end, "stop" or "length", or an exception. stops: texts that end
    the answer and do not belong to it."""

    ids: list[int]
    count: int
    sampling: Sampling
    tell: Callable[[str, str | Exception | None], None]
    stops: Sequence[str] = ()
    tokens: int = 0  # made so far
    cancelled: bool = False  # set by any thread; the answer ends with the next token
    ended: bool = field(default=False, init=False)


class StopTexts:
    """Passes a text on up to the first of the stops, which may come in pieces."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""

    def add(self, piece: str) -> tuple[str, bool]:
        """(the text that is certain, whether a stop was found)."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def end(self) -> str:
        """What is held back at the end of the text."""
        return self._held


def _begun(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` with which the text ends."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Engine:
    """A thread that computes. sequences: of a batch at most, as the model was made with."""

    def __init__(self, model: Inference, sequences: int):
        self.model, self.sequences = model, sequences
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def room(self, prompt: int) -> int:
        """The number of tokens that fit behind a prompt of so many; the last one takes no place."""
        return self.model.context - prompt + 1

    def check(self, ids: list[int], count: int) -> None:
        """Raises InputError for ids that the model lacks, and a prompt that leaves no room for the answer."""
        context = self.model.context
        as_ids(ids, "prompt", self.model.config.vocab_size)
        if count > self.room(len(ids)):
            expected = f"prompt and new tokens of together at most the context, {context}"
            raise InputError(f"max_tokens: expected {expected}, found {len(ids)} and {count}")

    def submit(self, requests: list[Request]) -> None:
        """Queues checked requests."""
        with self._changed:
            self._waiting += requests
            self._changed.notify()

    def close(self) -> None:
        """Ends all answers."""
        with self._changed:
            self._closed = True
            for request in (*self._waiting, *self._running):
                request.cancelled = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._answer(batch)
            except Exception as error:  # whatever it is, those who wait must learn of it
                for request in batch:
                    self._end(request, "", error)

    def _next_batch(self) -> list[Request]:
        """The oldest request, and those behind it that fit beside it: all sequences of a batch take as many
        places as the longest prompt and the longest answer of any. []: the engine is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._choose() or self._closed)
            return self._running

    def _choose(self) -> list[Request]:
        """Takes the next batch from those that wait, and ends cancelled ones."""
        batch: list[Request] = []
        longest = count = 0
        for request in tuple(self._waiting):
            if request.cancelled:
                self._waiting.remove(request)
                self._end(request, "", "stop")
                continue
            most, more = max(longest, len(request.ids)), max(count, request.count)
            if len(batch) < self.sequences and more <= self.room(most):
                longest, count = most, more
                self._waiting.remove(request)
                batch.append(request)
        self._running = batch
        return batch

    def _answer(self, batch: list[Request]) -> None:
        streams = [TextStream(self.model.decode) for _ in batch]
        texts = [StopTexts(request.stops) for request in batch]

        def made(i: int, token: int) -> bool:
            request = batch[i]
            request.tokens += 1
            if request.cancelled or token in self.model.stops:
                return finish(i, "stop")
            piece, stopped = texts[i].add(streams[i].add(token))
            if stopped:
                return self._end(request, piece, "stop")
            if request.tokens == request.count:
                return finish(i, "length", piece)
            if piece:
                request.tell(piece, None)
            return True

        def finish(i: int, reason: str, piece: str = "") -> bool:
            more, stopped = texts[i].add(streams[i].end())
            return self._end(batch[i], piece + more + texts[i].end(), "stop" if stopped else reason)

        count = max(request.count for request in batch)
        self.model.generate(
            [request.ids for request in batch], count, [request.sampling for request in batch], [], made
        )

    def _end(self, request: Request, piece: str, reason: str | Exception) -> bool:
        if not request.ended:
            request.ended = True
            request.tell(piece, reason)
        return False
