"""Rotary position embedding on Mosaic GPU: query and key in one launch, forward and backward alike.

The gradient of a rotation is the rotation by the opposite angle. A head of which only the first columns are rotated is
read as several heads, of which only the first is.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.ops.rope.heads import HeadArray, launch_heads


def rope_rotate(
    arrays: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    *,
    rotated: int,
    interleaved: bool,
    inverse: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns arrays with the first `rotated` columns of their heads rotated, or rotated back.

    arrays: (batch, tokens, heads, head size), of one floating dtype, and of the same size but for the heads.
    cos, sin: (tokens or batch * tokens, `rotated` or half of that).
    """
    batch, length, _, size = arrays[0].shape
    rows = batch * length
    results, _ = launch_heads(
        [HeadArray(array=array.reshape(rows, -1)) for array in arrays],
        (cos, sin),
        size=rotated,
        is_backward=inverse,
        is_interleaved=interleaved,
        every=size // rotated,
        name="rope",
    )
    return tuple(own.reshape(array.shape) for own, array in zip(results, arrays, strict=True))
