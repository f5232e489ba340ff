"""Cross-entropy on Mosaic GPU: the loss, and with it the gradient if requested; and the gradient alone.

One warpgroup holds a row in registers, or several short ones. A long row goes through shared memory
(`mosaic_gpu_ring`). If that is not possible, if rows are few, or if only the loss is needed, a row is split among many
blocks in two launches: the first computes maximum and sum of each part; in the second, every block combines the parts'
results and writes its part of loss and gradient.

Given each row's maximum and sum, the gradient is elementwise, so a block can compute any part of a row. So the second
launch serves the backward pass, too, if the forward pass did not write the gradient and rows are not short.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.config import ForwardConfig, default_forward
from pallas_kernels.ops.cross_entropy.formula import Slope, Terms, weight_of
from pallas_kernels.ops.cross_entropy.mosaic_gpu_ring import ring_kernel
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.exponents import LOWEST
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.references import changed_in_place
from pallas_kernels.primitives.row_kernel import HeldRows, RowChunks, compiler_params, held_segments
from pallas_kernels.primitives.rows import (
    load_row,
    map_row,
    row_columns,
    row_grid,
    row_max,
    row_of_block,
    row_sum,
    short_rows_at_once,
    store_row,
    to_float32,
)
from pallas_kernels.primitives.settings import named_kernel

Statistics = tuple[jax.Array, jax.Array]
"""The maximum of each row, and sum(exp(logit - maximum)); (rows,) float32."""
_SCALE_BLOCKS_PER_CORE = 8
_CHUNK = 8192
"""Columns of a row for one block."""


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
        name = "cross_entropy_with_gradient" if with_gradient else "cross_entropy"
        found = _whole_rows_kernel(operands, outputs, terms=terms, name=name)
    return found["loss"], (found["maximum"], found["total"]), found.get("gradient")


def _whole_rows_kernel(
    operands: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct], *, terms: Terms, name: str
) -> dict[str, jax.Array]:
    """Computes the losses with their statistics, and their gradient if it is an output; or that, given statistics."""
    logits = operands["logits"]
    rows, vocabulary = logits.shape
    at_once, segments = held_segments((rows, vocabulary), logits.dtype.itemsize)

    def body(refs):
        row = row_of_block(rows, at_once)
        held = HeldRows(at=row, segments=segments)
        weight = weight_of(held.load_value, refs.get("weights"))
        token = terms.token(held.load_value(refs["labels"]), weight)
        values = held.load(refs["logits"])

        def differentiate(maximum, total):
            slope = jax.tree.map(held.spread, terms.slope(maximum, total, token))
            label = held.spread(token.label)
            held.store(refs["gradient"], map_row(lambda v, c: slope(v, c == label), values, held.columns))

        if "loss" not in refs:
            differentiate(held.load_value(refs["maximum"]), held.load_value(refs["total"]))
            return
        target = held.element(refs["logits"], values, token.label)
        maximum = jnp.maximum(held.max(values), LOWEST)
        highest = held.spread(maximum)
        total = held.sum(map_row(lambda v: jnp.exp(v - highest), values))
        logit_sum = held.sum(values) if terms.label_smoothing else None
        if "gradient" in refs:
            differentiate(maximum, total)
        held.store_value(refs["loss"], terms.loss(token, maximum, total, target, logit_sum))
        held.store_value(refs["maximum"], maximum)
        held.store_value(refs["total"], total)

    return named_kernel(
        body,
        operands,
        outputs,
        name=name,
        grid=row_grid(rows, at_once),
        compiler_params=compiler_params(logits.dtype),
    )


def _split_kernels(
    operands: dict[str, jax.Array], outputs: dict[str, jax.ShapeDtypeStruct], *, terms: Terms, chunk: int
) -> dict[str, jax.Array]:
    logits = operands["logits"]
    rows, vocabulary = logits.shape
    chunks = RowChunks.make(vocabulary, logits.dtype.itemsize, chunk)
    kinds = ("part_maximum", "part_total", *(["part_logits"] if terms.label_smoothing else []))

    def summarize(refs):
        row, part = row_and_part(lax.axis_index("block"), chunks.parts)

        def of_part(columns, segments):
            values = to_float32(load_row(refs["logits"].at[row, columns], segments))
            maximum = jnp.maximum(row_max(values), LOWEST)
            refs["part_maximum"][row, part] = maximum
            refs["part_total"][row, part] = row_sum(map_row(lambda v: jnp.exp(v - maximum), values), segments)
            if terms.label_smoothing:
                refs["part_logits"][row, part] = row_sum(values, segments)

        chunks.at(part, of_part)

    parts = named_kernel(
        summarize,
        {"logits": logits},
        dict.fromkeys(kinds, jax.ShapeDtypeStruct((rows, chunks.parts), jnp.float32)),
        name="cross_entropy_parts",
        grid={"block": rows * chunks.parts},
        compiler_params=compiler_params(logits.dtype),
    )
    return kernel_from_parts(operands | parts, outputs, terms=terms, chunks=chunks, name="cross_entropy_from_parts")


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
    maximum, total = statistics
    operands = {"logits": logits, "labels": labels, "weights": weights}
    outputs, name = {"gradient": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}, "cross_entropy_gradient"
    if short_rows_at_once(logits.shape, logits.dtype.itemsize):
        operands |= {"maximum": maximum, "total": total}
        return _whole_rows_kernel(operands, outputs, terms=terms, name=name)["gradient"]
    operands |= {"part_maximum": maximum[:, None], "part_total": total[:, None]}
    chunks = RowChunks.make(logits.shape[1], logits.dtype.itemsize, chunk)
    return kernel_from_parts(operands, outputs, terms=terms, chunks=chunks, name=name)["gradient"]


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

    def body(refs):
        block = lax.axis_index("block")
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

    return named_kernel(
        body,
        operands,
        outputs,
        name=name,
        grid={"block": rows * (chunks.parts if with_gradient else 1)},
        compiler_params=compiler_params(operands["logits"].dtype),
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
    return changed_in_place(scale, (factor.reshape(1),), gradient)[1]
