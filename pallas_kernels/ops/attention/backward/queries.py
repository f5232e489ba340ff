"""The kernel of dquery: a block holds queries, and loops over the keys that they see.

With q, k, v, do tiles of query, key, value and dout,

    s = q @ k.T;  p = exp(s - lse);  dp = do @ v.T;  ds = p * (dp - delta);  dq += ds @ k

where ds is a left operand that never leaves its registers. The kernel by keys computes the same scores.
Where it can add up dquery, too (`config.can_be_one`), and that takes less time, this kernel does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, QueriesConfig, columns_at_once
from pallas_kernels.ops.attention.backward.tiles import Inputs, Tile, block_place, counted
from pallas_kernels.ops.attention.launch import (
    MORE_FOR_PRODUCER,
    REGISTERS,
    Lane,
    block_kernel,
    not_invariant,
    run_roles,
)
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives import compat
from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.row_tiles import TileForm, multiply_across, multiply_down


class Ring(NamedTuple):
    """Tiles in turns. full, empty: a slot's tile has arrived, or is free."""

    tiles: Any
    full: Any
    empty: Any


class Scratch(NamedTuple):
    """A block's shared memory and barriers.

    q, do: the block's queries and their dout. k, v: the rings of keys and of values; one ring, for both in turns, if
    their tiles have one size. key_segments: those of the keys in the ring, or None. held: a warpgroup's queries have
    arrived.
    """

    q: Any
    do: Any
    k: Any
    v: Any
    held: Any
    key_segments: Any


def _scratch_types(problem: Problem, config: QueriesConfig) -> Scratch:
    (form, value_form), has_segments = problem.forms, problem.masking.has_segments
    slots = config.slots // (1 if form == value_form else 2)

    def ring(form: TileForm, arrivals: int) -> Ring:
        return Ring(
            tiles=form.scratch(slots, config.columns),
            full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots),
            empty=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=slots),
        )

    return Scratch(
        q=form.scratch(config.warpgroups, WARPGROUP_ROWS),
        do=value_form.scratch(config.warpgroups, WARPGROUP_ROWS),
        k=ring(form, form.copies + has_segments),
        v=None if form == value_form else ring(value_form, value_form.copies),
        held=plgpu.Barrier(num_arrivals=form.copies + value_form.copies, num_barriers=config.warpgroups),
        key_segments=plgpu.SMEM((slots, config.columns), jnp.int32) if has_segments else None,
    )


@dataclass(frozen=True)
class _Block:
    """A running block; both roles use it.

    outputs: references to dquery, and to the gradients of all scores with a bias. lane: the batch entry and query head.
    first_query: of the block. visits: the key tiles that its queries see.
    """

    problem: Problem
    config: QueriesConfig
    inputs: Inputs
    outputs: Sequence[Any]
    scratch: Scratch
    lane: Lane
    key_head: Any
    first_query: Any
    visits: TileRange

    @classmethod
    def of(
        cls, problem: Problem, config: QueriesConfig, inputs: Inputs, outputs: Sequence[Any], scratch: Scratch
    ) -> _Block:
        """The running block, called in the kernel."""
        masking, (form, value_form), k, v = problem.masking, problem.forms, scratch.k, scratch.v
        k = k._replace(tiles=form.tiles(k.tiles))
        v = k if v is None else v._replace(tiles=value_form.tiles(v.tiles))
        scratch = scratch._replace(q=form.tiles(scratch.q), do=value_form.tiles(scratch.do), k=k, v=v)
        blocks = pl.cdiv(masking.queries, config.rows)
        place, lane = block_place(lax.axis_index("block"), tiles=blocks, lanes=problem.batch * problem.heads)
        # Under a causal mask the last queries see the most keys.
        tile_index = blocks - 1 - place
        lane = Lane.of(lane, problem.heads)
        key_head = lax.div(lane.head, problem.group)
        first_query = tile_index * config.rows
        if masking.has_segments:
            visits = TileRange.of(inputs.extras["tiles"], lane.batch, tile_index)
        else:
            visits = masking.key_tiles(first_query, config.rows, config.columns)
        if problem.has_bias:  # its gradient has all scores'
            visits = visits._replace(first=0, last=pl.cdiv(masking.keys, config.columns))
        return cls(problem, config, inputs, outputs, scratch, lane, key_head, first_query, visits)

    def slot(self, n: Any) -> Any:
        """The slot in its ring of the n-th tile, of keys and values in turns; one ring may have an odd number."""
        if self.scratch.k is self.scratch.v:
            return lax.rem(n, self.config.slots)
        return lax.rem(lax.div(n, 2), self.config.slots // 2)

    def produce(self) -> None:
        """Runs the producer: loads the queries, and all the keys and values that they see."""
        scratch, visits = self.scratch, self.visits
        for warpgroup in range(self.config.warpgroups):
            place = self.lane.rows(self.first_query + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            scratch.q.at(warpgroup).load_async(self.inputs.query.at[place], scratch.held.at[warpgroup])
            scratch.do.at(warpgroup).load_async(self.inputs.dout.at[place], scratch.held.at[warpgroup])
        masked, full = (counted(self.problem, count) for count in (visits.masked, visits.full))
        n = lax.fori_loop(0, masked, self._loader(visits.masked_tile), jnp.int32(0))
        n = lax.fori_loop(0, full, self._loader(visits.full_tile), n)
        if scratch.k is scratch.v:
            drain(scratch.k.empty, self.config.slots, n)
            return
        for ring in (scratch.k, scratch.v):
            drain(ring.empty, self.config.slots // 2, lax.div(n, 2))

    def _loader(self, tile_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """The body of a loop that loads the i-th key tile and then its values; n counts both."""
        config, inputs, scratch = self.config, self.inputs, self.scratch

        def step(i, n):
            place = (self.lane.batch, pl.ds(tile_of(i) * config.columns, config.columns), self.key_head)
            for ref, ring in ((inputs.key, scratch.k), (inputs.value, scratch.v)):
                slot = self.slot(n)
                pl.when(n >= config.slots)(lambda ring=ring, slot=slot: plgpu.barrier_wait(ring.empty.at[slot]))
                ring.tiles.at(slot).load_async(ref.at[place], ring.full.at[slot])
                if scratch.key_segments is not None and ring is scratch.k:
                    # With values too, if a slot holds keys at one time and values at another.
                    numbers = inputs.extras["key_segments"].at[place[0], place[1]]
                    plgpu.copy_gmem_to_smem(numbers, scratch.key_segments.at[slot], ring.full.at[slot])
                n = n + 1
            return n

        return step


def consume(block: _Block, warpgroup: Any) -> None:
    """Runs a consumer: computes and stores dquery of 64 queries, and what else the launch returns."""
    scratch, lane, extras = block.scratch, block.lane, block.inputs.extras
    problem, config, visits = block.problem, block.config, block.visits
    first = block.first_query + warpgroup * WARPGROUP_ROWS

    def of_queries(ref: Any, *place: Any) -> jax.Array:
        own = ref.at[(*place, pl.ds(first, WARPGROUP_ROWS))]
        return plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    own_rows = block.inputs.rows.at[lane.batch, lane.head]
    lse, delta = (of_queries(own_rows, i) for i in (0, 1))
    plgpu.barrier_wait(scratch.held.at[warpgroup])
    segments = None
    if scratch.key_segments is not None:
        segments = of_queries(extras["query_segments"], lane.batch)

    def release(n: Any) -> None:
        if scratch.key_segments is not None:
            plgpu.commit_smem()  # threads have read what TMA writes next
        plgpu.barrier_arrive(scratch.k.empty.at[block.slot(2 * n)])

    def step(n: Any, key_tile: Any, dq: Any, *, is_masked: bool) -> None:
        k_slot, v_slot = (block.slot(2 * n + i) for i in (0, 1))
        keys, values = scratch.k.tiles.at(k_slot), scratch.v.tiles.at(v_slot)
        column = key_tile * config.columns
        tile = Tile(
            problem=problem,
            query_axis=0,
            shape=(WARPGROUP_ROWS, config.columns),
            batch=lane.batch,
            head=lane.head,
            row=first,
            column=column,
            extras=extras,
            places=extras["places"].at[pl.ds(column, config.columns)],
            segments=None if segments is None else (segments, scratch.key_segments.at[k_slot]),
        )
        own = warpgroup + not_invariant(n)
        own_q, own_do = scratch.q.at(own), scratch.do.at(own)

        def products(s, dp):
            plgpu.barrier_wait(scratch.k.full.at[k_slot])
            multiply_across(s, own_q, keys)
            plgpu.barrier_wait(scratch.v.full.at[v_slot])
            multiply_across(dp, own_do, values)
            scores = plgpu.wgmma_accumulator_load(s, wait_n=problem.forms[1].copies)
            if config.overlaps:
                pl.when(n > 0)(lambda: release(n - 1))
            weights, slope = tile.weights(scores, lse, is_masked=is_masked)
            weights = tile.marked(weights)
            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=0)
            plgpu.barrier_arrive(scratch.v.empty.at[v_slot])
            dscores = tile.score_gradients(weights, dweights, delta)
            if problem.has_bias:
                place = (lane.batch, lane.head, pl.ds(first, WARPGROUP_ROWS), pl.ds(column, config.columns))
                compat.store(block.outputs[1].at[place], dscores)
            dscores = dscores if slope is None else dscores * slope
            multiply_down(dq, dscores.astype(problem.dtype), keys)
            if not config.overlaps:
                plgpu.wgmma_wait(0)
                release(n)

        pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(tile.shape, jnp.float32)] * 2)

    def over_keys(dq: Any) -> jax.Array:
        if visits.has_masked:
            masked = counted(problem, visits.masked)
            lax.fori_loop(0, masked, lambda n, _: step(n, visits.masked_tile(n), dq, is_masked=True), None)

        steps, full_tile = visits.masked + visits.full, lambda n: visits.full_tile(n - visits.masked)
        end = counted(problem, steps)
        lax.fori_loop(visits.masked, end, lambda n, _: step(n, full_tile(n), dq, is_masked=False), None)
        result = dq[...]
        if config.overlaps:
            pl.when(steps > 0)(lambda: release(steps - 1))
        return result

    sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, problem.head_size), jnp.float32)
    dq = pl.run_scoped(over_keys, sums)
    own = scratch.q.at(warpgroup)
    if not _has_automatic_barriers(problem):
        plgpu.commit_smem()  # all of the warpgroup's warps have read
    own.store(dq * problem.scale, width=columns_at_once(problem.head_size))
    plgpu.commit_smem()
    own.send(block.outputs[0].at[lane.rows(first, WARPGROUP_ROWS)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _has_automatic_barriers(problem: Problem) -> bool:
    """False where products of large heads by panels leave ptxas no registers for Pallas's barriers."""
    return not (problem.in_panels and problem.head_size > 128)


def query_gradients(inputs: Inputs, *, problem: Problem, config: QueriesConfig) -> tuple[jax.Array, jax.Array | None]:
    """Returns dquery, like query; and for a bias the gradients of all scores, else None.

    These are (batch, heads, queries, keys), float32, padded to whole tiles.
    """
    blocks, key_blocks = pl.cdiv(problem.masking.queries, config.rows), pl.cdiv(problem.masking.keys, config.columns)

    def attention_backward_queries(inputs, *others):
        *outputs, scratch = others
        warpgroup = lax.axis_index("warpgroup")
        block = _Block.of(problem, config, inputs, outputs, scratch)
        needs_more = config.warpgroups == 1 or (problem.in_panels and problem.head_size == 96)
        registers = MORE_FOR_PRODUCER if needs_more else REGISTERS
        run_roles(warpgroup, config.warpgroups, block.produce, lambda: consume(block, warpgroup), registers)

    out_type = [jax.ShapeDtypeStruct(inputs.query.shape, problem.dtype)]
    if problem.has_bias:
        shape = (blocks * config.rows, key_blocks * config.columns)
        out_type.append(jax.ShapeDtypeStruct((problem.batch, problem.heads, *shape), jnp.float32))
    # With segments there is no room for sums across warps, and there are none.
    params = {"reduction_scratch_bytes": 0} if problem.masking.has_segments else {}
    kernel = block_kernel(
        attention_backward_queries,
        out_type=out_type,
        blocks=blocks * problem.batch * problem.heads,
        consumers=config.warpgroups,
        scratch=(_scratch_types(problem, config),),
        products=problem.products(2, 1),
        automatic_barriers=_has_automatic_barriers(problem),
        **params,
    )
    dquery, *others = kernel(inputs)
    return dquery, others[0] if others else None
