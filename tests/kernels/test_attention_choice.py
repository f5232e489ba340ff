"""What attention takes unasked: implementation, warpgroups, and for a few queries the kernel of decoding."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import recorded_choices, testing
from pallas_kernels.ops.attention import few_queries
from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.backward.config import (
    default_backward,
    two_kernels,
)
from pallas_kernels.ops.attention.forward.config import default_forward, preferred
from pallas_kernels.ops.attention.problem import Problem, problem_of, widened
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.ops.attention.specs import ATTENTION

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=H200)
NAMES = ("bias", "mask", "scale", "window", "segment_ids", "softcap", "dropout_key")
NOTHING: dict[str, Any] = {**dict.fromkeys(NAMES), "is_causal": False, "dropout_rate": 0.0}


def described(batch=2, queries=1, keys=512, heads=8, key_heads=2, size=64, **given) -> Problem:
    query = jax.ShapeDtypeStruct((batch, queries, heads, size), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, keys, key_heads, size), jnp.bfloat16)
    return problem_of(query, key, **{**NOTHING, **given})[0]  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("with_gradient", [False, True])
def test_few_queries_of_a_group_are_queries_of_one_head(seed, with_gradient):
    given: dict[str, Any] = {"softcap": 2.0, "scale": -0.2}

    def draw(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = ((34, 3, 4, 64), (34, 16, 2, 64), (34, 16, 2, 64))
        operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

        def results(function, *operands):
            if not with_gradient:
                return {"out": function(*operands, **given)}
            out, pull = jax.vjp(partial(function, return_residuals=True, **given), *operands)
            names = ("out", "lse", "query", "key", "value")
            return dict(zip(names, (*out, *pull(jax.tree.map(jnp.cos, out))), strict=True))

        got = results(partial(attention, implementation="mosaic"), *operands)
        baseline = results(attention_reference, *operands)
        with jax.enable_x64(True):
            expected = results(attention_reference, *(x.astype(jnp.float64) for x in operands))
            expected = {name: np.asarray(array) for name, array in expected.items()}
        return testing.error_reports(got, baseline, expected, ATTENTION.error_bound)

    problem = few_queries.packed(described(batch=34, queries=3, keys=16, heads=4))
    assert (problem.heads, problem.masking.queries) == (2, 6)
    testing.assert_draws_within(draw, seed, "few queries")


FEW = {"batch": 4, "queries": 16, "keys": 4096}


@pytest.mark.parametrize(
    "given",
    [{"queries": 17}, {"keys": 4095}, {"batch": 1}, {"is_causal": True}, {"window": 5}, {"dropout_rate": 0.1}],
    ids=lambda given: next(iter(given)),
)
def test_the_kernel_of_decoding_takes_few_queries_that_see_all(given):
    assert few_queries.decodes(described(**FEW))
    assert few_queries.decodes(described(keys=8))
    assert not few_queries.decodes(described(**{**FEW, **given}))


def kernels(function, *shapes) -> set[str]:
    """The names of the kernels in a trace for an H200."""
    with jax.sharding.use_abstract_mesh(MESH):
        program = str(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)))
    return set(re.findall(r"(?:decode_)?attention(?=_mosaic_gpu|\b)", program.replace("operation=attention", "")))


def test_what_is_taken_unasked():
    def forward(*operands):
        return cast(jax.Array, attention(*operands))

    def gradient(*operands):
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum())(*operands)

    assert preferred(described(keys=1)) == ()
    assert preferred(described(queries=2, keys=2)) == ("mosaic",)
    for function in (forward, gradient):
        assert kernels(function, (16, 1, 4, 64), (16, 1, 2, 64), (16, 1, 2, 64)) == set()
        assert kernels(function, (16, 2, 4, 64), (16, 2, 2, 64), (16, 2, 2, 64)) == {"attention"}
    many = ((2, 1, 4, 64), (2, 512, 2, 64), (2, 512, 2, 64))
    assert kernels(forward, *many) == {"decode_attention"}
    assert kernels(gradient, *many) == {"attention"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [({"size": 192}, 1), ({"size": 192, "is_causal": True}, 1), ({}, 2), ({"keys": 100}, 2), ({"is_causal": True}, 2),
     ({"keys": 128, "is_causal": True}, 2), ({"keys": 100, "is_causal": True}, None),
     ({"size": 192, "queries": 82, "keys": 82, "is_causal": True}, None), ({"softcap": 1.0}, None)],
)  # fmt: skip
def test_large_heads_loop_over_tiles_where_registers_suffice(given, parts):
    problem = described(**{"batch": 32, "queries": 1024, "keys": 1024, "size": 256, **given})
    with jax.sharding.use_abstract_mesh(MESH):
        config = default_forward(problem)
    assert config.is_persistent == config.own_output == (parts is not None)
    assert config.output_parts == (parts or 1)


LLAMA = {"batch": 1, "heads": 32, "key_heads": 8, "size": 128, "is_causal": True}


@pytest.mark.parametrize(
    ("given", "parts", "columns"),
    [({"queries": 512}, 4, 64), ({"queries": 512, "is_causal": False}, 4, 128), ({"queries": 512, "batch": 2}, 4, 128),
     ({"queries": 512, "batch": 4}, 2, 128), ({"queries": 512, "batch": 8}, 1, 128), ({"queries": 1024}, 4, 128),
     ({"queries": 1024, "is_causal": False}, 2, 128), ({"queries": 1024, "heads": 12, "key_heads": 12}, 1, 64),
     ({"queries": 2048, "batch": 4}, 1, 128),
     ({"queries": 4096}, 1, 128), ({"queries": 256}, 4, 64), ({"queries": 128}, 4, 64), ({"queries": 17}, 4, 64),
     ({"queries": 7, "key_heads": 1}, 1, 128), ({"queries": 16, "key_heads": 1}, 32, 64),
     ({"queries": 128, "size": 256}, 4, 64), ({"queries": 256, "size": 256}, 4, 64),
     ({"queries": 512, "softcap": 1.0}, 1, 128), ({"queries": 300}, 4, 64),
     ({"queries": 300, "is_causal": False}, 4, 128), ({"queries": 128, "batch": 16}, 1, 128),
     ({"queries": 512, "key_heads": 32}, 1, 64)],
)  # fmt: skip
def test_more_blocks_where_keys_make_few(given, parts, columns):
    problem = described(**{**LLAMA, **given, "keys": given["queries"]})
    with jax.sharding.use_abstract_mesh(MESH):
        config = two_kernels(problem)
    assert (config.keys.parts, config.keys.columns) == (parts, columns)


@pytest.mark.parametrize(
    ("given", "is_one"),
    [({"batch": 4, "queries": 1024}, True), ({"batch": 4, "queries": 1000}, True),
     ({"batch": 4, "queries": 384}, False), ({"batch": 4, "queries": 1024, "size": 64}, True),
     ({"queries": 1024}, False), ({"queries": 1024, "is_causal": False}, False), ({"queries": 1600}, True),
     ({"batch": 2, "queries": 512}, False), ({"batch": 4, "queries": 512}, True), ({"queries": 2048}, True),
     ({"queries": 1800, "is_causal": False}, True), ({"batch": 2, "queries": 1024, "is_causal": False}, True),
     ({"queries": 512, "is_causal": False}, False), ({"queries": 480, "is_causal": False, "size": 192}, False),
     ({"queries": 400, "is_causal": False}, False), ({"batch": 8, "queries": 512, "softcap": 2.0}, False),
     ({"queries": 16384, "size": 64}, False), ({"queries": 16384, "size": 64, "is_causal": False}, True),
     ({"batch": 8, "queries": 1024, "size": 64}, True),
     ({"batch": 8, "queries": 1026, "size": 64}, True), ({"batch": 4, "queries": 4098}, True),
     ({"batch": 4, "queries": 4098, "is_causal": False}, True), ({"batch": 4, "queries": 4098, "keys": 2050}, False)],
)  # fmt: skip
def test_one_backward_kernel_where_its_blocks_are_many(given, is_one):
    problem = described(**{**LLAMA, "keys": given["queries"], **given})
    with jax.sharding.use_abstract_mesh(MESH):
        assert default_backward(problem).keys.adds_dquery == is_one


@pytest.mark.usefixtures("interpreter")
def test_one_warpgroup_gives_what_all_scores_give(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((1, 40, 2, 128), (1, 136, 1, 128), (1, 136, 1, 128))
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    out, lse = attention(*operands, is_causal=True, return_residuals=True, implementation="mosaic")
    want, want_lse = attention_reference(*operands, is_causal=True, return_residuals=True)
    np.testing.assert_allclose(np.float32(out), np.float32(want), atol=0.02, err_msg=f"seed={seed}")
    np.testing.assert_allclose(lse, want_lse, atol=1e-4, err_msg=f"seed={seed}")


@pytest.mark.parametrize(
    ("size", "length", "taken"),
    [(80, 512, "mosaic"), (72, 256, "mosaic"), (40, 4096, "mosaic"), (40, 32, "mosaic"), (16, 4096, "xla"),
     (264, 4096, "xla"), (64, 128, "mosaic")],
)  # fmt: skip
def test_heads_of_other_sizes_take_the_kernels(size, length, taken):
    heads = jax.ShapeDtypeStruct((2, length, 4, size), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(MESH), recorded_choices() as choices:
        jax.eval_shape(partial(attention, is_causal=True), heads, heads, heads)
    (choice,) = choices
    assert choice.taken == taken


@pytest.mark.parametrize(
    ("size", "keys", "taken", "clips"),
    [(80, 24, 96, True), (72, 25, 96, True), (40, 24, 64, True), (160, 25, 160, False), (112, 24, 128, True),
     (75, 24, 96, False)],
)  # fmt: skip
def test_wider_heads_keep_their_scale(size, keys, taken, clips):
    narrow = described(batch=1, queries=16, keys=keys, heads=2, key_heads=1, size=size)
    array = jnp.ones((1, 16, 2, size), jnp.bfloat16)
    wide, (widest,) = widened(narrow, array)
    assert (wide.head_size, wide.clips, wide.scale) == (taken, clips, narrow.scale)
    assert widest.shape == (1, 16, 2, size if clips else taken)
    assert not widest[..., size:].any()
    assert widened(wide, widest) == (wide, (widest,))


@pytest.mark.parametrize(
    ("batch", "length", "heads", "given", "warpgroups"),
    [(4, 4096, 32, {}, 3), (8, 1024, 16, {}, 3), (1, 1024, 16, {}, 2), (4, 4096, 32, {"is_causal": True}, 3),
     (4, 4096, 32, {"size": 128}, 2), (4, 4096, 32, {"dropout_rate": 0.1, "dropout_key": jnp.zeros(2, "uint32")}, 2)],
)  # fmt: skip
def test_where_a_block_has_three_consumers(batch, length, heads, given, warpgroups):
    with jax.sharding.use_abstract_mesh(MESH):
        problem = described(batch=batch, queries=length, keys=length, heads=heads, key_heads=heads, **given)
        assert default_forward(problem).warpgroups == warpgroups
