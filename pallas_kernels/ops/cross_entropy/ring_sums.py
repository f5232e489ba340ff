"""Maximum and sums of a row in the ring kernel: online softmax in each thread, then over the row's warpgroups.

A thread keeps one maximum for all the logits that it sees.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.formula import LOWEST_LOGIT, Exponential
from pallas_kernels.ops.cross_entropy.ring import Ring
from pallas_kernels.primitives.rows import LANES, WARPS, RowValues, sum_of


class ThreadSums(NamedTuple):
    """What threads have seen of a row so far: maximum and shift a thread, the two sums in pieces, all float32.

    totals: exponentials under the thread's shift. logits: the logits themselves, counted with label smoothing.
    """

    maximum: jax.Array
    shift: jax.Array
    totals: jax.Array
    logits: jax.Array


class RowSums(NamedTuple):
    """The same of a whole row, float32 scalars that every thread has. total: exponentials under `shift`."""

    maximum: jax.Array
    shift: jax.Array
    total: jax.Array
    logit_sum: jax.Array


@dataclass(frozen=True, kw_only=True)
class OnlineSoftmax:
    """Adds up the chunks of a warpgroup's part of a row, each thread for itself.

    sums_logits: whether logits are counted, too: for label smoothing.
    """

    ring: Ring
    exponential: Exponential
    sums_logits: bool

    def begin(self) -> ThreadSums:
        """Of nothing."""
        pieces = self.ring.pieces
        return ThreadSums(
            maximum=pieces.of_threads(LOWEST_LOGIT),
            shift=pieces.of_threads(self.exponential.shift(LOWEST_LOGIT)),
            totals=pieces.full(0),
            logits=pieces.full(0),
        )

    def add(self, seen: ThreadSums, values: RowValues, *, is_last: bool) -> ThreadSums:
        """With the pieces of one more chunk. is_last: of the part."""
        maximum, shift, totals, logits = seen
        over_vectors, exponential = self.ring.pieces.over_vectors, self.exponential
        if self.sums_logits:
            numbers = self._counted(values, 0.0) if is_last else values
            logits = sum((value.astype(jnp.float32) for value in numbers), logits)
        if is_last:
            values = tuple(self._counted(values, -jnp.inf))
        highest = jnp.max(functools.reduce(jnp.maximum, values), axis=2).astype(jnp.float32)
        before, shift = shift, jnp.maximum(shift, exponential.shift(highest))
        totals = totals * over_vectors(exponential.ratio(before, shift))
        spread = over_vectors(shift)
        for value in values:
            totals += exponential(value.astype(jnp.float32), spread)
        return ThreadSums(jnp.maximum(maximum, highest), shift, totals, logits)

    def _counted(self, values: RowValues, fill: float) -> Iterator[jax.Array]:
        """The values of the last chunk, those that were in the chunk before replaced."""
        for i, value in enumerate(values):
            if i * LANES < self.ring.plan.most_repeated:
                is_new = self.ring.pieces.access_numbers() >= self.ring.repeated - i * LANES
                value = jnp.where(is_new, value, jnp.asarray(fill, value.dtype))
            yield value


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Where the warpgroups that share a row put their sums together, with one barrier a row.

    lines: a (turns, kinds, warpgroups, warps) reference in shared memory: each warp's maximum, shift, and two sums.
    met: the barrier.
    """

    softmax: OnlineSoftmax
    lines: Any
    met: Any

    def join(self, seen: ThreadSums, turn: jax.Array) -> RowSums:
        """The row's sums, once all its warpgroups are here. turn: nobody still reads what was put there before."""
        self._put(seen, turn)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)
        return self._joined(turn)

    def _put(self, seen: ThreadSums, turn: jax.Array) -> None:
        softmax, lines, group = self.softmax, self.lines, self.softmax.ring.group
        warp_shift = jnp.max(seen.shift, axis=1)
        common_shift = softmax.ring.pieces.over_warps(warp_shift)
        lines[turn, 0, group] = jnp.max(seen.maximum, axis=1)
        lines[turn, 1, group] = warp_shift
        totals = jnp.sum(seen.totals, axis=2)
        lines[turn, 2, group] = sum_of(totals * softmax.exponential.ratio(seen.shift, common_shift), axis=1)
        if softmax.sums_logits:
            lines[turn, 3, group] = jnp.sum(jnp.sum(seen.logits, axis=2), axis=1)

    def _joined(self, turn: jax.Array) -> RowSums:
        softmax, lines = self.softmax, self.lines
        group, sharers = softmax.ring.group, softmax.ring.plan.sharers
        first = group - lax.rem(group, sharers)
        warps = [(first + sharer, warp) for sharer in range(sharers) for warp in range(WARPS)]
        maximum, shift = (
            functools.reduce(jnp.maximum, [lines[(turn, kind, *warp)] for warp in warps]) for kind in (0, 1)
        )
        total, logit_sum = jnp.float32(0), jnp.float32(0)
        for warp in warps:
            total += lines[(turn, 2, *warp)] * softmax.exponential.ratio(lines[(turn, 1, *warp)], shift)
            if softmax.sums_logits:
                logit_sum += lines[(turn, 3, *warp)]
        return RowSums(maximum, shift, total, logit_sum)
