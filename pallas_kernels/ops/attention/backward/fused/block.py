"""A block of the fused kernel: where it is, what it goes over, and who adds before and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.fused.finish import Done
from pallas_kernels.ops.attention.backward.fused.launch import COLUMNS, Launch, Scratch
from pallas_kernels.ops.attention.backward.fused.steps import Steps
from pallas_kernels.ops.attention.backward.inputs import Inputs
from pallas_kernels.ops.attention.backward.lanes import lane_place
from pallas_kernels.ops.attention.backward.tiles import Visits, block_place
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.primitives.platform import target_device


@dataclass(frozen=True)
class Outputs:
    """References to the results, and to the sums of shares."""

    dquery: Any
    dkey: Any
    dvalue: Any
    sums: Any


class Turn(NamedTuple):
    """A block's turn to add to a tile of queries.

    head, query_tile: whose. entry: of the sums' first axis. place: of the semaphore. before: blocks that add earlier.
    """

    head: Any
    query_tile: Any
    entry: Any
    place: Any
    before: Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is known of a block while it runs.

    tile: the number of its tile of keys, of which first_key is the first. b, key_head: its batch entry and its head.
    part: of the head's group and queries, or None.
    visits: the tiles of queries that see these keys, full ones and masked. walk: their order, over the heads of a
    group, in so many steps, full_steps of them with full tiles. turns: a semaphore for each sum, which counts the
    blocks that have added to it.
    """

    launch: Launch
    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    tile: Any
    b: Any
    key_head: Any
    part: Any
    first_key: Any
    visits: Visits
    walk: Steps
    full_steps: Any
    steps: Any
    turns: Any

    @classmethod
    def of(
        cls, launch: Launch, inputs: Inputs, outputs: Outputs, scratch: Scratch, number: Any, *, length: int
    ) -> Block:
        """The block of that number, called in the kernel. length: of the array of queries."""
        problem, config = launch.problem, launch.config
        tiles = {name: launch.form.tiles(getattr(scratch, name)) for name in ("k", "v", "q", "do")}
        share, done = scratch.share
        scratch = scratch._replace(**tiles, share=share, done=Done(done))
        tile, lane = block_place(
            number,
            tiles=launch.key_tiles,
            lanes=launch.lanes,
            # Queries and their cotangents, and the sums in float32.
            lane_bytes=8 * launch.group * length * launch.size,
            section_blocks=config.waves * target_device().core_count,
        )
        b, key_head, part = lane_place(lane, problem.key_heads, config.all_parts)
        if launch.keeps_apart:
            tile, b, key_head, part = lax.optimization_barrier((tile, b, key_head, part))
        first_key = tile * COLUMNS
        visits = Visits(tiles=launch.masking.query_tiles(first_key, COLUMNS, launch.rows))
        first_head = key_head * problem.group
        heads = part
        if config.splits > 1 and part is not None:
            heads, split = lax.div(part, config.splits), lax.rem(part, config.splits)
            visits = Visits(
                tiles=TileRange(0, 0, launch.lane_tiles, launch.lane_tiles), begin=split * launch.lane_tiles
            )
        if heads is not None:
            first_head = first_head + heads * launch.group
        walk = Steps(
            visits=visits,
            first_head=first_head,
            group=launch.group,
            heads_inside=config.heads_inside,
            spread=launch.spread,
            block=tile,
        )
        return cls(
            launch=launch,
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            tile=tile,
            b=b,
            key_head=key_head,
            part=part,
            first_key=first_key,
            visits=visits,
            walk=walk,
            full_steps=walk.full,
            steps=walk.count,
            turns=pl.get_global(plgpu.SemaphoreType.REGULAR((launch.sums * launch.tiles,))),
        )

    def turn(self, n: Any) -> Turn:
        """That of a step."""
        launch, spread = self.launch, self.launch.spread
        head, query_tile = self.walk.place(n)
        place = (self.b * launch.heads + head) * launch.query_tiles + query_tile
        if spread is None:
            # The tiles of keys that a tile of queries sees begin with the first.
            return Turn(head, query_tile, self.b, place, self.tile)
        number, has_turned = spread.at(self.tile, n)
        entry, place = (
            first + jnp.where(has_turned, further, 0)
            for first, further in ((self.b, launch.batch), (place, launch.tiles))
        )
        return Turn(head, query_tile, entry, place, spread.turn(self.tile, number, has_turned))

    def is_last_of(self, query_tile: Any, is_masked: Any) -> Any:
        """Whether no block adds to a tile of queries after this one, which then makes dquery of it."""
        launch, masking = self.launch, self.launch.masking
        if launch.config.finishers:
            return False
        if masking.right is None:
            return self.tile == launch.key_tiles - 1
        if masking.right == 0 and masking.queries <= masking.keys and masking.keys % COLUMNS == 0:
            # Known where the program is made: registers are short.
            return is_masked
        return self.tile == masking.key_tiles(query_tile * launch.rows, launch.rows, COLUMNS).last - 1
