"""Softmax as Triton kernels, called through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

A block holds a row in registers. The module is imported only when requested, since it imports Triton.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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


def _launch(kernel: Any, name: str, x: jax.Array, *others: jax.Array, **constants: Any) -> jax.Array:
    """Runs a kernel with a block for each row of x (rows, features); the result is like x."""
    rows, features = x.shape
    block, warps = row_block(features)
    return jax_triton.triton_call(
        *(x, *others),
        kernel=kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        name=name,
        num_warps=warps,
        features=features,
        block=block,
        **constants,
    )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def softmax_rows(x: jax.Array, scale: float, queries: int) -> jax.Array:
    """Computes the weights of x (rows, features). queries: the length of the axis before the last, 0 if not causal."""
    is_exact = x.dtype.itemsize == 4
    return _launch(softmax_forward, "softmax_triton", x, queries=queries, scale=scale, is_exact=is_exact)


def backward(weights: jax.Array, dy: jax.Array, scale: float) -> jax.Array:
    """Computes the gradient of x (rows, features)."""
    return _launch(softmax_backward, "softmax_backward_triton", weights, dy, scale=scale)


def _fwd(x, scale, queries):
    weights = softmax_rows(x, scale, queries)
    return weights, weights


def _bwd(scale, queries, weights, dy):
    del queries
    return (backward(weights, dy, scale),)


softmax_rows.defvjp(_fwd, _bwd)
