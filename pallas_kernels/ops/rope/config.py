"""How the rope kernel cuts query and key: what may be chosen, and what is chosen untuned.

The kernel runs for head sizes that are powers of two from 16 on, where a token's query heads, and its key heads, fill
the 128 threads of a warpgroup: multiples of 4 for head sizes from 64 on, of 8 for 32 and of 16 for 16; the rest is
"xla".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.primitives.rows import ACCESS_BYTES, WARPS

WARP_LANES = 32


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """What a block of one warpgroup takes.

    tokens: at most so many, all heads of each; their loads are under way together.
    access_bytes: the widest access of a thread. Narrower ones need the sine and cosine of fewer pairs a thread.
    """

    tokens: int = 1
    access_bytes: int = 16


@dataclass(frozen=True, kw_only=True)
class HeadTile:
    """A (heads, half) tile of pairs or of one of their members, `vector` to a thread and access."""

    heads: int
    half: int
    vector: int

    @property
    def layout(self) -> plgpu.Layout | Any:
        """Warps take different heads, and a warp's lanes the pairs of one or several heads."""
        heads_a_warp = self.heads // WARPS
        lanes = WARP_LANES // heads_a_warp
        if heads_a_warp == 1:
            tiling = plgpu.Tiling(((WARPS, lanes * self.vector), (self.vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling(((self.heads, self.half), (heads_a_warp, self.half), (self.vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def head_tile(heads: int, half: int, itemsize: int, *, access_bytes: int = ACCESS_BYTES) -> HeadTile | None:
    """The tile with the widest accesses of which `heads` heads are a multiple; None where there is none.

    `itemsize` is that of a member of a pair, or of a pair where both are read as one.
    """
    vector = max(1, access_bytes // itemsize)
    while vector:
        if half % vector == 0:
            lanes = min(half // vector, WARP_LANES)
            heads_a_tile = WARPS * WARP_LANES // lanes
            if WARP_LANES % lanes == 0 and half % (lanes * vector) == 0 and heads % heads_a_tile == 0:
                return HeadTile(heads=heads_a_tile, half=half, vector=vector)
        vector //= 2
    return None


def candidates() -> dict[str, RopeConfig]:
    """The configurations worth measuring, by name, in both phases."""
    shapes = ((1, 16), (2, 16), (4, 16), (1, 8), (2, 8), (4, 8))
    return {f"{t} tokens {b} bytes": RopeConfig(tokens=t, access_bytes=b) for t, b in shapes}
