from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.specs import ArraySpec
from pallas_kernels.testing import DRAWS, ErrorReport, assert_draws_within


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
    assert len(set(calls)) == DRAWS
    assert (together.error, together.baseline_error) == (2.1, 1.1)


@pytest.mark.parametrize("errors", [[(2.1, 1.0)], [(9.0, 1.0), (0.1, 1.0)], [(math.inf, 1.0), (0.1, 1.0)]])
def test_what_is_off_stays_off(errors):
    with pytest.raises(AssertionError, match=f"title seed=3, {DRAWS} draws"):
        assert_draws_within(drawn(*errors)[0], 3, "title")


@pytest.mark.parametrize("size", [2**20, 2**20 + 1], ids=["small", "large"])
@pytest.mark.parametrize(
    ("array", "mean", "deviation"),
    [
        ({"dtype": "bfloat16", "mean": 3.0, "deviation": 2.0}, 3.0, 2.0),
        ({"dtype": "float16", "fill": "extreme"}, 0.0, 1e4),
        ({"dtype": "float32", "fill": "zeros"}, 0.0, 0.0),
        ({"dtype": "float32", "fill": "ones"}, 1.0, 0.0),
        ({"dtype": "uint32", "fill": "bits"}, 2.0**31, 2.0**32 / 12**0.5),
        ({"dtype": "bool", "fill": "integers"}, 0.5, 0.5),
        ({"dtype": "int8", "fill": "integers", "minimum": -7, "maximum": 8}, 0.0, (224 / 12) ** 0.5),
        ({"dtype": "int32", "fill": "sorted", "maximum": 1000}, 499.5, 1000 / 12**0.5),
    ],
    ids=lambda value: value.get("fill", "normal") + "-" + value["dtype"] if isinstance(value, dict) else "",
)
def test_arrays_are_drawn_as_they_say(array, mean, deviation, size):
    spec = ArraySpec(shape=(size,), **array)
    drawn, again, other = spec.make(3), spec.make(3), spec.make(4)
    assert isinstance(drawn, jax.Array)
    assert (drawn.shape, drawn.dtype) == (spec.struct.shape, spec.struct.dtype)
    values = np.asarray(drawn, np.float64)
    np.testing.assert_allclose(values.mean(), mean, atol=0.01 * deviation)
    np.testing.assert_allclose(values.std(), deviation, rtol=0.01)
    assert jnp.array_equal(drawn, again)
    assert jnp.array_equal(drawn, other) == (deviation == 0)
    assert spec.fill != "sorted" or (np.diff(values) >= 0).all()
