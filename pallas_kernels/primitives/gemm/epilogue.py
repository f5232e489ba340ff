"""The epilogue of a product, between the accumulator and memory, and the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """Row scale, bias, activation, gating, residual and cast, in this order, in float32.

    activation: of the product (of the first one if `gated`), or None.
    gated: whether the result is activation(first) * second of two products. Without gating each product is a result.
    keeps_products: whether the products, scaled but without bias, are further results, for the backward pass.
    """

    activation: Activation | None = None
    gated: bool = False
    keeps_products: bool = False

    def dtypes(self, products: int, result: jnp.dtype, kept: jnp.dtype) -> list[jnp.dtype]:
        """Returns the dtype of each result: `result`, or `kept` for the products that are kept."""
        return [result] * (1 if self.gated else products) + [kept] * (products if self.keeps_products else 0)

    def apply(
        self,
        products: Sequence[jax.Array],
        *,
        scale: jax.Array | None,
        biases: Sequence[jax.Array],
        residual: jax.Array | None,
        dtype: jnp.dtype,
    ) -> tuple[jax.Array, ...]:
        """Computes the float32 results of a piece of the products.

        biases: one for each product, or none. scale, biases and residual are as wide as the piece; dtype is the
        result's, which decides how exact an activation needs to be.
        """
        if scale is not None:
            products = [product * scale for product in products]
        values = [product + bias for product, bias in zip(products, biases, strict=True)] if biases else [*products]
        if self.activation is not None:
            values[0] = self.activation.value(values[0], dtype)
        if self.gated:
            gate, linear = values
            values = [gate * linear]
        if residual is not None:
            values[0] = values[0] + residual
        return (*values, *(products if self.keeps_products else ()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotation of the heads of all results beside each other except the last, in float32.

    size: columns of a head, of which i and i + size / 2 are a pair.
    cos, sin: (rows, size / 2) float32, or (rows, size) with many rows.
    """

    size: int = field(metadata={"static": True})
    cos: jax.Array
    sin: jax.Array


@dataclass(frozen=True, kw_only=True)
class HeadRotation:
    """Rotates the heads of one result.

    size: columns of a head. angles: columns of cosines and sines, half as many or as many. has_bias: whether a bias is
    added before.
    """

    size: int
    angles: int
    has_bias: bool = False

    @property
    def widest_piece(self) -> int:
        """The most columns of a piece, which has only one column of each pair; more would spill."""
        return 32 if self.has_bias else self.size // 2


def store_order(rotation: HeadRotation | None, width: int, piece: int) -> list[int]:
    """Returns the first columns of a tile's pieces, in an order that puts pieces with the same angles together."""
    starts = list(range(0, width, piece))
    if rotation is None:
        return starts
    return sorted(starts, key=lambda start: start % rotation.angles)


def rotated_piece(
    value: Callable[[int], jax.Array],
    angles: Callable[[int], tuple[jax.Array, jax.Array]],
    rotation: HeadRotation,
    start: int,
):
    """Returns the rotated piece of heads that begins at column `start`.

    value: returns the piece from a column on. angles: returns cosines and sines from a column of theirs on.
    """
    half = rotation.size // 2
    cosine, sine = angles(start % rotation.angles)
    if start % rotation.size < half:
        return value(start) * cosine - value(start + half) * sine
    return value(start) * cosine + value(start - half) * sine
