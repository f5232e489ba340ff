"""The product of many rows with int8 or int4 weights, with one scale per output: out^T = w x^T.

In persistent blocks, one warpgroup loads operands by TMA and two or three multiply. Each of these reads its 64 columns
of weights into registers, widens them to 16 bits, and multiplies from registers, while the others keep the tensor cores
busy.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.flop_metadata import product
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.launch import in_one_warp
from pallas_kernels.primitives.gemm.operands import whole_groups
from pallas_kernels.primitives.integer_gemm.config import PIECE, IntegerGemmConfig, Problem
from pallas_kernels.primitives.integer_gemm.pipeline import Ring, compute, produce
from pallas_kernels.primitives.integer_gemm.store import Store
from pallas_kernels.primitives.platform import varying_like

_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = {2: 232, 3: 152}
"""Registers of a consumer thread, by number of consumer warpgroups. A multiprocessor has 512 per thread of one
warpgroup."""


def integer_gemm(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    epilogue: Epilogue,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    config: IntegerGemmConfig | None = None,
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
        config: the tiling; its stages are reduced to those that fit.
        name: the kernel's name, for traces.
    """
    rows = x.shape[0]
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if out_dtype.itemsize > 2:  # a panel of 64 columns would be wider than TMA's swizzle
        x = whole_groups(x)
        residual = None if residual is None else whole_groups(residual)
    bits = jnp.iinfo(values.dtype).bits
    config = (config or IntegerGemmConfig()).fitted(
        weight_bits=bits, itemsize=x.dtype.itemsize, out_itemsize=out_dtype.itemsize
    )
    operands = {"scales": scales, "bias": bias, "residual": residual}
    extras = {key: value for key, value in operands.items() if value is not None}
    problem = Problem(
        m=x.shape[0],
        n=values.shape[0],
        k=x.shape[1],
        integers=values.dtype,
        dtype=x.dtype,
        config=config,
    )
    y = _launch(problem, epilogue, x, values, extras, out_dtype, name)
    return varying_like(y[:rows], x, values, *extras.values())


def _launch(problem: Problem, epilogue: Epilogue, x, values, extras, out_dtype: jnp.dtype, name: str) -> jax.Array:
    config, warpgroups, result_form = problem.config, problem.config.warpgroups, problem.result_form(out_dtype)

    def body(x_ref, w_ref, extra_refs, out_ref, ring_refs, buffers, loaded):
        warpgroup = lax.axis_index("warpgroup")
        ring = Ring(problem=problem, **{**ring_refs, "x": problem.x_form.tiles(ring_refs["x"])})

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            in_one_warp(partial(produce, ring, x_ref, w_ref), x_ref, w_ref)()

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[warpgroups], action="increase")
            store = Store(
                problem=problem,
                epilogue=epilogue,
                extras=extra_refs,
                out=out_ref,
                buffer=result_form.tiles(buffers).at(warpgroup),
                loaded=loaded,
                warpgroup=warpgroup,
            )
            compute(ring, store, warpgroup)

    body.__name__ = name
    kernel = settings.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), out_dtype),
        grid=(problem.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            Ring.scratch(problem),
            result_form.scratch(warpgroups, config.slots, PIECE),
            plgpu.Barrier(num_barriers=warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        products=product(problem.m, problem.n, problem.k, problem.dtype),
    )
    return kernel(x, values, extras)
