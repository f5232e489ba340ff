"""Cross-entropy of long rows on Mosaic GPU: loss and gradient, each logit read from memory once and written once.

A row of 128256 bf16 logits is 250 KiB, more than the registers or the shared memory of a multiprocessor, and the
gradient needs the whole row's sum first. A persistent block takes a row at a time. Each of its warpgroups has a ring
of places in shared memory, into which it brings its own chunks of the row by TMA, and walks along them twice:

    1. maximum and sum (online softmax); the row's last chunks stay in their places
    2. the gradient, first of those that stayed, then of the others, which come a second time, out of the L2 cache

A place is filled again as soon as its chunk is done with, by chunks of the next row if need be, in one sequence of
loads throughout: memory is busy all the time, though the two walks of a row need each other's end. At 128256 bf16
logits three quarters stay; the others are read again within 10 µs, or stay in registers (`held`): the row's first
chunks, whose places the last ones take.

A row's label, weight and label's logit are asked for a row or a walk ahead: nobody waits for memory between the walks.

The warpgroups talk once a row, when they put their sums together; each reads and fills only places of its own. Sums
over a line need no other warp (see `primitives.rows.WarpSegment`).
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, line_length
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.rows import LOWEST, WARPS, WarpSegment, full_row, online_add, zeros_row


def ring_kernel(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None, *, terms: Terms, config: ForwardConfig
) -> tuple[jax.Array, ...]:
    """Returns scores, maxima, sums, and with weights the gradient; see `mosaic_gpu.cross_entropy_forward`."""
    rows, vocabulary = logits.shape
    line = line_length(vocabulary, logits.dtype.itemsize)
    if line is None:
        raise ValueError(f"a vocabulary of {vocabulary} does not divide into lines; use loads='chunked'.")
    warpgroups, slots, height = config.warpgroups, config.slots, config.chunk_lines
    lines = vocabulary // line
    chunks, tail_lines = divmod(lines, height)
    if chunks < warpgroups:
        raise ValueError(f"{chunks} chunks are too few for {warpgroups} warpgroups; use fewer.")
    held = config.held if weights is not None else 0
    if chunks // warpgroups < held:
        raise ValueError(f"{chunks} chunks for {warpgroups} warpgroups are fewer than {held} for each to hold.")
    blocks = min(rows, target_device().core_count)
    segment = WarpSegment(offset=0, size=line, vector=line // 32)
    tail = _tail_pieces(lines, tail_lines)
    with_gradient = weights is not None

    def cross_entropy_ring(*refs):
        *refs, ring, exchange, arrived, exchanged = refs
        gradient_ref = refs.pop() if with_gradient else None
        logits_ref, labels_ref, *weights_ref, score_ref, maximum_ref, total_ref = refs
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        own = (chunks - group + warpgroups - 1) // warpgroups
        kept = jnp.minimum(own - held, slots) if with_gradient else jnp.int32(0)
        loads_a_row = 2 * own - held - kept if with_gradient else own
        trips = (rows - block + blocks - 1) // blocks
        has_tail = group == (chunks - 1) % warpgroups  # whoever has the row's last chunk, beside it

        def place(load):
            """Where the ring's load number `load` goes."""
            slot = lax.rem(load, slots)
            return ring.at[group, slot], arrived.at[group * slots + slot]

        def first_line(j):
            """Of this warpgroup's chunk j."""
            return (j * warpgroups + group) * height

        def fetch(load):
            j = lax.rem(load, loads_a_row)
            row = (load // loads_a_row) * blocks + block
            source = logits_ref.at[row, pl.ds(first_line(jnp.where(j < own, j, j - own + held)), height)]
            plgpu.copy_gmem_to_smem(source, *place(load), oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        def fetch_within(load):
            pl.when(load < trips * loads_a_row)(lambda: fetch(load))

        def release(load):
            """All of the warpgroup have read the load's place: the next one may come."""
            plgpu.commit_smem()
            fetch_within(load + slots)

        def read(ref, first):
            """Four lines from `first` on, as they are."""
            return plgpu.load(ref.at[pl.ds(first, WARPS)], layout=segment.layout, optimized=False)

        def read_chunk(load):
            return tuple(read(place(load)[0], first) for first in range(0, height, WARPS))

        def accumulate(state, values):
            (highest, totals), sums = state
            online = online_add((highest, totals), values)
            return online, (sum(values, sums) if terms.label_smoothing else sums)

        def tail_values(row, fill):
            for first, repeated in tail:
                value = read(logits_ref.at[row], first).astype(jnp.float32)
                if repeated:
                    number = plgpu.broadcasted_iota(jnp.int32, segment.shape, 0, layout=segment.layout)
                    value = jnp.where(number >= repeated, value, jnp.float32(fill))
                yield value

        def accumulate_tail(row, state):
            state = (online_add(state[0], tuple(tail_values(row, -jnp.inf))), state[1])
            return (state[0], sum(tail_values(row, 0.0), state[1])) if terms.label_smoothing else state

        def write(gradient_ref, row, first, values, slope, label):
            """The gradient of lines `first` and on."""
            hit = label - first * line
            is_here = (hit >= 0) & (hit < len(values) * WARPS * line)

            def store(*, at_label: bool):
                for i, value in enumerate(values):
                    is_label = None
                    if at_label:
                        number, column = (
                            plgpu.broadcasted_iota(jnp.int32, segment.shape, axis, layout=segment.layout)
                            for axis in (0, 1)
                        )
                        is_label = number * line + column == hit - i * WARPS * line
                    gradient = slope(value.astype(jnp.float32), is_label)
                    gradient_ref[row, pl.ds(first + i * WARPS, WARPS)] = gradient.astype(gradient_ref.dtype)

            # Two forms of one loop: the comparisons would cost a quarter of the instructions, for one logit of a row.
            pl.when(is_here)(lambda: store(at_label=True))
            pl.when(jnp.logical_not(is_here))(lambda: store(at_label=False))

        def row_statistics(state, turn):
            """Maximum, sum of exponentials and sum over all warpgroups' parts of the row."""
            (highest, totals), sums = state
            line_maximum = jnp.max(highest, axis=1)
            spread = lax.broadcast_in_dim(line_maximum, segment.shape, (0,))
            exchange[turn, 0, group] = line_maximum
            exchange[turn, 1, group] = jnp.sum(totals * jnp.exp(highest - spread), axis=1)
            if terms.label_smoothing:
                exchange[turn, 2, group] = jnp.sum(sums, axis=1)
            plgpu.commit_smem()
            plgpu.barrier_arrive(exchanged)
            plgpu.barrier_wait(exchanged)
            parts = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            maximum = jnp.float32(LOWEST)
            for part in parts:
                maximum = jnp.maximum(maximum, exchange[(turn, 0, *part)])
            total, logit_sum = jnp.float32(0), jnp.float32(0)
            for part in parts:
                total += exchange[(turn, 1, *part)] * jnp.exp(exchange[(turn, 0, *part)] - maximum)
                if terms.label_smoothing:
                    logit_sum += exchange[(turn, 2, *part)]
            return maximum, total, logit_sum

        for load in range(slots):
            fetch_within(jnp.int32(load))

        def label_and_weight(row):
            return labels_ref[row], weights_ref[0][row] if weights_ref else jnp.float32(0)

        def one_row(i, label_weight):
            row, begin = i * blocks + block, i * loads_a_row
            label, weight = label_weight
            target = logits_ref[row, label // line, lax.rem(label, line)]
            following = label_and_weight(jnp.minimum(row + blocks, rows - 1))

            def arrive(j):
                load = begin + j
                plgpu.barrier_wait(place(load)[1])
                values = read_chunk(load)
                pl.when(j < own - kept)(lambda: release(load))
                return values

            def first_walk(j, state):
                return accumulate(state, tuple(v.astype(jnp.float32) for v in arrive(j)))

            zeros = zeros_row((segment,))[0]
            state = ((full_row((segment,), LOWEST)[0], zeros), zeros)
            held_values = []
            for j in range(held):
                held_values.append(arrive(jnp.int32(j)))
                state = accumulate(state, tuple(v.astype(jnp.float32) for v in held_values[j]))
            state = lax.fori_loop(jnp.int32(held), own, first_walk, state)
            if tail:
                state = lax.cond(has_tail, lambda state: accumulate_tail(row, state), lambda state: state, state)
            maximum, total, logit_sum = row_statistics(state, lax.rem(i, 2))  # no warpgroup is two rows ahead

            @pl.when(group == 0)
            def _():
                smooth_sum = logit_sum if terms.label_smoothing else None
                score_ref[row] = terms.score(maximum, target.astype(jnp.float32), smooth_sum)
                maximum_ref[row], total_ref[row] = maximum, total

            if gradient_ref is None:
                return following
            slope = terms.slope(maximum, total, weight)

            for j in range(held):
                write(gradient_ref, row, first_line(j), held_values[j], slope, label)

            def second_walk(load, j):
                values = read_chunk(load)
                release(load)
                write(gradient_ref, row, first_line(j), values, slope, label)

            @pl.loop(own - kept, own)
            def _(j):
                second_walk(begin + j, j)

            @pl.loop(jnp.int32(held), own - kept)
            def _(j):
                load = begin + own + j - held
                plgpu.barrier_wait(place(load)[1])
                second_walk(load, j)

            if tail:

                @pl.when(has_tail)
                def _():
                    for first, _ in tail:
                        write(gradient_ref, row, first, (read(logits_ref.at[row], first),), slope, label)

            return following

        lax.fori_loop(0, trips, one_row, label_and_weight(block))

    lines_of = jax.ShapeDtypeStruct((rows, lines, line), logits.dtype)
    one_a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = plgpu.kernel(
        cross_entropy_ring,
        out_type=(one_a_row, one_a_row, one_a_row, *((lines_of,) if with_gradient else ())),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((warpgroups, slots, height, line), logits.dtype),
            plgpu.SMEM((2, 3, warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * slots),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=compiler_params(logits.dtype, reduction_scratch_bytes=512),
    )(logits.reshape(lines_of.shape), labels, *((weights,) if weights is not None else ()))
    return (*outputs[:3], *(output.reshape(logits.shape) for output in outputs[3:]))


def _tail_pieces(lines: int, tail_lines: int) -> list[tuple[int, int]]:
    """The lines behind the last whole chunk, four at a time: where each four begin, and how many were there before."""
    pieces = -(-tail_lines // WARPS)
    starts = [lines - tail_lines + i * WARPS for i in range(pieces)]
    repeated = pieces * WARPS - tail_lines
    return [(min(start, lines - WARPS), repeated if start > lines - WARPS else 0) for start in starts]
