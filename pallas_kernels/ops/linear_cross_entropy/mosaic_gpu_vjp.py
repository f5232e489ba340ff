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

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.formula import Slope
from pallas_kernels.ops.cross_entropy.mosaic_gpu import write_gradient
from pallas_kernels.ops.linear_cross_entropy.config import CHUNK_UNIT, chunk_bounds, default_chunk
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import TileStore, load_rows, problem_of, product_kernel, spread
from pallas_kernels.primitives.gemm.config import choose_config
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.gemm.store import Pieces
from pallas_kernels.primitives.row_kernel import RowChunks, compiler_params
from pallas_kernels.primitives.settings import named_kernel

_COLUMNS = 8192
"""Columns per block in the kernel that turns kept logits into gradients."""
RowSlopes = tuple[Slope, Any]
"""Slopes of rows, of `BINARY` exponentials, and their labels: (rows,) arrays, or references to them in a kernel."""


def gradients(
    hidden: jax.Array,
    w: jax.Array,
    slopes: RowSlopes,
    logits: jax.Array | None = None,
    *,
    vocabulary: int,
    wants: tuple[bool, bool],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns (dhidden, dw), with None for a gradient that is not wanted.

    hidden, w: as `mosaic_gpu.logits_statistics` takes them. logits: from there, if they were kept. vocabulary: how
    many columns of w count.
    """
    dhidden, dw, (wants_hidden, wants_w) = None, logits, wants
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

    (result,) = product_kernel(
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
    return dhidden + result if is_apart and dhidden is not None else result


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

    (result,) = product_kernel(
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
    if not is_apart or dw is None:
        return result
    return lax.dynamic_update_slice(dw, result, (0, first[0] * CHUNK_UNIT))


def loaded(slopes: RowSlopes, read: Callable[[Any], Any]) -> RowSlopes:
    """Applies `read` to each reference."""
    slope, label = slopes
    everywhere = jax.tree.map(read, slope.everywhere)
    slope = jax.tree.map(read, replace(slope, everywhere=None))
    return replace(slope, everywhere=everywhere), read(label)


def is_checked(*arrays: jax.Array) -> bool:
    """Whether the trace is under jax.shard_map(check_vma=True), where jax 0.11.2 accepts no references."""
    return any(jax.typeof(array).manual_axis_type.varying for array in arrays)


@partial(jax.jit, static_argnames=("width",))
def chunk_gradients(hidden, w, slopes, logits, first, *, width) -> jax.Array:
    """Computes the gradients of a chunk's logits, (rows, width). logits: as they were kept, or None."""
    if logits is None:
        return _from_products(hidden, w, slopes, first, width)
    return _from_logits(logits, slopes, hidden.shape[0], first, width)


def _from_logits(logits, slopes, rows, first, width) -> jax.Array:
    """Computes the gradients of kept logits in one pass."""
    cut = RowChunks.make(width, logits.dtype.itemsize, _COLUMNS)

    def body(refs: dict[str, Any]) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        start = refs["first"][0] * CHUNK_UNIT
        slope, label = loaded(refs["slopes"], lambda ref: ref[row])
        columns = refs["logits"].at[row, pl.ds(start, width)]
        write_gradient(columns, refs["d"].at[row], cut, part, slope, label - start)

    found = named_kernel(
        body,
        {"logits": logits, "slopes": slopes, "first": first},
        {"d": jax.ShapeDtypeStruct((rows, width), logits.dtype)},
        name="linear_cross_entropy_slopes",
        grid={"row": rows, "part": cut.parts},
        compiler_params=compiler_params(logits.dtype),
    )
    return found["d"]


def _from_products(hidden, w, slopes, first, width) -> jax.Array:
    """Computes the gradients of logits that are computed again."""
    (rows, features), dtype = hidden.shape, hidden.dtype
    config = choose_config(rows, w.shape[1])
    problem = problem_of(rows, width, features, dtype, config, stored_bytes=dtype.itemsize)
    pieces = Pieces.of(problem)
    slopes = jax.tree.map(lambda array: padded_vector(array, problem.rows), slopes)

    def make_store(extras, outputs, buffer):
        first_column = extras["first"][0] * CHUNK_UNIT

        def gradients(logits, row, column):
            shape = (pieces.rows, pieces.columns)
            slope, label = loaded(extras["slopes"], lambda ref: spread(load_rows(ref, row, shape[0]), shape[1]))
            columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            label = label - (first_column + column)
            return lambda start: slope(logits[:, start : start + shape[1]], columns == label - start)

        return TileStore(pieces=pieces, output=outputs[0], buffer=buffer, results=gradients)

    (d,) = product_kernel(
        problem,
        hidden,
        w,
        name="linear_cross_entropy_gradient",
        make_store=make_store,
        extras={"slopes": slopes, "first": first},
        out_type=[jax.ShapeDtypeStruct((rows, width), dtype)],
        buffer_dtype=dtype,
        view_b=lambda ref, extras: ref.at[:, pl.ds(extras["first"][0] * CHUNK_UNIT, width)],
    )
    return d
