"""The projections backward: one launch for the heads, three products for the weights, and one launch for x."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import product_gradients
from pallas_kernels.ops.qkv_projection.config import HeadForm
from pallas_kernels.ops.rope.heads import HeadArray, launch_heads
from pallas_kernels.ops.rope.mosaic_gpu import rope_rotate

Arrays = tuple[jax.Array, ...]
OptionalArrays = Sequence[jax.Array | None]


def qkv_projection_backward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    form: HeadForm,
    products: OptionalArrays = (None, None),
    row_scale: jax.Array | None = None,
    biases: OptionalArrays = (None, None, None),
    head_scales: OptionalArrays = (None, None),
    tables: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, Arrays, jax.Array | None, tuple[jax.Array | None, ...], tuple[jax.Array | None, ...]]:
    """Returns the gradients of x, of the weights, of row_scale, of the biases and of head_scales.

    Arguments as for `qkv_projection_forward`; cotangents: (rows, outputs) each; products: those that it returned.
    """
    dproducts, dbiases, dscales = _through_heads(cotangents, form, products, biases, head_scales, tables)
    dx, dweights, drow_scale = product_gradients(x, weights, dproducts, row_scale)
    return dx, dweights, drow_scale, dbiases, dscales


def _through_heads(
    cotangents: Sequence[jax.Array],
    form: HeadForm,
    products: OptionalArrays,
    biases: OptionalArrays,
    head_scales: OptionalArrays,
    tables: tuple[jax.Array, jax.Array] | None,
) -> tuple[Arrays, tuple[jax.Array | None, ...], tuple[jax.Array | None, ...]]:
    """Returns the gradients of the products with biases, of the biases and of the head norms' scales."""
    if form.size is None or not (form.is_normed or form.is_rotated):
        sums = (
            None if b is None else jnp.sum(d, axis=0, dtype=jnp.float32)
            for d, b in zip(cotangents, biases, strict=True)
        )
        return tuple(cotangents), _cast_like(biases, sums), (None, None)
    if not form.is_normed and all(bias is None for bias in biases):
        return _rotated_back(cotangents, tables, form), (None,) * 3, (None, None)
    heads = [
        HeadArray(
            array=cotangent,
            product=product,
            scale=scale,
            epsilon=epsilon,
            is_rotated=is_rotated,
            has_bias=bias is not None,
        )
        for cotangent, product, scale, epsilon, is_rotated, bias in zip(
            cotangents,
            (*products, None),
            (*head_scales, None),
            (*form.epsilons, None),
            (form.is_rotated, form.is_rotated, False),
            biases,
            strict=True,
        )
    ]
    results = launch_heads(heads, tables, size=form.size, is_backward=True, name="qkv_heads_gradient")
    dbiases = _cast_like(biases, [result.bias for result in results])
    return tuple(result.array for result in results), dbiases, _cast_like(head_scales, [r.scale for r in results[:2]])


def _rotated_back(
    cotangents: Sequence[jax.Array], tables: tuple[jax.Array, jax.Array] | None, form: HeadForm
) -> Arrays:
    assert tables is not None and form.size is not None
    *rotated, dv = cotangents
    heads = [d.reshape(1, d.shape[0], -1, form.size) for d in rotated]
    dq, dk = rope_rotate(heads, *tables, rotated=form.size, interleaved=False, inverse=True)
    return dq.reshape(rotated[0].shape), dk.reshape(rotated[1].shape), dv


def _cast_like(arrays, sums):
    """Casts each float32 sum to its parameter's dtype; None where there is no parameter."""
    return tuple(
        None if array is None else total.astype(array.dtype) for array, total in zip(arrays, sums, strict=True)
    )
