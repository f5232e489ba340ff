"""Bias, activation and dropout backward on Mosaic GPU: one pass reads x and dy and writes dx.

The dropout mask is made again from the key. With a bias, its gradient is the column sums of dx. Blocks are then
persistent: each keeps one strip of columns, walks down the rows with the sums in registers, and writes them once. XLA
adds the blocks' sums in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.bias_activation.config import (
    ColumnSumConfig,
    ElementwiseConfig,
    default_column_sum,
    rows_at_once,
)
from pallas_kernels.ops.bias_activation.mosaic_gpu import (
    COMPILER_PARAMS,
    add_bias,
    elementwise_kernel,
    load_bias,
    load_row_part,
    make_keep,
    present,
)
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.elementwise import Blocks, access_columns
from pallas_kernels.primitives.platform import target_device, varying_like


def bias_activation_backward(
    x: jax.Array,
    bias: jax.Array | None,
    words: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation,
    rate: float = 0.0,
    config: ElementwiseConfig | ColumnSumConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dx, dbias), or (dx, None) without a bias. Arguments as of the forward kernel; dy like x."""
    operands = present({"x": x, "bias": bias, "words": words, "dy": dy})

    def step(row, part, loaded, keep):
        dy = loaded["dy"].astype(jnp.float32)
        if keep is not None:
            dy = keep(dy, row, part)
        return dy * activation.value_and_derivative(add_bias(loaded), x.dtype)[1]

    if bias is None:
        assert not isinstance(config, ColumnSumConfig)
        return elementwise_kernel("bias_activation_gradient", operands, step, rate=rate, config=config), None
    assert not isinstance(config, ElementwiseConfig)
    config = config or default_column_sum(x.shape[0])
    dx, partial = _column_sum_kernel(operands, step, rate=rate, config=config)
    return dx, jnp.sum(partial, axis=0).astype(bias.dtype)


def _column_sum_kernel(operands: Mapping[str, jax.Array], step, *, rate: float, config: ColumnSumConfig):
    """Returns dx and the blocks' column sums of it, (groups of rows, features) float32."""
    x = operands["x"]
    rows, features = x.shape
    itemsize, warpgroups = x.dtype.itemsize, config.warpgroups
    at_once = rows_at_once(config.rows, rows)
    units = rows // at_once  # what a warpgroup does in one step
    columns = access_columns(config.vectors, itemsize)
    strips = max(1, features // columns)
    groups = max(1, min(-(-units // warpgroups), target_device().core_count * config.blocks_per_core // strips))
    blocks = Blocks(rows=groups, features=features, columns=columns, itemsize=itemsize, stride=features)

    def bias_activation_gradient(*all_refs):
        refs = dict(zip(operands, all_refs, strict=False))
        dx_ref, partial_ref, sums, done = all_refs[len(operands) :]
        keep = make_keep(refs.pop("words", None), features=features, rate=rate)
        warpgroup = lax.axis_index("warpgroup")

        def work(group, parts):
            first = group * warpgroups + warpgroup
            together = groups * warpgroups
            for part in parts:
                bias = load_bias(refs, part)

                def fetch(i, part=part):
                    # Past the end the last rows are read again, and not used.
                    unit = jnp.minimum(first + i * together, units - 1)
                    return [load_row_part(refs, unit * at_once + j, part) for j in range(at_once)]

                def unit(i, carry, part=part, bias=bias, fetch=fetch):
                    total, loaded = carry
                    ahead = fetch(i + 1) if config.prefetch else loaded
                    loaded = loaded if config.prefetch else fetch(i)
                    for j, values in enumerate(loaded):
                        row = (first + i * together) * at_once + j
                        dx = step(row, part, {**values, **bias}, keep)
                        dx_ref[row, part.columns] = dx.astype(dx_ref.dtype)
                        total += dx
                    return total, ahead

                zeros = plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)
                trips = lax.div(units - first + together - 1, together)
                carry = (zeros, fetch(0) if config.prefetch else [])
                sums[warpgroup, _local(part)] = lax.fori_loop(0, trips, unit, carry)[0]
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

            @pl.when(warpgroup == 0)
            def _():
                for part in parts:
                    total = _load_sums(sums, 0, part)
                    for other in range(1, warpgroups):
                        total += _load_sums(sums, other, part)
                    partial_ref[group, part.columns] = total

        blocks.run(lax.axis_index("block"), work)

    dx, partial = plgpu.kernel(
        bias_activation_gradient,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((groups, features), jnp.float32)),
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
    return varying_like(dx, *operands.values()), varying_like(partial, *operands.values())


def _local(part):
    return pl.ds(part.start, part.segment.size)


def _load_sums(sums, warpgroup, part):
    return plgpu.load(sums.at[warpgroup, _local(part)], layout=part.segment.layout, optimized=False)
