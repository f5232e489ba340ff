"""Where blocks of the backward pass share what few of them would do alone, and how much each has."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import attention
from pallas_kernels.ops.attention.backward.config import BackwardConfig, backward_candidates, default_backward
from pallas_kernels.ops.attention.forward.config import known
from pallas_kernels.ops.attention.problem import Problem, problem_of

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
NAMES = ("bias", "mask", "scale", "window", "segment_ids", "softcap", "dropout_key")
NOTHING: dict[str, Any] = {**dict.fromkeys(NAMES), "is_causal": False, "dropout_rate": 0.0}


def described(batch, queries, keys, heads, key_heads, size, **given) -> Problem:
    query = jax.ShapeDtypeStruct((batch, queries, heads, size), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, keys, key_heads, size), jnp.bfloat16)
    return problem_of(query, key, **{**NOTHING, **given})[0]  # pyright: ignore[reportArgumentType]


def chosen(*shape, **given) -> BackwardConfig:
    with jax.sharding.use_abstract_mesh(MESH):
        return default_backward(described(*shape, **given))


@pytest.mark.parametrize(
    ("shape", "is_causal", "form", "parts"),
    [((1, 4096, 4096, 16, 4, 128), True, "one", 2), ((1, 4096, 4096, 32, 8, 128), True, "one", 1),
     ((1, 8192, 8192, 8, 2, 128), True, "one", 2), ((1, 5000, 5000, 16, 4, 128), True, "one", 2),
     ((1, 2048, 2048, 32, 8, 96), True, "one", 2), ((1, 4096, 4096, 8, 2, 64), True, "two", 4),
     ((1, 3000, 3000, 8, 1, 64), True, "two", 8), ((1, 1088, 2780, 24, 8, 128), True, "two", 3),
     ((1, 4096, 4096, 8, 2, 256), True, "two", 2), ((1, 4096, 4096, 8, 2, 128), False, "one", 2),
     ((1, 3000, 3000, 32, 8, 128), False, "one", 2), ((1, 2048, 2048, 32, 8, 128), False, "one", 1),
     ((1, 2048, 2048, 8, 2, 64), False, "one", 4), ((1, 4096, 4096, 4, 4, 128), True, "one", 1),
     ((2, 2040, 1244, 32, 8, 64), False, "one", 4), ((1, 1800, 1800, 32, 8, 128), False, "one", 1),
     ((2, 1400, 1400, 32, 8, 96), False, "one", 2), ((1, 3000, 3000, 8, 1, 64), False, "one", 4),
     ((1, 1600, 1600, 32, 8, 128), True, "one", 2), ((2, 1200, 1200, 32, 8, 128), True, "one", 2),
     ((1, 1024, 1024, 32, 8, 128), True, "two", 4), ((2, 200, 3000, 8, 8, 64), False, "two", 1)],
)  # fmt: skip
def test_blocks_share_the_heads_of_a_group(shape, is_causal, form, parts):
    config = chosen(*shape, is_causal=is_causal)
    assert (config.queries is None) == (form == "one")
    assert config.keys.parts == parts


@pytest.mark.parametrize(("length", "differs"), [(1280, True), (256, False)])
def test_only_the_fused_kernel_may_add_in_any_order(length, differs):
    heads = jax.ShapeDtypeStruct((2, length, 8, 64), jnp.bfloat16)

    def traced(**given):
        """The values, and the gradients."""
        attend = partial(attention, implementation="mosaic", **given)
        slopes = jax.grad(lambda *x: attend(*x).sum(dtype=jnp.float32), argnums=(0, 1, 2))
        with jax.sharding.use_abstract_mesh(MESH):
            return [str(jax.make_jaxpr(function)(heads, heads, heads)) for function in (attend, slopes)]

    (value, slopes), (own_value, own_slopes) = traced(), traced(deterministic=False)
    assert value == own_value
    assert (slopes != own_slopes) == differs
    assert traced(deterministic=True) == [value, slopes]
    shape = (2, length, length, 8, 8, 64)
    assert known(described(*shape)) == known(described(*shape, deterministic=False))


def test_parts_divide_the_group_in_every_candidate():
    for shape in ((1, 1088, 2780, 24, 8, 128), (2, 64, 1450, 8, 1, 96), (1, 3650, 3650, 16, 4, 96)):
        for is_causal in (True, False):
            problem = described(*shape, is_causal=is_causal)
            with jax.sharding.use_abstract_mesh(MESH):
                candidates = backward_candidates(problem)
            for config in candidates.values():
                assert problem.group % config.keys.parts == 0
