"""What all warpgroups of a block of the forward kernel know: see `mosaic_gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.forward.config import ForwardConfig
from pallas_kernels.ops.attention.forward.schedule import Schedule, divmod_of, rem_of
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.tiles.row_tiles import is_ragged


@dataclass(frozen=True, kw_only=True)
class Block:
    """References and static facts; the state is in loops' carries.

    index: of the block. extras: references to further arrays, by name. buffers, barriers: in shared memory, by name.
    """

    problem: Problem
    config: ForwardConfig
    schedule: Schedule
    index: jax.Array
    extras: dict[str, Any]
    buffers: dict[str, Any]
    barriers: dict[str, Any]

    @property
    def hides_steps(self) -> bool:
        """Whether LLVM may not know how often a loop over tiles of keys runs: it makes straight code of few times.

        Where registers are short, in panels or with large heads in a loop over tiles of queries, that takes too many.
        """
        config, masking = self.config, self.problem.masking
        has_large_heads = self.problem.head_size > 128 and config.is_persistent
        has_two = -(-masking.keys // config.columns) == 2
        return (is_ragged(masking) and has_two) or (has_large_heads and (has_two or not masking.has_band))

    def key_tiles(self, batch: jax.Array, tile: jax.Array, part: jax.Array) -> TileRange:
        """Those of a tile of queries: one at least, if masked throughout, so that nothing is a special case."""
        masking, config = self.problem.masking, self.config
        if masking.has_segments:
            bounds = TileRange(*(self.extras["tiles"][batch, tile, i] for i in range(4)))
        else:
            bounds = masking.key_tiles(tile * config.rows, config.rows, config.columns)
        first, full_first, full_last, last = (jnp.asarray(bound, jnp.int32) for bound in bounds)
        tiles = -(-masking.keys // config.columns)
        if self.schedule.rest:  # nothing else bounds what is seen
            parts = self.schedule.parts
            start = rem_of(part, parts)
            first = jnp.where(part < 0, 0, divmod_of(start * tiles, parts)[0])
            last = jnp.where(part < 0, tiles, divmod_of((start + 1) * tiles, parts)[0])
        first = jnp.minimum(first, tiles - 1)
        return TileRange(first, full_first, full_last, jnp.maximum(last, first + 1))
