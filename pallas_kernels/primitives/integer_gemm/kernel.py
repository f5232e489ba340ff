"""The product of many rows with int8 or int4 weights, one scale an output: out^T = w x^T.

Persistent blocks: one warpgroup brings operands by TMA, two compute. Each reads its 64 columns of weights into
registers, makes 16-bit values of them, and multiplies from there, while the other one keeps the tensor cores busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.weights import integer_tiles, load_integers, widened
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.operands import padded_vector, whole_groups
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.integer_gemm.config import COLUMNS, WARPGROUPS, IntegerGemmConfig
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.transposed import load_transposed, store_transposed

_GROUP = COLUMNS // WARPGROUPS
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


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
        values: (N, K), int8 or int4; N a multiple of 64. K is a multiple of 128, or 256.
        scales: (N,) float32.
        bias: (N,), any floating dtype of at most 32 bits.
        residual: (M, N) of out_dtype.
        config: the cut; stages are reduced to those that fit.
    """
    rows = x.shape[0]
    x = whole_groups(x)
    residual = None if residual is None else whole_groups(residual)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    bits = jnp.iinfo(values.dtype).bits
    config = (config or IntegerGemmConfig()).fitted(
        weight_bits=bits, itemsize=x.dtype.itemsize, out_itemsize=out_dtype.itemsize
    )
    operands = {"scales": padded_vector(scales, COLUMNS), "bias": padded_vector(bias, COLUMNS), "residual": residual}
    extras = {key: value for key, value in operands.items() if value is not None}
    job = _Job(m=x.shape[0], n=values.shape[0], k=x.shape[1], bits=bits, dtype=x.dtype, config=config)
    y = _launch(job, epilogue, x, values, extras, out_dtype, name)
    return varying_like(y[:rows], x, values, *extras.values())


@dataclass(frozen=True, kw_only=True)
class _Job:
    m: int
    n: int
    k: int
    bits: int
    dtype: jnp.dtype
    config: IntegerGemmConfig

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.m, self.config.rows), pl.cdiv(self.n, COLUMNS)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.k, self.config.depth)

    def for_each_tile(self, work) -> jax.Array:
        """Calls work(row, column, steps before) for each of the block's tiles; the number of all its steps."""
        rows, columns = self.grid

        @plgpu.nd_loop((rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
        def steps(info, carry):
            i, j = plgpu.planar_snake(info.index[0], (rows, columns), 0, min(self.config.group, rows))
            work(i * self.config.rows, j * COLUMNS, carry)
            return carry + self.steps

        return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry


def _launch(job: _Job, epilogue: Epilogue, x, values, extras, out_dtype: jnp.dtype, name: str) -> jax.Array:
    config = job.config
    tiles = job.grid[0] * job.grid[1]

    def body(x_ref, w_ref, extra_refs, out_ref, ring, buffers, brought):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            _produce(job, x_ref, w_ref, ring)

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            store = _Store(
                job=job,
                epilogue=epilogue,
                extras=extra_refs,
                out=out_ref,
                buffer=buffers.at[warpgroup],
                brought=brought,
                warpgroup=warpgroup,
            )
            _compute(job, ring, store, warpgroup)

    body.__name__ = name
    stages = config.stages
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((job.m, job.n), out_dtype),
        grid=(max(1, min(target_device().core_count, tiles)),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            {
                "w": integer_tiles((stages, COLUMNS, config.depth), values.dtype),
                "x": shared((stages, config.rows, config.depth), x.dtype, swizzle=128),
                "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            },
            shared((WARPGROUPS, config.store_slots, config.store_rows, _GROUP), out_dtype),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(x, values, extras)


def _produce(job: _Job, x_ref: Any, w_ref: Any, ring: Mapping[str, Any]) -> None:
    config = job.config

    def tile(row, column, before):
        def step(i, _):
            stage = lax.rem(before + i, config.stages)

            @pl.when(before + i >= config.stages)
            def _():
                plgpu.barrier_wait(ring["empty"].at[stage])

            depth = pl.ds(i * config.depth, config.depth)
            full = ring["full"].at[stage]
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(column, COLUMNS), depth], ring["w"].at[stage], full)
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, config.rows), depth], ring["x"].at[stage], full)

        lax.fori_loop(0, job.steps, step, None)

    total = job.for_each_tile(tile)

    # No barrier may be left with an arrival that nobody has seen.
    def drain(i, _):
        plgpu.barrier_wait(ring["empty"].at[lax.rem(i, config.stages)])

    lax.fori_loop(jnp.maximum(total - config.stages, 0), total, drain, None)


def _compute(job: _Job, ring: Mapping[str, Any], store: _Store, warpgroup: jax.Array) -> None:
    config = job.config

    def tile(row, column, before):
        column = column + warpgroup * _GROUP

        def multiply(accumulator):
            def integers(i):
                stage = lax.rem(before + i, config.stages)
                plgpu.barrier_wait(ring["full"].at[stage])
                return load_integers(ring["w"].at[stage, pl.ds(warpgroup * _GROUP, _GROUP)], job.bits)

            def multiply_by(values, i):
                stage = lax.rem(before + i, config.stages)
                left = widened(plgpu.layout_cast(values, plgpu.Layout.WGMMA), job.dtype)
                plgpu.wgmma(accumulator, left, ring["x"].at[stage].transpose((1, 0)))

            def release(i):
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # what TMA may overwrite has been read
                plgpu.barrier_arrive(ring["empty"].at[lax.rem(before + i, config.stages)])

            def step(i, values):
                multiply_by(values, i)
                later = integers(i + 1)  # meanwhile
                release(i)
                return later

            last = lax.fori_loop(0, job.steps - 1, step, integers(0))
            multiply_by(last, job.steps - 1)
            release(job.steps - 1)
            store.finish(accumulator[...], row, column)

        pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((_GROUP, config.rows), jnp.float32))

    job.for_each_tile(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True, kw_only=True)
class _Store:
    """The epilogue of one warpgroup, in pieces of some rows. Values are (columns, rows)."""

    job: _Job
    epilogue: Epilogue
    extras: Mapping[str, Any]
    out: Any
    buffer: Any
    brought: Any
    warpgroup: jax.Array

    def finish(self, product: jax.Array, row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the results of the tile that begins there."""
        config = self.job.config
        shape = (_GROUP, config.store_rows)
        scale = lax.broadcast_in_dim(self._along_columns("scales", column), shape, (0,))
        bias = None
        if "bias" in self.extras:
            bias = lax.broadcast_in_dim(self._along_columns("bias", column), shape, (0,))
        for piece in range(config.rows // config.store_rows):
            slot = piece % config.store_slots
            start = piece * config.store_rows
            place = (pl.ds(row + start, config.store_rows), pl.ds(column, _GROUP))
            plgpu.wait_smem_to_gmem(config.store_slots - 1, wait_read_only=True)
            residual = None
            if "residual" in self.extras:
                arrived = self.brought.at[self.warpgroup]
                plgpu.copy_gmem_to_smem(self.extras["residual"].at[place], self.buffer.at[slot], arrived)
                plgpu.barrier_wait(arrived)
                residual = load_transposed(self.buffer.at[slot])
            (value,) = self.epilogue.apply(
                [product[:, start : start + config.store_rows] * scale],
                scale=None,
                bias=bias,
                residual=residual,
                dtype=self.out.dtype,
            )
            store_transposed(value, self.buffer.at[slot])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.buffer.at[slot], self.out.at[place])

    def _along_columns(self, name: str, column: jax.Array) -> jax.Array:
        ref = self.extras[name].at[pl.ds(column, _GROUP)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.float32)
