"""Arrays in shared memory as TMA and the tensor cores want them."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def shared(shape: tuple[int, ...], dtype: jnp.dtype, *, swizzle: int | None = None) -> Any:
    """A shared-memory array, swizzled as TMA and the tensor cores want it: over `swizzle` bytes, or as many as fit."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)
