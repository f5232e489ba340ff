"""cuDNN's flash attention, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from functools import partial
from typing import Unpack

import jax

from pallas_kernels.ops.attention.dense import four_axes
from pallas_kernels.ops.attention.problem import Options, Window, sides_of
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
    left, right = sides_of(window)
    if left is not None:
        # cuDNN's window bounds the keys before; of those ahead it has only the causal limit.
        is_causal = is_causal or right == 0
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        None if bias is None else four_axes(bias),
        is_causal=is_causal,
        scale=scale,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )


def cudnn_unsupported(
    query: jax.Array, key: jax.Array, value: jax.Array, *, return_residuals: bool, **options: Unpack[Options]
) -> str | None:
    """Why cuDNN cannot take these arguments here, or None where it can."""
    is_causal, window = options["is_causal"], options["window"]
    if options["mask"] is not None or options["segment_ids"] is not None:
        return "it gives a query that sees no key an average of all values; pass a bias to have that"
    absent = {"softcap": options["softcap"], "dropout with this mask": options["dropout_rate"]}
    absent |= {name: options.get(name) is not None for name in ("mask_value", "sinks")}
    absent |= {"float32 residuals": return_residuals}
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
    call = partial(cudnn_attention, is_causal=is_causal, scale=options["scale"], window=window)
    try:
        jax.eval_shape(call, query, key, value, bias=options["bias"])
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"it says: {error}"
    return None
