"""Softmax on Mosaic GPU, forward and backward: a warpgroup reads one row, or several short ones, to registers.

Forward, a row that fits in registers is read once. A longer row is read twice: first for maximum and sum together
(online softmax), then, from the L2 cache, for the weights.

Backward, with p the weights that the forward pass returned and dy their cotangents, a row's gradient is

    dx = p * (dy - sum(p * dy) / sum(p)) * scale

The division makes up for p's rounding to the dtype of x. Without it a row with one large weight, where the two terms
nearly cancel, gets 20 times the error of a gradient from float32 weights; with it the error is that of rounding dx.
The mask plays no part: p is zero where it hides.

A block holds rows too long for registers in shared memory, where TMA brings the row's weights and dy; its warpgroups go
over them twice, each warp over its own lines. Several blocks share a multiprocessor, so that one reads while another
writes. XLA computes the gradients of other rows.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.masking import Masking, load_mask
from pallas_kernels.ops.softmax.rounding import (
    MOST_EXACT,
    exact_sum,
    normalise,
    online_add,
    pairwise,
    quotient,
    remainder,
)
from pallas_kernels.primitives.barriers import meet
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.row_kernel import HeldRows, RowChunks, compiler_params, held_segments
from pallas_kernels.primitives.rows import (
    WARPS,
    Row,
    WarpSegment,
    cut_row,
    full_row,
    line_sums,
    load_row,
    map_row,
    row_grid,
    row_max,
    row_of_block,
    row_sum,
    split_warp_row,
    store_row,
    sum_of,
    to_float32,
    zeros_row,
)
from pallas_kernels.primitives.settings import named_kernel, usual_promotion

REGISTER_COLUMNS = 16384
"""The longest row held in registers: 64 KiB of float32 weights fill half of them."""
BACKWARD_REGISTER_COLUMNS = 8192
"""The longest row held in registers: weights and dy take 145 registers a thread."""
_SHARED_BYTES = 220 * 1024
"""The most shared memory for the rows of a block."""
_WARPGROUPS = 4
"""The warpgroups of a block that holds a row in shared memory."""
_WARP_COLUMNS = 512
"""Columns of such a row that a warp has in registers at a time, if they divide its part of the row."""
Term = Callable[[jax.Array, jax.Array], jax.Array]
"""Computes something of each element from p and dy."""


def softmax_forward(
    x: jax.Array,
    mask: jax.Array | None,
    *,
    masking: Masking,
    register_columns: int = REGISTER_COLUMNS,
    chunk: int = 4096,
) -> jax.Array:
    """Returns the weights, like x.

    x: (rows, features) of a floating dtype, features >= 128. mask: (rows of its own, features), int8 where
    `masking.is_boolean`, else floating. register_columns: the longest row held in registers. chunk: columns in
    registers at a time in a longer row, which is read again from the L2 cache.
    """
    shape, itemsize = x.shape, x.dtype.itemsize
    is_whole = shape[1] <= register_columns
    at_once, segments = held_segments(shape, itemsize, masking.rows_at_once(x) if is_whole else 0)
    chunks = RowChunks.make(shape[1], itemsize, chunk)
    parts = masking.parts(shape[0]) if at_once else 1

    def body(refs):
        row = row_of_block(shape[0], at_once, parts)
        mask_row = refs["mask"].at[masking.mask_rows(row)] if "mask" in refs else None
        if is_whole:
            _held_rows(HeldRows(at=row, segments=segments), refs["x"], mask_row, refs["y"], masking)
        else:
            _online(row, chunks, refs["x"], mask_row, refs["y"], masking)

    results = named_kernel(
        body,
        {"x": x, "mask": mask},
        {"y": jax.ShapeDtypeStruct(shape, x.dtype)},
        name="softmax" if mask is None else "softmax_masked",
        grid=row_grid(shape[0], at_once, parts),
        compiler_params=compiler_params(x.dtype),
    )
    return results["y"]


def _held_rows(held: HeldRows, x_ref: Any, mask_row: Any, y_ref: Any, masking: Masking) -> None:
    """Computes the weights of rows in registers."""
    is_exact = x_ref.dtype.itemsize == 4
    values = load_row(x_ref.at[held.at], held.segments)
    mask = None if mask_row is None else load_mask(mask_row, held.segments, held.at)
    scores = masking.apply(values, mask)
    maximum = held.spread(jnp.maximum(held.max(scores), LOWEST))
    weights = map_row(lambda v: jnp.exp(v - maximum), scores)
    total = exact_sum(weights, held.sum) if is_exact and x_ref.shape[1] <= MOST_EXACT else held.sum(weights)
    held.store(y_ref, normalise(weights, held.spread(total), is_exact=is_exact))


def _online(row: Row, chunks: RowChunks, x_ref: Any, mask_row: Any, y_ref: Any, masking: Masking) -> None:
    """Computes the weights of a row that registers do not hold, chunk by chunk."""
    pieces, rest = cut_row(chunks.segments, 1), chunks.rest  # pieces of one shape, which `online_add` folds into one

    def scores(columns, segments):
        mask = None if mask_row is None else load_row(mask_row.at[columns], segments)
        return masking.apply(load_row(x_ref.at[row, columns], segments), mask)

    start = full_row(pieces[:1], LOWEST)[0], zeros_row(pieces[:1])[0]
    add = lambda i, state: online_add(state, scores(chunks.columns(i), pieces))  # noqa: E731
    highest, totals = lax.fori_loop(0, chunks.trips, add, start)
    tail = scores(chunks.whole, rest)
    maximum = row_max((highest, *tail))
    total = sum_of(totals * jnp.exp(highest - maximum))
    if rest:
        total += row_sum(map_row(lambda v: jnp.exp(v - maximum), tail), rest)

    def write(columns: pl.Slice, segments):
        values = tail if segments is rest else scores(columns, segments)
        weights = map_row(lambda v: jnp.exp(v - maximum), values)
        store_row(y_ref.at[row, columns], normalise(weights, total, is_exact=x_ref.dtype.itemsize == 4), segments)

    chunks.each(write)


def softmax_backward(weights: jax.Array, dy: jax.Array, *, scale: float | None) -> jax.Array:
    """Returns dx. weights (what `softmax_forward` returned) and dy: (rows, features), features >= 128."""
    features, itemsize = weights.shape[1], weights.dtype.itemsize
    if features <= BACKWARD_REGISTER_COLUMNS:
        return whole_row_gradient(weights, dy, scale=scale)
    is_even = split_warp_row(features, itemsize, warpgroups=_WARPGROUPS) is not None
    if is_even and 2 * features * itemsize <= _SHARED_BYTES:
        return shared_row_gradient(weights, dy, scale=scale)
    return xla_gradient(weights, dy, scale=scale)


@usual_promotion()
def xla_gradient(weights: jax.Array, dy: jax.Array, *, scale: float | None = None) -> jax.Array:
    """Computes dx in plain `jax.numpy`."""
    p, dy = weights.astype(jnp.float32), dy.astype(jnp.float32)
    total = jnp.sum(p, axis=-1, keepdims=True)
    centered = dy - jnp.sum(p * dy, axis=-1, keepdims=True) / jnp.where(total == 0, 1, total)
    return (p * (centered * jnp.float32(1 if scale is None else scale))).astype(weights.dtype)


def _differentiate(
    sums: Callable[..., list[jax.Array]], write: Callable[[Term], None], *, scale: float | None, is_exact: bool
) -> None:
    """Computes and writes a row's gradient.

    sums: takes the number of the call and terms; sums each of them over the row. write: writes the gradient, a term.
    """
    total, product = sums(0, lambda p, dy: p, lambda p, dy: p * dy)
    means = [quotient(product, total)]

    def centered(dy):
        for mean in means:
            dy = dy - mean
        return dy

    if is_exact:
        (product,) = sums(1, lambda p, dy: p * centered(dy))
        means.append(remainder(quotient(product, total), means[0]))
    factor = jnp.float32(1 if scale is None else scale)
    write(lambda p, dy: p * (centered(dy) * factor))


def whole_row_gradient(weights: jax.Array, dy: jax.Array, *, scale: float | None) -> jax.Array:
    """Computes dx of rows in registers."""
    rows = weights.shape[0]
    at_once, segments = held_segments(weights.shape, weights.dtype.itemsize)

    def body(refs):
        row = row_of_block(rows, at_once)
        held = HeldRows(at=row, segments=segments)
        p, dy = map(to_float32, [load_row(refs[name].at[row], segments) for name in ("weights", "dy")])

        def sums(_, *terms):
            return [held.spread(held.sum(map_row(term, p, dy))) for term in terms]

        def write(gradient):
            held.store(refs["dx"], map_row(gradient, p, dy))

        _differentiate(sums, write, scale=scale, is_exact=refs["dx"].dtype.itemsize == 4)

    results = named_kernel(
        body,
        {"weights": weights, "dy": dy},
        {"dx": jax.ShapeDtypeStruct(weights.shape, weights.dtype)},
        name="softmax_gradient",
        grid=row_grid(rows, at_once),
        compiler_params=compiler_params(weights.dtype),
    )
    return results["dx"]


def shared_row_gradient(
    weights: jax.Array, dy: jax.Array, *, scale: float | None, warpgroups: int = _WARPGROUPS
) -> jax.Array:
    """Computes dx of rows in shared memory, which divide evenly over the warpgroups."""
    rows, features = weights.shape
    segments = split_warp_row(features, weights.dtype.itemsize, warpgroups=warpgroups)
    assert segments is not None
    line = features // (warpgroups * WARPS)
    parts = (warpgroups, WARPS, line)
    columns = _WARP_COLUMNS if not line % _WARP_COLUMNS else 32 * segments[0].vector
    piece = (WarpSegment(offset=0, size=columns, vector=segments[0].vector),)
    is_exact = weights.dtype.itemsize == 4
    turns = 2 if is_exact else 1

    def body(refs: dict[str, Any]) -> None:
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")
        held, lines = refs["held"], refs["lines"]

        @pl.when(group == 0)
        def _():
            in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            for i, name in enumerate(("weights", "dy")):
                plgpu.copy_gmem_to_smem(refs[name].at[row], held.at[i], refs["arrived"], oob_mode=in_bounds)

        plgpu.barrier_wait(refs["arrived"])

        def load(i):
            place = pl.ds(i * columns, columns)
            return [to_float32(load_row(held.at[s, group, :, place], piece)) for s in range(2)]

        def sums(turn, *terms):
            def add(i, totals):
                values = load(i)
                return [map_row(jnp.add, total, map_row(t, *values)) for total, t in zip(totals, terms, strict=True)]

            for s, total in enumerate(lax.fori_loop(0, line // columns, add, [zeros_row(piece)] * len(terms))):
                lines[turn, s, group] = line_sums(total, piece)
            meet(refs["summed"].at[turn])
            every = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            return [pairwise([lines[(turn, s, *at)] for at in every]) for s in range(len(terms))]

        def write(gradient):
            @pl.loop(0, line // columns)
            def _(i):
                place = pl.ds(i * columns, columns)
                store_row(refs["dx"].at[row, group, :, place], map_row(gradient, *load(i)), piece)

        _differentiate(sums, write, scale=scale, is_exact=is_exact)

    found = named_kernel(
        body,
        {"weights": weights.reshape(rows, *parts), "dy": dy.reshape(rows, *parts)},
        {"dx": jax.ShapeDtypeStruct((rows, *parts), weights.dtype)},
        {
            "held": plgpu.SMEM((2, *parts), weights.dtype),
            "lines": plgpu.SMEM((turns, 2, warpgroups, WARPS), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=2),
            "summed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=turns),
        },
        name="softmax_gradient",
        grid={"row": rows},
        warpgroups=warpgroups,
        compiler_params=compiler_params(weights.dtype, reduction_scratch_bytes=512),
    )
    return found["dx"].reshape(weights.shape)
