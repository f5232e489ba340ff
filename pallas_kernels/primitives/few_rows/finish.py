"""From the accumulators to the results: sums over a cluster, epilogue, and the way out through shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.config import GROUP
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.transposed import load_transposed, store_transposed


def finish_types(problem: Problem) -> dict[str, Any]:
    """Scratch types of `Finish`'s members."""
    others, groups = problem.others, problem.own_groups
    types: dict[str, Any] = {
        "results": [plgpu.SMEM((groups, problem.tokens, GROUP), dtype) for dtype in problem.out_dtypes]
    }
    if others:
        shape = (groups, others, GROUP, problem.tokens)
        types["arriving"] = [shared(shape, jnp.dtype(jnp.float32)) for _ in range(problem.products)]
        types["arrived"] = plgpu.Barrier(num_arrivals=others * problem.products, num_barriers=groups)
        types["taken"] = plgpu.Barrier(num_barriers=groups)
    if problem.residual_dtype is not None:
        types["residual"] = plgpu.SMEM((groups, problem.tokens, GROUP), problem.residual_dtype)
        types["brought"] = plgpu.Barrier(num_barriers=groups)
    return types


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What was read before a group's products: a scale for each of its columns and weights, if any, and the bias."""

    scales: Sequence[jax.Array]
    bias: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tile begins, and whether it is the block's first and last one."""

    column: jax.Array
    is_first: jax.Array
    is_last: jax.Array


def _along_columns(ref: Any, column: jax.Array) -> jax.Array:
    values = plgpu.load(ref.at[pl.ds(column, GROUP)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return values.astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a block's tiles. Values are (columns, tokens): the product is made transposed.

    extras: what there is of bias, scale (of rows), scales (of columns, for each of the weights; all of these vectors in
        device memory, long enough for whole tiles) and residual.
    rank: of the block in its cluster. warpgroup: in the block.
    results: of each output, (own groups, tokens, 64) in shared memory. residual, brought: likewise, and its barriers.
    arriving: of each product, (own groups, other warpgroups, 64, tokens) float32; arrived: its barriers. taken: of the
        way back, for the next tile.
    """

    problem: Problem
    epilogue: Epilogue
    extras: Mapping[str, Any]
    outputs: Sequence[Any]
    rank: jax.Array
    warpgroup: jax.Array
    results: Sequence[Any]
    arriving: Sequence[Any] = ()
    arrived: Any = None
    taken: Any = None
    residual: Any = None
    brought: Any = None

    def begin(self, column: jax.Array) -> list[Ready]:
        """Before the products of the tile that begins there: what each group will need, and the residual sent for."""
        if self.residual is not None:
            for group in range(self.problem.groups):
                self._if_own(group, lambda group=group: self._bring(group, column))
        starts = [column + group * GROUP for group in range(self.problem.groups)]
        scales = self.extras.get("scales", ())
        bias = self.extras.get("bias")
        return [
            Ready(
                scales=[_along_columns(ref, start) for ref in scales],
                bias=None if bias is None else _along_columns(bias, start),
            )
            for start in starts
        ]

    def end(self, products: Sequence[jax.Array], place: Place, ready: Sequence[Ready]) -> None:
        """After them. products: of the first weights, 64 columns each, then of the next."""
        for group in range(self.problem.groups):
            parts = products[group :: self.problem.groups]
            slot = group // self.problem.config.splits
            if self.problem.others:
                pl.when(~self._owns(group))(partial(self._send, parts, group, place))

            def finish(parts=parts, slot=slot, group=group):
                sums = self._sums(parts, slot, place)
                self._finish(sums, slot, place.column + group * GROUP, ready[group])

            self._if_own(group, finish)

    def _owner(self, group: int) -> tuple[int, int]:
        """The block and warpgroup that finish a group of columns."""
        config = self.problem.config
        return group % config.splits, group // config.splits % config.warpgroups

    def _owns(self, group: int) -> jax.Array:
        rank, warpgroup = self._owner(group)
        return (self.rank == rank) & (self.warpgroup == warpgroup)

    def _if_own(self, group: int, work) -> None:
        if self.problem.others:
            pl.when(self._owns(group))(work)
        else:
            work()

    def _send(self, parts: Sequence[jax.Array], group: int, place: Place) -> None:
        config, others = self.problem.config, self.problem.others
        rank, warpgroup = self._owner(group)
        slot = group // config.splits
        # The warpgroups that come after the owner in turn, counted from there.
        own = self.rank * config.warpgroups + self.warpgroup
        turn = lax.rem(own + others - rank * config.warpgroups - warpgroup, others + 1)
        if config.splits == 1:
            pl.when(~place.is_first)(lambda: plgpu.barrier_wait(self.taken.at[slot]))
        for part, arriving in zip(parts, self.arriving, strict=True):
            if config.splits > 1:
                plgpu.async_store_smem(
                    part,
                    arriving.at[slot, turn],
                    self.arrived.at[slot],
                    cluster_idx=jnp.int32(rank),
                    cluster_dim="cluster",
                )
            else:
                arriving[slot, turn] = part
                plgpu.barrier_arrive(self.arrived.at[slot])

    def _sums(self, parts: Sequence[jax.Array], slot: int, place: Place) -> list[jax.Array]:
        others = self.problem.others
        if not others:
            return list(parts)
        plgpu.barrier_wait(self.arrived.at[slot])
        sums = []
        for part, arriving in zip(parts, self.arriving, strict=True):
            for turn in range(others):
                part = part + plgpu.load(arriving.at[slot, turn], layout=plgpu.Layout.WGMMA)
            sums.append(part)
        if self.problem.config.splits == 1:
            pl.when(~place.is_last)(lambda: plgpu.barrier_arrive(self.taken.at[slot]))
        return sums

    def _finish(self, products: Sequence[jax.Array], slot: int, column: jax.Array, ready: Ready) -> None:
        shape = (GROUP, self.problem.tokens)
        if ready.scales:
            wide = [lax.broadcast_in_dim(scale, shape, (0,)) for scale in ready.scales]
            products = [product * scale for product, scale in zip(products, wide, strict=True)]
        residual = None
        if self.residual is not None:
            plgpu.barrier_wait(self.brought.at[slot])
            residual = load_transposed(self.residual.at[slot])
        values = self.epilogue.apply(
            products,
            scale=self._scale(),
            bias=None if ready.bias is None else lax.broadcast_in_dim(ready.bias, shape, (0,)),
            residual=residual,
            dtype=self.outputs[0].dtype,
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for value, buffer in zip(values, self.results, strict=True):
            store_transposed(value, buffer.at[slot])
        plgpu.commit_smem()
        for buffer, output in zip(self.results, self.outputs, strict=True):
            place = output.at[pl.ds(0 * column, self.problem.tokens), pl.ds(column, GROUP)]
            plgpu.copy_smem_to_gmem(buffer.at[slot], place)

    def _bring(self, group: int, column: jax.Array) -> None:
        slot = group // self.problem.config.splits
        place = (pl.ds(0 * column, self.problem.tokens), pl.ds(column + group * GROUP, GROUP))
        plgpu.copy_gmem_to_smem(self.extras["residual"].at[place], self.residual.at[slot], self.brought.at[slot])

    def _scale(self) -> jax.Array | None:
        if "scale" not in self.extras:
            return None
        values = plgpu.load(self.extras["scale"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values, (GROUP, self.problem.tokens), (1,))
