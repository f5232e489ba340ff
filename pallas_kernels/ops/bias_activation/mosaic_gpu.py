"""Bias, activation, dropout and residual sum on Mosaic GPU: one pass each way, 16-byte accesses directly to registers.

A block takes the same columns of a few rows and reads their bias once. Backward it draws the dropout mask again from
the key. The bias's gradient is the column sums of dx; to compute it, blocks are persistent: each has a strip of columns
and a group of rows, which its warpgroups divide among them, keeps the column sums in registers, and writes them once.
XLA adds the groups' sums in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    Keep,
    Part,
    column_blocks,
    elementwise_kernel,
    launch_column_sums,
    load_part,
    make_keep,
    zeros_part,
)


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
    operands = {"x": x, "bias": bias, "residual": residual, "words": words}
    dtype = x.dtype

    def step(row: jax.Array, part: Part, loaded: Mapping[str, jax.Array], keep: Keep | None):
        y = activation.value(add_bias(loaded), dtype)
        if keep is not None:
            y = keep(y, row, part)
        return y + loaded["residual"].astype(jnp.float32) if "residual" in loaded else y

    return elementwise_kernel("bias_activation", operands, step, rate=rate)


def add_bias(loaded: Mapping[str, jax.Array]) -> jax.Array:
    """Returns x + bias, or x without a bias, in float32."""
    x = loaded["x"].astype(jnp.float32)
    return x + loaded["bias"].astype(jnp.float32) if "bias" in loaded else x


def bias_activation_backward(
    x: jax.Array,
    bias: jax.Array | None,
    words: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation,
    rate: float = 0.0,
    warpgroups: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes (dx, dbias); dbias is None without a bias. Arguments are the forward kernel's, and dy, shaped as x.

    warpgroups: of a block. They take rows in turn, and their column sums are added in shared memory. Eight have 64
    registers per thread, enough for the current row and for loading the next one.
    """
    operands = {"x": x, "bias": bias, "words": words, "dy": dy}
    # As accurate as the more accurate of the two gradients needs.
    shown = x.dtype if bias is None else jnp.promote_types(x.dtype, bias.dtype)

    def step(row, part, loaded, keep):
        dy = loaded["dy"].astype(jnp.float32)
        if keep is not None:
            dy = keep(dy, row, part)
        return dy * activation.value_and_derivative(add_bias(loaded), shown)[1]

    if bias is None:
        return elementwise_kernel("bias_activation_gradient", operands, step, rate=rate), None
    (rows, features), warpgroups = x.shape, warpgroups or (8 if x.shape[0] >= 1024 else 1)
    per_core = 2 if warpgroups == 1 else 1
    blocks = column_blocks(rows, features, x.dtype.itemsize, warpgroups=warpgroups, blocks_per_core=per_core)
    groups = blocks.rows
    is_sum = groups == 1  # nothing is left to add

    def make_sums(refs):
        keep = make_keep(refs.pop("words", None), features=features, rate=rate)
        arrays, dx_ref = {"x": refs["x"], "dy": refs["dy"]}, refs["dx"]

        def sums(group, warpgroup, part):
            """Writes dx of the warpgroup's rows in a part of the columns; returns their sums."""
            first, together = group * warpgroups + warpgroup, groups * warpgroups
            trips = lax.div(rows - first + together - 1, together)
            bias = load_part({"bias": refs["bias"]}, part)

            def read(i):
                # Past the end, the last row is read again but not used.
                row = jnp.minimum(first + i * together, rows - 1)
                return load_part({name: ref.at[row] for name, ref in arrays.items()}, part)

            def add(i, carry):
                total, loaded = carry
                ahead = read(i + 1)
                row = first + i * together
                dx = step(row, part, {**loaded, **bias}, keep)
                store(dx_ref.at[row, part.columns], dx.astype(dx_ref.dtype))
                return total + dx, ahead

            return lax.fori_loop(0, trips, add, (zeros_part(part), read(0)))[:1]

        return sums

    outputs = {
        "dx": jax.ShapeDtypeStruct(x.shape, x.dtype),
        "sums": jax.ShapeDtypeStruct((groups, 1, features), bias.dtype if is_sum else jnp.float32),
    }
    found = launch_column_sums(
        "bias_activation_gradient", operands, outputs, blocks, make_sums, warpgroups=warpgroups, kinds=1
    )
    sums = found["sums"][:, 0]
    return found["dx"], sums[0] if is_sum else jnp.sum(sums, axis=0).astype(bias.dtype)
