"""Differences between the JAX versions that this package supports, 0.11.2 and 0.12."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def store(ref: Any, value: jax.Array) -> None:
    """Stores `value` to a reference in its own layout, even if a warp does not fill whole sectors of memory.

    In JAX 0.11.2 `ref[...] = value` does this. JAX 0.12 raises unless such a store is marked as intended.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value
