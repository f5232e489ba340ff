"""Turns accumulators into results: sums over a cluster, the epilogue, and the stores.

Values are (columns, tokens) in registers; results are (tokens, columns) in device memory.
"""

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

from pallas_kernels.primitives.few_rows.heads import load_angles, rotated
from pallas_kernels.primitives.few_rows.norm import PrologueNorm
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.gemm.epilogue import Epilogue, Rotation
from pallas_kernels.primitives.integers import unit
from pallas_kernels.primitives.row_tiles import RowTiles, shared
from pallas_kernels.primitives.transposed import GROUP, load_transposed, store_transposed


def _store(
    problem: Problem,
    outputs: Sequence[Any],
    values: Sequence[Sequence[jax.Array]],
    columns: Sequence[jax.Array],
    buffers: Sequence[RowTiles],
    slots: Sequence[int],
) -> None:
    """Stores each group's results by TMA: `GROUP` columns from each of `columns` on.

    slots: each group's slot in the buffers. buffers: one per output, or one for all outputs.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for slot, results in zip(slots, values, strict=True):
        for value, buffer in zip(results, buffers, strict=True):
            store_transposed(value, buffer.at(slot).only_panel)
    plgpu.commit_smem()
    for slot, column in zip(slots, columns, strict=True):
        places = _places(problem, outputs, column)
        for buffer, (output, start, is_own) in zip([*buffers] * (len(places) // len(buffers)), places, strict=True):
            place = output.at[pl.ds(0 * start, problem.tokens), pl.ds(start, GROUP)]
            copy = partial(buffer.at(slot).send, place)
            copy() if is_own is None else pl.when(is_own)(copy)


def _places(problem: Problem, outputs: Sequence[Any], column: jax.Array) -> list[tuple[Any, jax.Array, Any]]:
    """Returns each output, the group's first column in it, and whether the group belongs to it; None if it always does.

    TMA does not store columns after the last one.
    """
    if len(problem.widths) == 1:
        return [(output, column, None) for output in outputs]
    owners = problem.owners(column)
    return [(output, column - first, is_own) for output, (is_own, first) in zip(outputs, owners, strict=True)]


def epilogue_types(problem: Problem) -> dict[str, Any]:
    """Returns the scratch types of `Finish`'s members."""
    others, bundles, groups = problem.others, problem.own_bundles, problem.own_bundles * problem.members
    results = [problem.result_form(dtype).scratch(groups, problem.tokens) for dtype in problem.out_dtypes]
    types: dict[str, Any] = {"results": results}
    if others:
        shape = (bundles, others, GROUP, problem.tokens)
        types["arriving"] = [shared(shape, jnp.dtype(jnp.float32)) for _ in range(problem.parts)]
        types["arrived"] = plgpu.Barrier(num_arrivals=others * problem.parts, num_barriers=bundles)
        types["taken"] = plgpu.Barrier(num_barriers=bundles)
    if problem.residual_dtype is not None:
        types["residual"] = problem.result_form(problem.residual_dtype).scratch(groups, problem.tokens)
        types["loaded"] = plgpu.Barrier(num_barriers=groups)
    return types


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The operands of a group that are loaded before its products.

    scales, biases: of the group's columns, for each of the weights; empty where there are none.
    angles: cosines and sines of a head's first half, or None. They are computed while the first weights are loaded.
    """

    scales: Sequence[jax.Array]
    biases: Sequence[jax.Array]
    angles: tuple[jax.Array, jax.Array] | None = None


def _along_columns(ref: Any, column: jax.Array) -> jax.Array:
    values = plgpu.load(ref.at[pl.ds(column, GROUP)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return values.astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a block's tiles. Values are (columns, tokens), as in the transposed product.

    extras: the operands given, in device memory: bias (of each product), scale (of rows), scales (of columns, for each
        of the weights), residual, and the arrays of `rotation` and `norm`. Vectors are padded to whole tiles.
    outputs: one for each of the problem's `widths`, or several for one product.
    rank: the block's number in its cluster. warpgroup: the warpgroup's number in the block.
    results: for each output, (own groups, tokens, 64) in shared memory.
    arriving: for each product of each member of a bundle, and for x's squares, the sums from other warpgroups: (own
        bundles, other warpgroups, 64, tokens) float32 in shared memory.
    arrived: barriers, passed when the sums of a bundle have arrived.
    taken: barriers, passed when the sums of a bundle have been read, so that those of the next tile may be sent.
    residual: (own groups, tokens, 64) in shared memory. loaded: its barriers.
    rotation: of heads, or None. norm: of x's rows, or None.
    """

    problem: Problem
    epilogue: Epilogue
    extras: Mapping[str, Any]
    outputs: Sequence[Any]
    rank: jax.Array
    warpgroup: jax.Array
    results: Sequence[RowTiles] = ()
    arriving: Sequence[Any] = ()
    arrived: Any = None
    taken: Any = None
    residual: RowTiles | None = None
    loaded: Any = None
    rotation: Rotation | None = None
    norm: PrologueNorm | None = None

    def begin(self, column: jax.Array) -> list[Ready]:
        """Starts the load of the residual and reads each group's operands, before the products of the tile there."""
        if self.residual is not None:
            for group in range(self.problem.groups):  # every group is a bundle: heads have no residual
                self._if_own(group, lambda group=group: self._load_residual(group, column))
        starts = [column + group * GROUP for group in range(self.problem.groups)]
        scales = self.extras.get("scales", ())
        factor = 1 / unit(self.problem.weight_dtype, self.problem.dtype)
        biases = jax.tree.leaves(self.extras.get("bias"))
        firsts = [bundle[0] for bundle in self.problem.bundles]

        def angles(group: int) -> tuple[jax.Array, jax.Array] | None:
            if self.rotation is None or group not in firsts:
                return None
            return load_angles(self.rotation, self.extras, group)

        return [
            Ready(
                scales=[_along_columns(ref, start) * factor for ref in scales],
                biases=[_along_columns(ref, start) for ref in biases],
                angles=angles(group),
            )
            for group, start in enumerate(starts)
        ]

    def end(
        self,
        products: Sequence[jax.Array],
        squares: jax.Array | None,
        column: jax.Array,
        ready: Sequence[Ready],
        *,
        is_first: jax.Array,
        is_last: jax.Array,
    ) -> None:
        """Adds up the products of the tile at a column over the cluster, and finishes the warpgroup's own bundles.

        products: 64 columns each, first those of the first weights, then of the next.
        squares: the sums of x's squares for a norm, or None. is_first, is_last: of the block's tiles.
        """
        for number, bundle in enumerate(self.problem.bundles):
            parts = [part for group in bundle for part in products[group :: self.problem.groups]]
            parts += [] if squares is None else [squares]
            if self.problem.others:
                pl.when(~self._owns(number))(partial(self._send, parts, number, is_first))

            def finish(parts=parts, number=number, bundle=bundle):
                sums = self._sums(parts, number // self.problem.config.splits, is_last)
                columns = [column + group * GROUP for group in bundle]
                self._finish(sums, number, columns, [ready[group] for group in bundle])

            self._if_own(number, finish)

    def _owner(self, bundle: int) -> tuple[int, int]:
        """Returns the block and the warpgroup that finish a bundle of column groups."""
        config = self.problem.config
        # Sums over columns use scratch that the warpgroups of a block share, so one warpgroup finishes a norm.
        warpgroups = 1 if self.norm is not None else config.warpgroups
        return bundle % config.splits, bundle // config.splits % warpgroups

    def _owns(self, bundle: int) -> jax.Array:
        rank, warpgroup = self._owner(bundle)
        return (self.rank == rank) & (self.warpgroup == warpgroup)

    def _if_own(self, bundle: int, work) -> None:
        if self.problem.others:
            pl.when(self._owns(bundle))(work)
        else:
            work()

    def _send(self, parts: Sequence[jax.Array], bundle: int, is_first: jax.Array) -> None:
        config, others = self.problem.config, self.problem.others
        rank, warpgroup = self._owner(bundle)
        slot = bundle // config.splits
        # The warpgroup's number among the others, counted from the owner on.
        own = self.rank * config.warpgroups + self.warpgroup
        turn = lax.rem(own + others - rank * config.warpgroups - warpgroup, others + 1)
        if config.splits == 1:
            pl.when(~is_first)(lambda: plgpu.barrier_wait(self.taken.at[slot]))
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

    def _sums(self, parts: Sequence[jax.Array], slot: int, is_last: jax.Array) -> list[jax.Array]:
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
            pl.when(~is_last)(lambda: plgpu.barrier_arrive(self.taken.at[slot]))
        return sums

    def _finish(
        self, sums: Sequence[jax.Array], number: int, columns: Sequence[jax.Array], ready: Sequence[Ready]
    ) -> None:
        """Computes and stores the results of a bundle.

        sums: all products of the bundle's first group, then of the next, then the squares. columns: the first column of
        each group.
        """
        members, count = len(columns), self.problem.products
        slots = [number // self.problem.config.splits * members + i for i in range(members)]
        scale = self._scale() if self.norm is None else self.norm.factors(self.problem, sums[-1])
        values = [
            self._epilogue(sums[i * count : (i + 1) * count], slot, own, scale)
            for i, (slot, own) in enumerate(zip(slots, ready, strict=True))
        ]
        if self.rotation is not None:
            assert ready[0].angles is not None
            (cosine, sine), end = ready[0].angles, self.problem.spans[-1][0]
            values = [(half,) for half in rotated([half for (half,) in values], cosine, sine, columns[0], end)]
        _store(self.problem, self.outputs, values, columns, self.results, slots)

    def _epilogue(
        self, products: Sequence[jax.Array], slot: int, ready: Ready, scale: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        shape = (GROUP, self.problem.tokens)
        if ready.scales:
            wide = [lax.broadcast_in_dim(scale, shape, (0,)) for scale in ready.scales]
            products = [product * scale for product, scale in zip(products, wide, strict=True)]
        residual = None
        if self.residual is not None:
            plgpu.barrier_wait(self.loaded.at[slot])
            residual = load_transposed(self.residual.at(slot).only_panel)
        return self.epilogue.apply(
            products,
            scale=scale,
            biases=[lax.broadcast_in_dim(bias, shape, (0,)) for bias in ready.biases],
            residual=residual,
            dtype=self.outputs[0].dtype,
        )

    def _load_residual(self, group: int, column: jax.Array) -> None:
        assert self.residual is not None
        slot = group // self.problem.config.splits
        place = (pl.ds(0 * column, self.problem.tokens), pl.ds(column + group * GROUP, GROUP))
        self.residual.at(slot).load_async(self.extras["residual"].at[place], self.loaded.at[slot])

    def _scale(self) -> jax.Array | None:
        if "scale" not in self.extras:
            return None
        values = plgpu.load(self.extras["scale"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values, (GROUP, self.problem.tokens), (1,))
