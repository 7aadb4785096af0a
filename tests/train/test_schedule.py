"""llamac.training.schedule at its corner points, and llamac.base.random against published values."""

import math
from itertools import pairwise

import numpy as np
import pytest

from llamac.base import random
from llamac.training.schedule import learning_rate

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def rates(schedule: str, warmup: int, steps: int, minimum: float = 0.1) -> list[float]:
    """Learning rates of steps 1 .. steps, at a peak of 2."""
    rule = {"lr": 2.0, "min_lr_frac": minimum, "warmup_steps": warmup, "steps": steps, "schedule": schedule}
    return [learning_rate(step, **rule) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_in_equal_steps(schedule):
    assert rates(schedule, 10, 100)[:10] == pytest.approx([0.2 * i for i in range(1, 11)], rel=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup, steps", [(0, 100), (1, 100), (10, 100), (99, 100)])
def test_last_update_has_the_minimum(schedule, warmup, steps):
    expected = 2.0 if schedule == "constant" else 0.2
    assert rates(schedule, warmup, steps)[-1] == pytest.approx(expected, rel=1e-15)
    zero = 2.0 if schedule == "constant" else 0
    assert rates(schedule, warmup, steps, 0.0)[-1] == pytest.approx(zero, abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_falls_after_the_warmup(schedule):
    values = rates(schedule, 10, 100)[9:]
    assert max(values) == 2.0 and all(a >= b for a, b in pairwise(values))


def test_cosine():
    values = rates("cosine", 20, 120)
    assert values[69] == pytest.approx(1.1, rel=1e-14)  # half-way between peak and minimum
    assert values[44] == pytest.approx(0.2 + 0.9 * (1 + math.sqrt(0.5)), rel=1e-14)


def test_linear():
    values = rates("linear", 20, 120)
    assert np.allclose(np.diff(values[19:]), -0.018, rtol=1e-12, atol=0)


def test_wsd_falls_in_the_last_fifth():
    values = rates("wsd", 10, 103)
    assert values[10:83] == [2.0] * 73
    assert np.allclose(np.diff(values[82:]), -0.09, rtol=1e-12, atol=0)
    assert rates("wsd", 0, 3) == pytest.approx([2.0, 2.0, 0.2])  # a decay of at least one step
    assert rates("wsd", 95, 100)[94:] == pytest.approx(
        [2.0, 1.64, 1.28, 0.92, 0.56, 0.2]
    )  # from the warm-up on


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_as_long_as_the_run_or_longer(schedule):
    assert rates(schedule, 5, 5) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates(schedule, 10, 2) == pytest.approx([0.2, 0.4])
    assert rates(schedule, 1, 1) == [2.0]


def test_unknown_schedule():
    with pytest.raises(ValueError, match="unknown schedule step"):
        rates("step", 0, 2)


# Known-answer vectors of Random123 (kat_vectors, philox4x32 with 10 rounds).
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_philox_known_answers(counter, key, expected):
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in (counter, key, expected))
    assert random.philox4x32(np.array([counter], np.uint32), tuple(key)).tolist() == [expected]


def test_words_take_their_place_in_the_counter():
    seed, step, stream, element = 0x299F31D0A4093822, 0x03707344, 0x13198A2E, 4 * 0x85A308D3243F6A88
    expected = [int(word, 16) for word in VECTORS[2][2].split()]
    assert random.bits(seed, step, stream, 4, element).tolist() == expected
    assert random.bits(seed, step, stream, 2, element + 1).tolist() == expected[1:3]
    whole = random.bits(7, 1, 2, 50)
    for start in range(9):
        assert np.array_equal(random.bits(7, 1, 2, 20, start), whole[start : start + 20])


def test_normal():
    n = 1 << 20 | 6  # several chunks, and no multiple of four
    values = random.normal(42, 0, 4, n)
    assert values.dtype == np.float32 and values.shape == (n,)
    radius, angle = np.split((random.bits(42, 0, 4, n).reshape(-1, 2) + 0.5) / 2**32, 2, axis=1)
    radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    expected = np.hstack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(-1)
    allowed = np.maximum(2**-24 * np.abs(expected), 1e-12)  # one rounding, to float32
    assert (np.abs(values - expected) <= allowed).all()
    for count in (1, 2, 3, 5, 4 * random._CHUNK + 1):
        assert np.array_equal(random.normal(42, 0, 4, count), values[:count])
    for count in (1, 2, 3, 1001):  # in chunks of 100 blocks
        on_device = random.normal_on("cpu", 42, 0, 4, count, chunk=100).numpy()
        assert np.array_equal(on_device, values[:count])
    # Mean, variance, skewness and kurtosis within five standard errors.
    moments = [np.mean(values.astype(np.float64) ** k) for k in (1, 2, 3, 4)]
    errors = [math.sqrt(variance / n) for variance in (1, 2, 15, 96)]
    assert all(abs(m - e) < 5 * s for m, e, s in zip(moments, (0, 1, 0, 3), errors, strict=True))
    assert not np.array_equal(values[:100], random.normal(43, 0, 4, 100))
    assert not np.array_equal(values[:100], random.normal(42, 1, 4, 100))
    assert not np.array_equal(values[:100], random.normal(42, 0, 5, 100))


def test_uniform_never_reaches_its_ends(monkeypatch):
    values = random.uniform(1, 2, 3, 100_000)
    assert 0 < values.min() < 1e-4 and 1 - 1e-4 < values.max() < 1
    monkeypatch.setattr(random, "bits", lambda *_: np.array([0, 2**32 - 1], np.uint32))
    low, high = random.uniform(1, 2, 3, 2)
    assert low > 0 and high < 1
