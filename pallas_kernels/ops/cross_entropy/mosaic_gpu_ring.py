"""Cross-entropy of long rows on Mosaic GPU: loss and gradient, each logit read from memory once and written once.

A row of 128256 bf16 logits is 250 KiB, more than the registers or the shared memory of a multiprocessor, and the
gradient needs the whole row's sum first. A persistent block takes a row at a time. Each of its warpgroups has a part of
the row, cut into chunks, and copies the chunks by TMA to a ring of stages in shared memory. It makes two passes over
them:

    1. maximum and sum (online softmax); the first chunks stay in registers (`held`), the last ones in their stages
    2. the gradient, first of the chunks in shared memory, then of those in registers, then of those that were not kept
       and are loaded again, latest first, from the L2 cache where it still has them

A stage is refilled as soon as its chunk is no longer needed, also with chunks of the next row, in one sequence of loads
(`ring`). So memory stays busy although the second pass must wait for the end of the first.

A row's label, weight and label's logit are loaded a row or a pass ahead, so that no thread waits for them. The
warpgroups of a block exchange their sums once per row; each reads and fills only stages of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, RowPlan
from pallas_kernels.ops.cross_entropy.formula import Exponential, Slope, Terms, weight_of
from pallas_kernels.ops.cross_entropy.ring import Pieces, Ring, RingRow
from pallas_kernels.primitives.barriers import meet
from pallas_kernels.primitives.exponents import LOWEST_LOGIT
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.row_kernel import compiler_params
from pallas_kernels.primitives.rows import ACCESS_BYTES, THREADS, WARPS, RowValues, sum_of
from pallas_kernels.primitives.settings import named_kernel


def ring_kernel(
    operands: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct], *, terms: Terms, config: ForwardConfig
) -> dict[str, jax.Array]:
    """Returns losses, maxima, sums, and the gradient; see `mosaic_gpu.cross_entropy_forward`."""
    logits = operands["logits"]
    (rows, vocabulary), dtype, warpgroups = logits.shape, logits.dtype, config.warpgroups
    plan = RowPlan.make(vocabulary, dtype.itemsize, config)
    blocks = min(rows, target_device().core_count)
    vector = ACCESS_BYTES // dtype.itemsize
    in_accesses = jax.ShapeDtypeStruct((rows, plan.accesses, vector), dtype)
    scratch = {
        "buffers": plgpu.SMEM((warpgroups, config.slots, plan.chunk, vector), dtype),
        "lines": plgpu.SMEM((2, 4, warpgroups, WARPS), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * config.slots),
        "met": plgpu.Barrier(num_arrivals=warpgroups),
    }
    body = functools.partial(_rows_of_warpgroup, plan=plan, terms=terms, slots=config.slots, stride=blocks)
    found = named_kernel(
        body,
        operands | {"logits": logits.reshape(in_accesses.shape)},
        outputs | {"gradient": in_accesses},
        scratch,
        name="cross_entropy_ring",
        grid={"block": blocks},
        warpgroups=warpgroups,
        compiler_params=compiler_params(dtype, reduction_scratch_bytes=512),
    )
    return found | {"gradient": found["gradient"].reshape(logits.shape)}


def _rows_of_warpgroup(refs: dict[str, Any], *, plan: RowPlan, terms: Terms, slots: int, stride: int) -> None:
    """Runs both passes over each of the block's rows. stride: the distance between two of them."""
    logits_ref = refs["logits"]
    rows, _, vector = logits_ref.shape
    group, first_row = lax.axis_index("warpgroup"), lax.axis_index("block")
    trips = (rows - first_row + stride - 1) // stride
    part, repeated = plan.part(group)
    ring = Ring(
        plan=plan,
        pieces=Pieces(vector=vector),
        logits=logits_ref,
        buffers=refs["buffers"],
        arrived=refs["arrived"],
        group=group,
        first_row=first_row,
        stride=stride,
        part=part,
        repeated=repeated,
    )
    exponential = Exponential(is_binary=logits_ref.dtype.itemsize == 2)
    softmax = OnlineSoftmax(ring=ring, exponential=exponential, sums_logits=bool(terms.label_smoothing))
    exchange = Exchange(softmax=softmax, lines=refs["lines"], met=refs["met"])

    def label_and_weight(row):
        return refs["labels"][row], jnp.asarray(weight_of(lambda ref: ref[row], refs.get("weights")), jnp.float32)

    def one_row(i, label_weight):
        row = ring.row(i)
        token = terms.token(*label_weight)
        target = logits_ref[row.index, token.label // vector, lax.rem(token.label, vector)]
        following = label_and_weight(jnp.minimum(row.index + stride, rows - 1))
        seen, held = _first_walk(row, softmax)
        sums = exchange.join(seen, lax.rem(i, 2))  # no warpgroup is two rows ahead

        # The warpgroups take turns at the end of a row, because the next row's loads wait for the gradient.
        def write_loss():
            logit_sum = sums.logit_sum if terms.label_smoothing else None
            total = exponential.total(sums.total, sums.shift, sums.maximum)
            refs["loss"][row.index] = terms.loss(token, sums.maximum, total, target.astype(jnp.float32), logit_sum)
            refs["maximum"][row.index], refs["total"][row.index] = sums.maximum, total

        slope = terms.slope(sums.maximum, sums.total, token, exponential=exponential, shift=sums.shift)
        _second_walk(row, held, refs["gradient"].at[row.index], slope, token.label)
        pl.when(group == lax.rem(i, plan.sharers))(write_loss)
        return following

    for load in range(slots):
        ring.fetch(jnp.int32(0), jnp.int32(load))
    lax.fori_loop(0, trips, one_row, label_and_weight(jnp.minimum(first_row, rows - 1)))


def _first_walk(row: RingRow, softmax: OnlineSoftmax) -> tuple[ThreadSums, list[RowValues]]:
    """Returns each thread's sums of the row, and the chunks that stay in registers."""
    plan = row.ring.plan

    def arrive(j):
        row.wait(j)
        values = row.read(j)
        if plan.held + plan.kept < plan.own:
            pl.when((plan.held <= j) & (j < plan.own - plan.kept))(lambda: row.release(j))
        return values

    seen, held = softmax.begin(), []
    for j in range(plan.held):
        seen = softmax.add(seen, arrive(jnp.int32(j)), is_last=j == plan.own - 1)
        # A second read after a barrier: otherwise the compiler keeps the float32 conversions, twice as many registers.
        plgpu.commit_smem()
        held.append(row.take(jnp.int32(j)))
    if plan.held < plan.own:
        add = lambda j, seen: softmax.add(seen, arrive(j), is_last=False)  # noqa: E731
        seen = lax.fori_loop(jnp.int32(plan.held), jnp.int32(plan.own - 1), add, seen)
        seen = softmax.add(seen, arrive(jnp.int32(plan.own - 1)), is_last=True)
    return seen, held


def _second_walk(row: RingRow, held: list[RowValues], gradient_ref, slope: Slope, label: jax.Array) -> None:
    """Writes the row's gradient: of chunks in shared memory, then in registers, then of those loaded again."""
    plan, pieces = row.ring.plan, row.ring.pieces

    def write(j, values):
        _write_chunk(gradient_ref, row.ring.start(j), values, pieces, slope, label)

    @pl.loop(jnp.int32(plan.own - plan.kept), jnp.int32(plan.own))
    def _(j):
        write(j, row.take(j))

    for j, values in enumerate(held):
        write(jnp.int32(j), values)

    if plan.loads > plan.own:

        @pl.loop(jnp.int32(plan.own), jnp.int32(plan.loads))
        def _(position):
            row.wait(position)
            values = row.take(position)
            write(plan.chunk_at(position), values)


def _write_chunk(gradient_ref, first, values: RowValues, pieces: Pieces, slope: Slope, label: jax.Array) -> None:
    """Writes the gradient of a chunk's logits to the row's accesses from `first` on."""
    hit = label - first * pieces.vector
    is_here = (hit >= 0) & (hit < len(values) * THREADS * pieces.vector)

    def store(*, at_label: bool):
        numbers = pieces.value_numbers() if at_label else None
        for i, value in enumerate(values):
            is_label = None if numbers is None else numbers == hit - i * THREADS * pieces.vector
            gradient = slope(value.astype(jnp.float32), is_label)
            pieces.store(gradient_ref, first + i * THREADS, gradient.astype(gradient_ref.dtype))

    # Two forms of one loop: comparing every logit with the label would cost a quarter of the instructions.
    pl.when(is_here)(lambda: store(at_label=True))
    pl.when(jnp.logical_not(is_here))(lambda: store(at_label=False))


class ThreadSums(NamedTuple):
    """The state of online softmax over each thread's logits so far: maximum and shift per thread, sums in pieces.

    All float32. totals: exponentials under the thread's shift. logits: the logits themselves, for label smoothing.
    """

    maximum: jax.Array
    shift: jax.Array
    totals: jax.Array
    logits: jax.Array


class RowSums(NamedTuple):
    """The sums of a whole row, float32 scalars that every thread has. total: exponentials under `shift`."""

    maximum: jax.Array
    shift: jax.Array
    total: jax.Array
    logit_sum: jax.Array


@dataclass(frozen=True, kw_only=True)
class OnlineSoftmax:
    """Sums the chunks of a warpgroup's part of a row; each thread has one maximum for all its logits.

    sums_logits: whether the logits are summed, too: for label smoothing.
    """

    ring: Ring
    exponential: Exponential
    sums_logits: bool

    def begin(self) -> ThreadSums:
        """Returns the state before the first chunk."""
        pieces = self.ring.pieces
        return ThreadSums(
            maximum=pieces.of_threads(LOWEST_LOGIT),
            shift=pieces.of_threads(self.exponential.shift(LOWEST_LOGIT)),
            totals=pieces.full(0),
            logits=pieces.full(0),
        )

    def add(self, seen: ThreadSums, values: RowValues, *, is_last: bool) -> ThreadSums:
        """Returns the state after one more chunk. is_last: whether it is the last one of the part."""
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
        """Returns the values of the last chunk, with `fill` in place of those that the chunk before also had."""
        numbers = self.ring.pieces.access_numbers()
        for i, value in enumerate(values):
            if i * THREADS < self.ring.plan.most_repeated:
                is_new = numbers >= self.ring.repeated - i * THREADS
                value = jnp.where(is_new, value, jnp.asarray(fill, value.dtype))
            yield value


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of the warpgroups' sums, with one barrier per row.

    lines: a (turns, kinds, warpgroups, warps) reference in shared memory: each warp's maximum, shift, and two sums.
    met: the barrier.
    """

    softmax: OnlineSoftmax
    lines: Any
    met: Any

    def join(self, seen: ThreadSums, turn: jax.Array) -> RowSums:
        """Returns the row's sums once all warpgroups have arrived. turn: a slot that no warpgroup still reads."""
        self._put(seen, turn)
        meet(self.met)
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
        warps = [(sharer, warp) for sharer in range(softmax.ring.plan.sharers) for warp in range(WARPS)]
        maximum, shift = (
            functools.reduce(jnp.maximum, [lines[(turn, kind, *warp)] for warp in warps]) for kind in (0, 1)
        )
        total, logit_sum = jnp.float32(0), jnp.float32(0)
        for warp in warps:
            total += lines[(turn, 2, *warp)] * softmax.exponential.ratio(lines[(turn, 1, *warp)], shift)
            if softmax.sums_logits:
                logit_sum += lines[(turn, 3, *warp)]
        return RowSums(maximum, shift, total, logit_sum)
