"""The product of many rows with int8 or int4 weights, one scale an output: out^T = w x^T.

Persistent blocks: one warpgroup brings operands by TMA, two compute. Each reads its 64 columns of weights into
registers, makes 16-bit values of them, and multiplies from there, while the other one keeps the tensor cores busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.few_rows.weights import integer_tiles, load_integers, widened
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.operands import whole_groups
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.integer_gemm.config import GROUP, IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.lanes import is_in_lanes, load_lanes, unit, widened_lanes
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.transposed import load_transposed, store_transposed

_PART = 64
"""Of a step's depth, that is widened while the tensor cores have the part before."""
_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = {2: 232, 3: 152}
"""By how many warpgroups compute: a multiprocessor has 512 for as many threads as a warpgroup has."""


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
        values: (N, K), int8, int4, or uint8 in the order of `lanes.py`; N a multiple of 64. K is a multiple of 128, or
            256 with int4.
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
    operands = {"scales": scales, "bias": bias, "residual": residual}
    extras = {key: value for key, value in operands.items() if value is not None}
    job = _Job(
        m=x.shape[0],
        n=values.shape[0],
        k=x.shape[1],
        bits=bits,
        in_lanes=is_in_lanes(values.dtype),
        dtype=x.dtype,
        config=config,
    )
    y = _launch(job, epilogue, x, values, extras, out_dtype, name)
    return varying_like(y[:rows], x, values, *extras.values())


@dataclass(frozen=True, kw_only=True)
class _Job:
    m: int
    n: int
    k: int
    bits: int
    in_lanes: bool
    dtype: jnp.dtype
    config: IntegerGemmConfig

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along rows and columns, these in units of a cluster's."""
        return pl.cdiv(self.m, self.config.rows), pl.cdiv(self.n, self.config.cluster * self.config.columns)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.k, self.config.depth)

    def left(self, values: jax.Array) -> jax.Array:
        """The operand in registers that is made of integers."""
        if self.in_lanes:
            return widened_lanes(values, self.dtype)
        return widened(plgpu.layout_cast(values, plgpu.Layout.WGMMA), self.dtype)

    @property
    def blocks(self) -> int:
        """That run, each on a multiprocessor; or clusters of them."""
        return max(1, min(target_device().core_count // self.config.cluster, self.grid[0] * self.grid[1]))

    @property
    def low_tiles(self) -> int:
        """The last tiles, which `config.last_rows` cuts into lower ones; 0 where those would be too many."""
        left = self.grid[0] * self.grid[1] % self.blocks
        return left if self.config.last_rows and left * self.config.rows <= self.blocks * self.config.last_rows else 0

    def for_each_tile(self, work) -> jax.Array:
        """Calls work(row, column, steps before, rows) for each of the block's tiles; the number of all its steps."""
        config, (rows, columns) = self.config, self.grid
        high_tiles = rows * columns - self.low_tiles

        def place(number):
            i, j = plgpu.planar_snake(number, (rows, columns), 0, min(config.group, rows))
            if config.cluster > 1:
                j = config.cluster * j + lax.axis_index("cluster")
            return i * config.rows, j * config.columns

        @plgpu.nd_loop((high_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def steps(info, carry):
            work(*place(info.index[0]), carry, config.rows)
            return carry + self.steps

        if not self.low_tiles:
            return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry
        block, pieces = lax.axis_index("block"), config.rows // config.last_rows
        has_one = block < self.low_tiles * pieces

        @pl.when(has_one)
        def _():
            row, column = place(high_tiles + lax.div(block, pieces))
            work(row + lax.rem(block, pieces) * config.last_rows, column, steps, config.last_rows)

        return steps + jnp.where(has_one, self.steps, 0)  # pyright: ignore[reportOperatorIssue]: likewise


def _launch(job: _Job, epilogue: Epilogue, x, values, extras, out_dtype: jnp.dtype, name: str) -> jax.Array:
    config, warpgroups = job.config, job.config.warpgroups

    def body(x_ref, w_ref, extra_refs, out_ref, ring, buffers, brought):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            _produce(job, x_ref, w_ref, ring)

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[warpgroups], action="increase")
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
    barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if config.cluster > 1 else plgpu.Barrier
    kernel = settings.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((job.m, job.n), out_dtype),
        grid=(job.blocks,),
        grid_names=("block",),
        **({"cluster": (config.cluster,), "cluster_names": ("cluster",)} if config.cluster > 1 else {}),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            {
                "w": integer_tiles((stages, config.columns, config.depth), values.dtype),
                "x": shared((stages, config.rows, config.depth), x.dtype, swizzle=128),
                "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                "empty": barrier(num_arrivals=warpgroups, num_barriers=stages),
            },
            shared((warpgroups, config.store_slots, config.store_rows, GROUP), out_dtype),
            plgpu.Barrier(num_barriers=warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(x, values, extras)


def _produce(job: _Job, x_ref: Any, w_ref: Any, ring: Mapping[str, Any]) -> None:
    config = job.config

    def tile(row, column, before, rows):
        def step(i, _):
            stage = lax.rem(before + i, config.stages)

            @pl.when(before + i >= config.stages)
            def _():
                plgpu.barrier_wait(ring["empty"].at[stage])

            depth = pl.ds(i * config.depth, config.depth)
            full = ring["full"].at[stage]
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(column, config.columns), depth], ring["w"].at[stage], full)
            place = ring["x"].at[stage, pl.ds(0, rows)]
            axes = "cluster" if config.cluster > 1 else None
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, rows), depth], place, full, collective_axes=axes)

        lax.fori_loop(0, job.steps, step, None)

    total = job.for_each_tile(tile)

    # No barrier may be left with an arrival that nobody has seen.
    def drain(i, _):
        plgpu.barrier_wait(ring["empty"].at[lax.rem(i, config.stages)])

    lax.fori_loop(jnp.maximum(total - config.stages, 0), total, drain, None)


def _compute(job: _Job, ring: Mapping[str, Any], store: _Store, warpgroup: jax.Array) -> None:
    config = job.config

    def tile(row, column, before, rows):
        column = column + warpgroup * GROUP
        vectors = store.vectors(column)

        def integers(i):
            stage = lax.rem(before + i, config.stages)
            plgpu.barrier_wait(ring["full"].at[stage])
            ref = ring["w"].at[stage, pl.ds(warpgroup * GROUP, GROUP)]
            return load_lanes(ref) if job.in_lanes else load_integers(ref, job.bits)

        def multiply_by(accumulator, values, i, start=0):
            stage = lax.rem(before + i, config.stages)
            right = ring["x"].at[stage, pl.ds(0, rows), pl.ds(start, values.shape[1])].transpose((1, 0))
            plgpu.wgmma(accumulator, job.left(values), right)

        def release(i):
            plgpu.commit_smem()  # what TMA may overwrite has been read
            plgpu.barrier_arrive(ring["empty"].at[lax.rem(before + i, config.stages)])

        def multiply(accumulator):
            def step(i, values):
                multiply_by(accumulator, values, i)
                later = integers(i + 1)  # meanwhile
                plgpu.wgmma_wait(0)
                release(i)
                return later

            last = lax.fori_loop(0, job.steps - 1, step, integers(0))
            multiply_by(accumulator, last, job.steps - 1)
            plgpu.wgmma_wait(0)
            release(job.steps - 1)
            store.finish(accumulator[...], vectors, row, column)

        def multiply_parts(accumulator):
            # Two parts a turn at least: the registers of a part are its product's until the next one is under way.
            turn = max(1, 2 * _PART // config.depth)

            def steps(number, _):
                for i in range(turn):
                    step = number * turn + i
                    values = integers(step)
                    for start in range(0, config.depth, _PART):
                        multiply_by(accumulator, values[:, start : start + _PART], step, start)
                        plgpu.wgmma_wait(1)
                        if start == 0:
                            pl.when(step > 0)(partial(release, step - 1))

            lax.fori_loop(0, job.steps // turn, steps, None)
            plgpu.wgmma_wait(0)
            release(job.steps - 1)
            store.finish(accumulator[...], vectors, row, column)

        multiply = multiply_parts if config.in_parts else multiply
        pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((GROUP, rows), jnp.float32))

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

    def vectors(self, column: jax.Array) -> dict[str, jax.Array]:
        """What there is of scales and bias for the 64 columns from there, before their products."""
        first = jnp.minimum(column, self.job.n - GROUP)  # of columns behind the last, nothing is stored
        layout = plgpu.Layout.WGMMA.reduce(1)
        found = {
            name: plgpu.load(self.extras[name].at[pl.ds(first, GROUP)], layout=layout, optimized=False)
            for name in ("scales", "bias")
            if name in self.extras
        }
        return {name: vector.astype(jnp.float32) for name, vector in found.items()}

    def finish(self, product: jax.Array, vectors: Mapping[str, jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the results of the tile that begins there."""
        if self.job.n > GROUP:
            self._finish(product, vectors, row, column)
        else:
            # TMA leaves out columns behind the last, but Mosaic GPU gives it no place along a dimension of one group:
            # it would store those over the first.
            pl.when(column == 0)(partial(self._finish, product, vectors, row, column))

    def _finish(self, product: jax.Array, vectors: Mapping[str, jax.Array], row: jax.Array, column: jax.Array) -> None:
        config = self.job.config
        scale, bias = vectors["scales"], vectors.get("bias")
        scale = scale / unit(self.job.dtype) if self.job.in_lanes else scale
        for piece, start in enumerate(range(0, product.shape[1], config.store_rows)):
            shape = (GROUP, min(config.store_rows, product.shape[1] - start))
            buffer = self.buffer.at[piece % config.store_slots, pl.ds(0, shape[1])]
            place = (pl.ds(row + start, shape[1]), pl.ds(column, GROUP))
            plgpu.wait_smem_to_gmem(config.store_slots - 1, wait_read_only=True)
            residual = None
            if "residual" in self.extras:
                arrived = self.brought.at[self.warpgroup]
                plgpu.copy_gmem_to_smem(self.extras["residual"].at[place], buffer, arrived)
                plgpu.barrier_wait(arrived)
                residual = load_transposed(buffer)
            (value,) = self.epilogue.apply(
                [product[:, start : start + shape[1]] * lax.broadcast_in_dim(scale, shape, (0,))],
                scale=None,
                bias=None if bias is None else lax.broadcast_in_dim(bias, shape, (0,)),
                residual=residual,
                dtype=self.out.dtype,
            )
            store_transposed(value, buffer)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, self.out.at[place])
