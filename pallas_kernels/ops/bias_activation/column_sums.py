"""The backward kernel with a bias: dx, and its sums down the columns, of which the bias's gradient is made.

Blocks are persistent: each keeps one strip of columns for a group of rows, which its warpgroups share out, walks down
the rows with the sums in registers, and writes them once. The groups' sums are added in a fixed order by a kernel of
its own, so results repeat bit for bit. Few rows are one group, and its sums the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.bias_activation.config import ColumnSumConfig
from pallas_kernels.ops.bias_activation.mosaic_gpu import load_bias, load_row_part, make_keep
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.elementwise import COMPILER_PARAMS, Blocks, Part, launch, rows_at_once
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.rows import LANES

MOST_PARTIALS = 72
"""So many values of a column a thread can hold at once; more are left to XLA's reduction."""


def column_sum_kernel(
    operands: Mapping[str, jax.Array],
    step: Callable[..., jax.Array],
    *,
    features: int,
    rate: float,
    config: ColumnSumConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns dx, like `operands["x"]`, and the sums of its columns in the dtype of `operands["bias"]`.

    features: of the unfolded rows: as many sums are returned.
    step: takes a row, a part of it, what was loaded of each operand for it, and how to drop (None: not at all).
    """
    x, sum_dtype, sums_wanted = operands["x"], operands["bias"].dtype, features
    rows, features = x.shape
    itemsize, warpgroups = x.dtype.itemsize, config.warpgroups
    columns = config.columns(itemsize)
    at_once = rows_at_once(config.rows, rows)
    units = rows // at_once  # what a warpgroup does in one step
    groups = 1
    if config.blocks_per_core:
        strips = max(1, features // columns)
        groups = max(1, min(-(-units // warpgroups), target_device().core_count * config.blocks_per_core // strips))
    is_sum = groups * features == sums_wanted  # nothing is left to add
    blocks = Blocks(rows=groups, features=features, columns=columns, itemsize=itemsize, stride=features)

    def bias_activation_gradient(*all_refs):
        refs = dict(zip(operands, all_refs, strict=False))
        dx_ref, partial_ref, sums, done = all_refs[len(operands) :]
        keep = make_keep(refs.pop("words", None), features=features, rate=rate)
        warpgroup = lax.axis_index("warpgroup")

        def sum_part(group, part):
            """Writes dx of all rows of the group in a part of the columns; returns their sums."""
            first, together = group * warpgroups + warpgroup, groups * warpgroups
            trips = lax.div(units - first + together - 1, together)
            bias = load_bias(refs, part)

            def finish(i, loaded, total):
                for j, values in enumerate(loaded):
                    row = (first + i * together) * at_once + j
                    dx = step(row, part, {**values, **bias}, keep)
                    dx_ref[row, part.columns] = dx.astype(dx_ref.dtype)
                    total += dx
                return total

            def read(i):
                # Past the end the last rows are read again, and not used.
                unit = jnp.minimum(first + i * together, units - 1)
                return [load_row_part(refs, unit * at_once + j, part) for j in range(at_once)]

            zeros = plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)
            if config.prefetch:

                def prefetching(i, carry):
                    total, loaded = carry
                    ahead = read(i + 1)
                    return finish(i, loaded, total), ahead

                return lax.fori_loop(0, trips, prefetching, (zeros, read(0)))[0]
            return lax.fori_loop(0, trips, lambda i, total: finish(i, read(i), total), zeros)

        def work(group, parts):
            for part in parts:
                sums[warpgroup, _local(part)] = sum_part(group, part)
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

            @pl.when(warpgroup == 0)
            def _():
                for part in parts:
                    total = _load_sums(sums, 0, part)
                    for other in range(1, warpgroups):
                        total += _load_sums(sums, other, part)
                    partial_ref[group, part.columns] = total.astype(partial_ref.dtype)

        blocks.run(lax.axis_index("block"), work)

    dx, partials = settings.kernel(
        bias_activation_gradient,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((groups, features), sum_dtype if is_sum else jnp.float32),
        ),
        grid=(blocks.count,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((warpgroups, blocks.widest), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    dx, partials = (varying_like(output, *operands.values()) for output in (dx, partials))
    return dx, partials[0] if is_sum else add_rows(partials.reshape(-1, sums_wanted), sum_dtype)


def add_rows(partials: jax.Array, dtype: Any) -> jax.Array:
    """The sum of (rows, features) float32 over the rows, in `dtype`: all of a column's values are read at once."""
    rows, features = partials.shape
    if rows > MOST_PARTIALS or features < LANES:
        return jnp.sum(partials, axis=0).astype(dtype)
    blocks = Blocks(rows=1, features=features, columns=LANES, itemsize=4, stride=features)

    def make_work(refs, sum_ref):
        def work(_, parts):
            for part in parts:
                places = (refs["partials"].at[row, part.columns] for row in range(rows))
                first, *others = [plgpu.load(place, layout=part.segment.layout, optimized=False) for place in places]
                sum_ref[part.columns] = sum(others, start=first).astype(sum_ref.dtype)

        return work

    return launch("bias_gradient", {"partials": partials}, jax.ShapeDtypeStruct((features,), dtype), blocks, make_work)


def _local(part: Part) -> pl.Slice:
    return pl.ds(part.start, part.segment.size)


def _load_sums(sums, warpgroup: int, part: Part) -> jax.Array:
    return plgpu.load(sums.at[warpgroup, _local(part)], layout=part.segment.layout, optimized=False)
