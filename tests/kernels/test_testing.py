from __future__ import annotations

import math

import pytest

from pallas_kernels.testing import ErrorReport, assert_draws_within


def report(error, baseline_error):
    return ErrorReport(
        output="output 0",
        error=error,
        baseline_error=baseline_error,
        excess=error - 2 * baseline_error,
        worst=(0,),
        baseline_factor=2.0,
    )


def drawn(*errors):
    """A draw for each call, and how many there were."""
    calls = []

    def draw(seed):
        calls.append(seed)
        return [report(*errors[min(len(calls), len(errors)) - 1])]

    return draw, calls


def test_one_draw_within_is_enough():
    draw, calls = drawn((1.9, 1.0))
    assert_draws_within(draw, 3, "title")
    assert calls == [3]


def test_the_largest_errors_of_several_draws_are_compared():
    draw, calls = drawn((2.1, 1.0), (1.5, 1.1))
    (together,) = assert_draws_within(draw, 3, "title")
    assert len(set(calls)) == 5
    assert (together.error, together.baseline_error) == (2.1, 1.1)


@pytest.mark.parametrize("errors", [[(2.1, 1.0)], [(9.0, 1.0), (0.1, 1.0)], [(math.inf, 1.0), (0.1, 1.0)]])
def test_what_is_off_stays_off(errors):
    with pytest.raises(AssertionError, match="title seed=3, 5 draws"):
        assert_draws_within(drawn(*errors)[0], 3, "title")
