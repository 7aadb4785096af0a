"""llamac.base.tolerance: units in the last place, the floor, the factor, what is no number; C++ likewise."""

import subprocess

import numpy as np
import pytest

from llamac.base.tolerance import (
    BACKWARD,
    FORWARD,
    Error,
    allowed_of,
    error_of,
    floor_of,
    ulp,
    violation,
    violation_of,
)

TRUTH = np.array([1.0, -3.0, 0.5, 0.0])  # an ulp of the largest: 2^-22 in f32, 2^-6 in bf16


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (1.0, "f32", 2.0**-23),
        (-1.99, "bf16", 2.0**-7),
        (2.0, "bf16", 2.0**-6),
        (2.0**-126, "f32", 2.0**-149),
        (2.0**-140, "f32", 2.0**-149),  # denormals are equally far from each other
        (0.0, "bf16", 2.0**-133),
        (2.0**-20, "fp16", 2.0**-24),
    ],
)
def test_ulp(x, dtype, expected):
    assert ulp(x, dtype) == expected


@pytest.mark.parametrize("dtype, unit", [("f32", 2.0**-22), ("bf16", 2.0**-6)])
def test_the_floor_is_two_ulp_of_the_largest_value(dtype, unit):
    assert floor_of(TRUTH, dtype).largest == 2 * unit
    assert floor_of(TRUTH, dtype).relative_l2 == unit  # 2 ulp of 1
    for ulps, right in ((2.0, True), (2.1, False)):
        found = TRUTH + ulps * unit * np.eye(4)[0]
        assert (violation(found, TRUTH, TRUTH, dtype, FORWARD) == "") == right
    assert violation_of(np.zeros(3), Error(0, 0), np.zeros(3), dtype, FORWARD) == ""


@pytest.mark.parametrize("factor", [FORWARD, BACKWARD])
def test_the_factor_of_pytorchs_error(factor):
    torch = TRUTH + 0.01
    for share, right in ((0.99, True), (1.01, False)):
        message = violation(TRUTH + share * factor * 0.01, torch, TRUTH, "f32", factor)
        assert (message == "") == right
    assert "relative l2 error" in message and f"factor {factor:g}" in message


def test_one_element_alone_is_seen():
    """Its L2 error is small among many; the largest error is not."""
    truth = np.ones(10000)
    found, torch = truth.copy(), truth + 1e-3
    found[7] += 2.1e-3
    assert violation(found, torch, truth, "f32", FORWARD).startswith("largest error")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_outside(value):
    found = np.where(np.arange(4) == 2, value, TRUTH)
    assert error_of(found, TRUTH) == Error(np.inf, np.inf)
    for torch in (TRUTH + 1, found):
        assert violation(found, torch, TRUTH, "f32", FORWARD)


def test_nan_is_right_where_the_truth_is():
    truth = np.where(np.arange(4) == 2, np.nan, TRUTH)
    assert violation(truth, truth, truth, "f32", FORWARD) == ""
    assert violation(TRUTH, truth, truth, "f32", FORWARD)


def test_another_shape_is_outside():
    assert error_of(TRUTH[:3], TRUTH) == Error(np.inf, np.inf)


def cases(dtype: str):
    """Results, a baseline and the truth: errors below the floor, beyond it, of one element; no number."""
    rng = np.random.default_rng(5)
    for size, scale in ((1, 1.0), (7, 3e-5), (100, 1e4), (5, 2.0**-130), (3, 0.0)):
        truth = scale * rng.standard_normal(size)
        unit = floor_of(truth, dtype).largest / 2
        for ours, theirs in ((0.0, 0.0), (1.9, 0.0), (2.1, 0.0), (5.0, 2.0), (5.0, 3.0)):
            sign = rng.choice((-1.0, 1.0), (2, size))
            yield truth + ours * unit * sign[0], truth + theirs * unit * sign[1], truth
        yield truth + 9 * unit * np.eye(size)[0], truth + 4 * unit, truth
    for value in (np.nan, np.inf):
        odd = np.where(np.arange(4) == 2, value, TRUTH)
        yield from ((odd, TRUTH, TRUTH), (odd, odd, TRUTH), (odd, odd, odd), (TRUTH, TRUTH, odd))


@pytest.mark.program
@pytest.mark.parametrize("factor", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    "dtype", ["f32", "bf16", *(pytest.param(name, marks=pytest.mark.more) for name in ("fp16", "f64"))]
)
def test_both_languages(build, dtype, factor):
    """C++ finds the same errors, floors, tolerances, units and verdicts."""
    verdicts = set()
    for found, torch, truth in cases(dtype):
        given = "\n".join(" ".join(map(repr, x.tolist())) for x in (found, torch, truth))
        command = [build / "tolerance", dtype, str(factor)]
        said = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
        *lines, verdict = said.splitlines()
        error, floor, allowed, units = ([float(word) for word in line.split()] for line in lines)
        with np.errstate(invalid="ignore"):
            expected = [error_of(found, truth), floor_of(truth, dtype)]
            expected.append(allowed_of(error_of(torch, truth), truth, dtype, factor))
            right = violation(found, torch, truth, dtype, factor) == ""
        for ours, theirs in zip((error, floor, allowed), expected):
            assert ours == pytest.approx([theirs.relative_l2, theirs.largest], rel=1e-12, abs=0), given
        finite = np.isfinite(found)
        assert np.array_equal(np.array(units)[finite], ulp(found[finite], dtype)), given
        assert int(verdict) == right, given
        verdicts.add(right)
    assert verdicts == {True, False}
