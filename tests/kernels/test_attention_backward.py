"""The backward kernels of attention by themselves, against gradients in float64. More shapes are tested on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

import draws
import interpreter_semaphores
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import normal

from pallas_kernels import attention, testing
from pallas_kernels.ops.attention.backward import keys_launch
from pallas_kernels.ops.attention.backward.config import default_backward, one_kernel, usual_two
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.backward.tiles import block_place
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import problem_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.specs import ErrorBound

NOTHING = {
    "bias": None,
    "mask": None,
    "is_causal": False,
    "scale": None,
    "window": None,
    "segment_ids": None,
    "softcap": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
}

FUSED = {
    "causal, two tiles of keys": ((1, 136, 136, 2, 1, 128), {"is_causal": True}),
    "causal, more queries": ((1, 264, 256, 2, 1, 64), {"is_causal": True}),
    "three tiles of queries": ((1, 136, 136, 1, 1, 128), {}),
    "causal, head size 64": ((1, 136, 200, 1, 1, 64), {"is_causal": True}),
    "head size 64": ((1, 136, 64, 1, 1, 64), {}),
    "causal, head size 96": ((1, 136, 136, 2, 1, 96), {"is_causal": True}),
    "parts, odd tiles, head size 96": ((1, 75, 133, 4, 1, 96), {}),
    "causal, clipped, head size 80": ((1, 136, 136, 2, 1, 80), {"is_causal": True}),
    "clipped, head size 112": ((1, 72, 136, 1, 1, 112), {}),
    "causal, parts, head size 64": ((1, 131, 131, 2, 1, 64), {"is_causal": True}),
    "causal, two odd tiles": ((1, 133, 133, 1, 1, 128), {"is_causal": True}),
}

SHORT = {
    "blocks share a group, causal": ((1, 72, 136, 2, 1, 64), {"is_causal": True}),
    "blocks share a group, a tile of keys that is not whole": ((1, 24, 71, 2, 1, 128), {}),
    "one warpgroup, softcap": ((2, 20, 72, 2, 2, 64), {"softcap": 2.0}),
}
"""Few blocks, which share a group's heads (`KeysConfig.parts`) or have one warpgroup."""

# (batch, queries, keys, heads, key heads, head size), arguments
CASES = {
    "causal, grouped heads, fewer queries": ((1, 72, 136, 2, 1, 64), {"is_causal": True}),
    "window, segments": ((1, 136, 136, 1, 1, 64), {"segment_ids": True, "window": (70, 9)}),
    "mask, softcap, scale": ((1, 64, 64, 1, 1, 64), {"mask": (1, 1, 64, 64), "softcap": 2.0, "scale": 0.5}),
    "bias, causal, more queries": ((1, 72, 24, 2, 1, 128), {"bias": (1, 1, 72, 24), "is_causal": True}),
    "dropout, bias of keys": ((2, 8, 71, 1, 1, 96), {"bias": (71,), "dropout_rate": 0.3, "dropout_key": True}),
    "head size 256": ((1, 1, 72, 1, 1, 256), {}),
    "head size 160": ((1, 16, 72, 1, 1, 160), {"is_causal": True}),
    "head size 72": ((1, 72, 136, 2, 1, 72), {"is_causal": True}),
}


def make(name, seed, dtype=jnp.bfloat16):
    """(query, key, value), the cotangent, and further arguments."""
    (batch, queries, keys, heads, key_heads, size), arguments = (CASES | FUSED | SHORT)[name]
    draw = count(seed)
    shape = (batch, queries, heads, size)
    query, dout = (normal(next(draw), *shape, dtype=dtype) for _ in range(2))
    key, value = (normal(next(draw), batch, keys, key_heads, size, dtype=dtype) for _ in range(2))
    arguments = NOTHING | arguments
    if arguments["segment_ids"]:
        arguments["segment_ids"] = jnp.sort(draws.integers(next(draw), (batch, queries), 0, 3), axis=-1)
    if arguments["dropout_key"]:
        arguments["dropout_key"] = jax.random.key(seed)
    if arguments["mask"]:
        # The first query sees nothing.
        seen = draws.integers(next(draw), arguments["mask"], 0, 2).astype(bool)
        arguments["mask"] = seen.at[..., 0, :].set(False)
    if arguments["bias"]:
        arguments["bias"] = normal(next(draw), *arguments["bias"], dtype=dtype)
    return (query, key, value), dout, arguments


def reference(operands, dout, dlse, arguments, static):
    """out and lse (0 of a query that sees nothing), and the gradients of query, key, value and bias."""
    arguments = arguments | static
    bias = arguments["bias"]
    inputs = operands if bias is None else (*operands, bias)

    def function(query, key, value, *bias):
        given = arguments | ({"bias": bias[0]} if bias else {})
        out, lse = attention_reference(query, key, value, **given, return_residuals=True)
        return out, jnp.where(lse == -jnp.inf, 0, lse)

    results, pull = jax.vjp(function, *inputs)
    return results, pull((dout, dlse.astype(results[1].dtype)))


def check(name, seed, **options):
    """Asserts that the gradients are as near to those of float64 as they must be, and returns them."""
    found = {}

    def draw(seed):
        found[seed], reports = compared(name, seed, **options)
        return reports

    testing.assert_draws_within(draw, seed, name)
    return found[seed]


def compared(name, seed, *, configure=default_backward, dtype=jnp.bfloat16, with_dlse=False, **given):
    operands, dout, arguments = make(name, seed, dtype)
    arguments |= given
    batch, queries, heads, _ = dout.shape
    dlse = with_dlse * normal(seed + 10, batch, heads, queries, dtype=jnp.float32)
    dynamic = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in arguments.items() if name not in dynamic}
    compute = jax.jit(lambda *inputs: reference(*inputs, static))
    (out, lse), baseline = compute(operands, dout, dlse, dynamic)
    with jax.enable_x64(True):

        def wide(value):
            is_float = jnp.issubdtype(value.dtype, jnp.floating)
            return jnp.asarray(np.asarray(value, np.float64)) if is_float else value

        _, exact = compute(*jax.tree.map(wide, (operands, dout, dlse, dynamic)))
        exact = [np.asarray(value) for value in exact]

    @jax.jit
    def gradients(operands, out, lse, dout, dlse, dynamic):
        problem, extras = problem_of(*operands[:2], **dynamic, **static)
        dlse = dlse if with_dlse else None
        given = {"problem": problem, "dlse": dlse, "config": configure(problem)}
        *got, of_extras = attention_backward(*operands, out, lse, dout, extras, **given)
        dbias = of_extras.bias
        assert (dbias is None) == (arguments["bias"] is None)
        return got if dbias is None else [*got, dbias.reshape(arguments["bias"].shape)]

    got = gradients(operands, out, lse, dout, dlse, dynamic)
    names = ["query", "key", "value", "bias"][: len(exact)]
    reports = testing.error_reports(
        *(dict(zip(names, values, strict=True)) for values in (got, baseline, exact)), ErrorBound()
    )
    return got, reports


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, seed):
    dquery, *_ = check(name, seed)
    if "mask" in name:
        assert not np.asarray(dquery, np.float32)[:, 0].any()


@pytest.mark.usefixtures("interpreter")
def test_gradient_of_log_sum_exp_and_products_that_overlap_in_float16(seed):
    def configure(problem):
        usual = usual_two(problem)
        keys, queries = replace(usual.keys, overlaps=True), replace(usual.queries, columns=64, overlaps=True)
        return replace(usual, keys=keys, queries=queries)

    check("causal, grouped heads, fewer queries", seed, configure=configure, dtype=jnp.float16, with_dlse=True)


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", SHORT)
def test_gradients_of_short_lengths(name, seed):
    def configure(problem):
        usual = usual_two(problem)
        if "share" in name:
            return replace(usual, keys=replace(usual.keys, parts=problem.group))
        return replace(usual, queries=replace(usual.queries, warpgroups=1))

    check(name, seed, configure=configure, with_dlse=True)


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", FUSED)
def test_gradients_by_one_kernel(name, seed, monkeypatch):
    counts = interpreter_semaphores.extend(monkeypatch)
    check(name, seed, configure=partial(one_kernel, parts=2 if "parts" in name else 1))
    if name == "causal, two tiles of keys":
        # Each tile of 64 queries of each head got a share from every tile of 128 keys that it sees.
        assert sorted(counts.values()) == [1, 1, 1, 1, 2, 2]


@pytest.mark.usefixtures("interpreter")
def test_one_kernel_with_scores_whose_weights_of_keys_of_zeros_would_be_infinite(seed, monkeypatch):
    interpreter_semaphores.extend(monkeypatch)
    draw = count(seed)
    query, key = normal(next(draw), 1, 72, 1, 64) / 8 + 3, normal(next(draw), 1, 72, 1, 64) / 8 - 4  # scores of -96
    value, dout = (normal(next(draw), 1, 72, 1, 64) for _ in range(2))
    (out, lse), expected = reference((query, key, value), dout, jnp.zeros((1, 1, 72)), NOTHING, {})
    assert lse.max() < -89
    problem, extras = problem_of(query, key, **NOTHING)
    config = one_kernel(problem, 1)
    got = attention_backward(query, key, value, out, lse, dout, extras, problem=problem, config=config)
    for own, other in zip(got[:3], expected, strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), other.astype(jnp.float32), rtol=0.05, atol=0.05)


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "name",
    ["causal, two tiles of keys", "causal, more queries", "causal, head size 96", "parts, odd tiles, head size 96"],
)
def test_gradients_by_one_kernel_that_need_not_repeat(name, seed, monkeypatch):
    interpreter_semaphores.extend(monkeypatch)
    check(name, seed, configure=partial(one_kernel, parts=2 if "parts" in name else 1), deterministic=False)


@pytest.mark.usefixtures("interpreter")
def test_shares_that_are_added_in_another_order(seed, monkeypatch):
    interpreter_semaphores.extend(monkeypatch)
    draw = count(seed)
    query, dout = (normal(next(draw), 1, 72, 2, 64) for _ in range(2))
    key, value = (normal(next(draw), 1, 300, 1, 64) for _ in range(2))
    (out, lse), _ = reference((query, key, value), dout, jnp.zeros((1, 2, 72)), NOTHING, {})

    def gradients(**given):
        problem, extras = problem_of(query, key, **NOTHING, **given)
        config = one_kernel(problem, 1)
        return attention_backward(query, key, value, out, lse, dout, extras, problem=problem, config=config)[:3]

    def place(block, *, tiles, **others):
        tile, lane = block_place(block, tiles=tiles, **others)
        return jnp.where(tile == 0, 0, tiles - tile), lane  # the first one, and then from the last one down

    in_order = gradients()
    monkeypatch.setattr(keys_launch, "block_place", place)
    dquery, *others = gradients(deterministic=False)
    np.testing.assert_allclose(
        dquery.astype(jnp.float32),
        in_order[0].astype(jnp.float32),
        rtol=2**-7,
        atol=2**-7 * float(jnp.abs(dquery).max()),
    )
    for own, other in zip(others, in_order[1:], strict=True):
        np.testing.assert_array_equal(own, other)


def copies(seed, **given):
    """The gradients by one kernel as a function of two operands, and two of each."""
    draw = count(seed)
    query, dout = (normal(next(draw), 2, 1, 72, 1, 128) for _ in range(2))
    key = normal(next(draw), 1, 136, 1, 128)

    def gradients(query, dout):
        problem, extras = problem_of(query, key, **NOTHING, **given)
        config = one_kernel(problem, 1)
        lse = jnp.full((1, 1, 72), np.log(136), jnp.float32)
        return attention_backward(query, key, key, query, lse, dout, extras, problem=problem, config=config)[:3]

    return gradients, query, dout


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("deterministic", [True, False])
def test_copies_of_one_kernel_are_one_launch(seed, deterministic, monkeypatch):
    counts = interpreter_semaphores.extend(monkeypatch)
    gradients, query, dout = copies(seed, deterministic=deterministic)
    together = jax.jit(jax.vmap(gradients))(query, dout)
    # Each copy has two tiles of queries, to which two blocks add.
    assert sorted(counts.values()) == [2] * 4
    one = jax.jit(gradients)
    for i in range(2):
        for own, copy in zip(one(query[i], dout[i]), together, strict=True):
            np.testing.assert_array_equal(own, copy[i])


def test_one_kernel_has_no_effects_without_which_checkpoint_would_leave_it_out(seed):
    gradients, query, dout = copies(seed)

    @jax.grad
    @jax.checkpoint
    def slope(factor, query, dout):
        return jnp.sin(factor) * jax.vmap(gradients)(query, dout)[0].sum(dtype=jnp.float32)

    traced = jax.make_jaxpr(slope)(1.0, query, dout)
    assert not traced.effects
    assert "attention_backward_fused" in str(traced)


@pytest.mark.parametrize(("tiles", "lanes", "waves"), [(3, 7, 2), (100, 7, 2), (40, 7, 1), (132, 3, 1), (300, 2, 1)])
def test_every_block_has_its_own_place(tiles, lanes, waves):
    blocks = np.arange(tiles * lanes, dtype=np.int32)
    tile, lane = jax.vmap(lambda block: block_place(block, tiles=tiles, lanes=lanes, waves=waves))(blocks)
    places = list(zip(lane.tolist(), tile.tolist(), strict=True))
    # The blocks that one adds after have lower numbers, so that they run or are done, however few run at once.
    assert sorted(places) == sorted(places, key=lambda place: place[0])
    assert set(places) == {(i, j) for i in range(lanes) for j in range(tiles)}
    section = max(1, min(lanes, waves * target_device().core_count // tiles))
    first = lanes % section or section
    assert {i for i, _ in places[: first * tiles]} == set(range(first))


def test_masked_and_full_tiles_are_all_tiles():
    tiles = TileRange(2, 4, 7, 8)
    masked = [int(tiles.masked_tile(i)) for i in range(tiles.masked)]
    full = [int(tiles.full_tile(i)) for i in range(tiles.full)]
    assert (masked, full) == ([2, 3, 7], [4, 5, 6])


@pytest.mark.usefixtures("interpreter")
def test_a_single_key_leaves_its_scores_no_gradient():
    query, key, value, dout = (normal(i, 2, 1, heads, 64) for i, heads in enumerate((8, 2, 2, 8)))
    out, pullback = jax.vjp(lambda *x: attention(*x, is_causal=True, implementation="mosaic"), query, key, value)
    dquery, dkey, dvalue = pullback(dout)
    np.testing.assert_array_equal(out, jnp.repeat(value, 4, axis=2))
    assert not np.any(dquery) and not np.any(dkey)
    summed = jnp.sum(dout.astype(jnp.float32).reshape(2, 1, 2, 4, 64), axis=3)
    np.testing.assert_allclose(dvalue.astype(np.float32), summed, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("interpreter")
def test_a_mask_of_one_number_a_batch_entry():
    query, dout = normal(0, 2, 2, 3, 1, 64)
    key, value = normal(1, 2, 2, 1, 1, 64)
    mask = jnp.array([True, False]).reshape(2, 1, 1, 1)
    out, pullback = jax.vjp(lambda *x: attention(*x, mask=mask, implementation="mosaic"), query, key, value)
    dquery, dkey, dvalue = pullback(dout)
    np.testing.assert_array_equal(out, jnp.where(mask, value, 0) + jnp.zeros_like(query))
    assert not np.any(dquery) and not np.any(dkey)
    summed = jnp.where(mask, jnp.sum(dout.astype(jnp.float32), axis=1, keepdims=True), 0)
    np.testing.assert_allclose(dvalue.astype(np.float32), summed, rtol=0.01, atol=0.01)
