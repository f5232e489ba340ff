"""The gradient of cross-entropy on Mosaic GPU if the forward kernel did not write it, or wrote it unscaled.

Given each row's maximum and sum, the gradient is elementwise, so a block can compute any part of a row. The same kernel
is the second one of a forward pass that splits rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.formula import Slope, Terms, weight_of
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.references import in_place
from pallas_kernels.primitives.row_kernel import RowChunks, compiler_params, row_kernel
from pallas_kernels.primitives.rows import load_row, map_row, row_columns, store_row, to_float32

_SCALE_BLOCKS_PER_CORE = 8
_CHUNK = 8192
"""Columns of a row for one block."""


def row_and_part(block: jax.Array, parts: int, *, reversed_rows: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns the row of a block and its part, of `parts` in each row.

    There is one grid axis of rows * parts, because CUDA limits its second axis to 65535.

    reversed_rows: the number of rows if the last ones come first, which the L2 cache still holds from the launch
        before; else 0.
    """
    if reversed_rows:
        block = jnp.int32(reversed_rows * parts - 1) - block
    return lax.div(block, jnp.int32(parts)), lax.rem(block, jnp.int32(parts))


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
    chunks = RowChunks.make(logits.shape[1], logits.dtype.itemsize, chunk)
    maximum, total = (statistic[:, None] for statistic in statistics)
    operands = {"logits": logits, "labels": labels, "weights": weights, "part_maximum": maximum, "part_total": total}
    outputs = {"gradient": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}
    return kernel_from_parts(operands, outputs, terms=terms, chunks=chunks, name="cross_entropy_gradient")["gradient"]


def kernel_from_parts(
    operands: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    terms: Terms,
    chunks: RowChunks,
    name: str,
) -> dict[str, jax.Array]:
    """Computes the losses with their statistics, the gradient in chunks, or both, from statistics of parts of rows.

    operands: the maximum and the sum of each part, with label smoothing also of its logits if the losses are computed,
        (rows, parts); and the arguments of `cross_entropy_forward`. The parts need not be the chunks.
    """
    rows, parts = operands["part_maximum"].shape
    with_gradient, added = "gradient" in outputs, functools.partial(functools.reduce, jnp.add)

    def compute(block, refs):
        row, chunk = row_and_part(block, chunks.parts, reversed_rows=rows) if with_gradient else (block, jnp.int32(0))
        token = terms.token(refs["labels"][row], weight_of(lambda ref: ref[row], refs.get("weights")))
        maxima, totals, *sums = (
            [refs[kind][row, i] for i in range(parts)]
            for kind in ("part_maximum", "part_total", "part_logits")
            if kind in refs
        )
        maximum = functools.reduce(jnp.maximum, maxima)
        total = added([each * jnp.exp(own - maximum) for each, own in zip(totals, maxima, strict=True)])
        if "loss" in refs:
            target = refs["logits"][row, token.label].astype(jnp.float32)

            @pl.when(chunk == 0)
            def _():
                refs["loss"][row] = terms.loss(token, maximum, total, target, added(sums[0]) if sums else None)
                refs["maximum"][row], refs["total"][row] = maximum, total

        if with_gradient:
            slope = terms.slope(maximum, total, token)
            write_gradient(refs["logits"].at[row], refs["gradient"].at[row], chunks, chunk, slope, token.label)

    return row_kernel(
        compute,
        operands,
        outputs,
        name=name,
        compiler_params=compiler_params(operands["logits"].dtype),
        rows=rows * (chunks.parts if with_gradient else 1),
    )


def write_gradient(
    logits_row: Any, gradient_row: Any, chunks: RowChunks, part: jax.Array, slope: Slope, label: jax.Array
) -> None:
    """Writes the gradient of one part of a row, given as references."""

    def differentiate(columns, segments):
        values, place = to_float32(load_row(logits_row.at[columns], segments)), label - columns.start
        gradient = map_row(lambda v, c: slope(v, c == place), values, row_columns(segments))
        store_row(gradient_row.at[columns], gradient, segments)

    chunks.at(part, differentiate)


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
    chunks = RowChunks.make(vocabulary, gradient.dtype.itemsize, _CHUNK)
    blocks = min(rows, target_device().core_count * _SCALE_BLOCKS_PER_CORE)

    def cross_entropy_scale(factor_ref, gradient_ref):
        factor = factor_ref[0]

        @pl.when(factor != 1.0)
        def _():
            @pl.loop(lax.axis_index("block"), rows, step=blocks)
            def _(i):
                row = gradient_ref.at[rows - 1 - i]  # the gradient's last rows are in the L2 cache

                def multiply(columns, segments):
                    values = to_float32(load_row(row.at[columns], segments))
                    if segments[-1].repeated:  # no thread may write a column that another has yet to read
                        plgpu.commit_smem()
                    store_row(row.at[columns], map_row(lambda v: v * factor, values), segments)

                chunks.each(multiply)

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
