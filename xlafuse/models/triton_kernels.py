"""Runs the block's sites on Triton kernels through jax_triton, for comparison.

The kernels compute norms, products with bias, activation and residual, and the softmax of attention's scores. XLA
computes the products of scores and weights, RoPE and the gate's product. This module is imported only if a plan asks
for it.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from pallas_kernels.primitives.triton_calls import LONGEST_ROW, SHORTEST_ROW, TRITON_DTYPES
from xlafuse.models.config import BlockConfig


def normalise(config: BlockConfig, x: Array, scale: Array, bias: Array | None) -> Array:
    """Returns the block's norm of `x` (B, T, hidden)."""
    if bias is not None:
        y = pallas_kernels.layer_norm(x, scale, bias, epsilon=config.epsilon, implementation="triton")
    else:
        y = pallas_kernels.rms_norm(x, scale, epsilon=config.epsilon, implementation="triton")
    return cast(Array, y)


def project(
    config: BlockConfig, x: Array, layer: nnx.Linear, *, activation: str | None = None, residual: Array | None = None
) -> Array:
    """Computes a layer's `activation(x @ kernel + bias) + residual` on `x` (B, T, features)."""
    dtype = jnp.dtype(config.dtype)
    return pallas_kernels.linear(
        x.astype(dtype),
        layer.kernel[...].astype(dtype),
        bias=None if layer.bias is None else layer.bias[...],
        activation=activation,
        residual=residual,
        implementation="triton",
    )


def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Scaled dot-product attention that materializes the scores; shapes as for `layers.attention`."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    # XLA computes rows with fewer scores than the kernel takes.
    weights = pallas_kernels.softmax(
        scores, scale=head_dim**-0.5, is_causal=is_causal, implementation=("triton", "xla")
    )
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(query.dtype), value).reshape(query.shape)


def unsupported(site: str, config: BlockConfig) -> str | None:
    """Returns why the kernel of `site` cannot serve a block of `config`, or None if it can."""
    if config.dtype not in TRITON_DTYPES:
        return f"{config.name} is {config.dtype}, the Triton kernels take {', '.join(TRITON_DTYPES)}"
    if site.endswith("_norm") and not SHORTEST_ROW <= config.hidden_size <= LONGEST_ROW:
        return f"rows have {config.hidden_size} features, the Triton kernels take {SHORTEST_ROW} to {LONGEST_ROW}"
    return None
