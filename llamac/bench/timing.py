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


class _Turns:
    """Calls that take turns; results are kept until their turn comes again."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.kept: list[object] = [None] * len(calls)
        self.turns = itertools.cycle(range(len(calls)))

    def make(self, count: int) -> None:
        for turn in itertools.islice(self.turns, count):
            self.kept[turn] = None
            self.kept[turn] = self.calls[turn]()


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


def host_ms(make: Callable[[int], None], count: int) -> float:
    """ms a call on the host, which waits for no device."""
    start = time.perf_counter()
    make(count)
    return (time.perf_counter() - start) / count * 1e3


def device_ms(make: Callable[[int], None], count: int, wait: float) -> float:
    """ms a call on the device, which first sleeps `wait` seconds, until the host has queued all of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait * sleep_rate()))
    start.record()
    make(count)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


class _Warm:
    """One baseline's calls, warm, and how many of them lie between two events."""

    def __init__(self, calls: Sequence[Call], device: str) -> None:
        self.turns = _Turns(calls)
        self.on_host = device == "cpu"
        self.turns.make(max(5, len(calls)))
        if self.on_host:
            self.together, self.seconds = 1, 0.0
            return
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.turns.make(5)
        queued = (time.perf_counter() - start) / 5
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - start) / 5
        # A short call alone would be timed with the event.
        self.together = min(max(1, round(1e-3 / self.seconds)), 16)
        self.wait = min(1.5 * queued * self.together, 0.05)

    def ms(self) -> float:
        if self.on_host:
            return host_ms(self.turns.make, 1)
        return device_ms(self.turns.make, self.together, self.wait)


def medians_ms(baselines: Mapping[str, Sequence[Call]], device: str, seconds: float) -> dict[str, float]:
    """Median time of a call by baseline, in ms. Baselines take turns round by round, and each one's calls in
    it. Each round has a new order: at the power limit the clock depends on what ran before.

    device: "cpu" or "cuda". seconds: about so many for each baseline's timed calls.
    """
    warm = {name: _Warm(calls, device) for name, calls in baselines.items()}
    times: dict[str, list[float]] = {name: [] for name in warm}
    a_round = sum(baseline.seconds * baseline.together for baseline in warm.values())
    least, most = ROUNDS
    order = random.Random(0)
    for _ in range(least if device == "cpu" else min(max(least, int(seconds * len(warm) / a_round)), most)):
        for name in order.sample(list(warm), len(warm)):
            times[name].append(warm[name].ms())
    return {name: statistics.median(found) for name, found in times.items()}
