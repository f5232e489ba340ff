"""Few rows with a norm inside under a checked `shard_map`."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import Norm, norm_linear
from pallas_kernels.primitives.platform import target_device


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [4096, 14336])
@pytest.mark.parametrize("rows", [1, 13, 16])
def test_a_checked_shard_map_has_the_same_bits(rows, outputs):
    if not target_device().is_hopper:
        pytest.skip("needs an attached Hopper GPU")
    keys = jax.random.split(jax.random.key(random.SystemRandom().randrange(2**30)), 3)
    shapes = ((rows, 2048), (2048,), (2048, outputs))
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

    def layer(x, scale, w):
        return norm_linear(x, w, norm=Norm(scale, epsilon=1e-6), implementation="mosaic")

    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    columns = PartitionSpec(None, "model")
    whole = PartitionSpec()
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(whole, whole, columns), out_specs=columns, check_vma=True)
    got, want = jax.jit(sharded)(*operands), jax.jit(layer)(*operands)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
