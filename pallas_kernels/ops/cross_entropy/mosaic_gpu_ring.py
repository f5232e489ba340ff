"""Cross-entropy of long rows on Mosaic GPU: loss and gradient, each logit read from memory once and written once.

A row of 128256 bf16 logits is 250 KiB, more than the registers or the shared memory of a multiprocessor, and the
gradient needs the whole row's sum first. A persistent block takes a row at a time. Each of its warpgroups has a part of
the row, cut into chunks, and a ring of places in shared memory, into which it brings them by TMA. It walks along them
twice:

    1. maximum and sum (online softmax); the first chunks stay in registers (`held`), the last ones in their places
    2. the gradient, first of those in their places, then of those in registers, then of what found no room and comes a
       second time, out of the L2 cache where that has it still, the latest first

A place is filled again as soon as its chunk is done with, by chunks of the next row if need be, in one sequence of
loads throughout (`ring`): memory is busy all the time, though the two walks of a row need each other's end. Short rows
leave room for several blocks on a multiprocessor, each at another place of its own row.

A row's label, weight and label's logit are asked for a row or a walk ahead: nobody waits for memory between the walks.

The warpgroups of a block talk once a row, when they put their sums together (`ring_sums`); each reads and fills only
places of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, RowPlan
from pallas_kernels.ops.cross_entropy.formula import Exponential, Slope, Terms, weight_of_row
from pallas_kernels.ops.cross_entropy.ring import Pieces, Ring, RingRow
from pallas_kernels.ops.cross_entropy.ring_sums import Exchange, OnlineSoftmax, ThreadSums
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import is_interpreted, target_device
from pallas_kernels.primitives.rows import ACCESS_BYTES, LANES, WARPS, RowValues


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
    warpgroups, rows_at_once = config.warpgroups, config.rows_at_once
    blocks = min(-(-rows // rows_at_once), target_device().core_count)
    vector = ACCESS_BYTES // dtype.itemsize
    in_accesses = jax.ShapeDtypeStruct((rows, plan.accesses, vector), dtype)
    one_a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    inputs = {"logits": logits.reshape(in_accesses.shape), "labels": labels}
    inputs |= {} if weights is None else {"weights": weights}
    out_types = {"loss": one_a_row, "maximum": one_a_row, "total": one_a_row}
    out_types |= {"gradient": in_accesses} if with_gradient else {}
    scratch = {
        "buffers": plgpu.SMEM((warpgroups, config.slots, plan.chunk, vector), dtype),
        "lines": plgpu.SMEM((2, 4, warpgroups, WARPS), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=warpgroups * config.slots),
        "met": plgpu.Barrier(num_arrivals=plan.sharers, num_barriers=rows_at_once),
    }
    names = (*inputs, *out_types, *scratch)

    def cross_entropy_ring(*references):
        refs = dict(zip(names, references, strict=True))
        _rows_of_warpgroup(refs, plan=plan, terms=terms, config=config, stride=blocks * rows_at_once)

    outputs = settings.kernel(
        cross_entropy_ring,
        out_type=tuple(out_types.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=compiler_params(dtype, reduction_scratch_bytes=512),
    )(*inputs.values())
    return (*outputs[:3], *(output.reshape(logits.shape) for output in outputs[3:]))


def _rows_of_warpgroup(
    refs: dict[str, Any], *, plan: RowPlan, terms: Terms, config: ForwardConfig, stride: int
) -> None:
    """Both walks along each of the block's rows. stride: from one of them to the next."""
    logits_ref, gradient_ref = refs["logits"], refs.get("gradient")
    weights_ref = [refs["weights"]] if "weights" in refs else []
    rows, _, vector = logits_ref.shape
    group = lax.axis_index("warpgroup")
    first_row = lax.axis_index("block") * config.rows_at_once + group // plan.sharers
    trips = (rows - first_row + stride - 1) // stride
    part, repeated = plan.part(lax.rem(group, plan.sharers))
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
    exchange = Exchange(softmax=softmax, lines=refs["lines"], met=refs["met"].at[group // plan.sharers])

    def label_and_weight(row):
        return refs["labels"][row], jnp.asarray(weight_of_row(weights_ref, row), jnp.float32)

    def one_row(i, label_weight):
        row = ring.row(i)
        token = terms.token(*label_weight)
        target = logits_ref[row.index, token.label // vector, lax.rem(token.label, vector)]
        following = label_and_weight(jnp.minimum(row.index + stride, rows - 1))
        seen, held = _first_walk(row, softmax)
        sums = exchange.join(seen, lax.rem(i, 2))  # nobody is two rows ahead

        # Each time another's task, and the last one of a row: the next row's loads wait for the gradient.
        def write_loss():
            logit_sum = sums.logit_sum if terms.label_smoothing else None
            total = exponential.total(sums.total, sums.shift, sums.maximum)
            refs["loss"][row.index] = terms.loss(token, sums.maximum, total, target.astype(jnp.float32), logit_sum)
            refs["maximum"][row.index], refs["total"][row.index] = sums.maximum, total

        is_my_turn = lax.rem(group, plan.sharers) == lax.rem(i, plan.sharers)
        if gradient_ref is not None:
            slope = terms.slope(sums.maximum, sums.total, token, exponential=exponential, shift=sums.shift)
            _second_walk(row, held, gradient_ref.at[row.index], slope, token.label)
        pl.when(is_my_turn)(write_loss)
        return following

    if config.stagger and not is_interpreted():
        pl.delay(lax.rem(lax.axis_index("block"), 8) * config.stagger)
    for load in range(config.slots):
        ring.fetch(jnp.int32(0), jnp.int32(load))
    lax.fori_loop(0, trips, one_row, label_and_weight(jnp.minimum(first_row, rows - 1)))


def _first_walk(row: RingRow, softmax: OnlineSoftmax) -> tuple[ThreadSums, list[RowValues]]:
    """What threads have seen of the row, and the chunks that stay in registers."""
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
        # Read a second time, behind a barrier: else the compiler holds its float32 conversions, twice as much.
        plgpu.commit_smem()
        held.append(row.take(jnp.int32(j)))
    if plan.held < plan.own:
        add = lambda j, seen: softmax.add(seen, arrive(j), is_last=False)  # noqa: E731
        seen = lax.fori_loop(jnp.int32(plan.held), jnp.int32(plan.own - 1), add, seen)
        seen = softmax.add(seen, arrive(jnp.int32(plan.own - 1)), is_last=True)
    return seen, held


def _second_walk(row: RingRow, held: list[RowValues], gradient_ref, slope: Slope, label: jax.Array) -> None:
    """Writes the row's gradient: of the chunks in shared memory, of those in registers, of those that come again."""
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
    """The gradient of a chunk's logits, to the row's accesses from `first` on."""
    hit = label - first * pieces.vector
    is_here = (hit >= 0) & (hit < len(values) * LANES * pieces.vector)

    def store(*, at_label: bool):
        for i, value in enumerate(values):
            is_label = pieces.value_numbers() == hit - i * LANES * pieces.vector if at_label else None
            gradient = slope(value.astype(jnp.float32), is_label)
            pieces.store(gradient_ref, first + i * LANES, gradient.astype(gradient_ref.dtype))

    # Two forms of one loop: the comparisons would cost a quarter of the instructions, for one logit of a row.
    pl.when(is_here)(lambda: store(at_label=True))
    pl.when(jnp.logical_not(is_here))(lambda: store(at_label=False))
