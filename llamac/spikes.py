"""Written twice on purpose: csrc/train/spikes.h has the same; tests/test_agreement.py::test_spikes.

A spike is a loss or gradient norm far above its recent values; the header has the definition.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

_WINDOW, _FEWEST = 64, 32
_DEVIATION, _LEAST_SPREAD, _FACTOR = 1.4826, 0.01, 8.0


@dataclass(frozen=True)
class Spike:
    """quantity: "loss" or "grad_norm", as in a step's event; allowed: the most that would have been none."""

    quantity: str
    found: float
    expected: float
    allowed: float


class SpikeDetector:
    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in ("loss", "grad_norm")}

    def add(self, loss: float, grad_norm: float) -> list[Spike]:
        """The spikes of a step whose numbers are finite."""
        spikes = []
        for quantity, value in (("loss", loss), ("grad_norm", grad_norm)):
            last = self._last[quantity]
            if len(last) >= _FEWEST:
                expected = median(last)
                deviation = median(abs(x - expected) for x in last)
                spread = max(_DEVIATION * deviation, _LEAST_SPREAD * abs(expected))
                allowed = expected + _FACTOR * spread
                if value > allowed:
                    spikes.append(Spike(quantity, value, expected, allowed))
            last.append(value)
        return spikes
