"""What attention takes unasked: implementation, configuration, and for a few queries the kernel of decoding."""

from __future__ import annotations

import itertools
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import recorded_choices, testing
from pallas_kernels.ops.attention import cost, few_queries
from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.backward.config import backward_candidates, backward_cost, default_backward
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.dense import TILE, WORD
from pallas_kernels.ops.attention.forward.config import (
    default_forward,
    forward_candidates,
    forward_cost,
    known,
    preferred,
)
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import Extras, Problem, problem_of
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
def test_queries_of_a_group_are_rows_of_the_decoding_kernel(seed):
    given: dict[str, Any] = {"softcap": 2.0, "scale": -0.2}

    def draw(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = ((2, 3, 4, 64), (2, 8192, 2, 64), (2, 8192, 2, 64))
        operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        got = attention(*operands, **given, implementation="mosaic")
        baseline = attention_reference(*operands, **given)
        with jax.enable_x64(True):
            exact = np.asarray(attention_reference(*(x.astype(jnp.float64) for x in operands), **given))
        return testing.error_reports({"out": got}, {"out": baseline}, {"out": exact}, ATTENTION.error_bound)

    assert few_queries.decodes(described(queries=3, keys=8192, heads=4))
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

    assert preferred(described(keys=1), 64) == ()
    assert preferred(described(queries=2, keys=2), 64) == ("mosaic",)
    for function in (forward, gradient):
        assert kernels(function, (16, 1, 4, 64), (16, 1, 2, 64), (16, 1, 2, 64)) == set()
        assert kernels(function, (16, 2, 4, 64), (16, 2, 2, 64), (16, 2, 2, 64)) == {"attention"}
    many = ((2, 1, 4, 64), (2, 512, 2, 64), (2, 512, 2, 64))
    assert kernels(forward, *many) == {"decode_attention"}
    assert kernels(gradient, *many) == {"attention"}


def test_one_query_behind_a_mask_takes_the_kernel_if_its_groups_fill_a_gpu():
    mask = {"mask": jnp.ones((1, 1, 1, 512), jnp.bool_)}
    assert preferred(described(**mask), 64) == ()
    assert preferred(described(batch=32, **mask), 64) == ("mosaic",)
    assert preferred(described(), 64) == ("mosaic",)  # the kernel of decoding
    assert preferred(described(queries=2, **mask), 64) == ("mosaic",)


LLAMA = {"heads": 32, "key_heads": 8, "size": 128, "is_causal": True}
VIT = {"heads": 12, "key_heads": 12, "size": 64}
GEMMA = {"heads": 16, "key_heads": 4, "size": 256, "is_causal": True}


def of_length(length, model, **given) -> Problem:
    return described(**{"queries": length, "keys": length, **model, **given})


@pytest.mark.parametrize("model", [LLAMA, VIT, GEMMA])
def test_more_work_never_costs_less(model):
    with jax.sharding.use_abstract_mesh(MESH):
        for lengths in itertools.pairwise((64, 197, 512, 1024, 2050, 4096, 8192)):
            for batches in itertools.pairwise((1, 2, 4, 16)):
                small, longer = (of_length(length, model, batch=batches[0]) for length in lengths)
                more = of_length(lengths[0], model, batch=batches[1])
                forward, backward = default_forward(small), default_backward(small)
                for larger in (longer, more):
                    assert forward_cost(small, forward) <= forward_cost(larger, forward)
                    assert backward_cost(small, backward) <= backward_cost(larger, backward)


def test_blocks_share_multiprocessors_as_they_fit(monkeypatch):
    monkeypatch.setattr(cost, "target_device", lambda: SimpleNamespace(core_count=4))
    assert cost.launch_cost([2, 2], lanes=2) == 2
    assert cost.launch_cost([2, 2, 2], lanes=2) == 4  # a second round of two blocks
    assert cost.launch_cost([6, 1, 1], lanes=1) == 6  # short blocks run beside the long one
    assert cost.launch_cost([3, 1], lanes=16) == 16


@pytest.mark.parametrize(
    ("batch", "length", "model", "rows", "parts", "is_one"),
    [(4, 4096, LLAMA, 128, 1, True), (1, 512, LLAMA, 64, 4, False), (64, 197, VIT, 128, 1, False)],
    ids=["llama", "a short llama", "vit"],
)
def test_known_shapes_take_what_was_fastest(batch, length, model, rows, parts, is_one):
    problem = of_length(length, model, batch=batch)
    with jax.sharding.use_abstract_mesh(MESH):
        forward, backward = default_forward(problem), default_backward(problem)
    assert (forward.rows, backward.keys.parts, backward.keys.adds_dquery) == (rows, parts, is_one)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    "given",
    [{"batch": 4}, {"queries": 300, "keys": 500}, {"size": 64, "is_causal": False}, {"size": 256, "batch": 4},
     {"window": (100, 0)}, {"softcap": 30.0}, {"queries": 5000, "keys": 5000}, {"heads": 24, "key_heads": 8},
     {"dropout_rate": 0.1, "dropout_key": jnp.zeros(2, "uint32")}],
    ids=str,
)  # fmt: skip
def test_every_choice_is_a_kernel(given):
    problem = of_length(1024, LLAMA, **{"batch": 1, **given})
    masking, shape = problem.masking, (problem.batch, problem.heads)
    query = jax.ShapeDtypeStruct((problem.batch, masking.queries, problem.heads, problem.head_size), problem.dtype)
    key = jax.ShapeDtypeStruct((problem.batch, masking.keys, problem.key_heads, problem.head_size), problem.dtype)
    words = jnp.zeros((1, 1, masking.queries, -(-masking.keys // TILE) * TILE // WORD), "uint32")
    extras = Extras(kept=words if problem.dropout_rate else None)
    lse = jax.ShapeDtypeStruct((*shape, masking.queries), jnp.float32)
    with jax.sharding.use_abstract_mesh(MESH):
        forwards, backwards = forward_candidates(problem), backward_candidates(problem)
        assert default_forward(problem) in forwards.values()
        assert default_backward(problem) in backwards.values()
        for config in forwards.values():
            forward = partial(attention_forward, extras=extras, problem=problem, config=config)
            assert jax.eval_shape(forward, query, key, key)[0].shape == query.shape
        for config in backwards.values():
            assert problem.group % config.keys.parts == 0
            backward = partial(attention_backward, extras=extras, problem=problem, config=config)
            gradients = jax.eval_shape(backward, query, key, key, query, lse, query)
            assert [each.shape for each in gradients[:3]] == [query.shape, key.shape, key.shape]


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
     (264, 4096, "xla"), (75, 512, "xla"), (64, 128, "mosaic")],
)  # fmt: skip
def test_heads_of_other_sizes_take_the_kernels(size, length, taken):
    heads = jax.ShapeDtypeStruct((2, length, 4, size), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(MESH), recorded_choices() as choices:
        jax.eval_shape(partial(attention, is_causal=True), heads, heads, heads)
    (choice,) = choices
    assert choice.taken == taken


@pytest.mark.parametrize(
    ("size", "taken", "clips"), [(80, 96, True), (40, 64, True), (160, 160, False), (112, 128, True)]
)
def test_tiles_wider_than_heads_keep_their_scale(size, taken, clips):
    facts = described(size=size, queries=16)
    assert (facts.head_size, facts.value_size, facts.clips) == (taken, taken, clips)
    assert (facts.in_panels, facts.scale) == (clips, pytest.approx(size**-0.5))


@pytest.mark.parametrize(("length", "differs"), [(1280, True), (256, False)])
def test_only_one_kernel_may_add_in_any_order(length, differs):
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
    own = {"queries": length, "keys": length, "key_heads": 8}
    assert known(described(**own)) == known(described(**own, deterministic=False))
