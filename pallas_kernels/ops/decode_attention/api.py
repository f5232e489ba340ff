"""The public function: checks and dispatch. Gradients, which decoding does not need, are XLA's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.attention.arguments import check_heads
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import HEAD_SIZES, ScoreRule
from pallas_kernels.ops.decode_attention.reference import appended, decode_attention_reference
from pallas_kernels.primitives.checks import as_arrays, finite_number, optional_arrays, positive_number, static_integer
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.settings import usual_promotion

DTYPES = ("bfloat16", "float16")
MOST_TOKENS = 8
_MOST_LENGTH = jnp.iinfo(jnp.int32).max


def _dimensions(arguments: Mapping[str, Any]) -> str:
    """Pages belong to all sequences; where the call writes them, devices do not share the sequences."""
    is_paged, writes = arguments["page_table"] is not None, arguments["new_key"] is not None
    cache = "!p !s g d" if is_paged else "b !s g d"
    batch = "!b" if is_paged and writes else "b"
    new = "new_key: b t g d, new_value: b t g d"
    caches = f"key_cache: {cache}, value_cache: {cache}, lengths: b, page_table: b !e"
    return f"query: {batch} !t (g r) !d, {caches}, {new} -> b t (g r) d, {cache}, {cache}"


@operation(_dimensions)
def decode_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    page_table: jax.Array | None = None,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """Computes attention of each sequence's newest tokens over its cache of keys and values, for inference.

    The T query tokens are the last ones of their sequence, and the cache holds their keys and values already, or gets
    them by the call: `new_key` and `new_value`. Token t is at position p = length - T + t and sees the keys at
    positions 0 to p. A token with p < 0 sees no key and gets zeros.

    Equivalent to this, for each head, in float32 between the casts:

        score = scale * query @ keys.T
        score = softcap * tanh(score / softcap)             # only if given
        score = where(seen, score, -inf)
        out = softmax(score) @ values

    N / K consecutive query heads share a head of keys and values.

    Args:
        query: (B, T, N, D), floating; 1 <= T <= 8 for "mosaic".
        key_cache, value_cache: (B, S, K, D), of query's dtype; K divides N. Entries after a sequence's end must be
            finite, but do not count.
        lengths: (B,) integers: the number of keys of each sequence, including its newest tokens. Values are clipped to
            the range 0 to S.
        scale: a Python number; None: D ** -0.5.
        window: a non-negative integer: a token at position p sees only keys p - window to p. None: keys 0 to p.
        softcap: a positive Python number that bounds the scores before masking. None: no bound.
        page_table: (B, P) integers, for paged caches. Then key_cache and value_cache are (pages, page size, K, D), key
            j of sequence b is entry j % page size of page page_table[b, j // page size], and S = P * page size. Table
            entries after a sequence's end do not count. None: the caches are not paged.
        new_key, new_value: (B, T, K, D), of query's dtype: keys and values of the T tokens, which the call writes into
            the caches at their positions p; one with p < 0 is not written. The kernels write in place, so donate the
            caches (`jax.jit(..., donate_argnums=...)`); else XLA copies them first. In paged caches no other sequence
            may use the pages that are written. None, both: the caches hold them already.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; bfloat16 or float16; D
            64, 96, 128, 192 or 256; S a multiple of 8; pages of 8, 16, 32 or a multiple of 64 keys.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla".

    Returns:
        out, (B, T, N, D), of query's dtype; with new_key and new_value (out, key_cache, value_cache). XLA computes the
        gradients of query, caches, new_key and new_value.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    query, key_cache, value_cache, lengths = as_arrays(
        "decode_attention", query=query, key_cache=key_cache, value_cache=value_cache, lengths=lengths
    )
    (page_table,) = optional_arrays("decode_attention", page_table=page_table)
    new_key, new_value = optional_arrays("decode_attention", new_key=new_key, new_value=new_value)
    _check(query, key_cache, value_cache, lengths, page_table, new_key, new_value)
    keys = key_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    rule = _checked_rule(query.shape[3], keys, scale, window, softcap)
    new = None if new_key is None or new_value is None else (new_key, new_value)
    if jnp.iinfo(lengths.dtype).max > _MOST_LENGTH:  # larger numbers would overflow int32
        lengths = jnp.clip(lengths, 0, keys)
    lengths = lengths.astype(jnp.int32)
    page_table = None if page_table is None else page_table.astype(jnp.int32)
    support = {"mosaic": partial(mosaic_unsupported, query, key_cache, page_table), "xla": lambda: None}
    chosen = choose("decode_attention", implementation, support, preferred=("mosaic",))
    if chosen == "xla" or query.size == 0 or key_cache.size == 0 or (page_table is not None and page_table.size == 0):
        return _xla(rule, query, key_cache, value_cache, lengths, page_table, new)
    operands = varying_alike((query, key_cache, value_cache, lengths, page_table, new))
    if new is None or not jax.typeof(operands[0]).manual_axis_type.varying:
        return _mosaic(rule, *operands)  # pyright: ignore
    # Under jax.shard_map(check_vma=True), jax 0.11.2 accepts no references: XLA writes into the caches.
    query, *caches, lengths, page_table, new = operands  # pyright: ignore
    caches = [appended(cache, each, lengths, page_table) for cache, each in zip(caches, new or (), strict=True)]
    return _mosaic(rule, query, *caches, lengths, page_table, None), *caches  # pyright: ignore


def mosaic_unsupported(query: jax.Array, key_cache: jax.Array, page_table: jax.Array | None = None) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    if query.dtype.name not in DTYPES:
        return f"query is {query.dtype.name}, the kernels take {', '.join(DTYPES)}"
    if query.shape[-1] not in HEAD_SIZES:
        return f"heads are of size {query.shape[-1]}, the kernels take {', '.join(map(str, HEAD_SIZES))}"
    if query.shape[1] > MOST_TOKENS:
        return f"there are {query.shape[1]} tokens a sequence, the kernels take at most {MOST_TOKENS}"
    if page_table is not None and key_cache.shape[1] not in (8, 16, 32) and key_cache.shape[1] % 64:
        return f"pages have {key_cache.shape[1]} keys, the kernels take 8, 16, 32 and multiples of 64"
    if key_cache.shape[1] % 8:
        return f"the caches have room for {key_cache.shape[1]} keys, the kernels take multiples of 8"
    return mosaic_gpu_unsupported()


def _checked_rule(size: int, keys: int, scale: Any, window: Any, softcap: Any) -> ScoreRule:
    scale = size**-0.5 if scale is None else finite_number("decode_attention", "scale", scale)
    softcap = None if softcap is None else positive_number("decode_attention", "softcap", softcap)
    if window is not None:
        window = static_integer("decode_attention", "window", window)
        if window < 0:
            raise ValueError(f"decode_attention: window must not be negative, got {window}; None is no window.")
    # A window that hides nothing is left out, however large.
    return ScoreRule(scale=scale, window=None if window is not None and window >= keys else window, softcap=softcap)


def _check(query, key_cache, value_cache, lengths, page_table, new_key, new_value) -> None:
    """Raises TypeError or ValueError where arguments do not fit together."""
    if (new_key is None) != (new_value is None):
        raise ValueError("decode_attention: new_key and new_value must be given together.")
    new = {} if new_key is None else {"new_key": new_key, "new_value": new_value}
    check_heads("decode_attention", query=query, key_cache=key_cache, value_cache=value_cache, **new)
    for name, array in {"lengths": lengths, "page_table": page_table}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"decode_attention: {name} must be integers, got {array.dtype.name}.")
    (batch, tokens, heads, size), (entries, _, key_heads, key_size) = query.shape, key_cache.shape
    is_paged, shape = page_table is not None, (batch, tokens, key_heads, size)
    words = None
    if not size:
        words = f"query must be (B, T, N, D) with a head size D, got {query.shape}"
    elif key_cache.shape != value_cache.shape:
        words = f"key_cache {key_cache.shape} and value_cache {value_cache.shape} must be of one shape"
    elif key_size != size or (not is_paged and entries != batch):
        words = f"key_cache must be (B, S, K, D) with B and D of query {query.shape}, got {key_cache.shape}"
    elif not key_heads or heads % key_heads:
        words = f"query's {heads} heads must be a multiple of key_cache's {key_heads} heads"
    elif lengths.shape != (batch,):
        words = f"lengths must be one value a sequence, ({batch},), got {lengths.shape}"
    elif is_paged and page_table.shape[:-1] != (batch,):
        words = f"page_table must be (B, pages of a sequence) with B = {batch}, got {page_table.shape}"
    elif is_paged and not entries and page_table.size:
        words = f"key_cache must have a page for page_table, got {key_cache.shape}"
    elif odd := [(name, array.shape) for name, array in new.items() if array.shape != shape]:
        name, got = odd[0]
        words = f"{name} must be one entry a token, {shape}, got {got}"
    if words is not None:
        raise ValueError(f"decode_attention: {words}.")


def _xla(rule: ScoreRule, query, key_cache, value_cache, lengths, page_table, new) -> Any:
    new_key, new_value = new or (None, None)
    others = {"page_table": page_table, "new_key": new_key, "new_value": new_value}
    return decode_attention_reference(query, key_cache, value_cache, lengths, **vars(rule), **others)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic(rule: ScoreRule, query, key_cache, value_cache, lengths, page_table, new) -> Any:
    results = decode_forward(query, key_cache, value_cache, lengths, page_table=page_table, new=new, scores=rule)
    return results[0] if new is None else results


def _mosaic_fwd(rule, *operands):
    return _mosaic(rule, *operands), operands


@usual_promotion()
def _mosaic_bwd(rule, operands, cotangent):
    *arrays, lengths, page_table, new = operands

    def forward(query, key_cache, value_cache, new):
        return _xla(rule, query, key_cache, value_cache, lengths, page_table, new)

    *gradients, new_gradients = jax.vjp(forward, *arrays, new)[1](cotangent)
    return (*gradients, None, None, new_gradients)


_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
