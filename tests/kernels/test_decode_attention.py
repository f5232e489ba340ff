"""What the shared base cannot say of decoding attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import testing
from pallas_kernels.ops.decode_attention.api import decode_attention
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import ScoreRule, choose_splits
from pallas_kernels.ops.decode_attention.reference import appended, decode_attention_reference
from pallas_kernels.ops.decode_attention.specs import DECODE_ATTENTION
from pallas_kernels.specs import seeds_of


def arrays(
    batch=2, tokens=1, heads=2, keys=128, kv_heads=1, head_size=64, dtype=jnp.bfloat16, seed=0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, *cache = seeds_of(seed, 3)
    key_cache, value_cache = (normal(own, (batch, keys, kv_heads, head_size), dtype) for own in cache)
    return normal(query, (batch, tokens, heads, head_size), dtype), key_cache, value_cache


def exact(query, key_cache, value_cache, lengths, *, scale=None, window=None):
    """Token by token in NumPy's float64."""
    query, key_cache, value_cache = (np.asarray(a, np.float64) for a in (query, key_cache, value_cache))
    batch, tokens, heads, head_size = query.shape
    group = heads // key_cache.shape[2]
    out = np.zeros_like(query)
    for b, t, n in np.ndindex(batch, tokens, heads):
        position = int(lengths[b]) - tokens + t
        begin = 0 if window is None else max(0, position - window)
        if position < 0:
            continue
        k, v = (cache[b, begin : position + 1, n // group] for cache in (key_cache, value_cache))
        scores = k @ query[b, t, n] * (head_size**-0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v
    return out


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 0}, {"scale": -0.2}, {"scale": 0.0}])
def test_reference_is_softmax_of_what_each_token_sees(options, seed):
    operands = arrays(batch=5, tokens=3, heads=4, keys=9, kv_heads=2, head_size=8, dtype=jnp.float32, seed=seed)
    lengths = jnp.array([0, 1, 2, 5, 9])
    got = decode_attention_reference(*operands, lengths, **options)
    np.testing.assert_allclose(got, exact(*operands, lengths, **options), atol=1e-5, err_msg=f"seed={seed}")


def test_lengths_and_windows_beyond_int32():
    operands = arrays(keys=16, dtype=jnp.float32)
    whole = decode_attention(*operands, jnp.array([0, 16]))
    with jax.enable_x64(True):
        for lengths in (np.array([-(2**40) + 5, 2**40]), np.array([0, 2**32 - 1], np.uint32)):
            np.testing.assert_array_equal(decode_attention(*operands, lengths, window=2**40), whole)


CUT = {"splits": 3, "stages": 2}
WHOLE = {"splits": 1, "warpgroups": 1}


@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize(
    ("config", "options"), [(CUT, {}), (CUT, {"window": 40}), (WHOLE, {"scale": -0.2}), (WHOLE, {"scale": 0.0})]
)
@pytest.mark.usefixtures("interpreter")
def test_lengths_of_every_kind(config, options, seed):
    """Empty, shorter than the tokens, one key, one tile less a key, more than the cache: as if they were alone."""
    lengths = jnp.array([0, 1, 2, 63, 1000])
    rule = ScoreRule(scale=options.get("scale", 0.125), window=options.get("window"), softcap=None)

    def draw(seed):
        operands = arrays(batch=5, tokens=2, keys=136, seed=seed)
        (got,) = decode_forward(*operands, lengths, scores=rule, **config)
        baseline = decode_attention_reference(*operands, lengths, **options)
        expected = exact(*operands, jnp.minimum(lengths, 136), **options)
        assert not np.asarray(got[0], np.float32).any()
        assert not np.asarray(got[1, 0], np.float32).any()
        return testing.error_reports({"out": got}, {"out": baseline}, {"out": expected}, DECODE_ATTENTION.error_bound)

    testing.assert_draws_within(draw, seed, "lengths of every kind")


PAGED = {"splits": 2, "stages": 2}


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("config", [CUT, WHOLE, PAGED])
@pytest.mark.usefixtures("interpreter")
def test_new_tokens_are_written_before_they_are_read(config, seed):
    """In tiles, parts and pages of their own and across their ends; none before a sequence's first key."""
    lengths = jnp.array([0, 1, 2, 64, 65, 66, 1000])
    query, *caches = arrays(batch=7, tokens=3, heads=4, keys=128, kv_heads=2, seed=seed)
    new = tuple(normal(own, (7, 3, 2, 64), jnp.bfloat16) for own in seeds_of(seed + 1, 2))
    page_table = None
    if config is PAGED:
        page_table = jnp.asarray(np.random.default_rng(seed).permutation(7 * 4).reshape(7, 4), jnp.int32)
        caches = [cache.reshape(28, 32, 2, 64) for cache in caches]
    rule = ScoreRule(scale=0.125, window=None, softcap=None)
    written = [appended(cache, each, lengths, page_table) for cache, each in zip(caches, new, strict=True)]
    (expected,) = decode_forward(query, *written, lengths, scores=rule, page_table=page_table, **config)
    # Old entries at the new tokens' places must not be seen.
    got = decode_forward(query, *caches, lengths, scores=rule, page_table=page_table, new=new, **config)
    for value, wanted in zip(got, (expected, *written), strict=True):
        np.testing.assert_array_equal(np.asarray(value, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("transform", ["vmap", "shard_map", "shard_map, checked"])
@pytest.mark.usefixtures("interpreter")
def test_new_tokens_of_several_calls(transform, seed):
    """Each mapped call or device updates its own caches."""
    cases = [arrays(keys=64, seed=seed + i) for i in range(2)]
    query, *caches = (jnp.stack(pair) for pair in zip(*cases, strict=True))
    new = [normal(own, (2, 2, 1, 1, 64), jnp.bfloat16) for own in seeds_of(seed + 2, 2)]
    lengths = jnp.array([[1, 64], [7, 0]])

    def one(query, key_cache, value_cache, lengths, new_key, new_value, implementation="mosaic"):
        given = {"new_key": new_key, "new_value": new_value, "implementation": implementation}
        return decode_attention(query, key_cache, value_cache, lengths, **given)

    run = jax.vmap(one)
    if transform != "vmap":
        if len(jax.devices("cpu")) < 2:
            pytest.skip("needs two simulated CPU devices; run this folder by itself")
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])

        def local(*operands):
            return tuple(result[None] for result in one(*(operand[0] for operand in operands)))

        spec = P("data")
        run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma="checked" in transform)
    got = jax.jit(run)(query, *caches, lengths, *new)
    expected = jax.vmap(lambda *operands: one(*operands, implementation="xla"))(query, *caches, lengths, *new)
    np.testing.assert_allclose(*(np.asarray(out[0], np.float32) for out in (got, expected)), atol=0.02)
    for cache, wanted in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(wanted, np.float32))


def test_new_tokens_lie_at_the_ends():
    cache = jnp.zeros((4, 8, 1, 1))
    new = jnp.arange(1.0, 9).reshape(4, 2, 1, 1)
    lengths = jnp.array([0, 1, 5, 100])
    got = appended(cache, new, lengths, None)[..., 0, 0]
    expected = np.zeros((4, 8))
    expected[1, 0] = 4
    expected[2, 3:5] = 5, 6
    expected[3, 6:] = 7, 8
    np.testing.assert_array_equal(got, expected)
    table = jnp.array([[0, 1], [2, 3], [4, 5], [7, 6]])
    paged = appended(cache.reshape(8, 4, 1, 1), new, lengths, table)[..., 0, 0]
    np.testing.assert_array_equal(paged[table].reshape(4, 8), expected)


@pytest.mark.usefixtures("interpreter")
def test_results_repeat_bit_for_bit():
    operands = arrays()
    lengths = jnp.array([100, 128])
    first, second = (decode_attention(*operands, lengths, implementation="mosaic") for _ in range(2))
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.usefixtures("interpreter")
def test_gradients_are_those_of_xla():
    operands = arrays(batch=1, keys=64)
    cotangent = jnp.ones((1, 1, 2, 64), jnp.bfloat16)

    def gradients(implementation):
        def forward(query, key_cache, value_cache):
            return decode_attention(
                query, key_cache, value_cache, jnp.array([60]), softcap=3.0, implementation=implementation
            )

        return jax.vjp(forward, *operands)[1](cotangent)

    for got, expected in zip(gradients("mosaic"), gradients("xla"), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_without_a_gpu_none_is_xla():
    operands, lengths = arrays(), jnp.array([100, 128])
    got, expected = (decode_attention(*operands, lengths, implementation=name) for name in (None, "xla"))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
    with pytest.raises(NotImplementedError, match="Hopper"):
        decode_attention(*operands, lengths, implementation="mosaic")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"dtype": jnp.float32}, "query is float32"),
        ({"head_size": 80}, "size 80, the kernels take 64"),
        ({"keys": 129}, "room for 129 keys"),
        ({"tokens": 9}, "9 tokens"),
    ],
)
@pytest.mark.usefixtures("interpreter")
def test_what_the_kernel_refuses(shape, reason):
    with pytest.raises(NotImplementedError, match=reason):
        decode_attention(*arrays(**shape), jnp.array([3, 4]), implementation="mosaic")


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"key_cache": jnp.ones((2, 8, 1, 64), jnp.float16)}, TypeError, "key_cache must have query's dtype bfloat16"),
        ({"value_cache": jnp.ones((2, 9, 1, 64), jnp.bfloat16)}, ValueError, r"\(2, 9, 1, 64\) must be of one shape"),
        ({"query": jnp.ones((3, 1, 2, 64), jnp.bfloat16)}, ValueError, "with B and D of query"),
        ({"query": jnp.ones((2, 2, 64), jnp.bfloat16)}, ValueError, "query must have four dimensions"),
        ({"lengths": jnp.ones((2,))}, TypeError, "lengths must be integers, got float32"),
        ({"lengths": jnp.ones((3,), jnp.int32)}, ValueError, r"\(2,\), got \(3,\)"),
        ({"window": -1}, ValueError, "window must not be negative"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"new_key": jnp.ones((2, 1, 1, 64), jnp.bfloat16)}, ValueError, "must be given together"),
        (
            dict.fromkeys(("new_key", "new_value"), jnp.ones((2, 1, 2, 64), jnp.bfloat16)),
            ValueError,
            r"new_key must be one entry a token, \(2, 1, 1, 64\)",
        ),
        (dict.fromkeys(("new_key", "new_value"), jnp.ones((2, 1, 1, 64))), TypeError, "new_key must have query's"),
        ({"implementation": "mosiac"}, ValueError, "Did you mean 'mosaic'"),
    ],
)
def test_errors_say_what_is_wrong(changed, error, words):
    query, key_cache, value_cache = arrays(keys=8)
    given = {"query": query, "key_cache": key_cache, "value_cache": value_cache, "lengths": jnp.array([1, 2])}
    with pytest.raises(error, match=words):
        decode_attention(**{**given, **changed})


def test_heads_must_be_whole_groups():
    query, _, _ = arrays(heads=3)
    _, key_cache, value_cache = arrays(kv_heads=2)
    with pytest.raises(ValueError, match="3 heads must be a multiple of key_cache's 2"):
        decode_attention(query, key_cache, value_cache, jnp.array([1, 2]))


@pytest.mark.parametrize(
    ("sequences", "keys", "splits"), [(128, 32768, 1), (512, 4096, 1), (8, 8192, 16), (8, 512, 4), (1, 64, 1)]
)
def test_parts_fill_the_multiprocessors(sequences, keys, splits):
    assert choose_splits(sequences, keys, 132) == splits
