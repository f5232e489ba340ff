"""The projections backward: one launch for the heads, three products for the weights, and one launch for x."""

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
    *,
    has_biases: bool = False,
) -> list[HeadArray]:
    """Returns query, key and value as arguments of `launch_heads`. has_biases: whether biases' gradients are summed."""
    parts = zip(
        arrays,
        (*products, None),
        (*given.head_scales, None),
        (*form.epsilons, None),
        (*form.rounds, False),
        (form.is_rotated, form.is_rotated, False),
        given.biases,
        strict=True,
    )
    return [
        HeadArray(
            array=array,
            product=product,
            scale=scale,
            epsilon=epsilon,
            rounds_before_scale=rounds,
            is_rotated=is_rotated,
            has_bias=has_biases and bias is not None,
        )
        for array, product, scale, epsilon, rounds, is_rotated, bias in parts
    ]


def qkv_projection_backward(
    form: HeadForm,
    given: Operands,
    tables: Tables | None,
    products: Sequence[jax.Array | None],
    cotangents: Sequence[jax.Array],
) -> Operands:
    """Returns the gradients. products: those that `qkv_projection_forward` returned; cotangents: (rows, outputs)."""
    dproducts, dscales = tuple(cotangents), (None, None)
    if form.size is None or not (form.is_normed or form.is_rotated):
        dbiases = tuple(map(bias_gradient, given.biases, cotangents))
    else:
        heads = heads_of(form, given, cotangents, products, has_biases=True)
        is_rope = not form.is_normed and not any(each.has_bias for each in heads)
        name = "rope" if is_rope else "qkv_heads_gradient"
        results = launch_heads(heads, tables, size=form.size, is_backward=True, name=name)
        dproducts = tuple(each.array for each in results)
        dbiases = _cast_like(given.biases, [each.bias for each in results])
        dscales = _cast_like(given.head_scales, [each.scale for each in results[:2]])
    dx, dweights = product_gradients(given.x, given.weights, dproducts)
    return Operands(x=dx, weights=dweights, biases=dbiases, head_scales=dscales)


def _cast_like(arrays, sums):
    """Casts each float32 sum to its parameter's dtype; None where there is no parameter."""
    return tuple(
        None if array is None else total.astype(array.dtype) for array, total in zip(arrays, sums, strict=True)
    )
