"""Writes the FLOPs of a kernel's matrix products into the program, since HLO does not show a kernel's body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.state import AbstractRef  # JAX has no public name for it
from jax.experimental.xla_metadata import set_xla_metadata

_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int8": "s8"}
"""HLO's names of element types, by NumPy's names."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """The matrix products of one launch.

    flops: multiplications and additions, for all results together.
    dtype: of the factors that the tensor cores multiply.
    """

    flops: int
    dtype: jnp.dtype

    def times(self, count: int) -> Products:
        """Returns the metadata of `count` such products."""
        return Products(flops=count * self.flops, dtype=self.dtype)

    def __add__(self, other: Products) -> Products:
        return Products(flops=self.flops + other.flops, dtype=self.dtype)

    def beside(self, results: Sequence[Any]) -> AbstractContextManager[Any]:
        """Gives launches inside the context the frontend attribute `matrix_flops="bf16 FLOPS / ELEMENTS"`.

        ELEMENTS is the size of all `results`. `jax.vmap` multiplies it, and the FLOPs by the same factor.
        """
        elements = sum(math.prod(result.shape) for result in results)
        name = _NAMES[jnp.dtype(self.dtype).name]
        return set_xla_metadata(matrix_flops=f"{name} {self.flops} / {elements}")


def product(m: int, n: int, k: int, dtype: Any) -> Products:
    """Returns the metadata of the product of an (m, k) and a (k, n) matrix."""
    return Products(flops=2 * m * n * k, dtype=jnp.dtype(dtype))


def references(arguments: Any) -> list[Any]:
    """Returns the arguments that the launch changes in place and returns."""
    return [leaf for leaf in jax.tree.leaves(arguments) if isinstance(jax.typeof(leaf), AbstractRef)]
