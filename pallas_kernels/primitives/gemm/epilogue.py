"""The epilogue of a product, between the accumulator and memory, and columns as heads: normalised, rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.operands import padded_vector


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """In this order, in float32: row scale, bias, activation, gating, residual, cast.

    activation: of the product (of the first one where `gated`), or None.
    gated: there are two products: activation(first) * second is the result.
    keeps_products: the products, scaled but without bias, are results too, after the first, for the backward pass.

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


HEAD_SIZES = (64, 128, 256)
"""Those of which tiles are made up whole, in pieces that TMA stores."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What one result's heads go through, in float32: norm, then rotation.

    size: columns of a head, one of `HEAD_SIZES`.
    epsilon: added to the mean square of the head's columns, whose root they are divided by; None for no norm.
    rotated: whether column i and column i + size / 2 are rotated as a pair.
    """

    size: int
    epsilon: float | None = None
    rotated: bool = False

    @property
    def widest_piece(self) -> int:
        """Columns that can be worked on at a time: a piece has one member of its pairs only, and registers hold the
        accumulators, both members' columns and their angles; with a norm, less of each."""
        return max(32, self.size // 4) if self.epsilon is not None else self.size // 2


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What belongs to one of the right operands that lie beside each other.

    heads: what its result goes through, or None.
    bias: (its columns,), added before that. scale: (head size,), of the heads' norm. Any floating dtype; or None.
    """

    heads: Heads | None = None
    bias: jax.Array | None = None
    scale: jax.Array | None = None

    def operands(self, multiple: int) -> dict[str, jax.Array | None]:
        """The arrays as the epilogue reads them, in multiples of so many columns."""
        return {"bias": padded_vector(self.bias, multiple), "head_scale": self.scale}


Piece = Callable[[int, int], jax.Array]
"""From a first column and a number of columns to that part of a warpgroup's tile, float32."""


def head_factors(
    value: Piece, heads: Heads, epsilon: float, scale: jax.Array | None, width: int, piece: int
) -> list[jax.Array]:
    """One over the root mean square of each head's columns of each row: (rows,) each.

    scale: (rows,), factors that the values lack; the results have them.
    """
    factors = []
    for head in range(0, width, heads.size):
        squares = [jnp.sum(jnp.square(value(start, piece)), axis=1) for start in range(head, head + heads.size, piece)]
        mean = sum(squares[1:], squares[0]) * (1.0 / heads.size)
        factor = lax.rsqrt((mean if scale is None else mean * scale * scale) + epsilon)
        factors.append(factor if scale is None else factor * scale)
    return factors


def store_order(heads: Heads | None, width: int, piece: int) -> list[int]:
    """The first columns of a tile's pieces, those rotated by the same angles one after the other."""
    starts = list(range(0, width, piece))
    if heads is None or not heads.rotated:
        return starts
    return sorted(starts, key=lambda start: start % (heads.size // 2))


def rotated_piece(
    value: Piece, angles: Callable[[int], tuple[jax.Array, jax.Array]], heads: Heads, start: int, piece: int
):
    """The piece that begins there, of heads rotated. angles: cosines and sines from an angle's number on."""
    half = heads.size // 2
    place = start % heads.size
    cosine, sine = angles(place % half)
    if place < half:
        return value(start, piece) * cosine - value(start + half, piece) * sine
    return value(start, piece) * cosine + value(start - half, piece) * sine
