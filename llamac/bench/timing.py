"""Times of PyTorch calls, without the host's share on a GPU. llamac bench and llamac doctor measure with it.

Inputs rotate, and so do outputs, which a call allocates as PyTorch does, so none is in the cache. The device
is kept busy while calls are queued, so that the time of a small operation is the device's, not the host's.
"""

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

ROTATED = 1 << 30  # bytes moved before a set comes again: four times the largest cache (MI300X: 256 MB)
LARGEST = 4 << 30  # bytes of all sets of inputs
SETS = 256
ROUNDS = (20, 100)  # timed: at least, at most

Call = Callable[[], object]
Inputs = dict[str, torch.Tensor]


def make_sets(inputs: Callable[[], Inputs], moved: float) -> list[Inputs]:
    """Sets of inputs; moved: bytes that a call must move."""
    first = inputs()
    size = sum(t.numel() * t.element_size() for t in first.values())
    count = max(1, min(-(-ROTATED // max(1, int(moved))), LARGEST // max(1, size), SETS))
    return [first, *(inputs() for _ in range(count - 1))]


@functools.cache
def sleep_rate() -> float:
    """Cycles of torch.cuda._sleep a second."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 5_000_000
    for _ in range(2):  # the first loads the kernel
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / start.elapsed_time(end) * 1e3


class _Turns:
    """One baseline's calls, warm, which take turns; results are kept until their turn comes again."""

    def __init__(self, calls: Sequence[Call], device: str) -> None:
        self.calls, self.on_host = calls, device == "cpu"
        self.kept: list[object] = [None] * len(calls)
        self.turns = itertools.cycle(range(len(calls)))
        self.make(max(5, len(calls)))
        self.together, self.seconds = 1, 0.0  # calls between two events; of one, on a device
        if not self.on_host:
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.make(5)
            queued = (time.perf_counter() - start) / 5
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - start) / 5
            # A short call alone would be timed with the event.
            self.together = min(max(1, round(1e-3 / self.seconds)), 16)
            self.wait = min(1.5 * queued * self.together, 0.05)

    def make(self, count: int) -> None:
        for turn in itertools.islice(self.turns, count):
            self.kept[turn] = None
            self.kept[turn] = self.calls[turn]()

    def ms(self) -> float:
        """Of a call: on the host, which waits for no device; or on the device, which first sleeps until the
        host has queued all calls.
        """
        if self.on_host:
            begin = time.perf_counter()
            self.make(1)
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(self.wait * sleep_rate()))
        start.record()
        self.make(self.together)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.together


def medians_ms(baselines: Mapping[str, Sequence[Call]], device: str, seconds: float) -> dict[str, float]:
    """Median time of a call by baseline, in ms. Baselines take turns round by round, and each one's calls in
    it. Each round has a new order: at the power limit the clock depends on what ran before.

    device: "cpu" or "cuda". seconds: about so many for each baseline's timed calls.
    """
    warm = {name: _Turns(calls, device) for name, calls in baselines.items()}
    times: dict[str, list[float]] = {name: [] for name in warm}
    a_round = sum(baseline.seconds * baseline.together for baseline in warm.values())
    least, most = ROUNDS
    order = random.Random(0)
    for _ in range(least if device == "cpu" else min(max(least, int(seconds * len(warm) / a_round)), most)):
        for name in order.sample(list(warm), len(warm)):
            times[name].append(warm[name].ms())
    return {name: statistics.median(found) for name, found in times.items()}
