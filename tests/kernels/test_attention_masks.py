"""Attention with the masks that programs draw by `jax.random`, and with hidden scores of a finite value."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import testing
from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.dense import packed_bits, seen_bits, unpacked_bits
from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.ops.attention.problem import problem_of
from pallas_kernels.specs import ErrorBound, seeds_of

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # (batch, queries, keys, heads, key heads, head size), arguments; arrays by their shapes
    "mask, value": ((2, 40, 70, 2, 1, 64), {"mask": (2, 1, 40, 70), "mask_value": -1e9}),
    "padding, value, causal": ((2, 72, 72, 1, 1, 64), {"mask": (2, 1, 1, 72), "mask_value": -3e38, "is_causal": True}),
    "value, bias of -inf": ((2, 16, 24, 2, 1, 64), {"bias": (16, 24), "mask": (2, 1, 1, 24), "mask_value": -1e9}),
    "value within the scores' range": ((1, 24, 40, 2, 2, 96), {"mask": (24, 1), "mask_value": -3.0, "softcap": 5.0}),
    "window behind the last key, value, bias": (
        (1, 40, 20, 1, 1, 64),
        {"window": (3, 0), "mask_value": -1e4, "bias": (1, 1, 40, 20), "mask": (40, 20)},
    ),
    "segments, value": ((1, 40, 40, 1, 1, 72), {"segment_ids": True, "mask_value": -65504.0}),
    "dropout, causal": ((2, 72, 136, 2, 1, 64), {"dropout_mask": (2, 2, 72, 136), "is_causal": True}),
    "dropout of a head, of large heads": ((2, 16, 70, 2, 1, 160), {"dropout_mask": (1, 2, 1, 70)}),
    "dropout, mask, value": (
        (2, 40, 70, 2, 1, 128),
        {"dropout_mask": (2, 1, 40, 70), "mask": (2, 2, 1, 70), "mask_value": -1e30},
    ),
    "dropout, mask of queries, bias": (
        (1, 24, 24, 2, 1, 64),
        {"dropout_mask": (2, 24, 1), "mask": (1, 1, 24, 1), "bias": (24,)},
    ),
}


def make(name, seed, dtype):
    """query, key and value, further arrays, and static arguments. The first query of a mask sees nothing."""
    (batch, queries, keys, heads, key_heads, size), given = CASES[name]
    random, seeds = np.random.default_rng(seed), count(seed)
    shape = (batch, keys, key_heads, size)
    shapes = {"query": (batch, queries, heads, size), "key": shape, "value": shape}
    if "bias" in given:
        shapes["bias"] = given["bias"]
    inputs = {name: normal(next(seeds), shape, dtype) for name, shape in shapes.items()}
    if "-inf" in name:  # a causal program with padding: the first queries may see no key, but hidden ones
        inputs["bias"] = jnp.where(jnp.tri(queries, keys, dtype=bool), inputs["bias"], -jnp.inf)
    static = {name: value for name, value in given.items() if name in ("is_causal", "window", "mask_value", "softcap")}
    arrays: dict[str, Any] = {}
    if "mask" in given:
        mask = random.random(given["mask"]) < 0.6
        mask[(..., 0, slice(None)) if mask.shape[-2] > 1 else (0,)] = False
        arrays["mask"] = jnp.asarray(mask)
    if "dropout_mask" in given:
        arrays["dropout_mask"] = jax.random.bernoulli(jax.random.key(seed), 0.7, given["dropout_mask"])
        static["dropout_rate"] = 0.3
    if "segment_ids" in given:
        numbers = np.arange(queries) // 10
        arrays["segment_ids"] = tuple(jnp.asarray(np.tile(own, (batch, 1))) for own in (numbers + 1, numbers))
    return inputs, arrays, static


def both_passes(inputs, arrays, cotangents, *, static, implementation="xla"):
    """out, lse, and the gradients of the inputs."""

    def call(inputs, arrays):
        given = {**inputs, **arrays, **static}
        out, lse = attention(**given, return_residuals=True, implementation=implementation)
        return out, jnp.where(lse == -jnp.inf, 0, lse)

    def run(inputs, arrays, dout, dlse):
        (out, lse), pull = jax.vjp(partial(call, arrays=arrays), inputs)
        (gradients,) = pull((dout.astype(out.dtype), dlse.astype(lse.dtype)))
        return {"out": out, "lse": lse, **gradients}

    rounds_each = {"xla_allow_excess_precision": False} if implementation == "xla" else None
    return jax.jit(run, compiler_options=rounds_each)(inputs, arrays, *cotangents)


def compared(name, seed, dtype):
    inputs, arrays, static = make(name, seed, dtype)
    batch, queries, heads, _ = inputs["query"].shape
    cotangents = normal(seed + 8, inputs["query"].shape), normal(seed + 9, (batch, heads, queries))
    got = both_passes(inputs, arrays, cotangents, static=static, implementation="mosaic")
    baseline = both_passes(inputs, arrays, cotangents, static=static)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(array, np.float64)) for name, array in inputs.items()}
        exact = jax.tree.map(np.asarray, both_passes(wide, arrays, cotangents, static=static))
    np.testing.assert_allclose(got.pop("lse"), exact.pop("lse"), rtol=1e-6, atol=1e-4, err_msg=f"seed={seed}")
    del baseline["lse"]
    return testing.error_reports(got, baseline, exact, ErrorBound(least_error=2.0**-18))


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", CASES)
def test_kernels_mean_what_programs_do(name, seed):
    dtype = jnp.float16 if "large" in name or "range" in name else jnp.bfloat16
    testing.assert_draws_within(partial(compared, name, dtype=dtype), seed, name)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize("name", [name for name in CASES if "value" in name])
def test_hidden_scores_are_the_value_of_the_mask(name, seed):
    """As `jnp.where` in a program: queries that see no key average all values, and gradients are those of `where`."""
    inputs, arrays, static = make(name, seed, jnp.float32)
    batch, queries, heads, size = inputs["query"].shape
    keys = inputs["key"].shape[1]
    own, other = np.arange(queries)[:, None], np.arange(keys)
    seen = np.ones((batch, heads, queries, keys), bool) & np.asarray(arrays.get("mask", True))
    seen &= (other <= own) | ("is_causal" not in static and "window" not in static)
    seen &= (other >= own - 3) | ("window" not in static)
    if "segment_ids" in arrays:
        of_queries, of_keys = map(np.asarray, arrays["segment_ids"])
        seen &= of_queries[:, None, :, None] == of_keys[:, None, None]
    assert not seen.any(-1).all(), "a case without a query that sees nothing"
    cotangents = normal(seed + 8, inputs["query"].shape), normal(seed + 9, (batch, heads, queries))

    def program(inputs):
        key, value = (jnp.repeat(inputs[name], heads // inputs[name].shape[2], axis=2) for name in ("key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", inputs["query"], key) / size**0.5
        if "softcap" in static:
            scores = static["softcap"] * jnp.tanh(scores / static["softcap"])
        scores = jnp.where(seen, scores + inputs.get("bias", 0), static["mask_value"])
        weights = jax.nn.softmax(scores)
        if "dropout_mask" in arrays:
            weights = jnp.where(arrays["dropout_mask"], weights / 0.7, 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value), jax.nn.logsumexp(scores, axis=-1)

    @jax.jit
    def values_and_gradients(inputs, cotangents):
        values, pull = jax.vjp(program, inputs)
        return *values, *pull(cotangents)

    out, lse, gradients = values_and_gradients(inputs, cotangents)
    got = both_passes(inputs, arrays, cotangents, static=static)
    np.testing.assert_allclose(got.pop("lse"), lse, rtol=1e-5, err_msg=f"seed={seed}")
    for name, want in {"out": out, **gradients}.items():
        np.testing.assert_allclose(got[name], want, atol=5e-5, err_msg=f"{name}, seed={seed}")


@pytest.mark.usefixtures("interpreter")
def test_masks_of_members_and_devices(seed):
    """Each member of `jax.vmap` and each device of `jax.shard_map` has its own masks."""
    query, key, value = (normal(own, (2, 1, 16, 1, 64), jnp.bfloat16) for own in seeds_of(seed, 3))
    mask, kept = jax.random.bernoulli(jax.random.key(seed), 0.5, (2, 2, 1, 1, 16, 16))

    def loss(query, key, value, mask, kept, implementation="mosaic"):
        given = {"mask": mask, "mask_value": -1e9, "dropout_mask": kept, "dropout_rate": 0.5}
        out = attention(query, key, value, **given, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    def gradients(*operands, **given):
        return jax.grad(partial(loss, **given), argnums=(0, 1, 2))(*operands)

    operands = (query, key, value, mask, kept)
    found = {"vmap": jax.jit(jax.vmap(gradients))(*operands)}
    if jax.device_count() > 1:
        flat = [operand.reshape(2, *operand.shape[2:]) for operand in operands]
        over = PartitionSpec("x")
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
        spread = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(over,) * 5, out_specs=over))(*flat)
        found["shard_map"] = [gradient[:, None] for gradient in spread]
    wide = [jnp.float32(operand) for operand in operands[:3]]
    want = jax.vmap(partial(gradients, implementation="xla"))(*wide, mask, kept)
    for name, own in found.items():
        for one, other in zip(own, want, strict=True):
            one, other = np.float32(one), np.float32(other)
            assert np.linalg.norm(one - other) < 0.01 * np.linalg.norm(other), f"{name}, seed={seed}"


@pytest.mark.parametrize("keys", [1, 31, 256, 300])
def test_packed_bits_are_numpys(keys, seed):
    mask = np.random.default_rng(seed).random((2, 1, 3, keys)) < 0.5
    words = np.asarray(packed_bits(jnp.asarray(mask)))
    assert words.shape[3] % 8 == 0
    want = np.packbits(mask, axis=-1, bitorder="little")
    found = words.view(np.uint8)
    np.testing.assert_array_equal(found[..., : want.shape[-1]], want, err_msg=f"seed={seed}")
    assert not found[..., want.shape[-1] :].any()
    np.testing.assert_array_equal(unpacked_bits(jnp.asarray(words), keys), mask)


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right"), [(600, 600, None, 0), (900, 300, 40, 0), (300, 900, 0, 9)]
)
def test_bits_are_those_of_all_pairs_that_are_seen(queries, keys, left, right, seed):
    masking = Masking(queries=queries, keys=keys, left=left, right=right)
    mask = jnp.asarray(np.random.default_rng(seed).random((1, 2, queries, keys)) < 0.5)
    row, column = np.arange(queries)[:, None], np.arange(keys)
    seen = np.asarray(masking.visible(row, column))
    words = packed_bits(mask)
    for bits in (seen_bits(mask, masking), seen_bits(words, masking)):
        assert bits.shape == words.shape
        np.testing.assert_array_equal(unpacked_bits(bits, keys) & seen, mask & seen, err_msg=f"seed={seed}")
        assert not unpacked_bits(bits, keys)[:, :, 0, 512:].any()


CAUSAL: dict[str, Any] = {"is_causal": True}
SEGMENTS = jnp.zeros((1, 64), jnp.int32)


@pytest.mark.parametrize(
    ("queries", "dtype", "given", "skips"),
    [
        (64, "bfloat16", CAUSAL | {"mask_value": -1e30}, True),
        (64, "bfloat16", CAUSAL | {"mask_value": -1e9}, False),  # scores may be lower
        (64, "float16", CAUSAL | {"mask_value": -1e12}, True),  # 65504 ** 2 * 8 is 3.4e10
        (64, "float16", CAUSAL | {"mask_value": -1e12, "bias": jnp.zeros((64,))}, False),
        (64, "bfloat16", CAUSAL | {"mask_value": -1e3, "softcap": 50.0}, True),
        (64, "bfloat16", CAUSAL | {"mask_value": -1e2, "softcap": 50.0}, False),  # exp(-50) is not 0
        (64, "bfloat16", CAUSAL | {"mask_value": -1e30, "mask": jnp.ones((64,), bool)}, False),
        (74, "bfloat16", {"window": (10, 0), "mask_value": -1e30}, True),
        (75, "bfloat16", {"window": (10, 0), "mask_value": -1e30}, False),  # the last query sees no key
        (64, "bfloat16", {"segment_ids": SEGMENTS, "mask_value": -1e30}, True),
        (64, "bfloat16", {"segment_ids": (SEGMENTS, SEGMENTS), "mask_value": -1e30}, False),
        (64, "bfloat16", {"mask_value": -3.0}, True),  # nothing is hidden
    ],
)
def test_tiles_are_skipped_only_where_that_changes_nothing(queries, dtype, given, skips):
    query, key = (jnp.zeros((1, length, 1, 64), dtype) for length in (queries, 64))
    names = ("bias", "mask", "scale", "window", "segment_ids", "softcap", "dropout_key")
    options = {"is_causal": False, "dropout_rate": 0.0, **dict.fromkeys(names), **given}
    problem, extras = problem_of(query, key, **options)
    if skips:
        assert (problem.mask_value, extras.mask) == (None, None)
        assert problem.masking.has_band or problem.masking.has_segments or set(given) == {"mask_value"}
    else:
        assert problem.mask_value == given["mask_value"]
        assert problem.has_mask and not (problem.masking.has_band or problem.masking.has_segments)
