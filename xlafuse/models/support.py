"""Tells which blocks the kernel of a site takes, by asking the operations without running them."""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import Norm
from pallas_kernels.ops._norms import apply as norms
from pallas_kernels.ops._products.norm import can_fuse_norm
from pallas_kernels.ops.attention import api as attention
from pallas_kernels.ops.bias_activation import api as bias_activation
from pallas_kernels.ops.gated_activation import api as gated_activation
from pallas_kernels.ops.gated_linear import config as gated_linear
from pallas_kernels.ops.linear import api as linear
from pallas_kernels.ops.qkv_projection import api as qkv_projection
from pallas_kernels.ops.qkv_projection.mosaic_gpu import HeadForm, chosen_config
from pallas_kernels.ops.rope import api as rope
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported
from xlafuse.models.config import BlockConfig


def takes_norm(site: str, config: BlockConfig, rows: int) -> bool:
    """Tells whether the product at `site` computes the norm in the same launch for this number of rows."""
    if config.norm != "rms_norm":
        return False
    dtype = jnp.dtype(config.dtype)

    def array(*sizes: int, dtype=dtype) -> Array:
        return cast(Array, ShapeDtypeStruct(sizes, dtype))

    x, norm = array(rows, config.hidden_size), Norm(array(config.hidden_size, dtype=jnp.dtype(config.param_dtype)))
    if site == "qkv_projection":
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        weights = [array(config.hidden_size, count * config.head_dim) for count in counts]
        form = HeadForm(size=config.head_dim, theta=config.rope_theta)
        return can_fuse_norm(chosen_config(x, weights, form), norm, x)
    if site != "up_projection" or config.mlp != "swiglu":
        return False
    known = gated_linear.problem(x, array(config.hidden_size, config.mlp_size), "silu")
    return can_fuse_norm(gated_linear.tuned_config(known, rows, is_normed=True), norm, x)


def unsupported(site: str, config: BlockConfig) -> str | None:
    """Returns why the kernel of `site` cannot serve a block of `config` at every batch and length; None if it can."""
    # The interpreter accepts what a Hopper GPU accepts and needs no device.
    with plgpu.force_gpu_interpret_mode():
        return refusal(site, config)


def refusal(site: str, config: BlockConfig) -> str | None:
    """Returns why the kernel of `site` cannot serve a block of `config` on the device of the current trace, or None."""

    def token(*shape: int) -> Array:
        return cast(Array, ShapeDtypeStruct((1, 1, *shape), jnp.dtype(config.dtype)))

    def weight(size: int) -> Array:
        return cast(Array, ShapeDtypeStruct((size,), jnp.dtype(config.param_dtype)))

    def matrix(inputs: int, outputs: int) -> Array:
        return cast(Array, ShapeDtypeStruct((inputs, outputs), jnp.dtype(config.dtype)))

    if site in ("attention_norm", "mlp_norm"):
        x, scale = token(config.hidden_size), weight(config.hidden_size)
        return norms.mosaic_unsupported(x, scale)
    if site == "rope" and config.rope_theta is None:
        return f"{config.name} has no rotary embedding"
    if site == "rope":
        return rope.mosaic_unsupported(token(config.num_heads, config.head_dim))
    if site == "qkv_projection":
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        weights = tuple(matrix(config.hidden_size, size) for size in sizes)
        biases = tuple(weight(size) for size in sizes) if config.use_bias else None
        positions = cast(Array, ShapeDtypeStruct((1, 1), jnp.int32))
        rotation = None if config.rope_theta is None else pallas_kernels.Rope(positions, config.rope_theta)
        return qkv_projection.mosaic_unsupported(
            token(config.hidden_size), weights, biases, config.head_dim, None, rotation, (None, None)
        )
    if site == "attention":
        return attention.mosaic_unsupported(token(config.num_heads, config.head_dim))
    if site == "up_projection":
        x, w = token(config.hidden_size), matrix(config.hidden_size, config.mlp_size)
        if config.mlp == "gelu":
            return linear.mosaic_unsupported(x, w, weight(config.mlp_size), x.dtype)
        if config.use_bias:
            return f"the kernel of gate and up has no biases, and {config.name} has"
        return operands_unsupported(x, w, w) or mosaic_gpu_unsupported()
    if site in ("output_projection", "down_projection"):
        size = config.mlp_size if site == "down_projection" else config.num_heads * config.head_dim
        return linear.mosaic_unsupported(token(size), matrix(size, config.hidden_size), None, jnp.dtype(config.dtype))
    hidden = token(config.mlp_size)
    if config.mlp == "swiglu":
        return gated_activation.mosaic_unsupported(hidden, hidden)
    return bias_activation.mosaic_unsupported(hidden, weight(config.mlp_size) if config.use_bias else None)
