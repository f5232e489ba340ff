"""The embedding bag on Mosaic GPU: one warpgroup per bag, which reads the bag's rows straight into registers.

A row's address depends on an index that the kernel has read. Mosaic GPU takes such an index of a whole row; it has no
load whose threads each take a row of their own. So all threads share a row, of at least 128 features.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.rows import load_row, map_row, split_row, store_row, to_float32, zeros_row

MOST_FEATURES = 4096
"""The longest row: 32 sums in each thread's registers."""
_ROWS_AT_ONCE, _VALUES_AT_ONCE = 8, 4096
"""The most rows, and values, of a bag in flight at once: 16 KiB of float32."""
_FEW_BAGS = 2
"""Up to this many bags a multiprocessor, too few blocks hide the loads' latency, so each keeps four times as many loads
in flight. µs on an H200, with the table in the L2 cache, by a script that is not kept: 32 bags of 64 rows of 128 1.9
instead of 4.0, 132 of 128 rows of 512 4.6 and 8.1; but 528 of 50 rows of 2048 14.4 and 14.0."""


def embedding_bag_forward(
    table: jax.Array, indices: jax.Array, weights: jax.Array | None, *, is_mean: bool
) -> jax.Array:
    """Returns the sums or means, (bags, features), of the table's dtype.

    table: (rows, features), 128 to 4096 features. indices: (bags, size) int32. weights: (bags, size), floating, or
    None.
    """
    (rows, features), (bags, size) = table.shape, indices.shape
    segments = split_row(features, table.dtype.itemsize)
    times = 4 if bags <= _FEW_BAGS * target_device().core_count else 1
    at_once = max(1, min(times * _ROWS_AT_ONCE, size, times * _VALUES_AT_ONCE // features))

    def embedding_bag(table_ref, indices_ref, *refs):
        bag, (*weights_refs, out_ref) = lax.axis_index("bag"), refs

        def load(place):
            """Loads a row and its factor, which is NaN if the index is out of range."""
            index = indices_ref[bag, place]
            index = jnp.where(index < 0, index + rows, index)
            inside = jnp.clip(index, 0, rows - 1)
            factor = weights_refs[0][bag, place].astype(jnp.float32) if weights_refs else jnp.float32(1)
            return load_row(table_ref.at[inside], segments), jnp.where(index == inside, factor, jnp.float32(jnp.nan))

        def add(sums, first, count):
            for row, factor in [load(first + i) for i in range(count)]:
                sums = map_row(lambda total, value, factor=factor: total + value * factor, sums, to_float32(row))
            return sums

        step = functools.partial(add, count=at_once)
        sums = lax.fori_loop(0, size // at_once, lambda i, sums: step(sums, i * at_once), zeros_row(segments))
        sums = add(sums, size - size % at_once, size % at_once)
        store_row(out_ref.at[bag], map_row(lambda total: total / size, sums) if is_mean else sums, segments)

    operands = (table, indices) if weights is None else (table, indices, weights)
    out = settings.kernel(
        embedding_bag,
        out_type=jax.ShapeDtypeStruct((bags, features), table.dtype),
        grid=(bags,),
        grid_names=("bag",),
        # No automatic barriers: the kernel reads nothing that it writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*operands)
    return varying_like(out, *operands)
