"""Stores and loads accumulators of transposed products, in buffers whose rows are the accumulators' columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

GROUP = 64
"""Columns of the result that a warpgroup computes at a time. They are rows of the transposed product."""


def store_transposed(value: jax.Array, ref: Any) -> None:
    """Writes an accumulator (columns, rows) into a buffer (rows, columns), in the buffer's dtype."""
    value = value.astype(ref.dtype)
    if value.dtype.itemsize == 4:  # for 16-bit values the hardware has an instruction
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    ref.transpose((1, 0))[...] = value


def load_transposed(ref: Any) -> jax.Array:
    """Reads a buffer (rows, columns) as an accumulator (columns, rows), float32."""
    layout = plgpu.Layout.WGMMA_TRANSPOSED if ref.dtype.itemsize == 4 else plgpu.Layout.WGMMA
    value = plgpu.load(ref.transpose((1, 0)), layout=layout, optimized=False)
    return plgpu.layout_cast(value, plgpu.Layout.WGMMA).astype(jnp.float32)
