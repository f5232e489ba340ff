"""Launch configurations of the linear layer's Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """How a product is cut up.

    tile_m, tile_n, tile_k: of a block's result and of a step along the depth; powers of two, at least 16.
    group: rows of tiles that blocks near in time share. warps: of a block. stages: steps of operands under way.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3


def default_config(rows: int, dtype: jnp.dtype) -> TritonConfig:
    """The choice: Triton's usual tiles of many rows, narrow ones of few, and small steps in float32."""
    if dtype.itemsize == 4:
        return TritonConfig(tile_m=64, tile_n=64, tile_k=32, warps=4)
    if rows <= 64:
        return TritonConfig(tile_m=16 if rows <= 16 else 64, tile_n=64, tile_k=128, warps=4, stages=4)
    if rows <= 1024:
        return TritonConfig(tile_n=128)
    return TritonConfig()
