"""The projections backward: the inverse rotation's kernel, three products for the weights, and one launch for x."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.norm import gradient_dtype, scaled_rows, through_row_scale
from pallas_kernels.ops.qkv_projection.mosaic_gpu import HeadForm
from pallas_kernels.ops.rms_norm.reference import rms_norm_reference
from pallas_kernels.ops.rope.api import rope
from pallas_kernels.primitives.gradients import input_gradient, weight_gradients

Gradients = tuple[jax.Array, ...]


def qkv_projection_backward(
    x: jax.Array,
    weights: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    form: HeadForm,
    row_scale: jax.Array | None = None,
    biases: Sequence[jax.Array | None] = (None, None, None),
    head_scales: Sequence[jax.Array | None] = (None, None),
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Gradients, jax.Array | None, tuple[jax.Array | None, ...], tuple[jax.Array | None, ...]]:
    """Returns the gradients of x, of the weights, of row_scale, of the biases and of head_scales.

    Arguments as for `qkv_projection_forward`; cotangents: (rows, outputs) each. Products that a head norm's gradient
    needs are computed again.
    """
    dq, dk, dv = cotangents
    scaled = scaled_rows(x, row_scale)
    if form.theta is not None and form.size is not None:
        assert positions is not None
        dq, dk = _rotated_back(dq, dk, positions, form.size, form.theta)
    dscales: list[jax.Array | None] = [None, None]
    projected = [dq, dk]
    for i, epsilon in enumerate(form.epsilons):
        if epsilon is not None:
            product = _with_bias(scaled @ weights[i], biases[i])
            projected[i], dscales[i] = _head_norm_back(product, head_scales[i], projected[i], form.size, epsilon)
    products = [*projected, dv]
    dweights = weight_gradients(scaled, products)
    dbiases = tuple(
        None if bias is None else jnp.sum(product, axis=0, dtype=jnp.float32).astype(bias.dtype)
        for product, bias in zip(products, biases, strict=True)
    )
    dscaled = input_gradient(products, weights, dtype=gradient_dtype(row_scale))
    dx, drow_scale = through_row_scale(dscaled, x, row_scale)
    return dx, dweights, drow_scale, dbiases, tuple(dscales)


def _rotated_back(dq, dk, positions, size, theta):
    shaped = [d.reshape(1, d.shape[0], -1, size) for d in (dq, dk)]
    # A rotation is linear: its gradient at any argument turns back. XLA removes the rotation itself.
    _, pullback = jax.vjp(lambda q, k: rope(q, k, positions, theta=theta), *shaped)
    back_q, back_k = pullback(tuple(shaped))
    return back_q.reshape(dq.shape), back_k.reshape(dk.shape)


def _with_bias(product, bias):
    return product if bias is None else (product.astype(jnp.float32) + bias.astype(jnp.float32)).astype(product.dtype)


def _head_norm_back(product, scale, cotangent, size, epsilon):
    gain = jnp.ones(size, jnp.float32) if scale is None else scale

    def norm(product, gain):
        return rms_norm_reference(product.reshape(product.shape[0], -1, size), gain, epsilon=epsilon)

    shaped = cotangent.reshape(product.shape[0], -1, size)
    dproduct, dgain = jax.vjp(norm, product, gain)[1](shaped)
    return dproduct.reshape(product.shape), None if scale is None else dgain
