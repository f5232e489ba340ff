"""Which arrays the products take, and how others are made to fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DTYPES = ("bfloat16", "float16")
COLUMNS = 64
"""Values of 16 bits in the 128 bytes over which TMA swizzles; lines in memory are whole multiples of them."""
FEWEST_OUTPUTS = 128
"""What the row kernels of the backward pass take."""
_ROWS = 8
"""TMA loads groups of eight rows: an array has fewer rows, or whole groups."""


def operands_unsupported(x: jax.Array, *weights: jax.Array) -> str | None:
    """Why the kernels cannot multiply x (..., features) by each of `weights` (features, outputs), or None."""
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
    """The array (rows, columns) with zero rows after it where TMA could not load its last rows."""
    rows = array.shape[0]
    if rows < _ROWS or rows % _ROWS == 0:
        return array
    return jnp.pad(array, ((0, -rows % _ROWS), (0, 0)))


def padded_vector(vector: jax.Array | None, multiple: int) -> jax.Array | None:
    """The vector with zeros after it up to a multiple: ordinary loads read past the edge, and need something there."""
    if vector is None or vector.shape[0] % multiple == 0:
        return vector
    return jnp.pad(vector, (0, -vector.shape[0] % multiple))


def padded_rows(array: jax.Array, multiple: int) -> jax.Array:
    """The same for the rows of an array."""
    return array if array.shape[0] % multiple == 0 else jnp.pad(array, ((0, -array.shape[0] % multiple), (0, 0)))
