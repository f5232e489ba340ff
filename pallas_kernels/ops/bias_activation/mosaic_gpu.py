"""Bias, activation, dropout and residual sum forward on Mosaic GPU: one pass, 16-byte accesses directly to registers.

A block takes the same columns of a few rows and reads their bias once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    Blocks,
    Part,
    access_columns,
    default_elementwise,
    folded_rows,
    launch,
    load_part,
    rows_from,
)
from pallas_kernels.primitives.random import keep_mask, mixed_words

Keep = Callable[[jax.Array, jax.Array, Part], jax.Array]
"""Applies dropout to a part of a row: takes its values, the row and the part."""


def bias_activation_forward(
    x: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    words: jax.Array | None,
    *,
    activation: Activation,
    rate: float = 0.0,
) -> jax.Array:
    """Returns residual + dropout(activation(x + bias)), like x.

    x, residual: (rows, features) of one floating dtype; one row where there is no bias. bias: (features,).
    words: the dropout key's, (2,) uint32, or None for no dropout at the given rate.
    """
    shape = x.shape
    x, bias, residual = fold(x, bias, residual)
    operands = present({"x": x, "bias": bias, "residual": residual, "words": words})
    dtype = x.dtype

    def step(row: jax.Array, part: Part, loaded: Mapping[str, jax.Array], keep: Keep | None):
        y = activation.value(add_bias(loaded), dtype)
        if keep is not None:
            y = keep(y, row, part)
        return y + loaded["residual"].astype(jnp.float32) if "residual" in loaded else y

    return elementwise_kernel("bias_activation", operands, step, rate=rate).reshape(shape)


def fold(x: jax.Array, bias: jax.Array | None, other: jax.Array | None) -> tuple[Any, Any, Any]:
    """Reshapes x, the bias and the other array like x to rows of wide accesses (see `folded_rows`).

    The element numbers that dropout draws from stay the same.
    """
    times = 1 if bias is None else folded_rows(x.shape[0], x.shape[1], x.dtype.itemsize)
    if bias is None or times == 1:
        return x, bias, other
    shape = (x.shape[0] // times, x.shape[1] * times)
    return x.reshape(shape), jnp.tile(bias, times), None if other is None else other.reshape(shape)


def add_bias(loaded: Mapping[str, jax.Array]) -> jax.Array:
    """Returns x + bias, or x without a bias, in float32."""
    x = loaded["x"].astype(jnp.float32)
    return x + loaded["bias"].astype(jnp.float32) if "bias" in loaded else x


def present(operands: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    """Returns the operands that are not None."""
    return {name: value for name, value in operands.items() if value is not None}


def elementwise_kernel(
    name: str, operands: Mapping[str, jax.Array], step: Callable[..., jax.Array], *, rate: float
) -> jax.Array:
    """Launches `step` over all parts of `operands["x"]`; returns its results in x's shape and dtype.

    step: takes the row, the part, each operand's values in it, and the dropout function (None: no dropout).
    """
    x = operands["x"]
    rows, features = x.shape
    itemsize = x.dtype.itemsize
    config = default_elementwise(rows, features, itemsize, has_bias="bias" in operands)
    blocks = Blocks(
        rows=rows,
        features=features,
        columns=access_columns(config.vectors, itemsize),
        itemsize=itemsize,
        stride=features if rows > 1 else None,
        at_once=config.rows,
    )

    def make_work(refs, y_ref):
        keep = make_keep(refs.pop("words", None), features=features, rate=rate)
        bias_ref = {"bias": refs.pop("bias")} if "bias" in refs else {}

        def work(first, part):
            bias = load_part(bias_ref, part)
            row_refs = {name: rows_from(ref, first, blocks.at_once) for name, ref in refs.items()}
            loaded = [
                load_part({name: rows[i] for name, rows in row_refs.items()}, part) for i in range(blocks.at_once)
            ]
            for i, (values, y_row) in enumerate(zip(loaded, rows_from(y_ref, first, blocks.at_once), strict=True)):
                y = step(first + i, part, {**values, **bias}, keep)
                store(y_row.at[part.columns], y.astype(y_ref.dtype))

        return work

    return launch(name, operands, jax.ShapeDtypeStruct(x.shape, x.dtype), blocks, make_work)


def make_keep(words_ref: Any, *, features: int, rate: float) -> Keep | None:
    """Returns the function that applies dropout to a part of a row, or None without dropout."""
    if words_ref is None:
        return None
    words = mixed_words(words_ref)

    def keep(value, row, part):
        column = part.segment_columns() + part.columns.start
        mask = keep_mask(words, row, column, features=features, rate=rate)
        return jnp.where(mask, value * (1.0 / (1.0 - rate)), jnp.float32(0))

    return keep
