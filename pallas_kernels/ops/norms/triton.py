"""The norms as Triton kernels, called through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

They serve the block's strategy: a scale, a bias for LayerNorm, and no residual.

A block holds a row in registers. Backward, blocks are persistent and keep partial column sums, which XLA adds up.
The module is imported only when requested, since it imports Triton.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.ops.norms.backward import NormGradients
from pallas_kernels.ops.norms.norm import StaticNorm
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
    sums_ptr,
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
    sums_ptr += first.to(tl.int64) * features + columns
    tl.store(sums_ptr, dscale, mask=inside)
    if has_bias:
        tl.store(sums_ptr + blocks * features, dbias, mask=inside)


def triton_forward(
    norm: StaticNorm,
    x: jax.Array,
    *,
    scale: jax.Array,
    bias: jax.Array | None,
    with_statistics: bool = False,
    **absent: None,
) -> tuple[jax.Array, None, jax.Array]:
    """Returns y, no sum and `StaticNorm.statistics`, whether asked for or not. x: (rows, features).

    absent: the arguments of the Mosaic GPU kernel that this one does not take.
    """
    del with_statistics, absent
    bias = scale if bias is None else bias  # an unused pointer must still be a valid one
    y, statistics = jax_triton.triton_call(
        *(x, scale, bias),
        kernel=norm_forward,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), norm.statistics(x.shape[0], x.dtype)),
        grid=(x.shape[0],),
        name=f"{norm.name}_triton",
        epsilon=norm.epsilon,
        has_bias=bias is not scale,
        **_constants(norm, x),
    )
    return y, None, statistics


def triton_backward(
    norm: StaticNorm,
    total: jax.Array,
    statistics: jax.Array,
    dy: jax.Array,
    *,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dtotal: jax.Array | None,
    words: None = None,
) -> NormGradients:
    """Returns the gradients of x, which is the total, of scale and bias. total, dy: (rows, features)."""
    if dtotal is not None or scale is None:
        raise NotImplementedError("the Triton kernels take a scale and no residual")
    rows, features = total.shape
    blocks = min(rows, _BLOCKS_PER_CORE * target_device().core_count)
    sums = jax.ShapeDtypeStruct((1 if bias is None else 2, blocks, features), jnp.float32)
    dx, partials = jax_triton.triton_call(
        *(total, statistics, dy, scale),
        kernel=norm_backward,
        out_type=(jax.ShapeDtypeStruct(total.shape, total.dtype), sums),
        grid=(blocks,),
        name=f"{norm.name}_backward_triton",
        blocks=blocks,
        has_bias=bias is not None,
        **_constants(norm, total),
    )
    dscale, *dbias = jnp.sum(partials, axis=1)
    dbias = None if bias is None else dbias[0].astype(bias.dtype)
    return NormGradients(dtotal=dx, dx=None, dscale=dscale.astype(scale.dtype), dbias=dbias)


def _constants(norm: StaticNorm, x: jax.Array) -> dict[str, int]:
    """Returns the static arguments that both kernels share."""
    rows, features = x.shape
    block, warps = row_block(features)
    passes = norm.mean_passes(x.dtype)
    return {"rows": rows, "features": features, "block": block, "num_warps": warps, "mean_passes": passes}
