"""Attention with values of another head size than keys, with sinks, and with tiles skipped beside a mask's value."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

from pallas_kernels.ops.attention import problem, reference
from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.few_queries import decodes
from pallas_kernels.ops.attention.problem import facts_of, tiles_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.specs import seeds_of


def operands(seed, *, queries=24, keys=24, heads=2, key_heads=1, sizes=(64, 64), dtype: Any = jnp.bfloat16):
    shapes = [(1, queries, heads, sizes[0]), *((1, keys, key_heads, size) for size in sizes)]
    return tuple(normal(own, shape, dtype) for own, shape in zip(seeds_of(seed, 3), shapes, strict=True))


def results(function, given, *arrays) -> dict[str, np.ndarray]:
    """The output, the log-sum-exp and the gradients by all arrays: query, key, value and those named in `given`."""
    names = [name for name in ("bias", "sinks") if name in given]

    def called(*arrays):
        own = dict(zip(names, arrays[3:], strict=True))
        return function(*arrays[:3], **{**given, **own}, return_residuals=True)

    @jax.jit
    def run(*arrays):
        (out, lse), pull = jax.vjp(called, *arrays)
        cotangents = (
            jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype),
            jnp.where(lse == -jnp.inf, 0.0, 0.5),
        )
        return out, lse, *pull(cotangents)

    values = run(*arrays, *(given[name] for name in names))
    found = zip(("out", "lse", "query", "key", "value", *names), values, strict=True)
    return {name: np.asarray(array, np.float32) for name, array in found}


def error_of_rounding(out: np.ndarray) -> float:
    """Six deviations of what rounding the output to bfloat16 does to a query's sum of the scores' gradients.

    The kernels take that sum's mean part from the output as written; the terms cancel, the error does not.
    """
    of_each = out * np.cos(np.arange(out.size)).reshape(out.shape) * 2.0**-9 / np.sqrt(3)
    return 6 * float(np.sqrt(np.square(of_each).sum(axis=(0, 2, 3)).max()))


def check(given, *arrays, seed) -> dict[str, np.ndarray]:
    """Asserts that the kernels' results are XLA's."""
    got = results(partial(attention, implementation="mosaic"), given, *arrays)
    want = results(attention_reference, given, *arrays)
    for name, array in want.items():
        limit = 1e-4 if name == "lse" else 0.012 * max(1.0, np.abs(array).max())
        if name == "bias" and array.shape[-1] == 1:
            limit = max(limit, error_of_rounding(want["out"]))
        np.testing.assert_allclose(got[name], array, atol=limit, rtol=1e-5, err_msg=f"{name}, seed={seed}")
    return got


SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several tiles": ({"queries": 136, "keys": 136, "key_heads": 2, "sizes": (192, 128)}, {"is_causal": True}),
    "panels": ({"queries": 133, "keys": 141, "sizes": (192, 128)}, {}),
    "segments": ({"queries": 72, "keys": 72, "sizes": (192, 128)}, {"segment_ids": (jnp.arange(72) // 30)[None]}),
    "a window": ({"queries": 72, "keys": 200, "sizes": (192, 128)}, {"window": (60, 20), "softcap": 5.0}),
    "one size of tiles": ({"key_heads": 2, "sizes": (96, 64)}, {"is_causal": True}),
    "larger values": ({"sizes": (40, 72)}, {}),
    "a bias": ({"keys": 72, "sizes": (192, 128)}, {"bias": jnp.cos(jnp.arange(24.0))[:, None]}),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", SIZES)
def test_values_of_another_size(name, seed):
    sizes, given = SIZES[name]
    check(given, *operands(seed, **sizes), seed=seed)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    ("sizes", "taken"),
    [((192, 128), (192, 128)), ((192, 120), (192, 128)), ((192, 192), (192, 192)), ((96, 64), (96, 96)),
     ((64, 128), (128, 128)), ((64, 264), None), ((264, 64), None), ((72, 36), None), ((75, 72), None)],
)  # fmt: skip
def test_tiles_of_two_sizes(sizes, taken):
    assert tiles_of(*sizes) == taken


def test_values_of_another_size_one_head_at_a_time(monkeypatch, seed):
    arrays = operands(seed, heads=4, key_heads=2, sizes=(16, 24), dtype=jnp.float32)
    given = {"sinks": normal(seed, (4,), jnp.float32)}
    want = attention_reference(*arrays, **given, return_residuals=True)
    monkeypatch.setattr(reference, "SCORES_BYTES", 0)
    for one, other in zip(attention_reference(*arrays, **given, return_residuals=True), want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f"seed={seed}")


def with_column(query, key, value, *, sinks, is_causal=False, return_residuals=False):
    """Attention with the sinks as the scores of one more key, whose weights are dropped after the softmax."""
    del return_residuals
    batch, queries, heads, size = query.shape
    key, value = (jnp.repeat(array, heads // array.shape[2], axis=2) for array in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * size**-0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    columns = jnp.broadcast_to(sinks[:, None, None], (batch, heads, queries, 1))
    scores = jnp.concatenate([scores, columns], axis=-1)
    weights = jax.nn.softmax(scores)[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value), jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_sinks_are_one_more_key_without_a_value(is_causal, seed):
    arrays = operands(seed, heads=4, key_heads=2, dtype=jnp.float32)
    given = {"sinks": 2 * normal(seed, (4,), jnp.float32), "is_causal": is_causal}
    got, want = (results(function, given, *arrays) for function in (attention_reference, with_column))
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=2e-5, err_msg=f"{name}, seed={seed}")


SINKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({"queries": 136, "keys": 136, "heads": 4, "key_heads": 2}, {"is_causal": True, "window": (40, 0)}),
    "queries that see no key": ({"queries": 72, "keys": 40}, {"window": (5, 0)}),
    "a single key": ({"queries": 8, "keys": 1}, {}),
    "hidden scores of a finite value": ({}, {"mask": jnp.arange(24) < 9, "mask_value": -2.0}),
    "a bias": ({}, {"bias": jnp.cos(jnp.arange(24.0))}),
    "dropout": ({}, {"dropout_rate": 0.5, "dropout_mask": jnp.arange(24) % 3 > 0, "softcap": 3.0}),
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name, seed):
    sizes, given = SINKS[name]
    arrays = operands(seed, **sizes)
    sinks = 2 * normal(seed, (arrays[0].shape[2],), jnp.float32)
    got = check({**given, "sinks": sinks}, *arrays, seed=seed)
    if name == "queries that see no key":
        assert not got["out"][:, 45:].any(), f"seed={seed}"
        np.testing.assert_allclose(got["lse"][0, :, 45:].T, jnp.broadcast_to(sinks, (27, 2)), rtol=1e-6)


@pytest.mark.usefixtures("interpreter")
def test_sinks_far_from_all_scores(seed):
    """One takes all the weight, one has none, and one has none where a query sees no key either."""
    arrays = operands(seed, queries=40, keys=24, heads=3)
    sinks = jnp.asarray([500.0, -500.0, -jnp.inf])
    got = check({"sinks": sinks, "window": (5, 0)}, *arrays, seed=seed)
    assert not got["out"][:, :, 0].any(), f"seed={seed}"
    assert (got["lse"][0, 2, 29:] == -np.inf).all(), f"seed={seed}"
    assert (got["lse"][0, 1, 29:] == -500).all(), f"seed={seed}"


@pytest.mark.usefixtures("interpreter")
def test_sinks_of_each_member_of_a_vmap(seed):
    arrays = operands(seed)
    sinks = normal(seed, (2, 2), jnp.float32)

    def slope(sinks):
        return jax.grad(
            lambda s: cast(Any, attention(*arrays, sinks=s, implementation="mosaic")).sum(dtype=jnp.float32)
        )(sinks)

    for own, other in zip(jax.vmap(slope)(sinks), map(slope, sinks), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, err_msg=f"seed={seed}")


def test_the_kernel_of_decoding_has_no_sinks():
    query, key = (jax.ShapeDtypeStruct((16, n, h, 64), jnp.bfloat16) for n, h in ((16, 8), (4096, 2)))
    plain, own = (facts_of(query, key, None, Options(sinks=sinks)) for sinks in (None, jnp.zeros(8)))
    assert decodes(plain)
    assert not decodes(own)


PADDED = (jnp.arange(72) >= jnp.asarray([[0], [70]]))[:, None, None]
"""Keys are padding at the front, so that causal queries there see none."""
ONE, OTHER = (jnp.repeat(jnp.asarray(numbers), 24)[None].repeat(2, 0) for numbers in ((0, 1, 2), (1, 1, 3)))

SKIPPED: dict[str, dict[str, Any]] = {
    "causal, padding": {"is_causal": True, "mask": PADDED},
    "a window, padding of some heads": {"window": (9, 3), "mask": PADDED & (jnp.arange(2) > 0)[:, None, None]},
    "segments of queries and others of keys": {"segment_ids": (ONE, OTHER)},
    "sinks": {"is_causal": True, "mask": PADDED, "sinks": jnp.asarray([0.5, -2.0])},
}


@pytest.mark.drawn(1 / 3)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", SKIPPED)
def test_queries_that_see_no_key_average_all_values_though_tiles_are_skipped(name, monkeypatch, seed):
    monkeypatch.setattr(problem, "_KEYS_TO_SKIP", 72)
    query, key, value = (jnp.repeat(array, 2, 0) for array in operands(seed, queries=72, keys=72))
    given = {**SKIPPED[name], "mask_value": -1e30}
    facts = facts_of(query, key, None, Options(**given))
    assert facts.mask_value is None
    assert facts.masking.has_band or facts.masking.has_segments
    got = check(given, query, key, value, seed=seed)
    if name == "causal, padding":
        average = np.asarray(value.astype(jnp.float32).mean(1))[1, 0]
        np.testing.assert_allclose(got["out"][1, :70], np.broadcast_to(average, (70, 2, 64)), atol=4e-3)


@pytest.mark.drawn(1 / 3)
@pytest.mark.parametrize(
    "given",
    [{"mask_value": -1e9}, {"keys": 500}, {"bias": jnp.zeros(1024)}, {"dropout_rate": 0.1}, {"is_causal": False}],
    ids=["scores may be lower", "few keys", "a bias of -inf", "dropout of the average", "no bounds"],
)
def test_where_all_tiles_are_visited(given):
    keys = given.get("keys", 1024)
    given = {"is_causal": True, "mask": jnp.ones(keys, bool), "mask_value": -1e30, **given}
    given.pop("keys", None)
    query, key = (jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16) for length in (64, keys))
    facts = facts_of(query, key, None, Options(**given))
    assert facts.mask_value == given["mask_value"]
    assert not facts.masking.has_band


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sinks": jnp.zeros(3)}, ValueError, r"one number a query head, shape \(2,\); got \(3,\)"),
        ({"sinks": jnp.zeros((1, 2))}, ValueError, "one number a query head"),
        ({"sinks": jnp.zeros(2, int)}, TypeError, "floating"),
        ({"sinks": jnp.zeros(2), "implementation": "cudnn"}, NotImplementedError, "no sinks"),
        ({"value": jnp.zeros((1, 20, 1, 64), jnp.bfloat16)}, ValueError, "value like it"),
        ({"value": jnp.zeros((1, 24, 2, 64), jnp.bfloat16)}, ValueError, "value like it"),
        ({"value": jnp.zeros((1, 24, 1, 32), jnp.bfloat16), "implementation": "cudnn"}, NotImplementedError, "NVIDIA"),
        ({"value": jnp.zeros((1, 24, 1, 264), jnp.bfloat16), "implementation": "mosaic"}, NotImplementedError, "264"),
        ({"value": jnp.zeros((1, 24, 1, 36), jnp.bfloat16), "implementation": "mosaic"}, NotImplementedError, "36"),
    ],
)  # fmt: skip
def test_errors(given, error, words, seed):
    query, key, value = operands(seed)
    with pytest.raises(error, match=words):
        attention(query, key, **{"value": value, **given})
