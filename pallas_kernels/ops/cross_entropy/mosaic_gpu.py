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
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import block_part, write_gradient
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.row_kernel import HeldRows, RowChunks, held_segments, row_kernel
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    row_max,
    row_sum,
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
    else:
        outputs = _whole_rows_kernel(*operands, terms=terms, with_gradient=with_gradient)
    losses, maximum, total, *gradient = (varying_like(output, *operands) for output in outputs)
    return losses, (maximum, total), gradient[0] if gradient else None


def _out_types(logits: jax.Array, *, with_gradient: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    gradient = (jax.ShapeDtypeStruct(logits.shape, logits.dtype),) if with_gradient else ()
    return (jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),) * 3 + gradient


def _whole_rows_kernel(logits, labels, weights=None, *, terms: Terms, with_gradient: bool):
    at_once, segments = held_segments(logits.shape, logits.dtype.itemsize)
    name = "cross_entropy_with_gradient" if with_gradient else "cross_entropy"
    out_types = _out_types(logits, with_gradient=with_gradient)
    is_each = weights is not None and weights.shape[0] > 1

    def compute(row, refs):
        held = HeldRows(at=row, segments=segments)
        if is_each:
            weight = held.load_value(refs["weights"])
        else:
            weight = weight_of_row([refs["weights"]] if "weights" in refs else [], jnp.int32(0))
        token = terms.token(held.load_value(refs["labels"]), weight)
        values = held.load(refs["logits"])
        target = held.element(refs["logits"], values, token.label)
        maximum = jnp.maximum(held.max(values), LOWEST)
        highest = held.spread(maximum)
        total = held.sum(map_row(lambda v: jnp.exp(v - highest), values))
        logit_sum = held.sum(values) if terms.label_smoothing else None
        if with_gradient:
            label, weight = held.spread(token.label), held.spread(token.weight)
            slope = terms.slope(highest, held.spread(total), replace(token, label=label, weight=weight))
            held.store(refs["gradient"], map_row(lambda v, c: slope(v, c == label), values, held.columns))
        held.store_value(refs["loss"], terms.loss(token, maximum, total, target, logit_sum))
        held.store_value(refs["maximum"], maximum)
        held.store_value(refs["total"], total)

    results = row_kernel(
        compute,
        {"logits": logits, "labels": labels, "weights": weights},
        dict(zip(("loss", "maximum", "total", "gradient"), out_types, strict=False)),
        name=name,
        compiler_params=compiler_params(logits.dtype),
        rows=logits.shape[0],
        at_once=at_once,
    )
    return tuple(results.values())


def _split_kernels(logits, labels, *weights, terms: Terms, with_gradient: bool, chunk: int):
    rows, vocabulary = logits.shape
    chunks = RowChunks.make(vocabulary, logits.dtype.itemsize, chunk)
    # Maxima, sums of exponentials and, for label smoothing, sums of logits.
    kinds = 3 if terms.label_smoothing else 2

    def cross_entropy_parts(logits_ref, *part_refs):
        row, part = block_part(chunks.parts)

        def summarize(columns, segments):
            values = to_float32(load_row(logits_ref.at[row, columns], segments))
            maximum = jnp.maximum(row_max(values, segments), LOWEST)
            part_refs[0][row, part] = maximum
            part_refs[1][row, part] = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
            if terms.label_smoothing:
                part_refs[2][row, part] = row_sum(values, segments)

        chunks.at(part, summarize)

    def cross_entropy_from_parts(*refs):
        whole_rows = (lax.axis_index("block"), jnp.int32(0))
        row, part = block_part(chunks.parts, reversed_rows=rows) if with_gradient else whole_rows
        gradient_ref: Any = refs[-1] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *inputs = inputs
        part_refs, weights_ref = inputs[:kinds], inputs[kinds:]
        token = terms.token(labels_ref[row], weight_of_row(weights_ref, row))
        target = logits_ref[row, token.label].astype(jnp.float32)
        maxima = [part_refs[0][row, i] for i in range(chunks.parts)]
        maximum = functools.reduce(jnp.maximum, maxima)
        total, logit_sum = jnp.float32(0), jnp.float32(0)
        for i in range(chunks.parts):
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
            write_gradient(logits_ref.at[row], gradient_ref.at[row], chunks, part, slope, token.label)

    launch = functools.partial(settings.kernel, grid_names=("block",), compiler_params=compiler_params(logits.dtype))
    parts = launch(
        cross_entropy_parts,
        out_type=(jax.ShapeDtypeStruct((rows, chunks.parts), jnp.float32),) * kinds,
        grid=(rows * chunks.parts,),
    )(logits)
    return launch(
        cross_entropy_from_parts,
        out_type=_out_types(logits, with_gradient=with_gradient),
        grid=(rows * chunks.parts if with_gradient else rows,),
    )(logits, labels, *parts, *weights)
