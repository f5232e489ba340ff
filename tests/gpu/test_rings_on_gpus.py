"""Rings on several GPUs: close to float64, and the same bits at each step, whichever GPU is late."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import BY_COPY_ENGINES, linear, overlapped_collectives
from pallas_kernels.primitives.platform import target_device

ROWS, FEATURES, OUTPUTS, STEPS = 4096, 1024, 2048, 1000


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_thousand_steps_are_equal(kind):
    if not target_device().is_hopper or jax.device_count() < 2:
        pytest.skip("needs two attached Hopper GPUs")
    seed = random.SystemRandom().randrange(2**30)
    mesh = Mesh(np.array(jax.devices()), ("t",))
    rows, columns = NamedSharding(mesh, P("t")), NamedSharding(mesh, P(None, "t"))
    places = (rows, columns) if kind == "gather" else (columns, rows)
    keys, shapes = jax.random.split(jax.random.key(seed)), ((ROWS, FEATURES), (FEATURES, OUTPUTS))
    arrays = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    x, w = jax.device_put(tuple(arrays), places)
    step = jax.jit(
        overlapped_collectives()(lambda x, w: linear(x, w)),
        out_shardings=columns if kind == "gather" else rows,
        compiler_options=dict(BY_COPY_ENGINES),
    )
    first = step(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert np.abs(np.asarray(first, np.float64) - exact).max() < 0.01 * np.abs(exact).max(), seed

    def wait(count, y):
        return lax.fori_loop(0, count[0], lambda _, y: jnp.sin(y), y)

    work = jax.device_put(jnp.ones((mesh.size, 1 << 22)), rows)
    late = jax.jit(jax.shard_map(wait, mesh=mesh, in_specs=(P("t"), P("t")), out_specs=P("t")))
    is_equal = jax.jit(lambda y, so_far: so_far & jnp.array_equal(y, first))
    equal = jnp.array(True)
    for counts in np.random.default_rng(seed).integers(0, 40, (STEPS, mesh.size), np.int32):
        late(jax.device_put(counts, rows), work)
        equal = is_equal(step(x, w), equal)
    assert equal, seed
