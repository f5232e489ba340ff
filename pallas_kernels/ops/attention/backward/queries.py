"""dquery: a block holds queries and goes over the keys that they see.

With q, k, v, do tiles of query, key, value and dout,

    s = q @ k.T;  p = exp(s - lse);  dp = do @ v.T;  ds = p * (dp - delta);  dq += ds @ k

where ds is a left operand that never leaves its registers. Scores are computed here once more instead of being added up
over blocks of the other kernel: results do not depend on the order in which blocks run.

What each query's row needs (`rows_of`) this kernel can make, too: a block has its queries' dout, and loads their
output to the place of the first keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUP_ROWS, QueriesConfig, columns_at_once
from pallas_kernels.ops.attention.backward.tiles import (
    Inputs,
    Tile,
    Visits,
    added,
    block_place,
    hidden,
    hides_steps,
    lane_place,
    not_invariant,
    row_sums,
)
from pallas_kernels.ops.attention.few_queries import Packing, row_places
from pallas_kernels.ops.attention.launch import MORE_FOR_PRODUCER, REGISTERS, block_kernel, run_roles
from pallas_kernels.ops.attention.masking import Masking, TileRange
from pallas_kernels.ops.attention.problem import LOG2_E, Problem
from pallas_kernels.ops.attention.row_tiles import RowTiles, TileForm, multiply_across, multiply_down
from pallas_kernels.primitives import compat
from pallas_kernels.primitives.flop_metadata import Products
from pallas_kernels.primitives.gemm.pipeline import drain
from pallas_kernels.primitives.random import mixed_words


class Scratch(NamedTuple):
    """A block's shared memory, and its barriers.

    q, do: of the block's queries. ring: tiles of keys and of values, in turns; at first of the queries' output. held: a
    warpgroup's queries are there; full, empty: a slot of the ring is there, and done with. key_segments: the numbers of
    a slot's keys, or None.
    """

    q: Any
    do: Any
    ring: Any
    held: Any
    full: Any
    empty: Any
    key_segments: Any


class Outputs(NamedTuple):
    """References to the results of `query_gradients`; None what it has not."""

    dquery: Any
    rows: Any
    dbias: Any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """See `query_gradients`. makes_rows: whether rows are made of output and log-sum-exp."""

    problem: Problem
    form: TileForm
    config: QueriesConfig
    makes_rows: bool
    makes_dbias: bool
    period: int | None
    packing: Packing | None

    @property
    def masking(self) -> Masking:
        """Who sees whom."""
        return self.problem.masking

    @property
    def blocks(self) -> int:
        """Of a head."""
        return pl.cdiv(self.masking.queries, self.config.rows)

    @property
    def lanes(self) -> int:
        """Heads of all batch entries, or their parts."""
        return self.problem.batch * self.problem.heads * self.config.parts

    @property
    def key_blocks(self) -> int:
        """Tiles of a head's keys."""
        return pl.cdiv(self.masking.keys, self.config.columns)

    @property
    def lead(self) -> int:
        """Slots of the ring that the output of a block's queries takes."""
        return pl.cdiv(self.config.rows, self.config.columns) if self.makes_rows else 0

    @property
    def hides_steps(self) -> bool:
        """See `tiles.hides_steps`."""
        hides = hides_steps(self.problem, self.form, self.masking.keys, self.config.columns)
        # With two steps, and two warpgroups' masks, a head size of 128 is large enough.
        is_two = self.key_blocks == 2 and self.config.warpgroups == 2
        return hides or (self.masking.is_causal and self.form.size == 128 and is_two)

    @property
    def automatic_barriers(self) -> bool:
        """Products of large heads by panels leave ptxas no registers for Pallas's barriers."""
        return not (self.form.in_panels and self.form.size > 128)

    @property
    def is_producer_large(self) -> bool:
        """Whether the producer takes more registers: with one consumer, or for heads of 96 in panels."""
        return self.config.warpgroups == 1 or (self.form.in_panels and self.form.size == 96)

    def scratch_types(self) -> Scratch:
        """What a block is given."""
        config, form, has_segments = self.config, self.form, self.masking.has_segments
        heads = 1 if self.packing is None else self.packing.heads_of(WARPGROUP_ROWS)
        held = (3 if self.makes_rows else 2) * form.copies * heads
        return Scratch(
            q=form.scratch(config.warpgroups, WARPGROUP_ROWS),
            do=form.scratch(config.warpgroups, WARPGROUP_ROWS),
            ring=form.scratch(config.slots, config.columns),
            held=plgpu.Barrier(num_arrivals=held, num_barriers=config.warpgroups),
            full=plgpu.Barrier(num_arrivals=form.copies + has_segments, num_barriers=config.slots),
            empty=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.slots),
            key_segments=plgpu.SMEM((config.slots, config.columns), jnp.int32) if has_segments else None,
        )

    def results(self, query: jax.Array) -> list[jax.ShapeDtypeStruct]:
        """dquery or its parts, and what else is made of rows and dbias."""
        shape = query.shape if self.config.parts == 1 else (self.config.parts, *query.shape)
        found = [jax.ShapeDtypeStruct(shape, self.problem.dtype)]
        rows = self.blocks * self.config.rows
        if self.makes_rows:
            found.append(jax.ShapeDtypeStruct((self.problem.batch, self.problem.heads, 3, rows), jnp.float32))
        if self.makes_dbias:
            shape = (self.problem.batch, self.problem.heads, rows, self.key_blocks * self.config.columns)
            found.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return found


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    b, head, key_head: its batch entry, and its heads of queries and of keys. part: of the keys, or None. first_query:
    of its tile. visits: the tiles of keys that it goes over.
    """

    launch: Launch
    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    b: Any
    head: Any
    part: Any
    key_head: Any
    first_query: Any
    visits: Visits

    @classmethod
    def of(cls, launch: Launch, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> Block:
        """The block that runs, called in the kernel."""
        form, config, problem, masking = launch.form, launch.config, launch.problem, launch.masking
        scratch = scratch._replace(q=form.tiles(scratch.q), do=form.tiles(scratch.do), ring=form.tiles(scratch.ring))
        # Where attention is causal, the last queries are those that see the most keys.
        place, lane = block_place(
            lax.axis_index("block"),
            tiles=launch.blocks,
            lanes=launch.lanes,
            lane_bytes=-(-4 * inputs.key.shape[1] * form.size // problem.group),
        )
        tile_index = launch.blocks - 1 - place
        b, head, part = lane_place(lane, problem.heads, config.parts)
        key_head = lax.div(head, problem.group)
        first_query = tile_index * config.rows
        if "tiles" in inputs.extras:
            tiles = TileRange(*(inputs.extras["tiles"][b, tile_index, i] for i in range(4)))
        else:
            tiles = masking.key_tiles(first_query, config.rows, config.columns)
        if part is not None:
            tiles = _part_of(tiles, part, config.parts)
        if launch.makes_dbias:
            tiles = tiles._replace(first=0, last=launch.key_blocks)
        visits = Visits(tiles=hidden(tiles) if launch.hides_steps else tiles)
        return cls(
            launch=launch,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            b=b,
            head=head,
            part=part,
            key_head=key_head,
            first_query=first_query,
            visits=visits,
        )

    def output_of(self, warpgroup: Any) -> RowTiles:
        """Where the output of a warpgroup's queries is, until the first keys come."""
        row, columns = warpgroup * WARPGROUP_ROWS, self.launch.config.columns
        slot, first = lax.div(row, columns), lax.rem(row, columns)
        return self.scratch.ring.at(slot, rows=pl.ds(first, WARPGROUP_ROWS))

    def produce(self) -> None:
        """The work of the producer."""
        for i in range(self.launch.config.warpgroups):
            self._load_queries(i)
        visits = self.visits
        n = lax.fori_loop(0, visits.masked, self._loader(visits.masked_tile), jnp.int32(self.launch.lead))
        n = lax.fori_loop(0, visits.full, self._loader(visits.full_tile), n)
        drain(self.scratch.empty, self.launch.config.slots, n)

    def _load_queries(self, i: int) -> None:
        """Those of warpgroup i, with their dout, and their output where rows are made of it."""
        launch, inputs, scratch = self.launch, self.inputs, self.scratch
        tiles = [(inputs.query, scratch.q.at(i)), (inputs.dout, scratch.do.at(i))]
        if launch.makes_rows:
            tiles.append((inputs.rows[0], self.output_of(i)))
        first = self.first_query + i * WARPGROUP_ROWS
        for place, own in row_places(self.b, first, self.head, WARPGROUP_ROWS, launch.packing):
            for ref, tile in tiles:
                tile.part(own).load_async(ref.at[place], scratch.held.at[i])

    def _loader(self, tile_of: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """The body of a loop that loads a tile of keys, and then one of values."""
        config, inputs, scratch = self.launch.config, self.inputs, self.scratch

        def step(i, n):
            place = (self.b, pl.ds(tile_of(i) * config.columns, config.columns), self.key_head)
            for ref in (inputs.key, inputs.value):
                slot = lax.rem(n, config.slots)

                @pl.when(n >= config.slots)
                def _(slot=slot):
                    plgpu.barrier_wait(scratch.empty.at[slot])

                scratch.ring.at(slot).load_async(ref.at[place], scratch.full.at[slot])
                if scratch.key_segments is not None:
                    # With values too, since a slot has now keys and now values.
                    numbers = inputs.extras["key_segments"].at[place[0], place[1]]
                    plgpu.copy_gmem_to_smem(numbers, scratch.key_segments.at[slot], scratch.full.at[slot])
                n = n + 1
            return n

        return step


def _part_of(tiles: TileRange, part: Any, parts: int) -> TileRange:
    """The tiles of one of so many parts, of tiles of which none in front of the full ones is masked."""
    each = lax.div(tiles.last - tiles.first + parts - 1, jnp.int32(parts))
    first = jnp.minimum(tiles.first + part * each, tiles.last)
    last = jnp.minimum(first + each, tiles.last)
    return TileRange(first, first, jnp.clip(tiles.full_last, first, last), last)


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
class Consumer:
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
        block, extras = self.block, self.block.inputs.extras
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
        lse = _row_values(block.inputs.rows[1].at[block.b, block.head, own]) * LOG2_E
        plgpu.barrier_wait(scratch.held.at[self.warpgroup])
        delta = row_sums(block.output_of(self.warpgroup), scratch.do.at(self.warpgroup))
        # What TMA writes there next must come after these reads.
        plgpu.commit_smem()
        for i in range(block.launch.lead):
            plgpu.barrier_arrive(scratch.empty.at[i])

        def store():
            for i, line in enumerate((lse, delta, self._numbers().astype(jnp.float32))):
                block.outputs.rows.at[block.b, block.head, i, own][...] = line

        if block.part is None:
            store()
        else:
            pl.when(block.part == 0)(store)
        return lax.optimization_barrier((lse, delta))

    def _given_rows(self) -> tuple[jax.Array, jax.Array]:
        block, own = self.block, pl.ds(self.first, WARPGROUP_ROWS)
        lse, delta = (_row_values(block.inputs.rows.at[block.b, block.head, i, own]) for i in (0, 1))
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
            if self.block.outputs.dbias is not None:
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
            extras=block.inputs.extras,
            words=held.words,
            places=block.inputs.extras["places"].at[pl.ds(column, config.columns)],
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
        compat.store(self.block.outputs.dbias.at[place], dscores)

    def _store(self, dq: jax.Array) -> None:
        block, launch = self.block, self.block.launch
        own = block.scratch.q.at(self.warpgroup)
        if not launch.automatic_barriers:
            plgpu.commit_smem()  # all of its warps have read
        own.store(dq * launch.problem.scale, width=columns_at_once(launch.form.size))
        plgpu.commit_smem()
        for place, rows in row_places(block.b, self.first, block.head, WARPGROUP_ROWS, launch.packing):
            place = place if block.part is None else (block.part, *place)
            own.part(rows).send(block.outputs.dquery.at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _row_values(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=_VECTOR, optimized=False)


def query_gradients(
    inputs: Inputs,
    *,
    problem: Problem,
    form: TileForm,
    config: QueriesConfig,
    makes_dbias: bool = False,
    period: int | None = None,
    packing: Packing | None = None,
    product: Products | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns dquery, like query; `rows_of`'s rows; and the gradients of all scores where they are asked for.

    Args:
        inputs: whose rows may also be what the kernel makes them of: the output, like query, and the log-sum-exp,
            (batch, heads, queries padded to whole tiles).
        form: of the tiles of query, key, value and dout.
        makes_dbias: whether to store (batch, heads, queries, keys), float32, both padded to whole tiles. No tile is
            skipped then.
        period: under a causal mask with packed heads, the queries of a head: numbers begin anew after so many.
        packing: how rows of the packed problem lie in query, dout and output; None: as they are.
        product: one of the kernel's matrix products, for the FLOPs that the program states.
    """
    makes_rows = isinstance(inputs.rows, tuple)
    launch = Launch(
        problem=problem,
        form=form,
        config=config,
        makes_rows=makes_rows,
        makes_dbias=makes_dbias,
        period=period,
        packing=packing,
    )

    def attention_backward_queries(inputs, *others):
        dquery, *made, scratch = others
        outputs = Outputs(dquery, made[0] if makes_rows else None, made[-1] if makes_dbias else None)
        warpgroup = lax.axis_index("warpgroup")
        block = Block.of(launch, inputs, outputs, scratch)
        registers = MORE_FOR_PRODUCER if launch.is_producer_large else REGISTERS
        consumer = Consumer(block=block, warpgroup=warpgroup)
        run_roles(warpgroup, config.warpgroups, block.produce, consumer.run, registers)

    # With segments there is no room for sums across warps, and there are none.
    params = {"reduction_scratch_bytes": 0} if problem.masking.has_segments else {}
    kernel = block_kernel(
        attention_backward_queries,
        out_type=launch.results(inputs.query),
        blocks=launch.blocks * launch.lanes,
        consumers=config.warpgroups,
        scratch=(launch.scratch_types(),),
        products=product and product.times(3),
        automatic_barriers=launch.automatic_barriers,
        **params,
    )
    dquery, *others = kernel(inputs)
    dquery = dquery if config.parts == 1 else added(dquery)
    made = others.pop(0) if makes_rows else inputs.rows
    return dquery, made, others[0] if others else None
