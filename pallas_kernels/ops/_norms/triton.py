"""The norms as Triton kernels, called through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

They serve the block's strategy: a scale, a bias for LayerNorm, and no residual.

A block holds a row in registers. Backward, blocks are persistent and keep partial column sums, which XLA adds up.
The module is imported only when requested, since it imports Triton.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.triton_calls import row_block

_BLOCKS_PER_CORE = 4


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def norm_forward(
    x_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    statistics_ptr,
    rows: tl.constexpr,
    features: tl.constexpr,
    epsilon: tl.constexpr,
    block: tl.constexpr,
    mean_passes: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Computes one row in each block. Without a bias its pointer is never dereferenced."""
    columns = tl.arange(0, block)
    inside = columns < features
    row = tl.program_id(0)
    offsets = row.to(tl.int64) * features + columns
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    value = x.to(tl.float32)
    for i in tl.static_range(mean_passes):
        mean = tl.sum(value, 0) / features
        value = tl.where(inside, value - mean, 0.0)
        tl.store(statistics_ptr + (i + 1) * rows + row, mean)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / features + epsilon)
    tl.store(statistics_ptr + row, inverse)
    y = value * inverse * tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(x.dtype), mask=inside)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def norm_backward(
    total_ptr,
    statistics_ptr,
    dy_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    dbias_ptr,
    rows: tl.constexpr,
    features: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    mean_passes: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Computes every `blocks`-th row in each block, and writes the block's partial column sums."""
    first = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < features
    gain = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dscale = tl.zeros((block,), tl.float32)
    dbias = tl.zeros((block,), tl.float32)
    offsets = first.to(tl.int64) * features + columns
    for row in range(first, rows, blocks):
        value = tl.load(total_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(mean_passes):
            value = tl.where(inside, value - tl.load(statistics_ptr + (i + 1) * rows + row), 0.0)
        inverse = tl.load(statistics_ptr + row)
        value *= inverse
        weighted = dy * gain
        dx = weighted - value * (tl.sum(weighted * value, 0) / features)
        if mean_passes > 0:
            dx -= tl.sum(weighted, 0) / features
        dx *= inverse
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dscale += dy * value
        dbias += dy
        offsets += blocks * features
    partial_sums = first.to(tl.int64) * features + columns
    tl.store(dscale_ptr + partial_sums, dscale, mask=inside)
    if has_bias:
        tl.store(dbias_ptr + partial_sums, dbias, mask=inside)


def forward(norm: Norm, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns y and the statistics, `Norm.statistics`. x: (rows, features)."""
    rows, features = x.shape
    block, warps = row_block(features)
    return jax_triton.triton_call(
        x,
        scale,
        scale if bias is None else bias,  # an unused pointer must still be a valid one
        kernel=norm_forward,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), norm.statistics(rows, x.dtype)),
        grid=(rows,),
        name=f"{norm.name}_triton",
        num_warps=warps,
        rows=rows,
        features=features,
        epsilon=norm.epsilon,
        block=block,
        mean_passes=norm.mean_passes(x.dtype),
        has_bias=bias is not None,
    )


def backward(
    norm: Norm, x: jax.Array, statistics: jax.Array, dy: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the gradients of x, scale and bias. x, dy: (rows, features)."""
    rows, features = x.shape
    block, warps = row_block(features)
    blocks = min(rows, _BLOCKS_PER_CORE * target_device().core_count)
    sums = ((blocks, features), (1,) if bias is None else (blocks, features))
    dx, *partials = jax_triton.triton_call(
        x,
        statistics,
        dy,
        scale,
        kernel=norm_backward,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), *(jax.ShapeDtypeStruct(n, jnp.float32) for n in sums)),
        grid=(blocks,),
        name=f"{norm.name}_backward_triton",
        num_warps=warps,
        rows=rows,
        features=features,
        block=block,
        blocks=blocks,
        mean_passes=norm.mean_passes(x.dtype),
        has_bias=bias is not None,
    )
    dscale, dbias = (
        None if array is None else jnp.sum(part, axis=0).astype(array.dtype)
        for array, part in zip((scale, bias), partials, strict=True)
    )
    assert dscale is not None
    return dx, dscale, dbias


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def triton_norm(norm: Norm, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Normalises the rows of x (rows, features)."""
    return forward(norm, x, scale, bias)[0]


def _fwd(norm, x, scale, bias):
    y, statistics = forward(norm, x, scale, bias)
    return y, (x, statistics, scale, bias)


def _bwd(norm, saved, dy):
    x, statistics, scale, bias = saved
    return backward(norm, x, statistics, dy, scale, bias)


triton_norm.defvjp(_fwd, _bwd)
