"""The norm and rotation of any numbers of heads, forward and backward: for `rope`, and for `qkv_projection`.

`qkv_projection` normalises heads here, and rotates them with it; without norms its product's epilogue rotates. Its
backward pass runs here, too.

Cosines and sines come from tables, which XLA computes once for all launches that have them. With p a head of a product,
r = 1 / sqrt(mean(p**2) + epsilon) and g its cotangent, rotated back, the gradients are

    dp = (g * scale - p * r * mean(g * scale * p * r)) * r
    dscale = sum over rows and heads of g * p * r

XLA adds the blocks' sums over rows in a fixed order, so results repeat bit for bit. The gradient of a rotation alone is
the rotation by the opposite angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.rope.heads_kernel import HeadNorm, Part, Plan, run_block
from pallas_kernels.ops.rope.pairs import HeadTile, Pairs
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS
from pallas_kernels.primitives.platform import target_device, varying_like

_STRIP = 8
"""The most neighbouring heads of a block, which share their rows' angles."""
_BLOCKS_PER_CORE = 4
"""The blocks that a multiprocessor holds."""


@dataclass(frozen=True, kw_only=True)
class HeadArray:
    """The heads of one array of a launch: of query or key.

    array: (rows, columns), forward the product, backward the cotangent.
    product: of array's shape and dtype; backward, with a norm.
    norm: of each head, or None. scale: of the norm, (head size,), or None.
    """

    array: jax.Array
    product: jax.Array | None = None
    norm: HeadNorm | None = None
    scale: jax.Array | None = None


def launch_heads(
    heads: Sequence[HeadArray],
    tables: tuple[jax.Array, jax.Array] | None,
    *,
    size: int,
    is_backward: bool,
    name: str,
    is_interleaved: bool = False,
    every: int = 1,
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Normalises and rotates heads of `size` columns, a power of two, or computes the gradient of that.

    tables: cosines and sines, (rows, size / 2) or (rows, size), of all rows or fewer that repeat; None for no rotation.
    name: the kernel's. is_interleaved: whether neighbouring columns are pairs, without norms. every: of so many heads
    only the first is rotated.

    Returns:
        For each array its heads or their gradient; and backward the gradient of its scale, (size,) float32.
    """
    rows, half = heads[0].array.shape[0], size // 2
    pairs = Pairs(dtype=heads[0].array.dtype, is_interleaved=is_interleaved)
    plan = _plan(heads, tables or (), size=size, every=every, pairs=pairs, is_backward=is_backward)

    def padded(array: jax.Array, fill: float) -> jax.Array:
        missing = [(0, plan.rows - rows)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, missing, constant_values=fill)

    def view(array: jax.Array | None, fill: float) -> jax.Array | None:
        return None if array is None else pairs.view(padded(array, fill), size)

    def table(array: jax.Array, own: Pairs | None) -> jax.Array:
        narrow = array.astype(jnp.float32) if array.dtype.itemsize > 4 else array
        period = array.shape[0]
        by_row = narrow if plan.period == period else padded(jnp.tile(narrow, (rows // period, 1)), 0)
        return by_row.reshape(-1, 1, half) if own is None else own.view(by_row, size)

    # Rows of ones are added to products: rows of zeros have no norm if epsilon is 0.
    operands = {
        "array": [view(each.array, 0 if is_backward else 1) for each in heads],
        "product": [view(each.product, 1) for each in heads],
        "scale": [None if each.scale is None else each.scale.reshape(2, half) for each in heads],
        "tables": None if tables is None else list(map(table, tables, plan.tables)),
    }
    results = [jax.ShapeDtypeStruct(own.shape, own.dtype) for own in jax.tree.leaves(operands["array"])]
    sums = [
        jax.ShapeDtypeStruct((plan.groups, part.heads // plan.strip, 2, half), jnp.float32)
        for part in plan.parts
        if part.has_sum
    ]

    def kernel(refs, *others):
        run_block(plan, refs, others[: len(results)], others[len(results) :])

    outputs = settings.kernel(
        kernel,
        out_type=(*results, *sums),
        grid=(plan.strips * plan.groups,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((2, plan.tile.rows, half), jnp.float32)] if sums else [],
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(operands)
    outputs = [varying_like(each, *jax.tree.leaves(operands)) for each in outputs]
    found = iter(outputs[len(results) :])
    scales = [jnp.sum(next(found), axis=(0, 1)).reshape(-1) if part.has_sum else None for part in plan.parts]
    return [pairs.restore(each)[:rows] for each in outputs[: len(results)]], scales


def _plan(
    heads: Sequence[HeadArray],
    tables: Sequence[jax.Array],
    *,
    size: int,
    every: int,
    pairs: Pairs,
    is_backward: bool,
) -> Plan:
    rows = heads[0].array.shape[0]
    period = tables[0].shape[0] if tables else rows
    of_tables = tuple(replace(pairs, dtype=each.dtype) if each.shape[1] == size else None for each in tables)
    parts = tuple(
        Part(heads=each.array.shape[1] // size, norm=each.norm, has_sum=is_backward and each.scale is not None)
        for each in heads
    )
    is_apart = any(each is not None and each.are_apart for each in (pairs, *of_tables))
    widths = (1,) if is_apart else (4, 2, 1)  # fewer rows than a tile's are padded
    tile = next((tile for tile in (HeadTile.of(size, v) for v in widths) if tile.rows <= rows), HeadTile.of(size, 1))
    units, count = -(-rows // tile.rows), sum(part.heads for part in parts)
    at_once = 4 if all(part.norm is None for part in parts) else 2  # norms take registers
    blocks = target_device().core_count * _BLOCKS_PER_CORE
    strip = _STRIP
    while strip > 1 and (units * count < 2 * strip * blocks or any(part.heads % strip for part in parts)):
        strip //= 2
    has_sums = any(part.has_sum for part in parts)
    return Plan(
        size=size,
        every=every,
        rows=max(rows, tile.rows),
        period=max(rows, tile.rows) if period % tile.rows else period,
        pairs=pairs,
        tables=of_tables,
        tile=tile,
        is_backward=is_backward,
        parts=parts,
        strip=strip,
        at_once=min(at_once, strip),
        groups=max(1, min(units, blocks * strip // count)) if has_sums else units,
    )


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
