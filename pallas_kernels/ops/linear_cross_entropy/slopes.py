"""The gradients of a chunk's logits on Mosaic GPU: from logits that were kept, or from logits computed again."""

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
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import write_gradient
from pallas_kernels.ops.linear_cross_entropy.config import CHUNK_UNIT
from pallas_kernels.ops.linear_cross_entropy.launch import TileStore, problem_of, product_kernel
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import load_rows, spread
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.config import choose_config
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.gemm.store import Pieces
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import RowChunks, compiler_params

_COLUMNS = 8192
"""Columns per block in the kernel that turns kept logits into gradients."""


RowSlopes = tuple[Slope, Any]
"""Slopes of rows, of `BINARY` exponentials, and their labels: (rows,) arrays, or references to them in a kernel."""


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

    def linear_cross_entropy_slopes(logits_ref, slopes_ref, first_ref, d_ref):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        start = first_ref[0] * CHUNK_UNIT
        slope, label = loaded(slopes_ref, lambda ref: ref[row])
        columns = logits_ref.at[row, pl.ds(start, width)]
        write_gradient(columns, d_ref.at[row], cut, part, slope, label - start)

    d = settings.kernel(
        linear_cross_entropy_slopes,
        out_type=jax.ShapeDtypeStruct((rows, width), logits.dtype),
        grid=(rows, cut.parts),
        grid_names=("row", "part"),
        compiler_params=compiler_params(logits.dtype),
    )(logits, slopes, first)
    return varying_like(d, logits, *jax.tree.leaves(slopes))


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
    return varying_like(d, hidden, w, *jax.tree.leaves(slopes))
