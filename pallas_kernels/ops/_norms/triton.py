"""The norms as Triton kernels, called through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

A block holds a row in registers. Backward, blocks are persistent and keep partial column sums, which XLA adds up.
The module is imported only when requested, since it imports Triton.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.ops._norms.backward import Kernels, NormGradients
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.triton_calls import row_block

_BLOCKS_PER_CORE = 4


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def norm_forward(
    x_ptr,
    residual_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    statistics_ptr,
    rows: tl.constexpr,
    features: tl.constexpr,
    epsilon: tl.constexpr,
    block: tl.constexpr,
    mean_passes: tl.constexpr,
    has_residual: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
    has_statistics: tl.constexpr,
    rounds_before_scale: tl.constexpr,
):
    """Computes one row in each block. A pointer whose flag is off is never dereferenced."""
    columns = tl.arange(0, block)
    inside = columns < features
    row = tl.program_id(0)
    offsets = row.to(tl.int64) * features + columns
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if has_residual:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
        total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        tl.store(total_ptr + offsets, total, mask=inside)
    value = total.to(tl.float32)
    for i in tl.static_range(mean_passes):
        mean = tl.sum(value, 0) / features
        value = tl.where(inside, value - mean, 0.0)
        if has_statistics:
            tl.store(statistics_ptr + (i + 1) * rows + row, mean)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / features + epsilon)
    if has_statistics:
        tl.store(statistics_ptr + row, inverse)
    y = value * inverse
    if rounds_before_scale and (has_scale or has_bias):
        y = y.to(total.dtype).to(tl.float32)
    if has_scale:
        scale = tl.load(scale_ptr + columns, mask=inside, other=0.0)
        y *= scale.to(tl.float32)
        if rounds_before_scale and has_bias and scale.dtype == total.dtype:
            y = y.to(total.dtype).to(tl.float32)
    if has_bias:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, y.to(total.dtype), mask=inside)


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def norm_backward(
    total_ptr,
    statistics_ptr,
    dy_ptr,
    dtotal_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    dbias_ptr,
    rows: tl.constexpr,
    features: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    mean_passes: tl.constexpr,
    has_dtotal: tl.constexpr,
    has_scale: tl.constexpr,
    has_bias: tl.constexpr,
):
    """Computes every `blocks`-th row in each block, and writes the block's partial column sums."""
    first = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < features
    gain = tl.full((block,), 1.0, tl.float32)
    if has_scale:
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
        if has_dtotal:
            dx += tl.load(dtotal_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dscale += dy * value
        dbias += dy
        offsets += blocks * features
    partial_sums = first.to(tl.int64) * features + columns
    if has_scale:
        tl.store(dscale_ptr + partial_sums, dscale, mask=inside)
    if has_bias:
        tl.store(dbias_ptr + partial_sums, dbias, mask=inside)


def forward(
    norm: Norm,
    x: jax.Array,
    *,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    words: None,
    with_statistics: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Runs a norm forward by Triton, like `forward.norm_forward`; takes no dropout."""
    del words
    rows, features = x.shape
    block, warps = row_block(features)
    # An unused pointer must still be a valid one.
    operands = (x if operand is None else operand for operand in (residual, scale, bias))
    statistics = norm.statistics(rows, x.dtype)
    y, total, statistics = jax_triton.triton_call(
        x,
        *operands,
        kernel=norm_forward,
        out_type=(
            _like(x, x.shape),
            _like(x, (1,) if residual is None else x.shape),
            statistics if with_statistics else _like(statistics, (1,)),
        ),
        grid=(rows,),
        name=f"{norm.name}_triton",
        num_warps=warps,
        rows=rows,
        features=features,
        epsilon=norm.epsilon,
        block=block,
        mean_passes=norm.mean_passes(x.dtype),
        has_residual=residual is not None,
        has_scale=scale is not None,
        has_bias=bias is not None,
        has_statistics=with_statistics,
        rounds_before_scale=norm.rounds_before_scale,
    )
    return y, None if residual is None else total, statistics


def backward(
    norm: Norm,
    total: jax.Array,
    statistics: jax.Array,
    dy: jax.Array,
    *,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dtotal: jax.Array | None,
    words: None,
) -> NormGradients:
    """Runs a norm backward by Triton, like `backward.norm_backward`; takes no dropout."""
    del words
    rows, features = total.shape
    block, warps = row_block(features)
    blocks = min(rows, _BLOCKS_PER_CORE * target_device().core_count)
    sums = [(1,) if array is None else (blocks, features) for array in (scale, bias)]
    dx, *partials = jax_triton.triton_call(
        total,
        statistics,
        dy,
        total if dtotal is None else dtotal,
        total if scale is None else scale,
        kernel=norm_backward,
        out_type=(_like(total, total.shape), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums)),
        grid=(blocks,),
        name=f"{norm.name}_backward_triton",
        num_warps=warps,
        rows=rows,
        features=features,
        block=block,
        blocks=blocks,
        mean_passes=norm.mean_passes(total.dtype),
        has_dtotal=dtotal is not None,
        has_scale=scale is not None,
        has_bias=bias is not None,
    )
    pairs = zip((scale, bias), partials, strict=True)
    dscale, dbias = (None if array is None else jnp.sum(part, axis=0).astype(array.dtype) for array, part in pairs)
    return NormGradients(dtotal=dx, dx=None, dscale=dscale, dbias=dbias)


def _like(array: jax.Array | jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, array.dtype)


TRITON = Kernels(forward, backward)
