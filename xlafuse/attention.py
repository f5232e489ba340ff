"""`jax.nn.dot_product_attention` on `xlafuse.kernels.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from xlafuse.errors import check_left_to_xla
from xlafuse.kernels import attention

__all__ = ["dot_product_attention"]

Implementation = str | Sequence[str] | None


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
) -> Any:
    """Computes `jax.nn.dot_product_attention` with `xlafuse.kernels.attention`.

    Lengths become segments: keys and queries beyond them are not computed, and no mask of queries by keys is made. A
    query that sees no key returns the mean of all values, as in `jax.nn`; a query beyond its length returns zeros.

    Args:
        query: (batch, queries, heads, head size), floating; all three arrays may lack the batch axis.
        key, value: (batch, keys, key heads, head size), of query's dtype; heads is a multiple of key heads.
        bias: broadcastable to (batch, heads, queries, keys); added to the scaled scores.
        mask: boolean, broadcastable likewise; True keeps a score.
        scale: a number; None: 1 / sqrt(head size).
        is_causal: query i sees keys j <= i.
        query_seq_lengths, key_value_seq_lengths: (batch,) int32; queries and keys from there on are padding.
        local_window_size: query i sees keys i - left <= j <= i + right; an integer for both, or (left, right).
        implementation: None takes `xlafuse.kernels.attention`, or `jax.nn` for what that cannot compute: a traced
            scale, no keys, a negative window, and dtypes other than floating point of at least 16 bits. "xla" and
            "cudnn" are those of `jax.nn`. "mosaic", or a sequence, goes to `xlafuse.kernels.attention`.
        return_residual: also returns the scores' log-sum-exp, which has no gradient.

    Returns:
        The output, shaped like query. With `return_residual` the pair (output, log-sum-exp); the log-sum-exp has
        query's shape without its last axis and query's dtype.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason. Also for forward-mode and second
            derivatives, which need implementation="xla".
    """
    options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "local_window_size": local_window_size}
    options |= {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    reason = None
    if implementation not in ("xla", "cudnn"):
        reason = _unsupported(query, key, scale, local_window_size)
        if reason is None:
            options |= {"implementation": implementation, "return_residual": return_residual}
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return _attend(query, key, value, bias, mask, **options)
    if reason is not None:
        check_left_to_xla("dot_product_attention", implementation, f"{reason}; pass None or 'xla'")
    options |= {"implementation": "cudnn" if implementation == "cudnn" else None, "return_residual": return_residual}
    return jax.nn.dot_product_attention(query, key, value, bias, mask, **options)


def _unsupported(query: ArrayLike, key: ArrayLike, scale: Any, window: Any) -> str | None:
    dtype, shape = jnp.asarray(query).dtype, jnp.shape(key)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        return f"the arrays are {dtype.name}, and kernels take floating types of 16 bits or more"
    if isinstance(scale, Tracer):
        return "the scale is traced, and kernels are compiled for one scale"
    if window is not None and min(_sides(window)) < 0:
        return f"the window {window} is negative on one side"
    if len(shape) >= 3 and shape[-3] == 0:
        return "there are no keys"
    return None


def _sides(window: Any) -> tuple[int, int]:
    left, right = window if isinstance(window, tuple | list) else (window, window)
    return left, right


def _attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any,
    is_causal: bool,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    implementation: Implementation,
    return_residual: bool,
) -> Any:
    """Attention, in which a query that sees no key returns the mean of all values."""
    shape = jnp.shape(query)
    query, key, value, bias, mask = (None if each is None else _four(each) for each in (query, key, value, bias, mask))
    query_lengths = _lengths("query_seq_lengths", query_seq_lengths, query)
    key_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, query)
    if bias is not None and not (jnp.issubdtype(bias.dtype, jnp.floating) and bias.dtype.itemsize > 1):
        bias = bias.astype(jnp.float32)
    window = None if local_window_size is None else _sides(local_window_size)
    segments = None
    if query_lengths is not None or key_lengths is not None:
        segments = _segments(query_lengths, query, beyond=1), _segments(key_lengths, key, beyond=2)
    may_be_empty = segments is not None or mask is not None
    may_be_empty |= window is not None and query.shape[1] - 1 - window[0] >= key.shape[1]
    results: Any = attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        scale=None if scale is None else float(scale),
        window=window,
        segment_ids=segments,
        return_residuals=may_be_empty or return_residual,
        implementation=implementation,
    )
    if not (may_be_empty or return_residual):
        return results.reshape(shape)
    out, lse = results
    if may_be_empty:
        is_averaged = lse == -jnp.inf
        if query_lengths is not None:
            is_averaged &= (jnp.arange(query.shape[1]) < query_lengths[:, None])[:, None]
        average = jnp.mean(value, axis=1, keepdims=True, dtype=jnp.promote_types(value.dtype, jnp.float32))
        average = jnp.repeat(average.astype(out.dtype), query.shape[2] // value.shape[2], axis=2)
        out = jnp.where(is_averaged.swapaxes(1, 2)[..., None], average, out)
    if not return_residual:
        return out.reshape(shape)
    hidden = -0.7 * float(jnp.finfo(jnp.float32).max)  # the score of a hidden key in `jax.nn`
    lse = jnp.where(lse == -jnp.inf, hidden, lse).swapaxes(1, 2).astype(query.dtype)
    return out.reshape(shape), jax.lax.stop_gradient(lse).reshape(shape[:-1])


def _segments(lengths: jax.Array | None, array: jax.Array, *, beyond: int) -> jax.Array:
    """Returns the segment of each position (batch, length): 0, or `beyond` from its row's length on."""
    batch, length = array.shape[:2]
    if lengths is None:
        return jnp.zeros((batch, length), jnp.int32)
    return jnp.where(jnp.arange(length) < lengths[:, None], 0, beyond).astype(jnp.int32)


def _four(array: Any) -> jax.Array:
    array = jnp.asarray(array)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _lengths(name: str, lengths: Any, query: jax.Array) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != query.shape[:1] or lengths.dtype != jnp.int32:
        raise ValueError(
            f"dot_product_attention: {name} must be int32 of shape {query.shape[:1]}, one length a batch entry; got "
            f"{lengths.dtype.name}{list(lengths.shape)}."
        )
    return lengths


def __dir__() -> list[str]:
    return sorted(__all__)
