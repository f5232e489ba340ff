"""The norm and rotation of any numbers of heads, forward and backward: for `rope`, and for `qkv_projection`.

`qkv_projection` normalises heads here, and rotates them with it; without norms its product's epilogue rotates. Its
backward pass runs here, too.

Cosines and sines come from tables, which XLA computes once for all launches that have them. With p a head of a product,
r = 1 / sqrt(mean(p**2) + epsilon) and g its cotangent, rotated back, the gradients are

    dp = (g * scale - p * r * mean(g * scale * p * r)) * r
    dscale = sum over rows and heads of g * p * r,   dbias = sum over rows of dp

XLA adds the blocks' sums over rows in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.ops.rope.heads_kernel import Part, Plan, run_block
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
    """The heads of one array of a launch: of query, key or value.

    array: (rows, columns), forward the product, backward the cotangent.
    product: of array's shape and dtype; backward, with a norm.
    scale: of the norm, (head size,), or None. epsilon: of the norm, or None for no norm. rounds_before_scale: whether
        normalised heads are rounded before the scale.
    is_rotated: whether heads are rotated. has_bias: whether a backward launch sums the gradient over rows.
    """

    array: jax.Array
    product: jax.Array | None = None
    scale: jax.Array | None = None
    epsilon: float | None = None
    rounds_before_scale: bool = False
    is_rotated: bool = False
    has_bias: bool = False

    @property
    def has_work(self) -> bool:
        """Whether a launch has anything to do for this array."""
        return self.is_rotated or self.epsilon is not None or self.has_bias


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """The result for one array: its heads or their gradient, and float32 sums over rows.

    scale: (head size,), if it has a scale. bias: (columns,), if it has one.
    """

    array: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None


def launch_heads(
    heads: Sequence[HeadArray],
    tables: tuple[jax.Array, jax.Array] | None,
    *,
    size: int,
    is_backward: bool,
    name: str,
    is_interleaved: bool = False,
    every: int = 1,
) -> tuple[HeadResult, ...]:
    """Normalises and rotates heads of `size` columns, a power of two, or computes the gradient of that.

    tables: cosines and sines, (rows, size / 2) or (rows, size), of all rows or fewer that repeat, if any are rotated.
    name: the kernel's. is_interleaved: whether neighbouring columns are pairs, without norms and biases. every: of so
    many heads only the first is rotated.
    """
    busy = [each for each in heads if each.has_work]
    rows, half = busy[0].array.shape[0], size // 2
    pairs = Pairs(dtype=busy[0].array.dtype, is_interleaved=is_interleaved)
    plan = _plan(busy, size=size, every=every, pairs=pairs, is_backward=is_backward)
    period = rows if tables is None else tables[0].shape[0]
    if period != rows and period % plan.tile.rows == 0:
        plan = replace(plan, period=period)
    elif tables is not None and period != rows:
        tables = jnp.tile(tables[0], (rows // period, 1)), jnp.tile(tables[1], (rows // period, 1))

    def view(array: jax.Array, fill: float) -> jax.Array:
        return pairs.view(jnp.pad(array, ((0, plan.rows - rows), (0, 0)), constant_values=fill), size)

    operands: dict[str, jax.Array] = {}
    out_types: dict[str, jax.ShapeDtypeStruct] = {}
    for part, each in zip(plan.parts, busy, strict=True):
        # Rows of ones are added to products: rows of zeros have no norm if epsilon is 0.
        operands[f"array {part.index}"] = view(each.array, 0 if is_backward else 1)
        if each.product is not None:
            operands[f"product {part.index}"] = view(each.product, 1)
        if each.scale is not None:
            operands[f"scale {part.index}"] = each.scale.reshape(2, half)
        if part.has_result:
            viewed = operands[f"array {part.index}"]
            out_types[f"result {part.index}"] = jax.ShapeDtypeStruct(viewed.shape, viewed.dtype)
    for kind, table in zip(("cos", "sin"), tables or (), strict=False):
        by_member = pairs.table(table.astype(jnp.float32) if table.dtype.itemsize > 4 else table, half)
        operands[kind] = jnp.pad(by_member, ((0, plan.period - table.shape[0]), (0, 0), (0, 0)))
    scratch = {}
    if sum_lines := plan.sum_lines:
        count = max(lines.stop for lines in sum_lines.values())
        out_types["sums"] = jax.ShapeDtypeStruct((plan.groups, count, 2, half), jnp.float32)
        scratch["lines"] = plgpu.SMEM((2, plan.tile.rows, half), jnp.float32)
    names = (*operands, *out_types, *scratch)

    def kernel(*refs):
        run_block(plan, dict(zip(names, refs, strict=True)))

    outputs = settings.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(plan.strips * plan.groups,),
        grid_names=("block",),
        scratch_types=tuple(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )(*operands.values())
    found = {name: varying_like(out, *operands.values()) for name, out in zip(out_types, outputs, strict=True)}

    def result(part: Part, array: jax.Array) -> HeadResult:
        sums = {
            kind: jnp.sum(found["sums"][:, lines.start : lines.stop], axis=0 if kind == "bias" else (0, 1)).reshape(-1)
            for (index, kind), lines in sum_lines.items()
            if index == part.index
        }
        if part.has_result:
            array = pairs.restore(found[f"result {part.index}"])[:rows]
        return HeadResult(array=array, **sums)

    parts = iter(plan.parts)
    return tuple(result(next(parts), each.array) if each.has_work else HeadResult(array=each.array) for each in heads)


def _plan(heads: Sequence[HeadArray], *, size: int, every: int, pairs: Pairs, is_backward: bool) -> Plan:
    rows = heads[0].array.shape[0]
    parts = tuple(
        Part(
            index=i,
            heads=each.array.shape[1] // size,
            epsilon=each.epsilon,
            rounds_before_scale=each.rounds_before_scale,
            is_rotated=each.is_rotated,
            has_scale=each.scale is not None,
            has_bias=each.has_bias,
        )
        for i, each in enumerate(heads)
    )
    widths = (1,) if pairs.are_apart else (4, 2, 1)  # fewer rows than a tile's are padded
    tile = next((tile for tile in (HeadTile.of(size, v) for v in widths) if tile.rows <= rows), HeadTile.of(size, 1))
    units, count = -(-rows // tile.rows), sum(part.heads for part in parts)
    has_norms = any(part.epsilon is not None for part in parts)
    has_biases = is_backward and any(part.has_bias for part in parts)
    has_sums = has_biases or (is_backward and any(part.has_scale for part in parts))
    # Norms and sums take registers; sums for biases are of each head.
    at_once = 2 if has_norms or has_sums else 4
    blocks = target_device().core_count * _BLOCKS_PER_CORE
    strip = at_once if has_biases else _STRIP
    while strip > 1 and (units * count < 2 * strip * blocks or any(part.heads % strip for part in parts)):
        strip //= 2
    strips = count // strip
    if has_sums:
        groups = max(1, min(units, blocks // strips))
    else:
        groups = -(-units // max(1, min(4 if has_norms else 1, units * strips // (4 * blocks))))
    return Plan(
        size=size,
        every=every,
        rows=max(rows, tile.rows),
        period=max(rows, tile.rows),
        pairs=pairs,
        tile=tile,
        is_backward=is_backward,
        parts=parts,
        strip=strip,
        at_once=min(at_once, strip),
        groups=groups,
    )
