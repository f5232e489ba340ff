"""Rotary position embedding on Mosaic GPU: query and key in one launch, forward and backward alike.

The gradient of a rotation is the rotation by the opposite angle. Sines and cosines are computed in the kernel (see
`angles`). A table of them would need a separate launch, and 2.5 % more bytes where each row has its own position.
"""

from __future__ import annotations

import jax

from pallas_kernels.ops.rope.heads import HeadArray, HeadsConfig, launch_heads
from pallas_kernels.ops.rope.pairs import HeadTile


def rope_rotate(
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    *,
    theta: float,
    interleaved: bool,
    inverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns query and key rotated by their positions' angles, or by the opposite ones.

    query: (batch, tokens, query heads, head size); key: (batch, tokens, key heads, head size), of one floating dtype.
    positions: (tokens,) or (batch, tokens) int32.
    """
    batch, length, _, size = query.shape
    rows = batch * length
    vector = next((v for v in (4, 2) if HeadTile.of(size, v).rows <= rows), 1)  # fewer rows than a tile's are padded
    rotated = launch_heads(
        [HeadArray(array=array.reshape(rows, -1), is_rotated=True) for array in (query, key)],
        positions.reshape(-1),
        size=size,
        theta=theta,
        is_backward=inverse,
        is_interleaved=interleaved,
        name="rope",
        config=HeadsConfig(vector=vector, at_once=4, strip=8, trips=1),
    )
    query_out, key_out = (own.array.reshape(array.shape) for own, array in zip(rotated, (query, key), strict=True))
    return query_out, key_out
