"""The gradient of cross-entropy on Mosaic GPU if the forward kernel did not write it, or wrote it unscaled.

Given each row's maximum and sum, the gradient is elementwise, so a block can compute any part of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.formula import Slope, Terms, weight_of_row
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.references import in_place
from pallas_kernels.primitives.rows import (
    LANES,
    Segment,
    load_row,
    map_row,
    row_columns,
    split_row,
    store_row,
    to_float32,
)

_SCALE_BLOCKS_PER_CORE = 8
_CHUNK = 8192
"""Columns of a row for one block."""


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A row split into parts for one warpgroup each: `chunks` of `chunk` columns, with their segments, and a rest.

    No segment of the rest repeats columns of a chunk, which another block may be writing, or has written in place.
    """

    vocabulary: int
    chunk: int
    chunks: int
    segments: tuple[Segment, ...]
    rest: tuple[Segment, ...]

    @classmethod
    def make(cls, vocabulary: int, itemsize: int, chunk: int) -> RowSplit:
        """Splits a row into chunks of `chunk` columns, or into one chunk if it is shorter."""
        chunk = min(chunk, vocabulary)
        chunks, tail = divmod(vocabulary, chunk)
        if 0 < tail < LANES:
            chunks -= 1
        segments = split_row(chunk, itemsize, stride=vocabulary)
        end = chunks * chunk
        rest = split_row(vocabulary - end, itemsize, offset=end, stride=vocabulary)
        return cls(vocabulary=vocabulary, chunk=chunk, chunks=chunks, segments=segments, rest=rest)

    @property
    def parts(self) -> int:
        """The number of blocks that share a row."""
        return self.chunks + bool(self.rest)

    def block_part(self, *, reversed_rows: int = 0) -> tuple[jax.Array, jax.Array]:
        """Returns the row and the part of a block.

        The grid is (rows * parts,), because CUDA limits its second axis to 65535.

        reversed_rows: the number of rows if the last ones come first, which the L2 cache still holds from the launch
            before; else 0.
        """
        block = lax.axis_index("block")
        if reversed_rows:
            block = jnp.int32(reversed_rows * self.parts - 1) - block
        return lax.div(block, jnp.int32(self.parts)), lax.rem(block, jnp.int32(self.parts))

    def run(self, part: jax.Array, function: Callable[[Any, pl.Slice, tuple[Segment, ...]], None]) -> None:
        """Calls `function(first column, columns, segments)` for a part."""

        def whole_chunk():
            function(part * self.chunk, pl.ds(part * self.chunk, self.chunk), self.segments)

        if not self.rest:
            whole_chunk()
        else:
            pl.when(part < self.chunks)(whole_chunk)
            pl.when(part == self.chunks)(lambda: function(0, pl.ds(0, self.vocabulary), self.rest))


def cross_entropy_backward(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    statistics: tuple[jax.Array, jax.Array],
    *,
    terms: Terms,
    chunk: int = _CHUNK,
) -> jax.Array:
    """Returns the gradient of sum(weights * losses), like logits.

    weights: (rows,) or (1,). statistics: what `cross_entropy_forward` returned. The other arguments are as there.
    """
    rows, vocabulary = logits.shape
    split = RowSplit.make(vocabulary, logits.dtype.itemsize, chunk)

    def cross_entropy_gradient(logits_ref, labels_ref, weights_ref, maximum_ref, total_ref, gradient_ref):
        row, part = split.block_part(reversed_rows=rows)
        token = terms.token(labels_ref[row], weight_of_row((weights_ref,), row))
        slope = terms.slope(maximum_ref[row], total_ref[row], token)
        write_gradient(logits_ref.at[row], gradient_ref.at[row], split, part, slope, token.label)

    gradient = settings.kernel(
        cross_entropy_gradient,
        out_type=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        grid=(rows * split.parts,),
        grid_names=("block",),
        compiler_params=compiler_params(logits.dtype),
    )(logits, labels, weights, *statistics)
    return varying_like(gradient, logits, labels, weights, *statistics)


def write_gradient(logits_row, gradient_row, split: RowSplit, part: jax.Array, slope: Slope, label: jax.Array) -> None:
    """Writes the gradient of one part of a row, given as references."""

    def differentiate(first, columns, segments):
        values = to_float32(load_row(logits_row.at[columns], segments))
        gradient = map_row(lambda v, c: slope(v, c == label - first), values, row_columns(segments))
        store_row(gradient_row.at[columns], gradient, segments)

    split.run(part, differentiate)


def scale_in_place(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies the gradient by the factor in place; a factor of 1 leaves the memory untouched.

    gradient: (rows, vocabulary). factor: a float32 scalar. It is 1 wherever the loss itself is differentiated; then
    this launch takes 2 µs, where `gradient * factor` would read and write gigabytes.
    """
    if jax.typeof(gradient).manual_axis_type.varying:
        # Under jax.shard_map(check_vma=True), jax 0.11.2 accepts no references. XLA's branch also works in place, but
        # the host waits for the factor.
        multiply = lambda values: (values.astype(jnp.float32) * factor).astype(values.dtype)  # noqa: E731
        return lax.cond(factor == 1, lambda values: values, multiply, gradient)
    rows, vocabulary = gradient.shape
    split = RowSplit.make(vocabulary, gradient.dtype.itemsize, _CHUNK)
    blocks = min(rows, target_device().core_count * _SCALE_BLOCKS_PER_CORE)

    def cross_entropy_scale(factor_ref, gradient_ref):
        factor = factor_ref[0]

        def multiply(ref, segments):
            values = to_float32(load_row(ref, segments))
            if segments[-1].repeated:  # no thread may write a column that another has yet to read
                plgpu.commit_smem()
            store_row(ref, map_row(lambda v: v * factor, values), segments)

        @pl.when(factor != 1.0)
        def _():
            @pl.loop(lax.axis_index("block"), rows, step=blocks)
            def _(i):
                row = rows - 1 - i  # the gradient's last rows are in the L2 cache
                if split.rest:
                    multiply(gradient_ref.at[row], split.rest)

                @pl.loop(0, split.chunks)
                def _(part):
                    multiply(gradient_ref.at[row, pl.ds(part * split.chunk, split.chunk)], split.segments)

    scale = settings.kernel(
        cross_entropy_scale,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=compiler_params(gradient.dtype),
    )

    @in_place
    def scaled(factor, gradient):
        ref = jax.new_ref(gradient)
        scale(factor, ref)
        return jax.freeze(ref)

    return scaled(factor.reshape(1), gradient)
