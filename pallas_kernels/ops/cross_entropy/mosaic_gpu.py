"""Cross-entropy on Mosaic GPU: the loss, and with it the gradient if requested.

One warpgroup holds a row in registers, or several short ones. A long row goes through shared memory
(`mosaic_gpu_ring`). If that is not possible, if rows are few, or if only the loss is needed, a row is split among many
blocks in two launches: the first computes maximum and sum of each part; in the second, every block combines the parts'
results and writes its part of loss and gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, default_forward
from pallas_kernels.ops.cross_entropy.formula import Terms, weight_of
from pallas_kernels.ops.cross_entropy.mosaic_gpu_ring import ring_kernel
from pallas_kernels.ops.cross_entropy.mosaic_gpu_vjp import kernel_from_parts, row_and_part
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.row_kernel import HeldRows, RowChunks, compiler_params, held_segments, row_kernel
from pallas_kernels.primitives.rows import load_row, map_row, row_max, row_sum, to_float32

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
    operands = {"logits": logits, "labels": labels} | ({} if weights is None else {"weights": weights})
    one_a_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = {"loss": one_a_row, "maximum": one_a_row, "total": one_a_row}
    if with_gradient:
        outputs["gradient"] = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    if config.loads == "ring":
        if not with_gradient:
            raise ValueError(f"{config} is for the loss with its gradient; take 'split' for the loss alone.")
        found = ring_kernel(operands, outputs, terms=terms, config=config)
    elif config.loads == "split":
        found = _split_kernels(operands, outputs, terms=terms, chunk=config.chunk)
    else:
        found = _whole_rows_kernel(operands, outputs, terms=terms)
    return found["loss"], (found["maximum"], found["total"]), found.get("gradient")


def _whole_rows_kernel(
    operands: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct], *, terms: Terms
) -> dict[str, jax.Array]:
    logits, with_gradient = operands["logits"], "gradient" in outputs
    rows, vocabulary = logits.shape
    at_once, segments = held_segments((rows, vocabulary), logits.dtype.itemsize)

    def compute(row, refs):
        held = HeldRows(at=row, segments=segments)
        weight = weight_of(held.load_value, refs.get("weights"))
        token = terms.token(held.load_value(refs["labels"]), weight)
        values = held.load(refs["logits"])
        target = held.element(refs["logits"], values, token.label)
        maximum = jnp.maximum(held.max(values), LOWEST)
        highest = held.spread(maximum)
        total = held.sum(map_row(lambda v: jnp.exp(v - highest), values))
        logit_sum = held.sum(values) if terms.label_smoothing else None
        if with_gradient:
            slope = jax.tree.map(held.spread, terms.slope(maximum, total, token))
            label = held.spread(token.label)
            held.store(refs["gradient"], map_row(lambda v, c: slope(v, c == label), values, held.columns))
        held.store_value(refs["loss"], terms.loss(token, maximum, total, target, logit_sum))
        held.store_value(refs["maximum"], maximum)
        held.store_value(refs["total"], total)

    return row_kernel(
        compute,
        operands,
        outputs,
        name="cross_entropy_with_gradient" if with_gradient else "cross_entropy",
        compiler_params=compiler_params(logits.dtype),
        rows=rows,
        at_once=at_once,
    )


def _split_kernels(
    operands: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct], *, terms: Terms, chunk: int
) -> dict[str, jax.Array]:
    logits = operands["logits"]
    rows, vocabulary = logits.shape
    chunks = RowChunks.make(vocabulary, logits.dtype.itemsize, chunk)
    kinds = ("part_maximum", "part_total", *(["part_logits"] if terms.label_smoothing else []))

    def summarize(block, refs):
        row, part = row_and_part(block, chunks.parts)

        def of_part(columns, segments):
            values = to_float32(load_row(refs["logits"].at[row, columns], segments))
            maximum = jnp.maximum(row_max(values), LOWEST)
            refs["part_maximum"][row, part] = maximum
            refs["part_total"][row, part] = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
            if terms.label_smoothing:
                refs["part_logits"][row, part] = row_sum(values, segments)

        chunks.at(part, of_part)

    parts = row_kernel(
        summarize,
        {"logits": logits},
        dict.fromkeys(kinds, jax.ShapeDtypeStruct((rows, chunks.parts), jnp.float32)),
        name="cross_entropy_parts",
        compiler_params=compiler_params(logits.dtype),
        rows=rows * chunks.parts,
    )
    return kernel_from_parts(operands | parts, outputs, terms=terms, chunks=chunks, name="cross_entropy_from_parts")
