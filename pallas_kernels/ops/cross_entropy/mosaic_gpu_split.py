"""Cross-entropy of few long rows on Mosaic GPU: each row shared among many blocks, in two launches.

The first gives maximum and sum of each part of a row. The second, with a gradient as many blocks again, puts the parts'
numbers together, all of them in every block, and writes loss and gradient; the logits come out of the L2 cache.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig
from pallas_kernels.ops.cross_entropy.formula import Terms, weight_of_row
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import Cut, write_gradient
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.rows import LOWEST, load_row, map_row, row_max, row_sum, to_float32


def split_kernels(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    *,
    terms: Terms,
    with_gradient: bool,
    config: ForwardConfig,
) -> tuple[jax.Array, ...]:
    """Returns losses, maxima, sums, and the gradient where asked for; see `mosaic_gpu.cross_entropy_forward`."""
    rows, vocabulary = logits.shape
    cut = Cut.make(vocabulary, logits.dtype.itemsize, config.chunk)
    one_a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    one_a_part = jax.ShapeDtypeStruct((rows, cut.parts), jnp.float32)

    def cross_entropy_parts(logits_ref, *part_refs):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        def summarize(columns, segments):
            values = to_float32(load_row(logits_ref.at[row, columns], segments))
            maximum = jnp.maximum(row_max(values), LOWEST)
            part_refs[0][row, part] = maximum
            part_refs[1][row, part] = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
            if terms.label_smoothing:
                part_refs[2][row, part] = row_sum(values, segments)

        cut.run(part, lambda _, columns, segments: summarize(columns, segments))

    def cross_entropy_from_parts(*refs):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        gradient_ref: Any = refs[-1] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *inputs = inputs
        part_refs, weights_ref = inputs[:number], inputs[number:]
        token = terms.token(labels_ref[row], weight_of_row(weights_ref, row))
        target = logits_ref[row, token.label].astype(jnp.float32)
        maxima = [part_refs[0][row, i] for i in range(cut.parts)]
        maximum = functools.reduce(jnp.maximum, maxima)
        total, logit_sum = jnp.float32(0), jnp.float32(0)
        for i in range(cut.parts):
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
            write_gradient(logits_ref.at[row], gradient_ref.at[row], cut, part, slope, token.label)

    params = compiler_params(logits.dtype)
    number = 3 if terms.label_smoothing else 2
    grid_names = ("row", "part")
    parts = settings.kernel(
        cross_entropy_parts,
        out_type=(one_a_part,) * number,
        grid=(rows, cut.parts),
        grid_names=grid_names,
        compiler_params=params,
    )(logits)
    return settings.kernel(
        cross_entropy_from_parts,
        out_type=(one_a_row,) * 3 + ((jax.ShapeDtypeStruct(logits.shape, logits.dtype),) if with_gradient else ()),
        grid=(rows, cut.parts if with_gradient else 1),
        grid_names=grid_names,
        compiler_params=params,
    )(logits, labels, *parts, *(() if weights is None else (weights,)))
