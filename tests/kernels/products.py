"""What tests of matrix products share: operands, and how close a result must be to the product in float64."""

from __future__ import annotations

from typing import Any

import draws
import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """An operand."""
    return draws.normal(seed, shape, dtype)


def wide(array: Any) -> np.ndarray:
    """In float64."""
    return np.asarray(array, np.float64)


def assert_close(got: Any, exact: np.ndarray, dtype: Any = jnp.bfloat16) -> None:
    """To the rounding of the result, and of float32 sums."""
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(wide(got), exact, rtol=eps, atol=1e-5 * np.abs(exact).max())
