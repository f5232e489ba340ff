"""The linear layer as a Triton kernel through jax_triton: for comparison, and for GPUs that Mosaic does not serve.

A block computes a tile of the result, and applies bias, activation and residual to the accumulator. The module is
imported only when requested, since it imports Triton.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.ops._products.product import bias_gradient, product_gradients
from pallas_kernels.ops.bias_activation.reference import bias_activation_reference

_GROUP = 8
"""Rows of tiles that blocks near in time share."""


def _tiling(rows: int, dtype: jnp.dtype) -> tuple[tuple[int, int, int], int, int]:
    """Returns a block's rows, columns and depth of a step, its warps, and the steps of operands in flight.

    They are Triton's usual tiles for many rows, narrow ones for few, and small steps for float32.
    """
    if dtype.itemsize == 4:
        return (64, 64, 32), 4, 3
    if rows <= 64:
        return (16 if rows <= 16 else 64, 64, 128), 4, 4
    return (128, 128 if rows <= 1024 else 256, 64), 8, 3


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def activated(x, activation: tl.constexpr):
    """Applies an activation of `pallas_kernels.primitives.activations` in float32."""
    if activation == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif activation == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif activation == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif activation == "silu":
        y = x * tl.sigmoid(x)
    elif activation == "relu":
        y = tl.maximum(x, 0.0)
    elif activation == "relu_squared":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(activation == "", "this kernel has no such activation")
        y = x
    return y


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def linear_forward(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    product_ptr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    features: tl.constexpr,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    keeps_product: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    group: tl.constexpr,
):
    """Computes one tile of y per block. Blocks near in time share `group` rows of tiles, and columns of w in the L2."""
    tiles_m = tl.cdiv(rows, tile_m)
    tiles_n = tl.cdiv(outputs, tile_n)
    tile = tl.program_id(0)
    first = tile // (group * tiles_n) * group
    height = tl.minimum(tiles_m - first, group)
    row = (first + tile % (group * tiles_n) % height) * tile_m + tl.arange(0, tile_m)
    column = tile % (group * tiles_n) // height * tile_n + tl.arange(0, tile_n)
    is_row, is_column = row < rows, column < outputs
    depth = tl.arange(0, tile_k)
    x_offsets = row.to(tl.int64)[:, None] * features + depth[None, :]
    w_offsets = depth.to(tl.int64)[:, None] * outputs + column[None, :]
    sums = tl.zeros((tile_m, tile_n), tl.float32)
    for start in range(0, features, tile_k):
        is_inside = depth < features - start
        x = tl.load(x_ptr + x_offsets, mask=is_row[:, None] & is_inside[None, :], other=0.0)
        w = tl.load(w_ptr + w_offsets, mask=is_inside[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
        x_offsets += tile_k
        w_offsets += tile_k * outputs
    offsets = row.to(tl.int64)[:, None] * outputs + column[None, :]
    is_kept = is_row[:, None] & is_column[None, :]
    if keeps_product:
        tl.store(product_ptr + offsets, sums.to(product_ptr.dtype.element_ty), mask=is_kept)
    if has_bias:
        sums += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sums = activated(sums, activation)
    if has_residual:
        sums += tl.load(residual_ptr + offsets, mask=is_kept, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, sums.to(y_ptr.dtype.element_ty), mask=is_kept)


def launch(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: str | None,
    keeps_product: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns y and the product, which is valid only if it is kept. x: (rows, features); the rest as in `linear`."""
    (rows, features), outputs = x.shape, w.shape[1]
    (tile_m, tile_n, tile_k), warps, stages = _tiling(rows, x.dtype)
    # An unused pointer must still be a valid one.
    operands = (x if operand is None else operand for operand in (bias, residual))
    y, product = jax_triton.triton_call(
        x,
        w,
        *operands,
        kernel=linear_forward,
        out_type=(
            jax.ShapeDtypeStruct((rows, outputs), x.dtype),
            jax.ShapeDtypeStruct((rows, outputs) if keeps_product else (1, 1), x.dtype),
        ),
        grid=(-(-rows // tile_m) * -(-outputs // tile_n),),
        name="linear_triton",
        num_warps=warps,
        num_stages=stages,
        rows=rows,
        outputs=outputs,
        features=features,
        activation=activation or "",
        has_bias=bias is not None,
        has_residual=residual is not None,
        keeps_product=keeps_product,
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        group=_GROUP,
    )
    return y, product


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_triton(
    activation: str | None, x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array | None
) -> jax.Array:
    """Applies the layer to x (rows, features). Differentiable."""
    return launch(x, w, bias, residual, activation=activation)[0]


def _fwd(activation, x, w, bias, residual):
    keeps = activation is not None
    y, product = launch(x, w, bias, residual, activation=activation, keeps_product=keeps)
    return y, (x, w, bias, product if keeps else None, residual is not None)


def _bwd(activation, saved, dy):
    """Computes the gradients with XLA's products, which are the fastest."""
    x, w, bias, product, has_residual = saved
    dz, dbias = dy, bias_gradient(bias, dy)
    if activation is not None:
        finish = partial(bias_activation_reference, activation=activation)
        dz, dbias = jax.vjp(finish, product, bias)[1](dy)
    dx, (dw,) = product_gradients(x, [w], [dz])
    return dx, dw, dbias, dy if has_residual else None


linear_triton.defvjp(_fwd, _bwd)
