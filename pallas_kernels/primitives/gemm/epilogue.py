"""What happens to a product between the accumulator and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """In this order, in float32: row scale, bias, activation, gating, residual, cast.

    activation: of the product (of the first one where `gated`), or None.
    gated: there are two products: activation(first) * second is the result.
    keeps_products: the products, scaled but without bias, are results too, behind the first, for the backward pass.

    Without gating each product is a result of its own.
    """

    activation: Activation | None = None
    gated: bool = False
    keeps_products: bool = False

    def outputs(self, products: int) -> int:
        """How many results a kernel of so many products has."""
        return (1 if self.gated else products) + (products if self.keeps_products else 0)

    def dtypes(self, products: int, result: jnp.dtype, kept: jnp.dtype) -> list[jnp.dtype]:
        """Of each result; `kept`: of the products that are kept."""
        count = products if self.keeps_products else 0
        return [result] * (self.outputs(products) - count) + [kept] * count

    def apply(
        self,
        products: Sequence[jax.Array],
        *,
        scale: jax.Array | None,
        bias: jax.Array | None,
        residual: jax.Array | None,
        dtype: jnp.dtype,
    ) -> tuple[jax.Array, ...]:
        """The results, float32, of a piece of the products.

        scale, bias and residual are as wide as the piece; dtype is the result's, which decides how exact an activation
        needs to be.
        """
        if scale is not None:
            products = [product * scale for product in products]
        values = [product if bias is None else product + bias for product in products]
        if self.activation is not None:
            values[0] = self.activation.value(values[0], dtype)
        if self.gated:
            gate, linear = values
            values = [gate * linear]
        if residual is not None:
            values[0] = values[0] + residual
        return (*values, *(products if self.keeps_products else ()))
