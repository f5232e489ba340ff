"""`xlafuse.dot_product_attention` beside `jax.nn`'s, with every argument."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlafuse
from hlo_analysis.capture.meshes import mesh_of_one
from hlo_analysis.targets import load_target
from pallas_kernels import recorded_choices
from xlafuse.numerics import judge

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, SIZE = 3, 10, 12, 4, 2, 8


def normal(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(dtype=jnp.float32, queries: int = QUERIES, keys: int = KEYS):
    query = normal(BATCH, queries, HEADS, SIZE, dtype=dtype)
    key, value = (normal(BATCH, keys, KEY_HEADS, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    return query, key, value


MASK = np.random.default_rng(3).random((BATCH, HEADS, QUERIES, KEYS)) < 0.5
MASK[0, 1, 2] = MASK[1, :, 4] = False  # queries that see no key
LENGTHS = np.asarray([4, 0, QUERIES], np.int32)
KEY_LENGTHS = np.asarray([7, 3, 0], np.int32)
OPTIONS = {
    "plain": {},
    "bias": {"bias": normal(1, HEADS, QUERIES, KEYS, seed=4)},
    "bias of integers": {"bias": np.arange(KEYS)},
    "mask": {"mask": MASK},
    "mask of keys": {"mask": MASK[:, :1, :1]},
    "mask of two axes": {"mask": MASK[0, 1]},
    "scale": {"scale": 0.3},
    "scale of numpy": {"scale": np.float64(0.3)},
    "causal": {"is_causal": True},
    "query lengths": {"query_seq_lengths": LENGTHS},
    "key lengths": {"key_value_seq_lengths": KEY_LENGTHS},
    "both lengths, causal": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": KEY_LENGTHS, "is_causal": True},
    "window": {"local_window_size": 2},
    "window of two sides": {"local_window_size": (3, 1)},
    "window before the query": {"local_window_size": (3, 0), "is_causal": True},
    "window and lengths": {"local_window_size": (2, 1), "key_value_seq_lengths": KEY_LENGTHS},
    "all": {
        "bias": normal(BATCH, 1, 1, KEYS, seed=5),
        "mask": MASK,
        "scale": 0.2,
        "is_causal": True,
        "query_seq_lengths": LENGTHS,
        "key_value_seq_lengths": KEY_LENGTHS,
        "local_window_size": (4, 1),
    },
}


def output_and_gradients(function, operands, cotangent):
    out, pullback = jax.vjp(function, *operands)
    return out, *pullback(cotangent)


def assert_agrees_with_jax(options, operands):
    """Judges output and gradients against `jax.nn` in float64."""
    cotangent = normal(*operands[0].shape, dtype=operands[0].dtype, seed=9)
    ours = output_and_gradients(functools.partial(xlafuse.dot_product_attention, **options), operands, cotangent)
    theirs_of = functools.partial(jax.nn.dot_product_attention, **options)
    theirs = output_and_gradients(theirs_of, operands, cotangent)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(each, np.float64)) for each in (*operands, cotangent)]
        exact = jax.device_get(output_and_gradients(theirs_of, wide[:3], wide[3]))
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        error, baseline, passed = judge(mine, other, true)
        assert passed, (error, baseline)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_that_of_jax(name):
    assert_agrees_with_jax(OPTIONS[name], arrays())


@pytest.mark.parametrize("name", ["bias", "mask", "both lengths, causal", "window", "all"])
def test_it_is_that_of_jax_in_16_bits(name):
    assert_agrees_with_jax(OPTIONS[name], arrays(jnp.bfloat16))


def test_kernels_are_taken_on_a_gpu():
    """Traced for an H200: all arguments go to the kernel, forward and backward."""
    query, key = (jnp.zeros((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    lengths = jnp.ones(2, jnp.int32)
    mask = jnp.ones((2, 1, 256, 256), bool)

    def loss(query, key, value):
        out, residual = xlafuse.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=(64, 0),
            return_residual=True,
        )
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(residual.astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(mesh_of_one(load_target("h200"))), recorded_choices() as choices:
        jax.eval_shape(jax.grad(loss, (0, 1, 2)), query, key, key)
    assert [choice.taken for choice in choices] == ["mosaic"]


def test_signature_is_that_of_jax():
    own, theirs = (
        inspect.signature(f).parameters for f in (xlafuse.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(p.name, p.kind, p.default) for p in own.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


def test_queries_beyond_all_windows_average_the_values():
    assert_agrees_with_jax({"local_window_size": (2, 2)}, arrays(queries=20, keys=6))


def test_arrays_without_a_batch():
    query, key, value = (each[0] for each in arrays())
    ours = xlafuse.dot_product_attention(query, key, value, OPTIONS["bias"]["bias"][0], MASK[0])
    theirs = jax.nn.dot_product_attention(query, key, value, OPTIONS["bias"]["bias"][0], MASK[0])
    assert ours.shape == (QUERIES, HEADS, SIZE)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    _, residual = xlafuse.dot_product_attention(query, key, value, return_residual=True)
    assert residual.shape == (QUERIES, HEADS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_residual(name, dtype):
    ours, residual = xlafuse.dot_product_attention(*arrays(dtype), **OPTIONS[name], return_residual=True)
    _, expected = jax.nn.dot_product_attention(*arrays(dtype), **OPTIONS[name], return_residual=True)
    assert (residual.shape, residual.dtype) == (expected.shape, expected.dtype) == (ours.shape[:-1], dtype)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(residual, expected, rtol=tolerance, atol=2 * tolerance)


def test_residual_has_no_gradient():
    query, key, value = arrays()
    residual = jax.grad(lambda q: xlafuse.dot_product_attention(q, key, value, return_residual=True)[1].sum())
    assert not residual(query).any()


def operations(*operands, **options) -> list[str]:
    with recorded_choices() as choices:
        jax.eval_shape(functools.partial(xlafuse.dot_product_attention, **options), *operands)
    return [choice.operation for choice in choices]


def test_what_attention_cannot_take_is_left_to_jax():
    query, key, value = arrays()
    traced = jax.jit(lambda scale: xlafuse.dot_product_attention(query, key, value, scale=scale))
    expected = jax.nn.dot_product_attention(query, key, value, scale=0.3)
    np.testing.assert_allclose(traced(0.3), expected, rtol=1e-5, atol=1e-6)
    assert operations(query, key, value) == ["attention"]
    assert operations(query, key, value, local_window_size=(3, -1)) == []
    assert operations(query, key[:, :0], value[:, :0]) == []
    ours = xlafuse.dot_product_attention(query, key, value, local_window_size=(3, -1))
    theirs = jax.nn.dot_product_attention(query, key, value, local_window_size=(3, -1))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"local_window_size": (3, -1)}, "is negative on one side"), ({}, "mosaic")],
    ids=["no window", "no GPU"],
)
def test_an_explicit_implementation_runs_or_says_why_not(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        xlafuse.dot_product_attention(*arrays(), **options, implementation="mosaic")


def test_xla_is_that_of_jax_with_all_derivatives():
    query, key, value = arrays()
    ours = functools.partial(xlafuse.dot_product_attention, implementation="xla")
    assert operations(query, key, value, implementation="xla") == []
    tangents = jax.jvp(ours, (query, key, value), (query, key, value))[1]
    np.testing.assert_array_equal(
        tangents, jax.jvp(jax.nn.dot_product_attention, (query, key, value), (query, key, value))[1]
    )


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"query_seq_lengths": np.ones(2, np.int32)}, ValueError, "query_seq_lengths must be int32 of shape .3,."),
        ({"key_value_seq_lengths": np.ones(3)}, ValueError, "one length a batch entry; got float"),
        ({"mask": np.ones((1, 1, QUERIES, KEYS))}, TypeError, "mask must be boolean"),
        ({"bias": np.ones((1, 1, QUERIES, 5), np.float32)}, ValueError, "bias must broadcast"),
        ({"implementation": "flash"}, ValueError, "unknown implementation 'flash'"),
    ],
)
def test_bad_input(options, error, words):
    with pytest.raises(error, match=words):
        xlafuse.dot_product_attention(*arrays(), **options)


def test_under_vmap_and_jit():
    query, key, value = arrays()
    mask = jnp.asarray(MASK)
    ours = jax.jit(jax.vmap(lambda q, k, v, m: xlafuse.dot_product_attention(q, k, v, mask=m)))(query, key, value, mask)
    expected = jax.nn.dot_product_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6)


def test_with_strict_promotion():
    query, key, value = arrays(jnp.bfloat16)
    options = {
        "mask": MASK,
        "query_seq_lengths": LENGTHS,
        "key_value_seq_lengths": KEY_LENGTHS,
        "return_residual": True,
    }
    usual = xlafuse.dot_product_attention(query, key, value, **options)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        strict = xlafuse.dot_product_attention(query, key, value, **options)
    jax.tree.map(np.testing.assert_array_equal, strict, usual)
