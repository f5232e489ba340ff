"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.ops.attention.problem import Segments, Window, sides_of
from pallas_kernels.primitives.platform import target_device


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
) -> jax.Array:
    """See `pallas_kernels.attention`."""
    if bias is not None:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    left, right = sides_of(window)
    if left is not None:
        # Its window reaches as far back as asked; ahead there is only the causal limit.
        is_causal, size = is_causal or right == 0, (left, 0)
    else:
        size = None
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        is_causal=is_causal,
        scale=scale,
        local_window_size=size,
        implementation="cudnn",
    )


def cudnn_unsupported(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    window: Window,
    segment_ids: Segments,
    softcap: float | None,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    return_residuals: bool,
) -> str | None:
    """Why cuDNN cannot take these arguments here, or None where it can."""
    del dropout_key
    if mask is not None or segment_ids is not None:
        return "it gives a query that sees no key an average of all values; pass a bias to have that"
    absent = {"softcap": softcap, "dropout with this mask": dropout_rate, "float32 residuals": return_residuals}
    for name, wanted in absent.items():
        if wanted:
            return f"it has no {name}"
    left, right = sides_of(window)
    if left is None and right is not None and not (is_causal or right == 0):
        return "it has no window that bounds the keys ahead alone"
    if left is not None and not (is_causal or right == 0):
        return "it has windows for causal attention only"
    if left is not None and query.shape[1] - left > key.shape[1]:
        return "the last queries see no key, and it says nothing of what they get"
    if target_device().platform != "cuda":
        return f"it is for NVIDIA GPUs and this trace is for {target_device().kind!r}"
    call = partial(cudnn_attention, is_causal=is_causal, scale=scale, window=window)
    try:
        jax.eval_shape(call, query, key, value, bias=bias)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"it says: {error}"
    return None
