"""Writes the FLOPs of a kernel's matrix products into the program: the HLO does not show a kernel's body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.state import AbstractRef  # JAX has no public name of it
from jax.experimental.xla_metadata import set_xla_metadata

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "s8"}
"""NumPy's names of element types, and HLO's."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """The matrix products of one launch.

    flops: multiplications and additions, of all its results together.
    dtype: of the factors, as tensor cores take them.
    """

    flops: int
    dtype: jnp.dtype

    def times(self, count: int) -> Products:
        """So many of them."""
        return Products(flops=count * self.flops, dtype=self.dtype)

    def __add__(self, other: Products) -> Products:
        return Products(flops=self.flops + other.flops, dtype=self.dtype)

    def beside(self, results: Sequence[Any]) -> AbstractContextManager[Any]:
        """Within, launches have the frontend attribute `matrix_flops="bf16 FLOPS / ELEMENTS"`.

        ELEMENTS: of all `results`, which `jax.vmap` makes more of, and with them the FLOPs.
        """
        elements = sum(math.prod(result.shape) for result in results)
        name = _NAMES[jnp.dtype(self.dtype).name]
        return set_xla_metadata(matrix_flops=f"{name} {self.flops} / {elements}")


def product(m: int, n: int, k: int, dtype: Any) -> Products:
    """Of an (m, k) and a (k, n) matrix."""
    return Products(flops=2 * m * n * k, dtype=jnp.dtype(dtype))


def references(arguments: Any) -> list[Any]:
    """What among arguments the launch changes in its place, and returns."""
    return [leaf for leaf in jax.tree.leaves(arguments) if isinstance(jax.typeof(leaf), AbstractRef)]
