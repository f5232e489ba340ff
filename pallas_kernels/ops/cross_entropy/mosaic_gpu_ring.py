"""Cross-entropy of long rows on Mosaic GPU: loss and gradient, each logit read from memory once and written once.

A row of 128256 bf16 logits is 250 KiB, more than the registers or the shared memory of a multiprocessor, and the
gradient needs the whole row's sum first. A persistent block takes a row at a time. Each of its warpgroups has a part of
the row, cut into chunks, and a ring of places in shared memory, into which it brings them by TMA. It walks along them
twice:

    1. maximum and sum (online softmax); the first chunks stay in registers (`held`), the last ones in their places
    2. the gradient, first of those in their places, then of those in registers, then of what found no room and comes a
       second time, out of the L2 cache where that has it still, the latest first

A place is filled again as soon as its chunk is done with, by chunks of the next row if need be, in one sequence of
loads throughout: memory is busy all the time, though the two walks of a row need each other's end. Short rows leave
room for several blocks on a multiprocessor, each at another place of its own row.

A row's label, weight and label's logit are asked for a row or a walk ahead: nobody waits for memory between the walks.

The warpgroups of a block talk once a row, when they put their sums together; each reads and fills only places of its
own. A thread keeps one maximum for all the logits that it sees.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import WARP_LANES, ForwardConfig, RowPlan
from pallas_kernels.ops.cross_entropy.formula import LOWEST_LOGIT, Exponential, Terms, weight_of_row
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import is_interpreted, target_device
from pallas_kernels.primitives.rows import ACCESS_BYTES, LANES, WARPS, sum_of


def ring_kernel(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    terms: Terms,
    with_gradient: bool,
    config: ForwardConfig,
) -> tuple[jax.Array, ...]:
    """Returns losses, maxima, sums, and the gradient where asked for; see `mosaic_gpu.cross_entropy_forward`."""
    (rows, vocabulary), dtype = logits.shape, logits.dtype
    plan = RowPlan.make(vocabulary, dtype.itemsize, config, with_gradient=with_gradient)
    warpgroups, rows_at_once, slots, own = config.warpgroups, config.rows_at_once, config.slots, plan.own
    blocks = min(-(-rows // rows_at_once), target_device().core_count)
    stride = blocks * rows_at_once
    vector = ACCESS_BYTES // dtype.itemsize
    piece = (WARPS, WARP_LANES, vector)  # what the warpgroup takes in one access: a line a warp
    layout = plgpu.Layout.TILED(plgpu.Tiling((piece,)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    exponential = Exponential(is_binary=dtype.itemsize == 2)

    def full(value):
        return plgpu.layout_cast(jnp.full(piece, value, jnp.float32), layout)

    def of_threads(value):
        return plgpu.layout_cast(jnp.full(piece[:2], value, jnp.float32), layout.reduce(2))

    def over_vectors(value):
        """A number of each thread beside each of its neighbouring logits."""
        return plgpu.layout_cast(lax.broadcast_in_dim(value, piece, (0, 1)), layout)

    def cross_entropy_ring(*refs):
        *refs, ring, exchange, arrived, exchanged = refs
        gradient_ref: Any = refs.pop() if with_gradient else None
        logits_ref, labels_ref, *weights_ref, loss_ref, maximum_ref, total_ref = refs
        group = lax.axis_index("warpgroup")
        first_row = lax.axis_index("block") * rows_at_once + group // plan.sharers
        trips = (rows - first_row + stride - 1) // stride
        part, repeated = plan.part(lax.rem(group, plan.sharers))
        met = exchanged.at[group // plan.sharers]

        def place(load):
            """Where the ring's load number `load` goes."""
            slot = lax.rem(load, slots)
            return ring.at[group, slot], arrived.at[group * slots + slot]

        def start(j):
            """Where this warpgroup's chunk j begins."""
            begin = part + j * plan.chunk
            return jnp.where(j == own - 1, begin - repeated, begin) if plan.most_repeated else begin

        def fetch(i, position):
            """Asks for what is loaded at `position` of the block's row number i, or of a row after it."""
            row = (i + position // plan.loads) * stride + first_row
            j = plan.chunk_at(lax.rem(position, plan.loads))

            @pl.when(row < rows)
            def _():
                source = logits_ref.at[row, pl.ds(start(j), plan.chunk)]
                target = place(i * plan.loads + position)
                plgpu.copy_gmem_to_smem(source, *target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        def release(i, position):
            """All of the warpgroup have read the place of this load: the next one may come."""
            plgpu.commit_smem()
            fetch(i, position + slots)

        def load_piece(ref, first):
            ref = ref.at[pl.ds(first, LANES)]
            if is_interpreted():  # which does not know reshaped references, nor needs layouts
                return ref[...].reshape(piece)
            return plgpu.load(ref.reshape(piece), layout=layout, optimized=False)

        def store_piece(ref, first, value):
            ref = ref.at[pl.ds(first, LANES)]
            if is_interpreted():
                ref[...] = value.reshape(LANES, vector)
            else:
                ref.reshape(piece)[...] = value

        def read_chunk(load):
            chunk = place(load)[0]
            return tuple(load_piece(chunk, first) for first in range(0, plan.chunk, LANES))

        def access_numbers():
            """Of a piece, in each place."""
            warp, lane = (plgpu.broadcasted_iota(jnp.int32, piece, axis, layout=layout) for axis in (0, 1))
            return warp * WARP_LANES + lane

        def counted(values, fill):
            """The values of the last chunk, those that were in the chunk before replaced."""
            for i, value in enumerate(values):
                if i * LANES < plan.most_repeated:
                    is_new = access_numbers() >= repeated - i * LANES
                    value = jnp.where(is_new, value, jnp.asarray(fill, value.dtype))
                yield value

        def accumulate(state, values, *, is_last):
            maximum, shift, totals, sums = state
            if terms.label_smoothing:
                numbers = counted(values, 0.0) if is_last else values
                sums = sum((value.astype(jnp.float32) for value in numbers), sums)
            if is_last:
                values = tuple(counted(values, -jnp.inf))
            highest = jnp.max(functools.reduce(jnp.maximum, values), axis=2).astype(jnp.float32)
            before, shift = shift, jnp.maximum(shift, exponential.shift(highest))
            totals = totals * over_vectors(exponential.ratio(before, shift))
            spread = over_vectors(shift)
            for value in values:
                totals += exponential(value.astype(jnp.float32), spread)
            return jnp.maximum(maximum, highest), shift, totals, sums

        def write(row, j, values, slope, label):
            first = start(j)
            hit = label - first * vector
            is_here = (hit >= 0) & (hit < plan.chunk * vector)

            def store(*, at_label: bool):
                for i, value in enumerate(values):
                    is_label = None
                    if at_label:
                        neighbour = plgpu.broadcasted_iota(jnp.int32, piece, 2, layout=layout)
                        is_label = access_numbers() * vector + neighbour == hit - i * LANES * vector
                    gradient = slope(value.astype(jnp.float32), is_label)
                    store_piece(gradient_ref.at[row], first + i * LANES, gradient.astype(dtype))

            # Two forms of one loop: the comparisons would cost a quarter of the instructions, for one logit of a row.
            pl.when(is_here)(lambda: store(at_label=True))
            pl.when(jnp.logical_not(is_here))(lambda: store(at_label=False))

        def row_statistics(state, turn):
            """Maximum, shift, sum of exponentials under it, and sum over all warpgroups' parts of the row."""
            maximum, shift, totals, sums = state
            line_shift = jnp.max(shift, axis=1)
            spread = plgpu.layout_cast(lax.broadcast_in_dim(line_shift, piece[:2], (0,)), layout.reduce(2))
            exchange[turn, 0, group] = jnp.max(maximum, axis=1)
            exchange[turn, 1, group] = line_shift
            exchange[turn, 2, group] = sum_of(jnp.sum(totals, axis=2) * exponential.ratio(shift, spread), axis=1)
            if terms.label_smoothing:
                exchange[turn, 3, group] = jnp.sum(jnp.sum(sums, axis=2), axis=1)
            plgpu.commit_smem()
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            team = group - lax.rem(group, plan.sharers)
            lines = [(team + sharer, warp) for sharer in range(plan.sharers) for warp in range(WARPS)]
            maximum, shift = (
                functools.reduce(jnp.maximum, [exchange[(turn, number, *line)] for line in lines]) for number in (0, 1)
            )
            total, logit_sum = jnp.float32(0), jnp.float32(0)
            for line in lines:
                total += exchange[(turn, 2, *line)] * exponential.ratio(exchange[(turn, 1, *line)], shift)
                if terms.label_smoothing:
                    logit_sum += exchange[(turn, 3, *line)]
            return maximum, shift, total, logit_sum

        if config.stagger and not is_interpreted():
            pl.delay(lax.rem(lax.axis_index("block"), 8) * config.stagger)
        for load in range(slots):
            fetch(jnp.int32(0), jnp.int32(load))

        def label_and_weight(row):
            return labels_ref[row], jnp.asarray(weight_of_row(weights_ref, row), jnp.float32)

        def one_row(i, label_weight):
            row, begin = i * stride + first_row, i * plan.loads
            token = terms.token(*label_weight)
            target = logits_ref[row, token.label // vector, lax.rem(token.label, vector)]
            following = label_and_weight(jnp.minimum(row + stride, rows - 1))

            def arrive(j):
                plgpu.barrier_wait(place(begin + j)[1])
                values = read_chunk(begin + j)
                if plan.held + plan.kept < own:
                    pl.when((plan.held <= j) & (j < own - plan.kept))(lambda: release(i, j))
                return values

            def hold(j):
                # Read a second time, behind a barrier: else the compiler holds its float32 conversions, twice as much.
                plgpu.commit_smem()
                values = read_chunk(begin + j)
                release(i, j)
                return values

            def first_walk(j, state):
                return accumulate(state, arrive(j), is_last=False)

            state = (of_threads(LOWEST_LOGIT), of_threads(exponential.shift(LOWEST_LOGIT)), full(0), full(0))
            held_values = []
            for j in range(plan.held):
                state = accumulate(state, arrive(jnp.int32(j)), is_last=j == own - 1)
                held_values.append(hold(jnp.int32(j)))
            if plan.held < own:
                state = lax.fori_loop(jnp.int32(plan.held), jnp.int32(own - 1), first_walk, state)
                state = accumulate(state, arrive(jnp.int32(own - 1)), is_last=True)
            maximum, shift, total, logit_sum = row_statistics(state, lax.rem(i, 2))  # nobody is two rows ahead

            # Each time another's task, and the last one of a row: the next row's loads wait for the gradient.
            def write_loss():
                smooth_sum = logit_sum if terms.label_smoothing else None
                exact_total = exponential.total(total, shift, maximum)
                loss_ref[row] = terms.loss(token, maximum, exact_total, target.astype(jnp.float32), smooth_sum)
                maximum_ref[row], total_ref[row] = maximum, exact_total

            is_my_turn = lax.rem(group, plan.sharers) == lax.rem(i, plan.sharers)
            if not with_gradient:
                pl.when(is_my_turn)(write_loss)
                return following
            slope = terms.slope(maximum, total, token, exponential=exponential, shift=shift)

            @pl.loop(jnp.int32(own - plan.kept), jnp.int32(own))
            def _(j):
                values = read_chunk(begin + j)
                release(i, j)
                write(row, j, values, slope, token.label)

            for j in range(plan.held):
                write(row, jnp.int32(j), held_values[j], slope, token.label)

            if plan.loads > own:

                @pl.loop(jnp.int32(own), jnp.int32(plan.loads))
                def _(position):
                    plgpu.barrier_wait(place(begin + position)[1])
                    values = read_chunk(begin + position)
                    release(i, position)
                    write(row, plan.chunk_at(position), values, slope, token.label)

            pl.when(is_my_turn)(write_loss)
            return following

        lax.fori_loop(0, trips, one_row, label_and_weight(jnp.minimum(first_row, rows - 1)))

    in_accesses = jax.ShapeDtypeStruct((rows, plan.accesses, vector), dtype)
    one_a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = settings.kernel(
        cross_entropy_ring,
        out_type=(one_a_row, one_a_row, one_a_row, *((in_accesses,) if with_gradient else ())),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((warpgroups, slots, plan.chunk, vector), dtype),
            plgpu.SMEM((2, 4, warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * slots),
            plgpu.Barrier(num_arrivals=plan.sharers, num_barriers=rows_at_once),
        ),
        compiler_params=compiler_params(dtype, reduction_scratch_bytes=512),
    )(logits.reshape(in_accesses.shape), labels, *((weights,) if weights is not None else ()))
    return (*outputs[:3], *(output.reshape(logits.shape) for output in outputs[3:]))
