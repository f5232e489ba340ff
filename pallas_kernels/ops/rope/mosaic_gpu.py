"""Rotary position embedding on Mosaic GPU: query and key in one launch, forward and backward alike.

The gradient of a rotation is the rotation by the opposite angle. Sines and cosines are computed in the kernel (see
`angles`), once per token and thread for all heads. A table of them would need a separate launch and 2.5 % more bytes.
Numbers of heads that a warpgroup cannot share run in the kernel of `heads`.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ops.rope.angles import cosine_and_sine, turns
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads
from pallas_kernels.ops.rope.pairs import HeadTile, Pairs, head_tile
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.epilogue import HEAD_SIZES
from pallas_kernels.primitives.platform import varying_like

# No automatic barriers: the kernel reads nothing that it writes.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


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
    batch, length, _, head_size = query.shape
    tokens = batch * length
    arrays, pairs = (query, key), Pairs(dtype=query.dtype, is_interleaved=interleaved)
    found = [_tile(array, pairs) for array in arrays]
    tiles = tuple(tile for tile in found if tile is not None)
    if len(tiles) < len(arrays):
        return _rotate_any_heads(query, key, positions, theta=theta, inverse=inverse)
    tables = _tables(set(tiles), head_size, theta)
    table_tiles = tuple(tables)
    views = [pairs.view(array, tokens) for array in arrays]
    flat_positions = positions.reshape(-1)
    period = flat_positions.size

    def rope(*refs):
        positions_ref, table_refs = refs[0], refs[1 : 1 + 2 * len(table_tiles)]
        inputs, outputs = refs[-4:-2], refs[-2:]
        frequencies = {
            tile: [plgpu.load(ref, layout=tile.layout, optimized=False) for ref in table_refs[2 * i : 2 * i + 2]]
            for i, tile in enumerate(table_tiles)
        }
        token = lax.axis_index("token")
        loaded = [
            [pairs.load(ref, token, heads, tile) for heads in _heads(ref, tile)]
            for ref, tile in zip(inputs, tiles, strict=True)
        ]
        position = positions_ref[lax.rem(token, period)]
        angles = {tile: cosine_and_sine(position, *parts) for tile, parts in frequencies.items()}
        for ref, tile, tile_values in zip(outputs, tiles, loaded, strict=True):
            cosine, sine = angles[tile]
            sine = -sine if inverse else sine
            for heads, loaded_pairs in zip(_heads(ref, tile), tile_values, strict=True):
                first, second = pairs.members(loaded_pairs)
                pairs.store(ref, token, heads, (first * cosine - second * sine, second * cosine + first * sine))

    operands = (flat_positions, *(table for pair in tables.values() for table in pair), *views)
    results = settings.kernel(
        rope,
        out_type=tuple(jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=COMPILER_PARAMS,
    )(*operands)
    query_out, key_out = (
        varying_like(pairs.restore(result, array), *arrays, positions)
        for result, array in zip(results, arrays, strict=True)
    )
    return query_out, key_out


def takes_any_heads(query: jax.Array, *, interleaved: bool) -> bool:
    """Whether any number of heads can be rotated; else their number must give tiles of a warpgroup."""
    return not interleaved and query.shape[-1] in HEAD_SIZES


def _rotate_any_heads(query, key, positions, *, theta, inverse):
    batch, length, _, size = query.shape
    rows = batch * length
    heads = [HeadArray(array=array.reshape(rows, -1), is_rotated=True) for array in (query, key)]
    positions = jnp.broadcast_to(positions, (batch, length)).reshape(rows)
    rotated = launch_heads(heads, positions, size=size, theta=theta, is_backward=inverse, name="rope")
    query_out, key_out = (own.array.reshape(array.shape) for own, array in zip(rotated, (query, key), strict=True))
    return query_out, key_out


def _tile(array: jax.Array, pairs: Pairs) -> HeadTile | None:
    heads, head_size = array.shape[2:]
    return head_tile(heads, head_size // 2, pairs.unit_bytes, access_bytes=pairs.widest_access)


def _tables(tiles: set[HeadTile], head_size: int, theta: float) -> dict[HeadTile, tuple[jax.Array, jax.Array]]:
    """Returns the frequencies (see `turns`) for each tile, repeated for each of its heads."""
    whole, fraction = turns(head_size, theta)
    return {
        tile: (jnp.asarray(np.tile(whole, (tile.heads, 1))), jnp.asarray(np.tile(fraction, (tile.heads, 1))))
        for tile in sorted(tiles, key=lambda tile: tile.vector)
    }


def _heads(ref, tile: HeadTile) -> list[pl.Slice]:
    return [pl.ds(first, tile.heads) for first in range(0, ref.shape[1], tile.heads)]
