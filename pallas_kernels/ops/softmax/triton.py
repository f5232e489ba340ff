"""Softmax as Triton kernels, called through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

A block holds a row in registers. The module is imported only when requested, since it imports Triton.
"""

from __future__ import annotations

from functools import partial

import jax
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import libdevice  # pyright: ignore[reportMissingImports]

from pallas_kernels.primitives.triton_calls import row_block


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def softmax_forward(
    x_ptr,
    weights_ptr,
    features: tl.constexpr,
    queries: tl.constexpr,
    scale: tl.constexpr,
    block: tl.constexpr,
    is_exact: tl.constexpr,
):
    """Computes one row per block. queries: row r keeps columns 0 to r % queries; 0 keeps all.

    is_exact: whether exponentials are accurate to the last place. Triton's own multiplies by log2(e) first, whose error
    makes the weight of x - max = -90 wrong by up to 40 units in the last place.
    """
    columns = tl.arange(0, block)
    row = tl.program_id(0)
    kept = columns < features
    if queries > 0:
        kept = kept & (columns <= row % queries)
    offsets = row.to(tl.int64) * features + columns
    score = tl.load(x_ptr + offsets, mask=kept, other=0.0).to(tl.float32) * scale
    score = tl.where(kept, score, float("-inf"))
    difference = score - tl.max(score, 0)
    weight = libdevice.exp(difference) if is_exact else tl.exp(difference)
    weight /= tl.sum(weight, 0)
    tl.store(weights_ptr + offsets, weight.to(weights_ptr.dtype.element_ty), mask=columns < features)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def softmax_backward(weights_ptr, dy_ptr, dx_ptr, features: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
    """Computes one row per block. Divides by the weights' sum, which rounding leaves near one."""
    columns = tl.arange(0, block)
    inside = columns < features
    offsets = tl.program_id(0).to(tl.int64) * features + columns
    weight = tl.load(weights_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(weight * dy, 0) / tl.sum(weight, 0)
    dx = weight * (dy - mean) * scale
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def softmax_rows(x: jax.Array, scale: float, queries: int) -> jax.Array:
    """Computes the weights of x (rows, features). queries: the length of the axis before the last, 0 if not causal."""
    rows, features = x.shape
    block, warps = row_block(features)
    return jax_triton.triton_call(
        x,
        kernel=softmax_forward,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        name="softmax_triton",
        num_warps=warps,
        features=features,
        queries=queries,
        scale=scale,
        block=block,
        is_exact=x.dtype.itemsize == 4,
    )


def backward(weights: jax.Array, dy: jax.Array, scale: float) -> jax.Array:
    """Computes the gradient of x (rows, features)."""
    rows, features = weights.shape
    block, warps = row_block(features)
    return jax_triton.triton_call(
        weights,
        dy,
        kernel=softmax_backward,
        out_type=jax.ShapeDtypeStruct(weights.shape, weights.dtype),
        grid=(rows,),
        name="softmax_backward_triton",
        num_warps=warps,
        features=features,
        scale=scale,
        block=block,
    )


def _fwd(x, scale, queries):
    weights = softmax_rows(x, scale, queries)
    return weights, weights


def _bwd(scale, queries, weights, dy):
    del queries
    return (backward(weights, dy, scale),)


softmax_rows.defvjp(_fwd, _bwd)
