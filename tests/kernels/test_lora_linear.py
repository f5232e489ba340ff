"""What the shared base cannot say of lora_linear."""

from __future__ import annotations

from functools import partial
from typing import Any

import interpreter_semaphores
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels import lora_linear
from pallas_kernels.ops.lora_linear.config import preferred
from pallas_kernels.ops.lora_linear.mosaic_gpu import lora_linear_forward
from pallas_kernels.ops.lora_linear.one_launch import WorkSplit
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.specs import seeds_of


def arrays(rows=8, features=64, outputs=128, rank=4, dtype=jnp.bfloat16) -> dict[str, Any]:
    shapes = {"x": (rows, features), "w": (features, outputs), "a": (features, rank), "b": (rank, outputs)}
    scales = {"x": 1.0, "w": features**-0.5, "a": features**-0.5, "b": 1.0}
    return {
        name: (scales[name] * normal(own, shape)).astype(dtype)
        for own, (name, shape) in zip(seeds_of(0, len(shapes)), shapes.items(), strict=True)
    }


def exact(x, w, a, b, *, alpha):
    x, w, a, b = (np.asarray(value, np.float64) for value in (x, w, a, b))
    return x @ w + alpha * (x @ a) @ b


@pytest.mark.parametrize(
    ("rows", "outputs", "features", "rank", "taken"),
    [
        (1024, 704, 1024, 8, True),
        (8192, 4096, 14336, 16, True),  # an MLP's second layer
        (1024, 256, 8192, 16, False),
        (14456, 512, 14720, 4, False),
        (1024, 4096, 4096, 128, False),  # not one launch
        (256, 4096, 4096, 16, False),
    ],
)
def test_the_kernel_is_for_many_rows_and_outputs(rows, outputs, features, rank, taken):
    assert preferred(rows, outputs, features, rank) == (("mosaic",) if taken else ())


def test_without_a_gpu_none_is_xla():
    arguments = arrays()
    np.testing.assert_array_equal(lora_linear(**arguments), lora_linear(**arguments, implementation="xla"))
    with pytest.raises(NotImplementedError, match="Hopper"):
        lora_linear(**arguments, implementation="mosaic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w": jnp.ones((65, 128), jnp.bfloat16)}, ValueError, r"features of x \(8, 64\), got \(65, 128\)"),
        ({"a": jnp.ones((65, 4), jnp.bfloat16)}, ValueError, r"a must be \(features, rank\) .* got \(65, 4\)"),
        ({"b": jnp.ones((5, 128), jnp.bfloat16)}, ValueError, r"\(4, 128\), got \(5, 128\)"),
        ({"a": jnp.ones((64, 4), jnp.float32)}, TypeError, "a must have x's dtype bfloat16, got float32"),
        ({"bias": jnp.ones(127, jnp.bfloat16)}, ValueError, r"shape \(128,\), got \(127,\)"),
        ({"bias": jnp.ones(128, jnp.int32)}, TypeError, "bias must be floating, got int32"),
        ({"implementation": "mosiac"}, ValueError, "Did you mean 'mosaic'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    with pytest.raises(error, match=words):
        lora_linear(**{**arrays(), **changed})


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("shape", "words"), [({"features": 96}, "multiples of 64"), ({"rank": 130}, "at most 128")])
def test_what_the_kernel_refuses(shape, words):
    arguments = arrays(**shape)
    with pytest.raises(NotImplementedError, match=words):
        lora_linear(**arguments, implementation="mosaic")
    assert "mosaic_gpu" not in str(jax.make_jaxpr(lambda kept: lora_linear(**kept))(arguments))


def assert_close(y, expected):
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=2e-2 * np.abs(expected).max())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("cluster", [1, 2])
def test_rows_over_several_tiles(cluster):
    x, w, a, b = arrays(rows=136, features=128, outputs=192, rank=24).values()
    config = GemmConfig(tile_n=128, cluster=cluster)
    y = lora_linear_forward(x, w, a, b, None, alpha=0.5, config=config, one_launch=False)
    assert_close(y, exact(x, w, a, b, alpha=0.5))


ONE_LAUNCH = {
    "one width": GemmConfig(tile_n=128),
    "two widths": GemmConfig(tile_n=128, passes=(128, 64)),
    "half the swizzle": GemmConfig(tile_n=96, store_columns=32),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("cut", ONE_LAUNCH)
def test_few_blocks_compute_x_a_for_all(cut, monkeypatch):
    counts = interpreter_semaphores.extend(monkeypatch)
    # As many steps of x and a as do not fit into the buffers that they come by.
    x, w, a, b = arrays(rows=136, features=320, outputs=320, rank=20).values()
    bias = jnp.linspace(-1, 1, 320, dtype=jnp.float32)
    y = lora_linear_forward(x, w, a, b, bias, alpha=0.5, config=ONE_LAUNCH[cut], one_launch=True)
    assert_close(y, exact(x, w, a, b, alpha=0.5) + np.asarray(bias, np.float64))
    # Two warpgroups of one block each for two tiles of rows.
    assert sorted(counts.values()) == [2, 2]


@pytest.mark.usefixtures("interpreter")
def test_copies_are_launches_of_their_own(monkeypatch):
    counts = interpreter_semaphores.extend(monkeypatch)
    x, w, a, b = arrays(rows=3, features=128, outputs=128, rank=8).values()
    copies = jnp.stack([x, 2 * x, 3 * x])
    forward = partial(lora_linear_forward, alpha=0.5, config=ONE_LAUNCH["one width"], one_launch=True)
    for y in (
        jax.vmap(lambda x: forward(x, w, a, b, None))(copies),
        jax.vmap(lambda x, b: forward(x, w, a, b, None))(copies[:2], jnp.stack([b, b])),
    ):
        for i in range(y.shape[0]):
            assert_close(y[i], (i + 1) * exact(x, w, a, b, alpha=0.5))
    assert sum(counts.values()) == 3 * 2 + 2 * 2


@pytest.mark.parametrize(
    ("rows", "columns", "most", "blocks", "low_blocks"),
    [(4, 32, 132, 132, 4), (64, 16, 132, 132, 32), (3, 44, 132, 132, 2), (1, 1, 132, 2, 1)],
)
def test_each_tile_has_one_block(rows, columns, most, blocks, low_blocks):
    split = WorkSplit.of(rows=rows, columns=columns, most=most)
    assert (split.blocks, split.low_blocks) == (blocks, low_blocks)
    every = jnp.arange(blocks)
    lows, strips = (counts.tolist() for counts in jax.vmap(split.counts)(every))
    assert sum(lows) == rows
    assert {int(split.low(i, n)) for i in range(blocks) for n in range(lows[i])} == set(range(rows))
    assert max(strips[:low_blocks]) <= min(strips[low_blocks:], default=1)
    numbers = jnp.array([(i, n) for i in range(blocks) for n in range(strips[i])])
    places = jax.vmap(partial(split.place, group=8))(numbers[:, 0], numbers[:, 1])
    pairs = zip(*(place.tolist() for place in places), strict=True)
    assert sorted(pairs) == [(row, column) for row in range(rows) for column in range(columns)]


def test_rank_zero_is_no_correction():
    x, w, *_ = arrays().values()
    y = lora_linear(x, w, jnp.zeros((64, 0), x.dtype), jnp.zeros((0, 128), x.dtype))
    np.testing.assert_array_equal(y, x @ w)
