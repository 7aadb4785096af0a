"""llamac/tolerance.py: units in the last place, the floor, the factor, and what is no number."""

import numpy as np
import pytest

from llamac.tolerance import BACKWARD, FORWARD, Error, error_of, floor_of, ulp, violation, violation_of

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
    ],
)
def test_ulp(x, dtype, expected):
    assert ulp(x, dtype) == expected


@pytest.mark.parametrize("dtype, unit", [("f32", 2.0**-22), ("bf16", 2.0**-6)])
def test_the_floor_is_two_ulp_of_the_largest_value(dtype, unit):
    assert floor_of(TRUTH, dtype).largest == 2 * unit
    assert floor_of(TRUTH, dtype).relative_l2 == pytest.approx(2 * unit * 2 / np.linalg.norm(TRUTH))
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
    assert violation(found, TRUTH + 1, TRUTH, "f32", FORWARD)


def test_another_shape_is_outside():
    assert error_of(TRUTH[:3], TRUTH) == Error(np.inf, np.inf)
