"""Says why a product cannot take its operands, and pads those that it can."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.row_tiles import has_whole_groups

DTYPES = ("bfloat16", "float16")
SWIZZLE_BYTES = 128
"""TMA's widest swizzle."""
COLUMNS = SWIZZLE_BYTES // 2
"""16-bit values in it; rows in memory must be multiples of this."""
FEWEST_OUTPUTS = 128
"""The fewest outputs that the row kernels of the backward pass take."""


def operands_unsupported(x: jax.Array, *weights: jax.Array) -> str | None:
    """Returns why the kernels cannot multiply x (..., features) by each of `weights` (features, outputs), or None."""
    if x.dtype.name not in DTYPES:
        return f"x is {x.dtype.name}, the kernels take {', '.join(DTYPES)}"
    for weight in weights:
        features, outputs = weight.shape
        if features % COLUMNS or outputs % COLUMNS or outputs < FEWEST_OUTPUTS:
            return (
                f"w is {features} by {outputs}; the kernels take multiples of {COLUMNS}, and at least "
                f"{FEWEST_OUTPUTS} outputs"
            )
    return None


def whole_groups(array: jax.Array) -> jax.Array:
    """Pads an array (rows, columns) with zero rows to whole groups, or leaves fewer rows than one as they are."""
    return array if has_whole_groups(array.shape[0]) else padded_rows(array, 8)


def padded_vector(vector: jax.Array | None, multiple: int) -> jax.Array | None:
    """Pads a vector, or several (count, columns), with zeros to a multiple: ordinary loads read past the end."""
    if vector is None or vector.shape[-1] % multiple == 0:
        return vector
    return jnp.pad(vector, [(0, 0)] * (vector.ndim - 1) + [(0, -vector.shape[-1] % multiple)])


def padded_rows(array: jax.Array, multiple: int) -> jax.Array:
    """Pads an array with zero rows to a multiple."""
    return array if array.shape[0] % multiple == 0 else jnp.pad(array, ((0, -array.shape[0] % multiple), (0, 0)))
