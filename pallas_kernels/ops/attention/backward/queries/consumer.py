"""The work of a computing warpgroup: 64 queries, and all tiles of keys that they see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, columns_at_once
from pallas_kernels.ops.attention.backward.queries.producer import Block
from pallas_kernels.ops.attention.backward.tiles import Tile, not_invariant, row_sums
from pallas_kernels.ops.attention.gqa_packing import row_places
from pallas_kernels.ops.attention.problem import LOG2_E
from pallas_kernels.ops.attention.tiles.row_tiles import multiply_across, multiply_down
from pallas_kernels.primitives import compat
from pallas_kernels.primitives.random import mixed_words

_VECTOR = plgpu.Layout.WGMMA.reduce(1)
"""Of a value for each query."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a warpgroup has of its queries throughout: lse in base 2 and delta as in `rows_of`, and what there is of
    their numbers, their segments, and the dropout key's words."""

    lse: jax.Array
    delta: jax.Array
    numbers: jax.Array | None
    segments: jax.Array | None
    words: Any


@dataclass(frozen=True, kw_only=True)
class Computing:
    """warpgroup: its number in the block."""

    block: Block
    warpgroup: Any

    @cached_property
    def first(self) -> Any:
        """Of its queries."""
        return self.block.first_query + self.warpgroup * WARPGROUP_ROWS

    def run(self) -> None:
        """Computes and stores its part of dquery, and what else the launch makes."""
        held = self._hold()
        sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, self.block.launch.form.size), jnp.float32)
        self._store(pl.run_scoped(lambda dq: self._over_keys(dq, held), sums))

    def _hold(self) -> Held:
        block, extras = self.block, self.block.refs.extras
        words = mixed_words(extras["words"]) if "words" in extras else None
        lse, delta = self._made_rows() if block.launch.makes_rows else self._given_rows()
        segments = None
        numbers = None if block.launch.period is None else self._numbers()
        if block.scratch.key_segments is not None:
            segments = _row_values(extras["query_segments"].at[block.b, pl.ds(self.first, WARPGROUP_ROWS)])
        return Held(lse=lse, delta=delta, numbers=numbers, segments=segments, words=words)

    def _made_rows(self) -> tuple[jax.Array, jax.Array]:
        """lse in base 2 and delta; and the rows are in device memory for the other kernel."""
        block, scratch = self.block, self.block.scratch
        own = pl.ds(self.first, WARPGROUP_ROWS)
        lse = _row_values(block.refs.rows[1].at[block.b, block.head, own]) * LOG2_E
        plgpu.barrier_wait(scratch.held.at[self.warpgroup])
        delta = row_sums(block.output_of(self.warpgroup), scratch.do.at(self.warpgroup))
        # What TMA writes there next must come after these reads.
        plgpu.commit_smem()
        for i in range(block.launch.lead):
            plgpu.barrier_arrive(scratch.empty.at[i])

        def store():
            for i, line in enumerate((lse, delta, self._numbers().astype(jnp.float32))):
                block.refs.made_rows.at[block.b, block.head, i, own][...] = line

        if block.part is None:
            store()
        else:
            pl.when(block.part == 0)(store)
        return lax.optimization_barrier((lse, delta))

    def _given_rows(self) -> tuple[jax.Array, jax.Array]:
        block, own = self.block, pl.ds(self.first, WARPGROUP_ROWS)
        lse, delta = (_row_values(block.refs.rows.at[block.b, block.head, i, own]) for i in (0, 1))
        plgpu.barrier_wait(block.scratch.held.at[self.warpgroup])
        return lse, delta

    def _numbers(self) -> jax.Array:
        """Of the queries, in their heads."""
        period = self.block.launch.period
        if period == 1:  # a remainder by one folds to a constant, which has no layout to infer
            return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.int32), _VECTOR)
        number = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=_VECTOR) + self.first
        return number if period is None else lax.rem(number, period)

    def _over_keys(self, dq: Any, held: Held) -> jax.Array:
        """dquery but for the scores' scale: masked tiles first."""
        visits = self.block.visits
        if not isinstance(visits.masked, int) or visits.masked:

            def masked_step(n, _):
                self._step(n, visits.masked_tile(n), dq, held, is_masked=True)

            lax.fori_loop(0, visits.masked, masked_step, None)

        def full_step(n, _):
            self._step(n, visits.full_tile(n - visits.masked), dq, held, is_masked=False)

        steps = visits.masked + visits.full
        lax.fori_loop(visits.masked, steps, full_step, None)
        result = dq[...]
        if self.block.launch.config.overlaps:
            pl.when(steps > 0)(lambda: self._release(steps - 1))
        return result

    def _step(self, n: Any, key_tile: Any, dq: Any, held: Held, *, is_masked: bool) -> None:
        launch, scratch, config = self.block.launch, self.block.scratch, self.block.launch.config
        k_slot, v_slot = (lax.rem(launch.lead + 2 * n + i, config.slots) for i in (0, 1))
        tile = self._scores(key_tile, k_slot, held)
        own = self.warpgroup + not_invariant(n)
        own_q, own_do = scratch.q.at(own), scratch.do.at(own)

        def products(s, dp):
            plgpu.barrier_wait(scratch.full.at[k_slot])
            multiply_across(s, own_q, scratch.ring.at(k_slot))
            plgpu.barrier_wait(scratch.full.at[v_slot])
            multiply_across(dp, own_do, scratch.ring.at(v_slot))
            scores = plgpu.wgmma_accumulator_load(s, wait_n=launch.form.copies)
            if config.overlaps:
                pl.when(n > 0)(lambda: self._release(n - 1))
            weights, slope = tile.weights(scores, held.lse, is_masked=is_masked)
            weights = tile.marked(weights)
            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            plgpu.barrier_arrive(scratch.empty.at[v_slot])
            dscores = tile.score_gradients(weights, dweights, held.delta)
            if self.block.refs.dbias is not None:
                self._store_dbias(dscores, tile.column)
            dscores = dscores if slope is None else dscores * slope
            multiply_down(dq, dscores.astype(launch.problem.dtype), scratch.ring.at(k_slot))
            if not config.overlaps:
                plgpu.wgmma_wait(0)
                self._release(n)

        pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(tile.shape, jnp.float32)] * 2)

    def _scores(self, key_tile: Any, k_slot: Any, held: Held) -> Tile:
        block, config = self.block, self.block.launch.config
        column, numbers = key_tile * config.columns, block.scratch.key_segments
        return Tile(
            problem=block.launch.problem,
            query_axis=0,
            shape=(WARPGROUP_ROWS, config.columns),
            batch=block.b,
            head=block.head,
            row=self.first,
            column=column,
            extras=block.refs.extras,
            words=held.words,
            places=block.refs.extras["places"].at[pl.ds(column, config.columns)],
            numbers=held.numbers,
            segments=None if numbers is None else (held.segments, numbers.at[k_slot]),
        )

    def _release(self, n: Any) -> None:
        """The slot of a step's keys is free again."""
        launch, scratch = self.block.launch, self.block.scratch
        if scratch.key_segments is not None:
            plgpu.commit_smem()  # threads have read what TMA writes next
        plgpu.barrier_arrive(scratch.empty.at[lax.rem(launch.lead + 2 * n, launch.config.slots)])

    def _store_dbias(self, dscores: jax.Array, column: Any) -> None:
        rows, columns = dscores.shape
        place = (self.block.b, self.block.head, pl.ds(self.first, rows), pl.ds(column, columns))
        compat.store(self.block.refs.dbias.at[place], dscores)

    def _store(self, dq: jax.Array) -> None:
        block, launch = self.block, self.block.launch
        own = block.scratch.q.at(self.warpgroup)
        if not launch.config.automatic_barriers:
            plgpu.commit_smem()  # all of its warps have read
        own.store(dq * launch.problem.scale, width=columns_at_once(launch.form.size))
        plgpu.commit_smem()
        for place, rows in row_places(block.b, self.first, block.head, WARPGROUP_ROWS, launch.packing):
            place = place if block.part is None else (block.part, *place)
            own.part(rows).send(block.refs.dquery.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _row_values(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_VECTOR, optimized=False)
