"""What is particular to rope: angles, tiles of heads, and positions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import rope
from pallas_kernels.ops.rope.pairs import HeadTile
from pallas_kernels.ops.rope.tables import cosine_and_sine, turns


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 2.0])
def test_angles_are_exact_at_all_positions(theta):
    positions = np.concatenate([np.arange(-50, 300), [4095, 131071, 131072, 10**6, 2**31 - 1]]).astype(np.int32)
    whole, fraction = turns(128, theta)
    cosine, sine = cosine_and_sine(jnp.asarray(positions)[:, None], jnp.asarray(whole), jnp.asarray(fraction))
    frequency = np.longdouble(theta) ** (-np.arange(64, dtype=np.longdouble) / 64)
    angle = positions.astype(np.longdouble)[:, None] * frequency
    # The last position's product has 31 bits beside the frequency's rounding in float64.
    tolerance = np.where(np.abs(positions) > 10**7, 2e-6, 2.5e-7)[:, None]
    assert (np.abs(np.asarray(cosine) - np.cos(angle)) < tolerance).all()
    assert (np.abs(np.asarray(sine) - np.sin(angle)) < tolerance).all()


def test_known_values():
    query = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    for interleaved, second in ((False, 2), (True, 1)):
        rotated, _ = rope(query, query, jnp.array([1]), interleaved=interleaved)
        expected = np.zeros(4)
        expected[0], expected[second] = np.cos(1), np.sin(1)
        np.testing.assert_allclose(rotated[0, 0, 0], expected, rtol=1e-6)


@pytest.mark.usefixtures("interpreter")
def test_backward_undoes_forward(seed):
    query = normal(seed, (1, 2, 4, 128))
    positions = jnp.array([3, 131072])
    (rotated, _), pullback = jax.vjp(lambda q, k: rope(q, k, positions, implementation="mosaic"), query, query)
    back, _ = pullback((rotated, rotated))
    np.testing.assert_allclose(back, query, atol=2e-6, err_msg=f"seed={seed}")


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_a_warpgroup_shares_a_tile_evenly(size, vector):
    tile = HeadTile.of(size, vector)
    assert tile.rows % 4 == 0 and tile.half == size // 2
    assert tile.vector <= vector and tile.half % tile.vector == 0
    assert tile.rows * tile.half % (128 * tile.vector) == 0


@pytest.mark.drawn(1 / 4)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(2, 16, 3, 1, 32), (3, 5, 2, 2, 64), (1, 2, 5, 3, 128)], ids=["repeated", "ragged", "few rows"]
)
def test_positions_that_a_batch_shares(sizes, dtype, interleaved, seed):
    batch, tokens, heads, key_heads, size = sizes
    query, key = (normal(seed + i, (batch, tokens, n, size), dtype) for i, n in enumerate((heads, key_heads)))
    run = partial(rope, query, key, 7 * jnp.arange(tokens), interleaved=interleaved)
    step = float(jnp.finfo(dtype).eps)
    for got, exact in zip(run(implementation="mosaic"), run(implementation="xla"), strict=True):
        got, exact = np.asarray(got, np.float32), np.asarray(exact, np.float32)
        np.testing.assert_allclose(got, exact, rtol=2 * step, atol=2e-5, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("key_shape", "positions", "error", "message"),
    [
        ((1, 2, 1, 4), jnp.arange(3), ValueError, r"one a token, \(2,\) or \(1, 2\), got \(3,\)"),
        ((1, 2, 1, 6), jnp.arange(2), ValueError, r"key must be float32\[1, 2, key heads, 4\]"),
        ((1, 2, 1, 4), jnp.ones(2), TypeError, "positions must be integers, got float32"),
    ],
)
def test_arguments_that_do_not_belong_together(key_shape, positions, error, message):
    with pytest.raises(error, match=message):
        rope(jnp.ones((1, 2, 3, 4)), jnp.ones(key_shape), positions)


SHAPES = {"of tokens": (4, 8), "of a batch of one": (1, 4, 8), "of a head": (1, 4, 1, 8), "of one token": (1, 8)}


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tables_broadcast(shape, implementation, seed):
    query, key = (normal(seed + n, (2, 4, n, 16)) for n in (3, 1))
    cos, sin = (normal(seed + 5 + i, SHAPES[shape]) for i in range(2))
    by_token = [table.reshape(-1, 8) for table in (cos, sin)]
    every = [jnp.broadcast_to(table[None], (2, 4, 8)) for table in by_token]
    run = partial(rope, query, key, implementation=implementation)
    for got, expected in zip(run(cos=cos, sin=sin), run(cos=every[0], sin=every[1]), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(
        rope(query, cos=cos, sin=sin, implementation=implementation), run(cos=cos, sin=sin)[0]
    )


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_other_dtypes_with_a_value_for_each_column(interleaved, seed):
    query = normal(seed, (1, 40, 3, 64), jnp.bfloat16)
    cos, sin = (normal(seed + 1 + i, (40, 64), dtype) for i, dtype in enumerate((jnp.float32, jnp.float16)))
    run = partial(rope, query, cos=cos, sin=sin, interleaved=interleaved)
    got, expected = (np.asarray(run(implementation=each), np.float32) for each in ("mosaic", "xla"))
    np.testing.assert_allclose(got, expected, rtol=2**-7, atol=1e-6, err_msg=f"seed={seed}")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_columns_that_are_not_rotated_are_as_they_were(interleaved, seed):
    query = normal(seed, (1, 5, 2, 96), jnp.bfloat16)
    positions, options = jnp.arange(5) * 100, {"interleaved": interleaved, "implementation": "mosaic"}
    got = rope(query, positions=positions, rotated=32, **options)
    np.testing.assert_array_equal(got[..., 32:], query[..., 32:])
    np.testing.assert_array_equal(got[..., :32], rope(query[..., :32], positions=positions, **options))


@pytest.mark.usefixtures("interpreter")
def test_tables_are_differentiated_by_xla(seed):
    query, cos, sin = (normal(seed + i, shape) for i, shape in enumerate([(2, 4, 3, 32), (4, 16), (4, 16)]))

    def loss(query, cos, sin, implementation):
        return jnp.sum(jnp.sin(rope(query, cos=cos, sin=sin, implementation=implementation)))

    def rotated(implementation):
        return jax.make_jaxpr(jax.grad(lambda query: loss(query, cos, sin, implementation)))(query)

    gradients = [jax.grad(loss, (0, 1, 2))(query, cos, sin, each) for each in ("mosaic", "xla")]
    for got, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=f"seed={seed}")
    assert str(rotated("mosaic")).count("mpmd_map[") == 2  # forward and back, where tables are not differentiated


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "pass positions, or both cos and sin; got none of them"),
        ({"cos": jnp.ones((2, 2))}, TypeError, "pass positions, or both cos and sin; got cos"),
        (
            {"positions": jnp.arange(2), "cos": jnp.ones((2, 2)), "sin": jnp.ones((2, 2))},
            TypeError,
            "got positions and",
        ),
        (
            {"cos": jnp.ones((3, 2)), "sin": jnp.ones((3, 2))},
            ValueError,
            r"cos must be \(1, 2, columns\).*got \(3, 2\)",
        ),
        (
            {"cos": jnp.ones((2, 3)), "sin": jnp.ones((2, 3))},
            ValueError,
            r"which are 2, one a pair, or 4; got \(2, 3\)",
        ),
        ({"cos": jnp.ones((2, 2)), "sin": jnp.ones((2, 4))}, ValueError, "as many columns"),
        ({"cos": jnp.ones((1, 2, 3, 2)), "sin": jnp.ones((1, 2, 3, 2))}, ValueError, "an axis of one head"),
        ({"cos": jnp.ones((2, 2), int), "sin": jnp.ones((2, 2))}, TypeError, "cos must be floating"),
        ({"positions": jnp.arange(2), "rotated": 6}, ValueError, "from 2 to the head size 4, got 6"),
        ({"positions": jnp.arange(2), "rotated": 3}, ValueError, "rotated must be even"),
    ],
)
def test_tables_that_do_not_fit(given, error, message):
    with pytest.raises(error, match=message):
        rope(jnp.ones((1, 2, 3, 4)), **given)
