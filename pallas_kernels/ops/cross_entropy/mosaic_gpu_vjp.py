"""The gradient of cross-entropy on Mosaic GPU where the forward kernel did not write it, or wrote it for another scale.

From each row's maximum and sum the gradient is elementwise, so that a block takes any part of a row.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import GradientConfig
from pallas_kernels.ops.cross_entropy.formula import Terms
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives.platform import target_device, varying_like
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

_SCALE_BLOCKS_PER_CORE = 4


def cross_entropy_backward(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    statistics: tuple[jax.Array, jax.Array],
    *,
    terms: Terms,
    config: GradientConfig | None = None,
) -> jax.Array:
    """Returns the gradient of sum(weights * losses), like logits.

    statistics: what `cross_entropy_forward` returned. The other arguments are as there.
    """
    config = config or GradientConfig()
    rows, vocabulary = logits.shape
    chunk, chunks, segments, rest = _cut(vocabulary, logits.dtype.itemsize, config.chunk)

    def cross_entropy_gradient(logits_ref, labels_ref, weights_ref, maximum_ref, total_ref, gradient_ref):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        label = labels_ref[row]
        slope = terms.slope(maximum_ref[row], total_ref[row], weights_ref[row])

        def differentiate(first, columns, segments):
            values = to_float32(load_row(logits_ref.at[row, columns], segments))
            gradient = map_row(lambda v, c: slope(v, c == label - first), values, row_columns(segments))
            store_row(gradient_ref.at[row, columns], gradient, segments)

        def whole_chunk():
            differentiate(part * chunk, pl.ds(part * chunk, chunk), segments)

        if not rest:
            whole_chunk()
        else:
            pl.when(part < chunks)(whole_chunk)
            pl.when(part == chunks)(lambda: differentiate(0, pl.ds(0, vocabulary), rest))

    gradient = plgpu.kernel(
        cross_entropy_gradient,
        out_type=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        grid=(rows, chunks + bool(rest)),
        grid_names=("row", "part"),
        compiler_params=compiler_params(logits.dtype),
    )(logits, labels, weights, *statistics)
    return varying_like(gradient, logits, labels, weights, *statistics)


def scale_in_place(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """factor * gradient, in the gradient's own memory, and without touching it where the factor is 1.

    gradient: (rows, vocabulary). factor: a float32 scalar. It is 1 wherever the loss is what is differentiated, and
    then this is a launch of 2 µs; `gradient * factor` would read and write gigabytes to change nothing.
    """
    if jax.typeof(gradient).manual_axis_type.varying:
        # jax.shard_map(check_vma=True): jax 0.11.2 takes no references there. XLA's branch works in place, too, but
        # the host waits for the factor.
        multiply = lambda values: (values.astype(jnp.float32) * factor).astype(values.dtype)  # noqa: E731
        return lax.cond(factor == 1, lambda values: values, multiply, gradient)
    rows, vocabulary = gradient.shape
    chunk, chunks, segments, rest = _cut(vocabulary, gradient.dtype.itemsize, GradientConfig().chunk)
    blocks = min(rows, target_device().core_count * _SCALE_BLOCKS_PER_CORE)

    def cross_entropy_scale(factor_ref, gradient_ref):
        factor = factor_ref[0]

        def multiply(ref, segments):
            values = to_float32(load_row(ref, segments))
            if segments[-1].repeated:  # no thread may write a column that another has still to read
                plgpu.commit_smem()
            store_row(ref, map_row(lambda v: v * factor, values), segments)

        @pl.when(factor != 1.0)
        def _():
            @pl.loop(lax.axis_index("block"), rows, step=blocks)
            def _(row):
                if rest:
                    multiply(gradient_ref.at[row], rest)

                @pl.loop(0, chunks)
                def _(i):
                    multiply(gradient_ref.at[row, pl.ds(i * chunk, chunk)], segments)

    ref = jax.new_ref(gradient)
    plgpu.kernel(
        cross_entropy_scale,
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=compiler_params(gradient.dtype),
    )(factor.reshape(1), ref)
    return jax.freeze(ref)


def _cut(vocabulary: int, itemsize: int, chunk: int) -> tuple[int, int, tuple[Segment, ...], tuple[Segment, ...]]:
    """Columns of a chunk, how many chunks, a chunk's segments, and those of the rest of a row.

    No segment of the rest repeats columns of a chunk, which another block may be writing, or has written in place.
    """
    chunk = min(chunk, vocabulary)
    chunks, tail = divmod(vocabulary, chunk)
    if 0 < tail < LANES:
        chunks -= 1
    segments = split_row(chunk, itemsize, stride=vocabulary)
    end = chunks * chunk
    return chunk, chunks, segments, split_row(vocabulary - end, itemsize, offset=end, stride=vocabulary)
