"""What is particular to the gated activation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import gated_activation
from pallas_kernels.primitives.elementwise import Blocks


def test_known_values():
    y = gated_activation(jnp.array([0.0, 2.0]), jnp.array([3.0, 10.0]))
    np.testing.assert_allclose(y, [0.0, 20 / (1 + np.exp(-2.0))], rtol=1e-6)
    np.testing.assert_allclose(gated_activation(jnp.array([[-1.0, 2.0, 5.0, 7.0]]), activation="relu"), [[0.0, 14.0]])


@pytest.mark.usefixtures("interpreter")
def test_packed_is_the_same_as_two_arrays(seed):
    gate, up = normal(seed, (2, 3, 256))
    packed = jnp.concatenate([gate, up], axis=-1)
    expected = gated_activation(gate, up, activation="gelu", implementation="mosaic")
    got = gated_activation(packed, activation="gelu", implementation="mosaic")
    np.testing.assert_array_equal(got, expected, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("gate", "up", "error", "message"),
    [
        (jnp.ones((2, 3)), None, ValueError, r"even length, got \(2, 3\)"),
        (jnp.ones((2, 4)), jnp.ones((4,)), ValueError, r"like gate, float32\[2, 4\]"),
        (jnp.ones((2, 4), "int32"), None, TypeError, "must be floating, got int32"),
    ],
)
def test_arguments_that_do_not_belong_together(gate, up, error, message):
    with pytest.raises(error, match=message):
        gated_activation(gate, up)


@pytest.mark.parametrize("is_one_part", [False, True])
@pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("features", [128, 129, 640, 1000, 1024, 2047, 2048, 2049, 3000, 4097])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_blocks_cover_every_value(rows, at_once, features, itemsize, is_one_part):
    blocks = Blocks(
        rows=rows, features=features, columns=1024, itemsize=itemsize, is_one_part=is_one_part, at_once=at_once
    )
    counted = np.zeros((rows, features), int)
    parts: dict[int, int] = {}

    def work(row, part):
        start = int(part.columns.start)
        assert start % part.segment.vector == 0 and start + part.segment.size <= features
        assert row + at_once <= rows
        counted[int(row) : int(row) + at_once, start : start + part.segment.size] += 1
        parts[block] = parts.get(block, 0) + 1

    with pytest.MonkeyPatch.context() as patch:
        # Outside a kernel conditions are plain values.
        patch.setattr("jax.experimental.pallas.when", lambda is_true: lambda run: run() if is_true else None)
        for block in range(blocks.count):
            blocks.run(jnp.int32(block), work)
    assert counted.min() == 1 and counted.max() <= (2 if at_once == 1 else 4)
    assert max(parts.values()) <= (1 if is_one_part else 2)
