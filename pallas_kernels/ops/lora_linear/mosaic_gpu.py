"""The low-rank corrected linear layer forward on Mosaic GPU.

The correction is more depth of the product: [x | alpha x a] @ [w ; b]. What x @ a is needed for that is either an array
by then, which the producer brings as it brings x, or is computed along with x @ w by every block for its own rows, and
goes from its accumulator back to the tensor cores through registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.lora_linear.ahead import lora_linear_ahead
from pallas_kernels.ops.lora_linear.config import DEPTH, LoraConfig, default_config, joint_rank
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.launch import launcher
from pallas_kernels.primitives.gemm.mainloop import Ring, drain, for_each_tile, give_back_last, ring_types, run_steps
from pallas_kernels.primitives.gemm.operands import padded_vector, whole_groups
from pallas_kernels.primitives.gemm.problem import ONE, Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.stated import product


@partial(jax.jit, static_argnames=("alpha", "config"))
def lora_linear_forward(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    alpha: float,
    config: LoraConfig | None = None,
) -> jax.Array:
    """Returns x @ w + alpha (x @ a) @ b + bias, (rows, outputs) in x's dtype.

    x: (rows, features), w: (features, outputs), a: (features, rank), b: (rank, outputs), of one 16-bit dtype. bias:
    (outputs,).
    """
    (rows, features), outputs, rank = x.shape, w.shape[1], a.shape[1]
    config = config or default_config(rows, outputs, features, rank)
    operands = [value for value in (x, w, a, b, bias) if value is not None]
    if config.low == "ahead":
        a, b = jnp.pad(a, ((0, 0), (0, -rank % 8))), jnp.pad(b, ((0, -rank % 8), (0, 0)))
        y = lora_linear_ahead(x, w, a, b, bias, alpha=float(alpha), config=config)
        return varying_like(y, *operands)
    x = whole_groups(x)
    joint = config.low == "inside"
    padding = (joint_rank(rank) if joint else -(-rank // DEPTH) * DEPTH) - rank
    a, b = jnp.pad(a, ((0, 0), (0, padding))), jnp.pad(b, ((0, padding), (0, 0)))
    low = a.T
    if not joint:
        product = jnp.matmul(x, a, preferred_element_type=jnp.float32)
        low = (alpha * product).astype(x.dtype)
    y = _launch(x, w, low, b, bias, alpha=alpha, config=config, name="lora_linear")
    return varying_like(y[:rows], *operands)


def lora_linear_gradient_x(
    dy: jax.Array, w: jax.Array, a: jax.Array, low: jax.Array, *, alpha: float, config: GemmConfig
) -> jax.Array:
    """Returns dy @ w.T + alpha low @ a.T, like x.

    dy: (rows, outputs), w: (features, outputs), a: (features, rank), low: dy @ b.T, (rows, rank) float32.
    """
    rows, rank = dy.shape[0], a.shape[1]
    padding = ((0, 0), (0, -rank % DEPTH))
    low = whole_groups(jnp.pad((alpha * low).astype(dy.dtype), padding))
    dx = _launch(
        whole_groups(dy),
        w,
        low,
        jnp.pad(a, padding),
        None,
        alpha=1.0,
        config=LoraConfig(product=config, low="before"),
        name="lora_linear_gradient_x",
        transpose_b=True,
    )
    return varying_like(dx[:rows], dy, w, a, low)


def _launch(x, w, low, b, bias, *, alpha, config, name, transpose_b=False):
    """low: (rank, features) where x @ a is computed inside, else x @ a itself, (rows, rank)."""
    (rows, features), dtype = x.shape, x.dtype
    outputs, rank = (w.shape[0], b.shape[1]) if transpose_b else (w.shape[1], b.shape[0])
    cut, joint = config.fitted(rank=rank, itemsize=dtype.itemsize), config.low == "inside"
    # What the correction takes from b comes in steps that follow those of x and w.
    depth = -(-features // cut.tile_k) + -(-rank // cut.tile_k)
    problem = Problem(
        m=rows,
        widths=(outputs,),
        k=depth * cut.tile_k,
        dtype=dtype,
        products=ONE,
        transpose_a=False,
        transpose_b=transpose_b,
        config=cut,
    )
    loop = LoraLoop(problem=problem, joint=joint, own_steps=-(-features // cut.tile_k), rank=rank, alpha=float(alpha))
    pieces = Pieces.of(problem)

    def roles(x_ref, w_ref, low_ref, b_ref, extra_refs, y_ref, ring_refs, low_buffers, buffers, arrived):
        ring = Ring(problem=problem, **ring_refs)

        def multiply(warpgroup):
            store = Store.of_one_result(
                pieces,
                extras=extra_refs,
                output=y_ref,
                buffer=buffers.at[warpgroup],
                arrived=arrived,
                warpgroup=warpgroup,
            )
            loop.compute(ring, low_buffers, store, warpgroup)

        return partial(loop.produce, x_ref, w_ref, low_ref, b_ref, ring, low_buffers), multiply

    ring_scratch = ring_types(problem, 1, 1)
    if joint:
        ring_scratch["full"] = plgpu.Barrier(num_arrivals=3, num_barriers=cut.stages)
    low_scratch = [shared((cut.stages, rank, cut.tile_k), dtype, swizzle=problem.swizzle)] if joint else []
    products = product(rows, outputs, features + rank, dtype)
    kernel = launcher(
        problem,
        roles,
        name=name,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        scratch_types=(
            ring_scratch,
            low_scratch,
            shared((cut.warpgroups, pieces.slots, pieces.rows, pieces.columns), dtype),
            plgpu.Barrier(num_barriers=cut.warpgroups * pieces.slots),
        ),
        products=products + product(rows, rank, features, dtype) if joint else products,
    )
    extras = {} if bias is None else {"bias": padded_vector(bias, cut.tile_n)}
    return kernel(x, w, low, b, extras)


@dataclass(frozen=True, kw_only=True)
class LoraLoop:
    """The steps of a tile: first `own_steps` of x and w, then those of the correction. See `config.LoraConfig`.

    rank: filled up. In the latter steps b's tile lies where w's did, and (alpha x @ a)'s where x's did, if it is an
    array.
    """

    problem: Problem
    joint: bool
    own_steps: int
    rank: int
    alpha: float

    def produce(self, x_ref: Any, w_ref: Any, low_ref: Any, b_ref: Any, ring: Ring, low_buffers: Sequence[Any]) -> None:
        """As `mainloop.produce`."""
        problem, config = self.problem, self.problem.config
        shared_b = "cluster" if config.cluster == "m" else None
        depth = config.tile_k

        def tile(row, column, _, before):
            rows, columns = pl.ds(row, config.tile_m), pl.ds(column, config.tile_n)

            def step(i, _):
                stage = lax.rem(before + i, config.stages)
                full = ring.full.at[stage]

                @pl.when(before + i >= config.stages)
                def _():
                    plgpu.barrier_wait(ring.empty.at[stage])

                def bring_left(ref, start):
                    plgpu.copy_gmem_to_smem(ref.at[rows, pl.ds(start, depth)], ring.a[0].at[stage], full)

                def bring_right(ref, start):
                    index = (columns, pl.ds(start, depth)) if problem.transpose_b else (pl.ds(start, depth), columns)
                    plgpu.copy_gmem_to_smem(ref.at[index], ring.b[0].at[stage], full, collective_axes=shared_b)

                @pl.when(i < self.own_steps)
                def _():
                    bring_left(x_ref, i * depth)
                    bring_right(w_ref, i * depth)
                    if self.joint:
                        low = low_ref.at[:, pl.ds(i * depth, depth)]
                        plgpu.copy_gmem_to_smem(low, low_buffers[0].at[stage], full)

                @pl.when(i >= self.own_steps)
                def _():
                    start = (i - self.own_steps) * depth
                    bring_right(b_ref, start)
                    if not self.joint:
                        bring_left(low_ref, start)
                    else:
                        plgpu.barrier_arrive(full)
                        plgpu.barrier_arrive(full)

            lax.fori_loop(0, problem.steps, step, None)

        drain(ring.empty, config.stages, for_each_tile(problem, tile))

    def compute(self, ring: Ring, low_buffers: Sequence[Any], store: Store, warpgroup: jax.Array) -> None:
        """As `mainloop.compute`, for warpgroups that share a tile's rows."""
        problem, config = self.problem, self.problem.config
        rows = config.warpgroup_rows
        first_row = warpgroup * rows
        own = pl.ds(first_row, rows)

        def tile(row, column, _, before):
            store.begin(row + first_row, column)

            def multiply(accumulator, *low):
                def issue(_, stage):
                    left, right = ring.a[0].at[stage, own], ring.b[0].at[stage]
                    plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if problem.transpose_b else right)
                    if self.joint:
                        plgpu.wgmma(low[0], left, low_buffers[0].at[stage].transpose((1, 0)))

                steps = self.own_steps if self.joint else problem.steps
                run_steps(ring, issue, steps, before, products=2 if self.joint else 1)
                if self.joint:
                    inner = (low[0][...] * self.alpha).astype(problem.dtype)
                    give_back_last(ring, steps, before)
                    # Behind b's rows there are zeros, so that anything may stand in the columns that meet them.
                    inner = jnp.concatenate([inner] * (config.tile_k // self.rank), axis=1)
                    stage = lax.rem(before + self.own_steps, config.stages)
                    plgpu.barrier_wait(ring.full.at[stage])
                    plgpu.wgmma(accumulator, inner, ring.b[0].at[stage])
                value = accumulator[...]
                give_back_last(ring, problem.steps, before, pending=1 if self.joint else None)
                if store.pieces.count % store.pieces.slots:
                    # The next tile would begin with a buffer by which the last one's results may still leave.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store.finish([value], row + first_row, column)

            types = [plgpu.WGMMAAccumulatorRef((rows, config.tile_n), jnp.float32)]
            if self.joint:
                types.append(plgpu.WGMMAAccumulatorRef((rows, self.rank), jnp.float32))
            pl.run_scoped(multiply, *types)

        for_each_tile(problem, tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
