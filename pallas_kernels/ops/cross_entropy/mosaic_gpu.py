"""Cross-entropy on Mosaic GPU, one warpgroup a row: the loss, its gradient with it where the row fits in registers.

Longer rows go to `mosaic_gpu_ring`; what that cannot take (vocabularies that are no multiple of a warp's access) gets
its loss here, by online softmax in chunks, and its gradient from a second kernel.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, default_forward
from pallas_kernels.ops.cross_entropy.formula import Terms, weight_of_row
from pallas_kernels.ops.cross_entropy.mosaic_gpu_ring import ring_kernel
from pallas_kernels.ops.cross_entropy.mosaic_gpu_split import split_kernels
from pallas_kernels.ops.softmax.mosaic_gpu import compiler_params
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    LOWEST,
    even_pieces,
    full_row,
    load_row,
    map_row,
    online_add,
    row_columns,
    row_max,
    row_sum,
    split_row,
    store_row,
    sum_of,
    to_float32,
    zeros_row,
)

Statistics = tuple[jax.Array, jax.Array]
"""Of each row: its maximum, and sum(exp(logit - maximum)); (rows,) float32."""


def gives_gradient(rows: int, vocabulary: int, itemsize: int) -> bool:
    """Whether the forward kernels give the gradient, too."""
    return default_forward(rows, vocabulary, itemsize, with_gradient=True).loads != "chunked"


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

    logits: (rows, vocabulary), a floating dtype, vocabulary >= 128. labels: (rows,) int32, any. weights: what each
    row's loss is multiplied with, (rows,) or for all rows (1,) float32; or (1,) int32, what all are divided by where it
    is not 0; or None for 1. losses: (rows,) float32, 0 where a label is ignored and NaN where it names no token.
    gradient: of their sum, like logits, 0 in both cases.
    """
    rows, vocabulary = logits.shape
    config = config or default_forward(rows, vocabulary, logits.dtype.itemsize, with_gradient=with_gradient)
    if with_gradient and config.loads == "chunked":
        raise ValueError(f"{config} gives no gradient; take cross_entropy_backward for it")
    kernel = {"registers": _registers_kernel, "ring": ring_kernel, "split": split_kernels, "chunked": _chunked_kernel}[
        config.loads
    ]
    outputs = kernel(logits, labels, weights, terms=terms, with_gradient=with_gradient, config=config)
    operands = (logits, labels) if weights is None else (logits, labels, weights)
    losses, maximum, total, *gradient = (varying_like(output, *operands) for output in outputs)
    return losses, (maximum, total), gradient[0] if gradient else None


def _launch(body, name, logits, labels, weights, *, terms, with_gradient):
    def kernel(*refs):
        row = lax.axis_index("row")
        gradient_row = refs[-1].at[row] if with_gradient else None
        *inputs, loss_ref, maximum_ref, total_ref = refs[:-1] if with_gradient else refs
        logits_ref, labels_ref, *weights_ref = inputs
        token = terms.token(labels_ref[row], weight_of_row(weights_ref, row))
        target = logits_ref[row, token.label].astype(jnp.float32)
        maximum, total, logit_sum = body(logits_ref.at[row], token, gradient_row)
        loss_ref[row] = terms.loss(token, maximum, total, target, logit_sum)
        maximum_ref[row], total_ref[row] = maximum, total

    kernel.__name__ = kernel.__qualname__ = name
    one_a_row = jax.ShapeDtypeStruct(labels.shape, jnp.float32)
    gradient = (jax.ShapeDtypeStruct(logits.shape, logits.dtype),) if with_gradient else ()
    return settings.kernel(
        kernel,
        out_type=(one_a_row, one_a_row, one_a_row, *gradient),
        grid=(logits.shape[0],),
        grid_names=("row",),
        compiler_params=compiler_params(logits.dtype),
    )(logits, labels, *(() if weights is None else (weights,)))


def _registers_kernel(logits, labels, weights, *, terms, with_gradient, config):
    del config
    segments = split_row(terms.vocabulary, logits.dtype.itemsize)

    def body(logits_row, token, gradient_row):
        values = to_float32(load_row(logits_row, segments))
        maximum = jnp.maximum(row_max(values), LOWEST)
        total = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
        logit_sum = row_sum(values, segments) if terms.label_smoothing else None
        if with_gradient:
            slope = terms.slope(maximum, total, token)
            gradient = map_row(lambda v, c: slope(v, c == token.label), values, row_columns(segments))
            store_row(gradient_row, gradient, segments)
        return maximum, total, logit_sum

    name = "cross_entropy_with_gradient" if with_gradient else "cross_entropy"
    return _launch(body, name, logits, labels, weights, terms=terms, with_gradient=with_gradient)


def _chunked_kernel(logits, labels, weights, *, terms, with_gradient, config):
    assert not with_gradient
    vocabulary, itemsize = logits.shape[1], logits.dtype.itemsize
    chunk = min(config.chunk, vocabulary)
    trips = vocabulary // chunk
    pieces = even_pieces(chunk, itemsize, stride=vocabulary)
    rest = split_row(vocabulary - trips * chunk, itemsize, offset=trips * chunk, stride=vocabulary)

    def body(logits_row, token, gradient_row):
        del token, gradient_row

        def accumulate(i, state):
            values = to_float32(load_row(logits_row.at[pl.ds(i * chunk, chunk)], pieces))
            online, sums = online_add(state[0], values), state[1]
            if terms.label_smoothing:
                sums = sum(values, sums)
            return online, sums

        start = (full_row(pieces[:1], LOWEST)[0], zeros_row(pieces[:1])[0])
        (highest, totals), sums = lax.fori_loop(0, trips, accumulate, (start, start[1]))
        maximum = jnp.max(highest)
        tail = to_float32(load_row(logits_row, rest))
        if rest:
            maximum = jnp.maximum(maximum, row_max(tail))
        total = sum_of(totals * jnp.exp(highest - maximum))
        logit_sum = jnp.sum(sums) if terms.label_smoothing else None
        if rest:
            total += row_sum(map_row(lambda v: jnp.exp(v - maximum), tail), rest)
            logit_sum = None if logit_sum is None else logit_sum + row_sum(tail, rest)
        return maximum, total, logit_sum

    return _launch(body, "cross_entropy_chunked", logits, labels, weights, terms=terms, with_gradient=with_gradient)
