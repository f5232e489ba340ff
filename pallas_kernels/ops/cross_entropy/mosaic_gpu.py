"""Cross-entropy on Mosaic GPU: the loss, and with it the gradient if requested.

One warpgroup holds a row in registers, or several short ones. A long row goes through shared memory
(`mosaic_gpu_ring`). If that is not possible, if rows are few, or if only the loss is needed, a row is split among many
blocks in two launches: the first computes maximum and sum of each part; in the second, every block combines the parts'
results and writes its part of loss and gradient.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, default_forward
from pallas_kernels.ops.cross_entropy.formula import Terms, weight_of_row
from pallas_kernels.ops.cross_entropy.mosaic_gpu_ring import ring_kernel
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import RowSplit, write_gradient
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    LOWEST,
    line_max,
    line_sums,
    load_lines,
    load_row,
    map_row,
    over_lines,
    row_columns,
    row_max,
    row_of_block,
    row_sum,
    short_rows_at_once,
    split_row,
    split_short_rows,
    store_row,
    to_float32,
)

Statistics = tuple[jax.Array, jax.Array]
"""The maximum of each row, and sum(exp(logit - maximum)); (rows,) float32."""


def cross_entropy_forward(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    terms: Terms,
    with_gradient: bool,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, Statistics, jax.Array | None]:
    """Returns (losses, statistics, gradient), the last None unless `with_gradient`.

    logits: (rows, vocabulary), a floating dtype, vocabulary >= 128. labels: (rows,) int32, any. weights: factors of the
    losses, (rows,) float32 or (1,) for all rows; or (1,) int32, a divisor of all losses unless it is 0; or None for 1.
    losses: (rows,) float32, 0 where a label is ignored and NaN where it names no token. gradient: of their sum, like
    logits, 0 in both cases.
    """
    rows, vocabulary = logits.shape
    config = config or default_forward(rows, vocabulary, logits.dtype.itemsize, with_gradient=with_gradient)
    operands = (logits, labels) if weights is None else (logits, labels, weights)
    if config.loads == "ring":
        if not with_gradient:
            raise ValueError(f"{config} is for the loss with its gradient; take 'split' for the loss alone.")
        outputs = ring_kernel(*operands, terms=terms, config=config)
    elif config.loads == "split":
        outputs = _split_kernels(*operands, terms=terms, with_gradient=with_gradient, chunk=config.chunk)
    elif short_rows_at_once(logits.shape, logits.dtype.itemsize):
        outputs = _short_rows_kernel(*operands, terms=terms, with_gradient=with_gradient)
    else:
        outputs = _registers_kernel(*operands, terms=terms, with_gradient=with_gradient)
    losses, maximum, total, *gradient = (varying_like(output, *operands) for output in outputs)
    return losses, (maximum, total), gradient[0] if gradient else None


def _out_types(logits: jax.Array, *, with_gradient: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    gradient = (jax.ShapeDtypeStruct(logits.shape, logits.dtype),) if with_gradient else ()
    return (jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),) * 3 + gradient


def _registers_kernel(logits, labels, *weights, terms: Terms, with_gradient: bool):
    segments = split_row(terms.vocabulary, logits.dtype.itemsize)

    def kernel(*refs):
        row = lax.axis_index("row")
        gradient_ref: Any = refs[-1] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *weights_ref = inputs
        token = terms.token(labels_ref[row], weight_of_row(weights_ref, row))
        target = logits_ref[row, token.label].astype(jnp.float32)
        values = to_float32(load_row(logits_ref.at[row], segments))
        maximum = jnp.maximum(row_max(values, segments), LOWEST)
        total = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
        logit_sum = row_sum(values, segments) if terms.label_smoothing else None
        if with_gradient:
            slope = terms.slope(maximum, total, token)
            gradient = map_row(lambda v, c: slope(v, c == token.label), values, row_columns(segments))
            store_row(gradient_ref.at[row], gradient, segments)
        loss_ref[row] = terms.loss(token, maximum, total, target, logit_sum)
        maximum_ref[row], total_ref[row] = maximum, total

    kernel.__name__ = kernel.__qualname__ = "cross_entropy_with_gradient" if with_gradient else "cross_entropy"
    return settings.kernel(
        kernel,
        out_type=_out_types(logits, with_gradient=with_gradient),
        grid=(logits.shape[0],),
        grid_names=("row",),
        compiler_params=compiler_params(logits.dtype),
    )(logits, labels, *weights)


def _short_rows_kernel(logits, labels, *weights, terms: Terms, with_gradient: bool):
    rows, at_once = logits.shape[0], short_rows_at_once(logits.shape, logits.dtype.itemsize)
    segments = split_short_rows(terms.vocabulary, logits.dtype.itemsize, rows=at_once)

    def wide(line_values):
        return over_lines(line_values, segments[:1])[0]

    def kernel(*refs):
        row = row_of_block(lax.axis_index("block"), rows, at_once)
        gradient_ref: Any = refs[-1] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *weights_ref = inputs
        is_each = bool(weights_ref) and weights_ref[0].shape[0] > 1
        weight = load_lines(weights_ref[0].at[row], segments) if is_each else weight_of_row(weights_ref, jnp.int32(0))
        token = terms.token(load_lines(labels_ref.at[row], segments), weight)
        label = wide(token.label)
        values, columns = to_float32(load_row(logits_ref.at[row], segments)), row_columns(segments)
        target = line_sums(map_row(lambda v, c: jnp.where(c == label, v, jnp.float32(0)), values, columns), segments)
        maximum = jnp.maximum(line_max(values), LOWEST)
        highest = wide(maximum)
        total = line_sums(map_row(lambda v: jnp.exp(v - highest), values), segments)
        logit_sum = line_sums(values, segments) if terms.label_smoothing else None
        if with_gradient:
            slope = terms.slope(highest, wide(total), replace(token, label=label, weight=wide(token.weight)))
            store_row(gradient_ref.at[row], map_row(lambda v, c: slope(v, c == label), values, columns), segments)
        store(loss_ref.at[row], terms.loss(token, maximum, total, target, logit_sum))
        store(maximum_ref.at[row], maximum)
        store(total_ref.at[row], total)

    kernel.__name__ = kernel.__qualname__ = "cross_entropy_with_gradient" if with_gradient else "cross_entropy"
    return settings.kernel(
        kernel,
        out_type=_out_types(logits, with_gradient=with_gradient),
        grid=(pl.cdiv(rows, at_once),),
        grid_names=("block",),
        compiler_params=compiler_params(logits.dtype),
    )(logits, labels, *weights)


def _split_kernels(logits, labels, *weights, terms: Terms, with_gradient: bool, chunk: int):
    rows, vocabulary = logits.shape
    split = RowSplit.make(vocabulary, logits.dtype.itemsize, chunk)
    # Maxima, sums of exponentials and, for label smoothing, sums of logits.
    kinds = 3 if terms.label_smoothing else 2

    def cross_entropy_parts(logits_ref, *part_refs):
        row, part = split.block_part()

        def summarize(_, columns, segments):
            values = to_float32(load_row(logits_ref.at[row, columns], segments))
            maximum = jnp.maximum(row_max(values, segments), LOWEST)
            part_refs[0][row, part] = maximum
            part_refs[1][row, part] = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
            if terms.label_smoothing:
                part_refs[2][row, part] = row_sum(values, segments)

        split.run(part, summarize)

    def cross_entropy_from_parts(*refs):
        whole_rows = (lax.axis_index("block"), jnp.int32(0))
        row, part = split.block_part(reversed_rows=rows) if with_gradient else whole_rows
        gradient_ref: Any = refs[-1] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *inputs = inputs
        part_refs, weights_ref = inputs[:kinds], inputs[kinds:]
        token = terms.token(labels_ref[row], weight_of_row(weights_ref, row))
        target = logits_ref[row, token.label].astype(jnp.float32)
        maxima = [part_refs[0][row, i] for i in range(split.parts)]
        maximum = functools.reduce(jnp.maximum, maxima)
        total, logit_sum = jnp.float32(0), jnp.float32(0)
        for i in range(split.parts):
            total += part_refs[1][row, i] * jnp.exp(maxima[i] - maximum)
            if terms.label_smoothing:
                logit_sum += part_refs[2][row, i]

        @pl.when(part == 0)
        def _():
            smooth_sum = logit_sum if terms.label_smoothing else None
            loss_ref[row] = terms.loss(token, maximum, total, target, smooth_sum)
            maximum_ref[row], total_ref[row] = maximum, total

        if with_gradient:
            slope = terms.slope(maximum, total, token)
            write_gradient(logits_ref.at[row], gradient_ref.at[row], split, part, slope, token.label)

    launch = functools.partial(settings.kernel, grid_names=("block",), compiler_params=compiler_params(logits.dtype))
    parts = launch(
        cross_entropy_parts,
        out_type=(jax.ShapeDtypeStruct((rows, split.parts), jnp.float32),) * kinds,
        grid=(rows * split.parts,),
    )(logits)
    return launch(
        cross_entropy_from_parts,
        out_type=_out_types(logits, with_gradient=with_gradient),
        grid=(rows * split.parts if with_gradient else rows,),
    )(logits, labels, *parts, *weights)
