"""The block's sites on Mosaic GPU kernels: which operation serves a site, and which blocks it cannot serve.

Every function runs its kernel or raises `NotImplementedError` with the operation's own reason.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.ops.bias_activation import api as bias_activation
from pallas_kernels.ops.gated_activation import api as gated_activation
from pallas_kernels.ops.layer_norm import api as layer_norm
from pallas_kernels.ops.layer_norm.mosaic_gpu_vjp import layer_norm_backward
from pallas_kernels.ops.rms_norm import api as rms_norm
from pallas_kernels.ops.rms_norm.mosaic_gpu_vjp import rms_norm_backward
from pallas_kernels.ops.rope import api as rope
from pallas_kernels.primitives.platform import varying_like
from xlafuse.models.config import BlockConfig


def normalise(config: BlockConfig, x: Array, scale: Array, bias: Array | None) -> tuple[Array, Array]:
    """The block's norm of `x` (B, T, hidden), and `x` for the residual stream.

    What comes back along the residual stream in the backward pass goes through the norm's kernel, which adds it to its
    own gradient: else that sum would be a launch of its own. The forward sum is left to the matrix product before it,
    whose epilogue adds for one array more to read; in the norm it would be one more to read and one more to write.
    """
    # All marked as varying alike, so that shard_map sums the weights' gradients over the devices.
    weights = (None if weight is None else varying_like(weight, x) for weight in (scale, bias))
    rows = x.reshape(-1, config.hidden_size)
    y, stream = _norm_and_stream(config.norm, config.epsilon, rows, *weights)  # pyright: ignore
    return y.reshape(x.shape), stream.reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm_and_stream(norm: str, epsilon: float, x: Array, scale: Array, bias: Array | None) -> tuple[Array, Array]:
    if norm == "layer_norm":
        y = pallas_kernels.layer_norm(x, scale, bias, epsilon=epsilon, implementation="mosaic")
    else:
        y = pallas_kernels.rms_norm(x, scale, epsilon=epsilon, implementation="mosaic")
    return cast(Array, y), x


def _norm_and_stream_fwd(norm, epsilon, x, scale, bias):
    return _norm_and_stream(norm, epsilon, x, scale, bias), (x, scale, bias)  # pyright: ignore


def _norm_and_stream_bwd(norm, epsilon, saved, cotangents):
    x, scale, bias = saved
    dy, dstream = cotangents
    if norm == "layer_norm":
        gradients = layer_norm_backward(x, scale, bias, dy, dstream, epsilon=epsilon)
        return gradients.dtotal, gradients.dscale, gradients.dbias
    return *rms_norm_backward(x, scale, dy, dstream, epsilon=epsilon), None


_norm_and_stream.defvjp(_norm_and_stream_fwd, _norm_and_stream_bwd)


def rotate(config: BlockConfig, query: Array, key: Array, positions: Array | None) -> tuple[Array, Array]:
    """Rotary embedding of query and key (B, T, N, H) at `positions` (B, T); None counts from 0."""
    if positions is None:
        positions = jnp.arange(query.shape[1], dtype=jnp.int32)
    return pallas_kernels.rope(query, key, positions, theta=cast(float, config.rope_theta), implementation="mosaic")


def gate_activation(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`, all (B, T, mlp)."""
    return pallas_kernels.gated_activation(gate, up, activation="silu", implementation="mosaic")


def gelu(up: Array, bias: Array | None) -> Array:
    """`gelu(up + bias)` in its tanh form; `up` is (B, T, mlp), `bias` (mlp,)."""
    return pallas_kernels.bias_activation(up, bias, activation="gelu_tanh", implementation="mosaic")


def unsupported(site: str, config: BlockConfig) -> str | None:
    """Why the kernel of `site` cannot serve a block of `config` at every batch and length, or None where it can."""
    if site == "rope" and config.rope_theta is None:
        return f"{config.name} has no rotary embedding"
    # The interpreter takes what a Hopper GPU takes, and asks for no device.
    with plgpu.force_gpu_interpret_mode():
        return _refusal(site, config)


def _refusal(site: str, config: BlockConfig) -> str | None:
    def token(*shape: int) -> Array:
        return cast(Array, ShapeDtypeStruct((1, 1, *shape), jnp.dtype(config.dtype)))

    def weight(size: int) -> Array:
        return cast(Array, ShapeDtypeStruct((size,), jnp.dtype(config.param_dtype)))

    if site in ("attention_norm", "mlp_norm"):
        x, scale = token(config.hidden_size), weight(config.hidden_size)
        if config.norm == "layer_norm":
            return layer_norm.mosaic_unsupported(x, scale, scale)
        return rms_norm.mosaic_unsupported(x, scale)
    if site == "rope":
        query, key = token(config.num_heads, config.head_dim), token(config.num_kv_heads, config.head_dim)
        return rope.mosaic_unsupported(query, key, interleaved=False)
    hidden = token(config.mlp_size)
    if config.mlp == "swiglu":
        return gated_activation.mosaic_unsupported(hidden, hidden)
    return bias_activation.mosaic_unsupported(hidden, weight(config.mlp_size) if config.use_bias else None)
