"""The gradients of a chunk's logits on Mosaic GPU: from logits that were kept, or from logits computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from pallas_kernels.ops.linear_cross_entropy.launch import problem_of, product_kernel
from pallas_kernels.ops.linear_cross_entropy.mosaic_gpu import BINARY, load_rows, spread
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.gemm.store import Pieces
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import RowChunks

_COLUMNS = 8192
"""Columns per block in the kernel that turns kept logits into gradients."""


@dataclass(frozen=True, kw_only=True)
class RowSlopes:
    """The slopes of rows and their labels: (rows,) arrays, or references to them in a kernel."""

    shift: Any
    factor: Any
    everywhere: Any
    at_label: Any
    label: Any

    @classmethod
    def of(cls, slope: Slope, label: jax.Array) -> RowSlopes:
        """Makes the record from a slope and the labels."""
        return cls(
            shift=slope.shift,
            factor=slope.factor,
            everywhere=slope.everywhere,
            at_label=slope.at_label,
            label=label,
        )

    def slope(self, read) -> tuple[Slope, Any]:
        """Returns the slopes and labels that `read` gives for each reference."""
        everywhere = None if self.everywhere is None else read(self.everywhere)
        slope = Slope(
            exponential=BINARY,
            shift=read(self.shift),
            factor=read(self.factor),
            everywhere=everywhere,
            at_label=read(self.at_label),
        )
        return slope, read(self.label)


jax.tree_util.register_dataclass(RowSlopes, ["shift", "factor", "everywhere", "at_label", "label"], [])


def is_checked(*arrays: jax.Array) -> bool:
    """Whether the trace is under jax.shard_map(check_vma=True), where jax 0.11.2 accepts no references."""
    return any(jax.typeof(array).manual_axis_type.varying for array in arrays)


@partial(jax.jit, static_argnames=("width", "kept_rows", "config"))
def chunk_gradients(hidden, w, slopes, logits, first, *, width, kept_rows, config) -> jax.Array:
    """Computes the gradients of a chunk's logits, (rows, width)."""
    rows = hidden.shape[0]
    if not kept_rows:
        return _from_products(hidden, w, slopes, None, first, width, kept_rows=0, config=config)
    kept = _from_logits(logits, slopes, rows, first, width, kept_rows=kept_rows)
    if kept_rows == rows:
        return kept
    return _from_products(hidden, w, slopes, kept, first, width, kept_rows=kept_rows, config=config)


def _from_logits(logits, slopes, rows, first, width, *, kept_rows) -> jax.Array:
    """Computes the gradients of kept logits in one pass: (rows, width), of which only `kept_rows` are written."""
    cut = RowChunks.make(width, logits.dtype.itemsize, _COLUMNS)

    def linear_cross_entropy_slopes(logits_ref, slopes_ref, first_ref, d_ref):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        start = first_ref[0] * CHUNK_UNIT
        slope, label = slopes_ref.slope(lambda ref: ref[row])
        columns = logits_ref.at[row, pl.ds(start, width)]
        write_gradient(columns, d_ref.at[row], cut, part, slope, label - start)

    d = settings.kernel(
        linear_cross_entropy_slopes,
        out_type=jax.ShapeDtypeStruct((rows, width), logits.dtype),
        grid=(kept_rows, cut.parts),
        grid_names=("row", "part"),
        compiler_params=compiler_params(logits.dtype),
    )(logits, slopes, first)
    return varying_like(d, logits, *jax.tree.leaves(slopes))


def _from_products(hidden, w, slopes, d, first, width, *, kept_rows, config) -> jax.Array:
    """Computes the rows from `kept_rows` on from logits computed again; `d` holds the others."""
    (rows, features), dtype = hidden.shape, hidden.dtype
    problem = problem_of(rows - kept_rows, width, features, dtype, config.recompute, stored_bytes=dtype.itemsize)
    pieces = Pieces.of(problem)
    height = problem.rows
    slopes = jax.tree.map(lambda array: padded_vector(array[kept_rows:], height), slopes)
    is_separate = d is None or is_checked(hidden, w, d)
    out_type = [jax.ShapeDtypeStruct((rows - kept_rows, width), dtype)] if is_separate else []

    def make_store(extras, outputs, buffer, arrived, warpgroup):
        del arrived, warpgroup
        output = outputs[0] if is_separate else extras["d"].at[pl.ds(kept_rows, rows - kept_rows)]
        return GradientStore(
            pieces=pieces,
            slopes=extras["slopes"],
            first_column=extras["first"][0] * CHUNK_UNIT,
            output=output,
            buffer=buffer,
        )

    outputs = product_kernel(
        problem,
        hidden,
        w,
        name="linear_cross_entropy_gradient",
        make_store=make_store,
        extras={"slopes": slopes, "first": first},
        changed=None if is_separate else {"d": d},
        out_type=out_type,
        buffer_dtype=dtype,
        view_a=lambda ref, extras: ref.at[pl.ds(kept_rows, rows - kept_rows)] if kept_rows else ref,
        view_b=lambda ref, extras: ref.at[:, pl.ds(extras["first"][0] * CHUNK_UNIT, width)],
    )
    if not is_separate:
        return outputs[0]
    rest = varying_like(outputs[0], hidden, w, *jax.tree.leaves(slopes))
    return rest if d is None else jnp.concatenate((d[:kept_rows], rest))


@dataclass(frozen=True, kw_only=True)
class GradientStore:
    """The store of a warpgroup's tile of logits: it stores their gradients by TMA, in pieces.

    slopes: references to (padded rows,) arrays. first_column: of the chunk. output: the chunk in device memory.
    """

    pieces: Pieces
    slopes: RowSlopes
    first_column: jax.Array
    output: Any
    buffer: Any

    def begin(self, row: jax.Array, column: jax.Array) -> None:
        """Does nothing before the products."""

    def finish(self, products: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Computes and stores the gradients of the tile."""
        (logits,), pieces = products, self.pieces
        rows, width = pieces.rows, pieces.columns
        slope, label = self.slopes.slope(lambda ref: spread(load_rows(ref, row, rows), width))
        columns = plgpu.broadcasted_iota(jnp.int32, (rows, width), 1, layout=plgpu.Layout.WGMMA)
        label = label - (self.first_column + column)
        for piece in range(pieces.count):
            slot, start = piece % pieces.slots, piece * width
            plgpu.wait_smem_to_gmem(pieces.slots - 1, wait_read_only=True)
            values = slope(logits[:, start : start + width], columns == label - start)
            self.buffer[slot] = values.astype(self.buffer.dtype)
            plgpu.commit_smem()
            place = self.output.at[pl.ds(row, rows), pl.ds(column + start, width)]
            plgpu.copy_smem_to_gmem(self.buffer.at[slot], place)
