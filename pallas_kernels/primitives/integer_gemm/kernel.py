"""The product of many rows with int8 or int4 weights, with one scale per output: out^T = w x^T.

In persistent blocks, one warpgroup loads operands by TMA and two or three multiply. Each of these reads its 64 columns
of weights into registers, widens them to 16 bits, and multiplies from registers, while the others keep the tensor cores
busy.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.launch import Roles, in_one_warp, launcher
from pallas_kernels.primitives.gemm.operands import whole_groups
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.integer_gemm.pipeline import Ring, compute, produce
from pallas_kernels.primitives.integer_gemm.store import PIECE, Store
from pallas_kernels.primitives.integers import unit
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_tiles import TileForm
from pallas_kernels.primitives.transposed import GROUP


def integer_gemm(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    epilogue: Epilogue,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    config: GemmConfig,
    name: str = "integer_gemm",
) -> jax.Array:
    """Returns the epilogue's result, (M, N).

    Args:
        x: (M, K), bfloat16 or float16; K a multiple of 64.
        values: (N, K), int8, int4, or packed uint8 (`primitives/integers.py`); N a multiple of 64 and at least 128, K a
            multiple of 128, or of 256 with int4.
        scales: (N,) float32.
        bias: (N,), any floating dtype of at most 32 bits.
        residual: (M, N) of out_dtype.
        out_dtype: the result's dtype; None: x's.
        config: the tiling, of at most 256 rows and of 64 columns for each of two or three warpgroups; its stages are
            reduced to those that fit. A tile has a multiple of `store_slots` pieces of `PIECE` rows.
        name: the kernel's name, for traces.
    """
    rows = x.shape[0]
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if out_dtype.itemsize > 2:  # a panel of 64 columns would be wider than TMA's swizzle
        x = whole_groups(x)
        residual = None if residual is None else whole_groups(residual)
    operands = {"scales": scales, "bias": bias, "residual": residual}
    extras = {key: value for key, value in operands.items() if value is not None}
    config = config.fitted(
        itemsize=x.dtype.itemsize,
        stored_bytes=0,
        other_bytes=config.store_slots * config.tile_n * PIECE * out_dtype.itemsize,
        weight_bits=jnp.iinfo(values.dtype).bits,
    )
    problem = Problem(
        m=x.shape[0], widths=(values.shape[0],), k=x.shape[1], dtype=x.dtype, config=config, transpose_b=True
    )
    result_form = TileForm.of(problem.m, size=GROUP, dtype=out_dtype)
    scale_unit = unit(values.dtype, x.dtype)

    def roles(x_ref, w_ref, extra_refs, out_ref, ring_refs, buffers, loaded) -> Roles:
        ring = Ring.of(problem, ring_refs)

        def consume(warpgroup: jax.Array) -> None:
            store = Store(
                problem=problem,
                epilogue=epilogue,
                unit=scale_unit,
                extras=extra_refs,
                out=out_ref,
                buffer=result_form.tiles(buffers).at(warpgroup),
                loaded=loaded.at[warpgroup],
            )
            compute(ring, store, warpgroup)

        return in_one_warp(partial(produce, ring, x_ref, w_ref), x_ref, w_ref), consume

    kernel = launcher(
        problem,
        roles,
        name=name,
        out_type=jax.ShapeDtypeStruct((problem.m, *problem.widths), out_dtype),
        scratch_types=(
            Ring.scratch(problem, values.dtype),
            result_form.scratch(config.warpgroups, config.store_slots, PIECE),
            plgpu.Barrier(num_barriers=config.warpgroups),
        ),
    )
    return varying_like(kernel(x, values, extras)[:rows], x, values, *extras.values())
