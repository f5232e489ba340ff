"""The work of a computing warpgroup: 64 keys, and all tiles of queries that see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, columns_at_once
from pallas_kernels.ops.attention.backward.keys.producer import Block
from pallas_kernels.ops.attention.backward.tiles import Tile, kept_scale, not_invariant
from pallas_kernels.ops.attention.tiles.row_tiles import multiply_across, multiply_down
from pallas_kernels.primitives.random import mixed_words


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a warpgroup has throughout: its keys' segments and the dropout key's words, where there are such; and the
    accumulators of what it makes."""

    segments: jax.Array | None
    words: Any
    dk: Any
    dv: Any


@dataclass(frozen=True, kw_only=True)
class Computing:
    """makes_dkey, makes_dvalue: which of them this warpgroup makes. first: of its keys, in the block's tile."""

    block: Block
    makes_dkey: bool
    makes_dvalue: bool
    first: Any

    def run(self) -> None:
        """Computes and stores them."""
        block, extras = self.block, self.block.refs.extras
        words = mixed_words(extras["words"]) if "words" in extras else None
        segments = None
        if block.scratch.query_segments is not None:
            own = extras["key_segments"].at[block.b, pl.ds(block.first_key + self.first, WARPGROUP_ROWS)]
            segments = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def over_queries(*accumulators):
            found = list(accumulators)
            dk = found.pop(0) if self.makes_dkey else None
            dv = found.pop(0) if self.makes_dvalue else None
            return self._over_queries(Held(segments=segments, words=words, dk=dk, dv=dv))

        sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, block.launch.form.size), jnp.float32)
        results = pl.run_scoped(over_queries, *[sums] * (self.makes_dkey + self.makes_dvalue))
        self._store(results)

    def _over_queries(self, held: Held) -> list[jax.Array]:
        """dkey and dvalue, those of them that it makes, but for constant factors: masked tiles first."""
        block, visits, heads = self.block, self.block.visits, self.block.launch.heads
        masked_steps = heads * visits.masked

        def masked_step(n, _):
            head = block.first_head + lax.div(n, visits.masked)
            self._step(n, head, visits.masked_tile(lax.rem(n, visits.masked)), held, is_masked=True)

        def full_step(n, _):
            i = n - masked_steps
            head = block.first_head + lax.div(i, visits.full)
            self._step(n, head, visits.full_tile(lax.rem(i, visits.full)), held, is_masked=False)

        if not isinstance(visits.masked, int) or visits.masked:
            lax.fori_loop(0, masked_steps, masked_step, None)
        steps = heads * (visits.masked + visits.full)
        lax.fori_loop(masked_steps, steps, full_step, None)
        results = [sums[...] for sums in (held.dk, held.dv) if sums is not None]
        if block.launch.config.overlaps:
            pl.when(steps > 0)(lambda: self._release(steps - 1))
        return results

    def _step(self, n: Any, head: Any, query_tile: Any, held: Held, *, is_masked: bool) -> None:
        launch, scratch, config = self.block.launch, self.block.scratch, self.block.launch.config
        copies, dtype = launch.form.copies, launch.problem.dtype
        stage = self.block.stage(n)
        tile = self._scores(head, query_tile, stage, held)
        plgpu.barrier_wait(scratch.full.at[stage])
        own = pl.ds(self.first + not_invariant(n) * WARPGROUP_ROWS, WARPGROUP_ROWS)
        own_k, own_v = scratch.k.at(rows=own), scratch.v.at(rows=own)
        q, do = scratch.q.at(stage), scratch.do.at(stage)

        def products(s, *others):
            multiply_across(s, own_k, q)
            for dp in others:
                multiply_across(dp, own_v, do)
            scores = plgpu.wgmma_accumulator_load(s, wait_n=len(others) * copies)
            if config.overlaps:
                pl.when(n > 0)(lambda: self._release(n - 1))
            lse = plgpu.load(scratch.rows.at[stage, 0], layout=tile.row_layout())
            weights, slope = tile.weights(scores, lse, is_masked=is_masked)
            weights = tile.marked(weights)
            if held.dv is not None:
                multiply_down(held.dv, tile.dropped(weights).astype(dtype), do)
            for dp in others:
                dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0 if held.dv is None else copies)
                delta = plgpu.load(scratch.rows.at[stage, 1], layout=tile.row_layout())
                dscores = tile.score_gradients(weights, dweights, delta)
                dscores = dscores if slope is None else dscores * slope
                multiply_down(held.dk, dscores.astype(dtype), q)
            if not config.overlaps:
                plgpu.wgmma_wait(0)
                self._release(n)

        count = 2 if self.makes_dkey else 1
        pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(tile.shape, jnp.float32)] * count)

    def _scores(self, head: Any, query_tile: Any, stage: Any, held: Held) -> Tile:
        block, rows, numbers = self.block, self.block.launch.config.rows, self.block.scratch.query_segments
        return Tile(
            problem=block.launch.problem,
            query_axis=1,
            shape=(WARPGROUP_ROWS, rows),
            batch=block.b,
            head=head,
            row=query_tile * rows,
            column=block.first_key + self.first,
            extras=block.refs.extras,
            words=held.words,
            places=block.scratch.rows.at[stage, 2],
            segments=None if numbers is None else (held.segments, numbers.at[stage]),
        )

    def _release(self, n: Any) -> None:
        """A step's queries are done with."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.block.scratch.empty.at[self.block.stage(n)])

    def _store(self, results: list[jax.Array]) -> None:
        block, scratch, problem = self.block, self.block.scratch, self.block.launch.problem
        if not block.launch.config.shares_keys:
            # The other warpgroup may still multiply by what the result is about to overwrite.
            plgpu.barrier_arrive(scratch.finished)
            plgpu.barrier_wait(scratch.finished)
        place = (block.b, pl.ds(block.first_key + self.first, WARPGROUP_ROWS), block.key_head)
        place = place if block.part is None else (block.part, *place)
        own_k, own_v = (tiles.at(rows=pl.ds(self.first, WARPGROUP_ROWS)) for tiles in (scratch.k, scratch.v))
        columns = columns_at_once(block.launch.form.size)
        if self.makes_dkey:
            own_k.store(results.pop(0) * problem.scale, width=columns)
        if self.makes_dvalue:
            own_v.store(results.pop(0) * kept_scale(problem), width=columns)
        plgpu.commit_smem()
        if self.makes_dkey:
            own_k.send(block.refs.dkey.at[place])
        if self.makes_dvalue:
            own_v.send(block.refs.dvalue.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if block.launch.config.tiles > 1:
            plgpu.barrier_arrive(scratch.finished)
