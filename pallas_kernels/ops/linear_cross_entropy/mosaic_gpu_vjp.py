"""Linear layer and cross-entropy backward on Mosaic GPU, a chunk of the vocabulary at a time.

For each chunk the gradients of its logits, d, (rows, chunk) in the operands' dtype, then

    dhidden += d @ w[:, chunk].T        # float32 between the chunks
    dw[:, chunk] = hidden.T @ d         # complete at once, since it has all rows

d comes either from logits that the forward pass kept, in one pass over them, or from logits computed again. Kept logits
lie where dw will: an array of (features, vocabulary) holds them if there are no more rows than features, and a chunk
of it is needed for dw when its logits have become d. So three products suffice, and no array of the logits' size
is in memory but dw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.linear_cross_entropy.config import CHUNK_UNIT, chunk_bounds, default_chunk
from pallas_kernels.ops.linear_cross_entropy.launch import TileStore, problem_of, product_kernel
from pallas_kernels.ops.linear_cross_entropy.slopes import RowSlopes, chunk_gradients, is_checked
from pallas_kernels.primitives.gemm.config import choose_config
from pallas_kernels.primitives.gemm.store import Pieces
from pallas_kernels.primitives.platform import varying_like


def gradients(
    hidden: jax.Array,
    w: jax.Array,
    slopes: RowSlopes,
    logits: jax.Array | None,
    *,
    vocabulary: int,
    wants_hidden: bool,
    wants_w: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (dhidden, dw), with None for a gradient that is not wanted.

    hidden, w: as `mosaic_gpu.logits_statistics` takes them. logits: from there, if they were kept. vocabulary: how
    many columns of w count.
    """
    dhidden, dw = None, logits
    chunk = default_chunk(w.shape[1], w.shape[0])
    bounds = chunk_bounds(w.shape[1], chunk)
    for start, width in bounds:
        first = jnp.full(1, start // CHUNK_UNIT, jnp.int32)
        d = chunk_gradients(hidden, w, slopes, None if logits is None else dw, first, width=width)
        if start + width > vocabulary:  # exp(0 - lse) may be infinite there, and times the zeros of w no number
            d = d.at[:, vocabulary - start :].set(0)
        if wants_hidden:
            dhidden = _add_to_hidden(d, w, dhidden, first, is_only=len(bounds) == 1)
            # Both products of a chunk come before the next chunk; else all chunks would be in memory together.
            d, dhidden = lax.optimization_barrier((d, dhidden))
        if wants_w:
            dw = _put_into_w(hidden, d, w, dw, first, chunk=chunk)
    return None if dhidden is None else dhidden.astype(hidden.dtype), dw if wants_w else None


# Under jit, so that chunks are traced once and, if called eagerly, compiled once.


@partial(jax.jit, static_argnames=("is_only",))
def _add_to_hidden(d, w, dhidden, first, *, is_only) -> jax.Array:
    """Returns dhidden + d @ w[:, chunk].T, (rows, features) float32, or in d's dtype if there is only one chunk."""
    (rows, width), features = d.shape, w.shape[0]
    dtype = d.dtype if is_only else jnp.dtype(jnp.float32)
    # Small buffers for float32 sums, so that four stages fit.
    config = replace(choose_config(rows, features), store_columns=32)
    problem = problem_of(rows, features, width, d.dtype, config, transpose_b=True, stored_bytes=dtype.itemsize)
    is_apart = dhidden is None or is_checked(d, w)

    def make_store(extras, outputs, buffer):
        output = outputs[0] if is_apart else extras["sums"]
        return TileStore(pieces=Pieces.of(problem), output=output, buffer=buffer, adds=not is_apart)

    outputs = product_kernel(
        problem,
        d,
        w,
        name="linear_cross_entropy_gradient_hidden",
        make_store=make_store,
        extras={"first": first},
        changed=None if is_apart else {"sums": dhidden},
        out_type=[jax.ShapeDtypeStruct((rows, features), dtype)] if is_apart else [],
        buffer_dtype=dtype,
        view_b=lambda ref, extras: ref.at[:, pl.ds(extras["first"][0] * CHUNK_UNIT, width)],
    )
    if not is_apart:
        return outputs[0]
    result = varying_like(outputs[0], d, w)
    return result if dhidden is None else dhidden + result


@partial(jax.jit, static_argnames=("chunk",))
def _put_into_w(hidden, d, w, dw, first, *, chunk) -> jax.Array:
    """Returns dw with hidden.T @ d in the chunk's columns; makes a new array if dw is None."""
    (rows, width), (features, vocabulary) = d.shape, w.shape
    config = choose_config(features, chunk)
    problem = problem_of(features, width, rows, d.dtype, config, transpose_a=True, stored_bytes=d.dtype.itemsize)
    is_new = dw is None
    is_apart = not is_new and is_checked(hidden, d)
    shape = (features, width) if is_apart else (features, vocabulary)
    is_changed = not is_new and not is_apart

    def place(extras, outputs):
        if is_apart:
            return outputs[0]
        columns = pl.ds(extras["first"][0] * CHUNK_UNIT, width)
        return (outputs[0] if is_new else extras["dw"]).at[:, columns]

    def make_store(extras, outputs, buffer):
        return TileStore(pieces=Pieces.of(problem), output=place(extras, outputs), buffer=buffer)

    outputs = product_kernel(
        problem,
        hidden,
        d,
        name="linear_cross_entropy_gradient_w",
        make_store=make_store,
        extras={"first": first},
        changed={"dw": dw} if is_changed else None,
        out_type=[] if is_changed else [jax.ShapeDtypeStruct(shape, d.dtype)],
        buffer_dtype=d.dtype,
    )
    if is_changed:
        return outputs[0]
    result = varying_like(outputs[0], hidden, d)
    if dw is None:
        return result
    return lax.dynamic_update_slice(dw, result, (0, first[0] * CHUNK_UNIT))
