"""What differs between the JAX versions that this package supports, 0.11.2 and 0.12."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def store(ref: Any, value: jax.Array) -> None:
    """Stores `value` to a reference as its layout has it, also where a warp does not fill whole sectors of memory.

    JAX 0.11.2 stores so by `ref[...] = value`; 0.12 refuses such stores unless they say that they are meant.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value
