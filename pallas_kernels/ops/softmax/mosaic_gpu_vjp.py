"""Softmax backward on Mosaic GPU, from the weights that the forward pass returned.

With p the weights and dy their cotangents, a row's gradient is

    dx = p * (dy - sum(p * dy) / sum(p)) * scale

The division makes up for p's rounding to the dtype of x. Without it a row with one large weight, where the two terms
nearly cancel, gets 20 times the error of a gradient from float32 weights; with it the error is that of rounding dx.
The mask plays no part: p is zero where it hides.

A short row is in the registers of one warpgroup. A block holds a longer one in shared memory, where TMA brings the
row's weights and dy; its warpgroups go over them twice, each warp over its own lines. Several blocks share a
multiprocessor, so that one reads while another writes. XLA computes the gradients of other rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.softmax.rounding import pairwise, quotient, remainder
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import HeldRows, compiler_params, held_segments, row_kernel
from pallas_kernels.primitives.rows import (
    WARPS,
    WarpSegment,
    line_sums,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)
from pallas_kernels.primitives.settings import usual_promotion

REGISTER_COLUMNS = 8192
"""The longest row held in registers: weights and dy take 145 registers a thread."""
_SHARED_BYTES = 220 * 1024
"""The most shared memory for the rows of a block."""
_WARPGROUPS = 4
"""The warpgroups of a block that holds a row in shared memory."""
_WARP_COLUMNS = 512
"""Columns of such a row that a warp has in registers at a time, if they divide its part of the row."""

Term = Callable[[jax.Array, jax.Array], jax.Array]
"""Computes something of each element from p and dy."""


def softmax_backward(weights: jax.Array, dy: jax.Array, *, scale: float | None) -> jax.Array:
    """Returns dx. weights (what `softmax_forward` returned) and dy: (rows, features), features >= 128."""
    features, itemsize = weights.shape[1], weights.dtype.itemsize
    if features <= REGISTER_COLUMNS:
        return whole_row_gradient(weights, dy, scale=scale)
    is_even = split_warp_row(features, itemsize, warpgroups=_WARPGROUPS) is not None
    if is_even and 2 * features * itemsize <= _SHARED_BYTES:
        return varying_like(shared_row_gradient(weights, dy, scale=scale), weights, dy)
    return xla_gradient(weights, dy, scale=scale)


@usual_promotion
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
    at_once, segments = held_segments(weights.shape, weights.dtype.itemsize)

    def compute(row, refs):
        held = HeldRows(at=row, segments=segments)
        p, dy = map(to_float32, [load_row(refs[name].at[row], segments) for name in ("weights", "dy")])

        def sums(_, *terms):
            return [held.spread(held.sum(map_row(term, p, dy))) for term in terms]

        def write(gradient):
            held.store(refs["dx"], map_row(gradient, p, dy))

        _differentiate(sums, write, scale=scale, is_exact=refs["dx"].dtype.itemsize == 4)

    results = row_kernel(
        compute,
        {"weights": weights, "dy": dy},
        {"dx": jax.ShapeDtypeStruct(weights.shape, weights.dtype)},
        name="softmax_gradient",
        compiler_params=compiler_params(weights.dtype),
        rows=weights.shape[0],
        at_once=at_once,
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

    def softmax_gradient(weights_ref, dy_ref, dx_ref, held, lines, arrived, summed):
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")

        @pl.when(group == 0)
        def _():
            for i, ref in enumerate((weights_ref, dy_ref)):
                plgpu.copy_gmem_to_smem(ref.at[row], held.at[i], arrived, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        plgpu.barrier_wait(arrived)

        def load(i):
            place = pl.ds(i * columns, columns)
            return [to_float32(load_row(held.at[s, group, :, place], piece)) for s in range(2)]

        def sums(turn, *terms):
            def add(i, totals):
                values = load(i)
                return [map_row(jnp.add, total, map_row(t, *values)) for total, t in zip(totals, terms, strict=True)]

            for s, total in enumerate(lax.fori_loop(0, line // columns, add, [zeros_row(piece)] * len(terms))):
                lines[turn, s, group] = line_sums(total, piece)
            plgpu.commit_smem()
            plgpu.barrier_arrive(summed.at[turn])
            plgpu.barrier_wait(summed.at[turn])
            every = [(g, w) for g in range(warpgroups) for w in range(WARPS)]
            return [pairwise([lines[(turn, s, *at)] for at in every]) for s in range(len(terms))]

        def write(gradient):
            @pl.loop(0, line // columns)
            def _(i):
                store_row(dx_ref.at[row, group, :, pl.ds(i * columns, columns)], map_row(gradient, *load(i)), piece)

        _differentiate(sums, write, scale=scale, is_exact=is_exact)

    dx = settings.kernel(
        softmax_gradient,
        out_type=jax.ShapeDtypeStruct((rows, *parts), weights.dtype),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((2, *parts), weights.dtype),
            plgpu.SMEM((turns, 2, warpgroups, WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=turns),
        ),
        compiler_params=compiler_params(weights.dtype, reduction_scratch_bytes=512),
    )(weights.reshape(rows, *parts), dy.reshape(rows, *parts))
    return dx.reshape(weights.shape)
