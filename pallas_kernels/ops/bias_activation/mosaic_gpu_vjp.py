"""Bias, activation and dropout backward on Mosaic GPU: one pass reads x and dy and writes dx.

The dropout mask is drawn again from the key. The bias's gradient is the column sums of dx; to compute it, blocks are
persistent: each has a strip of columns and a group of rows, which its warpgroups divide among them, keeps the column
sums in registers, and writes them once. XLA adds the groups' sums in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.bias_activation.mosaic_gpu import add_bias, present
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    COMPILER_PARAMS,
    Part,
    column_blocks,
    elementwise_kernel,
    load_part,
    make_keep,
)
from pallas_kernels.primitives.platform import varying_like


def bias_activation_backward(
    x: jax.Array,
    bias: jax.Array | None,
    words: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation,
    rate: float = 0.0,
    warpgroups: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes (dx, dbias); dbias is None without a bias. Arguments are the forward kernel's, and dy, shaped as x.

    warpgroups: of a block. They take rows in turn, and their column sums are added in shared memory. Eight have 64
    registers per thread, enough for the current row and for loading the next one.
    """
    operands = present({"x": x, "bias": bias, "words": words, "dy": dy})
    # As accurate as the more accurate of the two gradients needs.
    shown = x.dtype if bias is None else jnp.promote_types(x.dtype, bias.dtype)

    def step(row, part, loaded, keep):
        dy = loaded["dy"].astype(jnp.float32)
        if keep is not None:
            dy = keep(dy, row, part)
        return dy * activation.value_and_derivative(add_bias(loaded), shown)[1]

    if bias is None:
        return elementwise_kernel("bias_activation_gradient", operands, step, rate=rate), None
    warpgroups = warpgroups or (8 if x.shape[0] >= 1024 else 1)
    return _column_sum_kernel(operands, step, rate=rate, warpgroups=warpgroups)


def _column_sum_kernel(
    operands: Mapping[str, jax.Array],
    step: Callable[..., jax.Array],
    *,
    rate: float,
    warpgroups: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns dx, like `operands["x"]`, and the sums of its columns in the dtype of `operands["bias"]`.

    step: takes a row, a part of it, each operand's values in it, and the dropout function (None: no dropout).
    """
    x, sum_dtype = operands["x"], operands["bias"].dtype
    rows, features = x.shape
    per_core = 2 if warpgroups == 1 else 1
    blocks = column_blocks(rows, features, x.dtype.itemsize, warpgroups=warpgroups, blocks_per_core=per_core)
    groups = blocks.rows
    is_sum = groups == 1  # nothing is left to add
    names = tuple(operands)

    def bias_activation_gradient(*all_refs):
        refs = dict(zip(names, all_refs, strict=False))
        dx_ref, partial_ref, sums, done = all_refs[len(names) :]
        keep = make_keep(refs.pop("words", None), features=features, rate=rate)
        bias_ref = {"bias": refs.pop("bias")}
        warpgroup = lax.axis_index("warpgroup")

        def sum_part(group, part):
            """Writes dx of the warpgroup's rows in a part of the columns; returns their sums."""
            first, together = group * warpgroups + warpgroup, groups * warpgroups
            trips = lax.div(rows - first + together - 1, together)
            bias = load_part(bias_ref, part)

            def read(i):
                # Past the end, the last row is read again but not used.
                row = jnp.minimum(first + i * together, rows - 1)
                return load_part({name: ref.at[row] for name, ref in refs.items()}, part)

            def add(i, carry):
                total, loaded = carry
                ahead = read(i + 1)
                row = first + i * together
                dx = step(row, part, {**loaded, **bias}, keep)
                store(dx_ref.at[row, part.columns], dx.astype(dx_ref.dtype))
                return total + dx, ahead

            zeros = plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)
            return lax.fori_loop(0, trips, add, (zeros, read(0)))[0]

        def work(group, part):
            sums[warpgroup] = sum_part(group, part)
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

            @pl.when(warpgroup == 0)
            def _():
                total = _load_sums(sums, 0, part)
                for other in range(1, warpgroups):
                    total += _load_sums(sums, other, part)
                store(partial_ref.at[group, part.columns], total.astype(partial_ref.dtype))

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
            plgpu.SMEM((warpgroups, blocks.width), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    dx, partials = (varying_like(output, *operands.values()) for output in (dx, partials))
    return dx, partials[0] if is_sum else jnp.sum(partials, axis=0).astype(sum_dtype)


def _load_sums(sums, warpgroup: int, part: Part) -> jax.Array:
    return plgpu.load(sums.at[warpgroup], layout=part.segment.layout, optimized=False)
