"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.dense import four_axes
from pallas_kernels.primitives.platform import target_device


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, options: Options) -> jax.Array:
    """See `pallas_kernels.attention`; of the options, bias, is_causal, scale and window."""
    left, right = options.window_sides
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        None if options.bias is None else four_axes(options.bias),
        # cuDNN's window bounds the keys before; of those ahead it has only the causal limit.
        is_causal=options.is_causal or (left is not None and right == 0),
        scale=options.scale,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )


def cudnn_unsupported(
    query: jax.Array, key: jax.Array, value: jax.Array, options: Options, return_residuals: bool
) -> str | None:
    """Why cuDNN cannot take these arguments here, or None where it can."""
    if options.mask is not None or options.segment_ids is not None:
        return "it gives a query that sees no key an average of all values; pass a bias to have that"
    absent = {
        "softcap": options.softcap,
        "dropout with this mask": options.dropout_rate,
        "mask_value": options.mask_value is not None,
        "sinks": options.sinks is not None,
        "float32 residuals": return_residuals,
    }
    for name, wanted in absent.items():
        if wanted:
            return f"it has no {name}"
    left, right = options.window_sides
    if (left is not None or right is not None) and not (options.is_causal or right == 0):
        return "it has windows for causal attention only"
    if left is not None and query.shape[1] - left > key.shape[1]:
        return "the last queries see no key, and it says nothing of what they get"
    if target_device().platform != "cuda":
        return f"it is for NVIDIA GPUs and this trace is for {target_device().kind!r}"
    try:
        jax.eval_shape(partial(cudnn_attention, options=options), query, key, value)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"it says: {error}"
    return None
