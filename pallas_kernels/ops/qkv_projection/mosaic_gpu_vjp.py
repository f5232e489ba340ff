"""The projections backward: one launch for the heads, three products for the weights, and one launch for x.

The gradients of biases are sums of XLA's over the heads' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pallas_kernels.ops._products.product import bias_gradient, product_gradients
from pallas_kernels.ops.qkv_projection.config import HeadForm
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines, (rows, head size or half of that) float32 each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of a call, or their gradients; without the tables, whose gradients are XLA's.

    x: (rows, features), weights: (features, outputs) each, all of one 16-bit dtype. biases: (outputs,) each.
    head_scales: of the norms of query and key heads, (head size,) each.
    """

    x: jax.Array
    weights: tuple[jax.Array, ...]
    biases: tuple[jax.Array | None, ...] = (None, None, None)
    head_scales: tuple[jax.Array | None, ...] = (None, None)


def heads_of(
    form: HeadForm,
    given: Operands,
    arrays: Sequence[jax.Array],
    products: Sequence[jax.Array | None] = (None, None),
) -> list[HeadArray]:
    """Returns query and key as arguments of `launch_heads`. arrays: of query, key and value."""
    parts = zip(arrays[:2], products, form.norms, given.head_scales, strict=True)
    return [HeadArray(array=array, product=own, norm=norm, scale=scale) for array, own, norm, scale in parts]


def qkv_projection_backward(
    form: HeadForm,
    given: Operands,
    tables: Tables | None,
    products: Sequence[jax.Array | None],
    cotangents: Sequence[jax.Array],
) -> Operands:
    """Returns the gradients. products: those that `qkv_projection_forward` returned; cotangents: (rows, outputs)."""
    dproducts, dscales = tuple(cotangents), (None, None)
    if form.size is not None and (form.is_normed or form.is_rotated):
        heads = heads_of(form, given, cotangents, products)
        name = "qkv_heads_gradient" if form.is_normed else "rope"
        dheads, sums = launch_heads(heads, tables, size=form.size, is_backward=True, name=name)
        dproducts = (*dheads, cotangents[2])
        dscales = tuple(
            None if scale is None or total is None else total.astype(scale.dtype)
            for scale, total in zip(given.head_scales, sums, strict=True)
        )
    dx, dweights = product_gradients(given.x, given.weights, dproducts)
    dbiases = tuple(map(bias_gradient, given.biases, dproducts))
    return Operands(x=dx, weights=dweights, biases=dbiases, head_scales=dscales)
