"""Runs the block's sites on operations of `pallas_kernels`.

implementation: a name as the operations take it; None: the operation's own choice. Every function runs what is named or
raises `NotImplementedError` with the operation's reason.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from pallas_kernels import Norm
from xlafuse.models.config import BlockConfig


def normalise(
    config: BlockConfig, x: Array, scale: Array, bias: Array | None, implementation: str | None
) -> tuple[Array, Array]:
    """Returns the block's norm of `x` (B, T, hidden), and `x` for the residual stream.

    In the backward pass, the residual stream's gradient goes through the norm's kernel, which adds it to its own
    gradient; otherwise that sum would be a launch of its own. The forward sum belongs to the matrix product before the
    norm, whose epilogue reads only one more array. In the norm it would cost one more read and one more write.
    """
    norm = pallas_kernels.rms_norm
    if bias is not None:
        norm = functools.partial(pallas_kernels.layer_norm, bias=bias)
    if implementation == "triton":  # has no such second result
        return cast(Array, norm(x, scale, epsilon=config.epsilon, implementation="triton")), x
    return cast(Any, norm(x, scale, returns_total=True, epsilon=config.epsilon, implementation=implementation))


def norm_in_product(config: BlockConfig, x: Array, scale: Array) -> Norm | None:
    """Returns the norm of `x` (B, T, hidden) as an argument of the product after it; None: it is a launch of its own.

    The rows must be so few that their norm may be computed in the product's launch.
    """
    fuses = config.norm == "rms_norm" and x.shape[0] * x.shape[1] <= pallas_kernels.MOST_FUSED_NORM_ROWS
    return Norm(scale, epsilon=config.epsilon) if fuses and x.dtype == jnp.dtype(config.dtype) else None


def project_heads(
    config: BlockConfig,
    x: Array,
    layers: Sequence[nnx.Linear],
    positions: Array | None,
    implementation: str | None,
    *,
    norm: Norm | None = None,
) -> tuple[Array, Array, Array]:
    """Returns query, key and value of `x` (B, T, hidden), each (B, T, heads, head_dim), with RoPE on the first two."""
    dtype = jnp.dtype(config.dtype)
    rope = None
    if config.rope_theta is not None:
        positions = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
        rope = pallas_kernels.Rope(positions, config.rope_theta)
    return pallas_kernels.qkv_projection(
        x.astype(dtype),
        *(layer.kernel[...].astype(dtype) for layer in layers),
        bias=[cast(nnx.Param, layer.bias)[...] for layer in layers] if config.use_bias else None,
        head_size=config.head_dim,
        norm=norm,
        rope=rope,
        implementation=implementation,
    )


def attend(query: Array, key: Array, value: Array, *, is_causal: bool, implementation: str | None) -> Array:
    """Computes scaled dot-product attention; shapes as for `layers.attention`.

    "triton" is the softmax of scores that are written out, as there is no Triton kernel for all of it.
    """
    if implementation != "triton":
        return cast(
            Array, pallas_kernels.attention(query, key, value, is_causal=is_causal, implementation=implementation)
        )
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    # XLA computes rows with fewer scores than the kernel takes.
    weights = pallas_kernels.softmax(
        scores, scale=head_dim**-0.5, is_causal=is_causal, implementation=("triton", "xla")
    )
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(query.dtype), value).reshape(query.shape)


def expand_gated(
    config: BlockConfig,
    x: Array,
    gate: nnx.Linear,
    up: nnx.Linear,
    implementation: str | None,
    *,
    norm: Norm | None = None,
) -> Array:
    """Computes `silu(x @ gate) * (x @ up)`, without biases, from `x` (B, T, hidden) to (B, T, mlp)."""
    dtype = jnp.dtype(config.dtype)
    if config.use_bias:
        raise NotImplementedError(f"the kernel of gate and up has no biases, and {config.name} has")
    weights = (layer.kernel[...].astype(dtype) for layer in (gate, up))
    return pallas_kernels.gated_linear(x.astype(dtype), *weights, norm=norm, implementation=implementation)


def project(
    config: BlockConfig,
    x: Array,
    layer: nnx.Linear,
    implementation: str | None,
    *,
    activation: str | None = None,
    residual: Array | None = None,
) -> Array:
    """Computes a layer's `activation(x @ kernel + bias) + residual`, in the residual's dtype if there is one."""
    dtype = jnp.dtype(config.dtype)
    out_dtype = dtype if residual is None else jnp.promote_types(dtype, residual.dtype)
    return pallas_kernels.linear(
        x.astype(dtype),
        layer.kernel[...].astype(dtype),
        bias=None if layer.bias is None else layer.bias[...],
        activation=activation,
        residual=None if residual is None else residual.astype(out_dtype),
        out_dtype=out_dtype,
        implementation=implementation,
    )
