"""Shared-memory arrays in the layout that TMA and the tensor cores need."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def shared(shape: tuple[int, ...], dtype: jnp.dtype, *, swizzle: int | None = None) -> Any:
    """Returns a shared-memory array, swizzled for TMA and the tensor cores.

    swizzle: in bytes; None: as many as fit.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)
