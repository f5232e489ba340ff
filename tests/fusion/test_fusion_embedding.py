"""Lookups in tables: which become an embedding, what they keep, and what stays a gather."""

from __future__ import annotations

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewriting import normal

import xlafuse
from xlafuse.numerics import judge

BF16 = jnp.bfloat16
TABLE = normal((300, 256))
NARROW = TABLE.astype(BF16)
IDS = jnp.asarray(np.random.default_rng(3).integers(-300, 300, (8, 256)))


def fused(fn, *arguments):
    """The function and its report, of a trace that takes a derivative for the first argument."""
    reports = []
    own = xlafuse.fuse(fn, report=reports.append)
    jax.eval_shape(lambda first: jax.vjp(lambda first: own(first, *arguments[1:]), first), arguments[0])
    return own, reports[0]


def calls(fn, *arguments):
    """The options of each embedding that a function becomes; there is nothing else to say."""
    _, report = fused(fn, *arguments)
    assert not report.refused and not report.left
    return [{**each.options, **each.arrays} for each in report.taken if each.operation == "embedding"]


def tied(table, ids):
    w = table.astype(BF16)
    return w[ids] @ w.T


LOOKUPS = {
    "index": (lambda table, ids: table[ids], {"mode": "promise_in_bounds"}),
    "take": (lambda table, ids: jnp.take(table, ids, axis=0), {}),
    "clip": (lambda table, ids: jnp.take(table, ids, axis=0, mode="clip"), {"mode": "clip"}),
    "cast first": (lambda table, ids: table.astype(BF16)[ids], {"mode": "promise_in_bounds", "dtype": "bfloat16"}),
    "cast first, taken": (lambda table, ids: jnp.take(table.astype(BF16), ids, axis=0), {"dtype": "bfloat16"}),
    "tied": (tied, {"mode": "promise_in_bounds", "dtype": "bfloat16"}),
    "one list": (lambda table, ids: table[ids.reshape(-1)].reshape(*ids.shape, -1), {"mode": "promise_in_bounds"}),
    "mapped": (lambda table, ids: jax.vmap(lambda own: table[own])(ids), {"mode": "promise_in_bounds"}),
    "scaled, and zero where padded": (
        lambda table, ids: jnp.take(table, ids, axis=0) * 16.0 * (ids >= 0)[..., None],
        {},
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    fn, options = LOOKUPS[name]
    table = TABLE if "dtype" in options else NARROW
    (found,) = calls(fn, table, IDS)
    assert found["table"] == f"{table.dtype}[300,256]"
    assert {key: value for key, value in found.items() if key not in ("table", "ids")} == options


@pytest.mark.parametrize("name", ["index", "take", "clip", "cast first", "cast first, taken", "one list", "mapped"])
def test_lookups_compute_the_same_and_their_gradients_are_as_exact(name):
    """Also where indices count from the end or are out of range: NaN, the nearest row, or no gradient."""
    fn, options = LOOKUPS[name]
    ids = IDS.at[0, :4].set(jnp.array([300, -301, 2**31 - 1, -(2**31)]))

    def both(fn, table, dy):
        y, pull = jax.vjp(lambda table: fn(table, ids), table)
        return np.asarray(y, np.float32), pull(dy.astype(y.dtype))[0]

    dy = normal((8, 256, 256), BF16, seed=5)
    table = TABLE if "dtype" in options else NARROW
    (y, gradient), (plain, plain_gradient) = (both(each, table, dy) for each in (xlafuse.fuse(fn), fn))
    np.testing.assert_array_equal(y, plain)
    with jax.enable_x64(True):
        uncast = LOOKUPS[{"promise_in_bounds": "index", "clip": "clip"}.get(options.get("mode"), "take")][0]
        exact = both(uncast, jnp.asarray(table, jnp.float64), jnp.asarray(dy, jnp.float64))[1]
    error, baseline, passed = judge(gradient, plain_gradient, exact)
    assert passed, f"error {error:.3g}, of the plain program {baseline:.3g}"


def test_a_cast_table_has_gradients_that_are_not_rounded():
    """1024 ones add up to 256 in bfloat16."""
    ids = jnp.zeros(1024, jnp.int32)
    gradient = jax.grad(lambda table: xlafuse.fuse(LOOKUPS["cast first"][0])(table, ids).astype(jnp.float32).sum())
    assert gradient(TABLE)[0, 0] == 1024


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_indices_of_other_integers(dtype):
    assert len(calls(lambda table, ids: table[ids], NARROW[:100], IDS.astype(dtype))) == 1


def test_modules_of_flax():
    tokens = jnp.abs(IDS) % 300
    old = nn.Embed(300, 256, dtype=BF16)
    assert calls(old.apply, {"params": {"embedding": TABLE}}, tokens)[0]["dtype"] == "bfloat16"
    graph, state = nnx.split(nnx.Embed(300, 256, param_dtype=BF16, rngs=nnx.Rngs(0)))
    (found,) = calls(lambda state, ids: nnx.merge(graph, state)(ids), state, tokens)
    assert found == {"table": "bfloat16[300,256]", "ids": "int32[8,256]"}


NONE = {
    "columns": lambda table, ids: jnp.take(table.T, ids, axis=1),
    "parts of rows": lambda table, ids: table[ids, :128],
    "elements": lambda table, ids: table[ids, ids],
    "zero out of range": lambda table, ids: table.at[ids].get(mode="fill", fill_value=0),
    "modulo": lambda table, ids: jnp.take(table, ids, axis=0, mode="wrap"),
    "promised unique": lambda table, ids: table.at[ids].get(unique_indices=True),
    "promised sorted": lambda table, ids: table.at[ids].get(indices_are_sorted=True),
    "positions": lambda table, ids: table[jnp.arange(256)] + 0.0 * ids[0, 0],
    "a slice": lambda table, ids: table[3:290] + 0.0 * ids[0, 0],
    "few indices": lambda table, ids: table[ids[0, :4]],
    "short rows": lambda table, ids: table[:, :64][ids],
    "integers": lambda table, ids: table.astype(jnp.int32)[ids].astype(jnp.float32),
    "one row": lambda table, ids: table[ids[0, 0]],
}


@pytest.mark.parametrize("name", NONE)
def test_what_stays_a_gather_without_a_word(name):
    assert not calls(NONE[name], NARROW, IDS)


def test_float32_is_added_by_atomics_of_its_own_except_into_few_rows():
    """Also where the rows are cast afterwards: the gradient is added up in float32 either way."""
    for fn in (lambda table, ids: table[ids], lambda table, ids: table[ids].astype(BF16)):
        assert not calls(fn, TABLE, IDS)
        assert len(calls(fn, TABLE[:2], IDS)) == 1


def test_a_program_that_takes_no_derivative_is_not_said_to_change():
    reports = []
    own = xlafuse.fuse(lambda table, ids: table[ids].sum(), report=reports.append)
    for run in (own, jax.jit(own), jax.grad(own)):
        run(NARROW, IDS)
    jax.jit(jax.vmap(jax.value_and_grad(own), (0, None)))(NARROW[None], IDS)
    assert [len(each.taken) for each in reports] == [0, 0, 1, 1]


def test_tables_share_what_is_computed_of_the_indices():
    """Token embeddings of two tables, of one size and of another: each wraps the same indices."""
    for other in (NARROW, NARROW[:200]):
        assert len(calls(lambda table, ids, other=other: table[ids] + 2 * other[::-1][ids], NARROW, IDS)) == 2
