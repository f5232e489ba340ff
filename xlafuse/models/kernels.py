"""Runs the block's sites on Mosaic GPU kernels; `support.py` tells which blocks each site's kernel takes.

Every function runs its kernel or raises `NotImplementedError` with the operation's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import jax.numpy as jnp
from flax import nnx
from jax import Array, ShapeDtypeStruct

import pallas_kernels
from pallas_kernels import Norm
from pallas_kernels.ops.attention.forward.config import preferred
from pallas_kernels.ops.attention.problem import problem_of
from pallas_kernels.primitives.gradients import differentiated_as
from pallas_kernels.primitives.platform import varying_alike
from xlafuse.models.config import BlockConfig


def normalise(config: BlockConfig, x: Array, scale: Array, bias: Array | None) -> tuple[Array, Array]:
    """Returns the block's norm of `x` (B, T, hidden), and `x` for the residual stream.

    In the backward pass, the residual stream's gradient goes through the norm's kernel, which adds it to its own
    gradient; otherwise that sum would be a launch of its own. The forward sum belongs to the matrix product before the
    norm, whose epilogue reads only one more array. In the norm it would cost one more read and one more write.
    """
    norm = partial(pallas_kernels.layer_norm, bias=bias) if config.norm == "layer_norm" else pallas_kernels.rms_norm
    return norm(x, scale, returns_total=True, epsilon=config.epsilon, implementation="mosaic")  # pyright: ignore


def project_heads(
    config: BlockConfig, x: Array, layers: Sequence[nnx.Linear], positions: Array | None
) -> tuple[Array, Array, Array]:
    """Returns query, key and value of `x` (B, T, hidden), each (B, T, heads, head_dim), with RoPE on the first two."""
    return _project_heads(config, x, None, _arrays_of(layers), _positions(config, x, positions))


def normalise_and_project_heads(
    config: BlockConfig, x: Array, scale: Array, layers: Sequence[nnx.Linear], positions: Array | None
) -> tuple[tuple[Array, Array, Array], Array]:
    """Runs norm and `project_heads` in one launch; also returns `x` for the residual stream.

    Its gradient is that of `normalise` and `project_heads`.
    """

    def together(x, scale, arrays, positions):
        return _project_heads(config, x, Norm(scale, epsilon=config.epsilon), arrays, positions), x

    def apart(x, scale, arrays, positions):
        normed, stream = normalise(config, x, scale, None)
        return _project_heads(config, normed, None, arrays, positions), stream

    positions = _positions(config, x, positions)
    return differentiated_as(apart, together)(*varying_alike((x, scale, _arrays_of(layers), positions)))


def _arrays_of(layers: Sequence[nnx.Linear]) -> list[tuple[Array, Array | None]]:
    return [(layer.kernel[...], None if layer.bias is None else layer.bias[...]) for layer in layers]


def _positions(config: BlockConfig, x: Array, positions: Array | None) -> Array | None:
    if config.rope_theta is None:
        return None
    return jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions


def _project_heads(
    config: BlockConfig,
    x: Array,
    norm: Norm | None,
    arrays: Sequence[tuple[Array, Array | None]],
    positions: Array | None,
) -> tuple[Array, Array, Array]:
    dtype = jnp.dtype(config.dtype)
    return pallas_kernels.qkv_projection(
        x.astype(dtype),
        *(kernel.astype(dtype) for kernel, _ in arrays),
        bias=[cast(Array, bias) for _, bias in arrays] if config.use_bias else None,
        head_size=config.head_dim,
        norm=norm,
        rope=None if positions is None else pallas_kernels.Rope(positions, cast(float, config.rope_theta)),
        implementation="mosaic",
    )


def rotate(config: BlockConfig, query: Array, key: Array, positions: Array | None) -> tuple[Array, Array]:
    """Applies the rotary embedding to query and key (B, T, N, H) at `positions` (B, T); None counts from 0."""
    if positions is None:
        positions = jnp.arange(query.shape[1], dtype=jnp.int32)
    return pallas_kernels.rope(query, key, positions, theta=cast(float, config.rope_theta), implementation="mosaic")


def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Computes scaled dot-product attention; shapes as for `layers.attention`."""
    return cast(Array, pallas_kernels.attention(query, key, value, is_causal=is_causal, implementation="mosaic"))


def attend_cached(
    query: Array, key: Array, value: Array, caches: tuple[Array, Array], lengths: Array
) -> tuple[Array, Array, Array]:
    """Attends one token a sequence, (B, 1, N, H), to caches (B, S, K, H) of `lengths` (B,) tokens, this one included.

    Returns also the caches, into which key and value (B, 1, K, H) of the token are written.
    """
    return pallas_kernels.decode_attention(
        query, *caches, lengths, new_key=key, new_value=value, implementation=("mosaic", "xla")
    )  # pyright: ignore


def head_loss(hidden: Array, head: Array, labels: Array) -> Array:
    """Returns the mean cross-entropy of `labels` (B, T) under `hidden @ head`; stores no logits if that is faster."""
    return pallas_kernels.linear_cross_entropy(hidden, head.astype(hidden.dtype), labels, reduction="mean")


def attention_order(config: BlockConfig, shape: tuple[int, int]) -> Sequence[str]:
    """Returns the implementations of attention, fastest first, as measured at `shape` (batch, length)."""

    def heads(count: int) -> Array:
        return cast(Array, ShapeDtypeStruct((*shape, count, config.head_dim), jnp.dtype(config.dtype)))

    problem, _ = problem_of(
        heads(config.num_heads),
        heads(config.num_kv_heads),
        is_causal=config.is_causal,
        **dict.fromkeys(("bias", "mask", "scale", "window", "segment_ids", "softcap", "dropout_key")),
        dropout_rate=0.0,
    )
    return preferred(problem)


def gate_activation(gate: Array, up: Array) -> Array:
    """Computes `silu(gate) * up`; all are (B, T, mlp)."""
    return pallas_kernels.gated_activation(gate, up, activation="silu", implementation="mosaic")


def gelu(up: Array, bias: Array | None) -> Array:
    """Computes `gelu(up + bias)` in its tanh form; `up` is (B, T, mlp), `bias` (mlp,)."""
    return pallas_kernels.bias_activation(up, bias, activation="gelu_tanh", implementation="mosaic")


def expand(config: BlockConfig, x: Array, up: nnx.Linear, gate: nnx.Linear | None) -> Array:
    """Computes the MLP's first product and its activation, from `x` (B, T, hidden) to (B, T, mlp).

    With a gate it is `silu(x @ gate) * (x @ up)`, which has no biases, else `gelu(x @ up + bias)` in its tanh form.
    """
    if gate is not None:
        return _expand_gated(config, x, None, gate.kernel[...], up.kernel[...])
    dtype = jnp.dtype(config.dtype)
    bias = None if up.bias is None else up.bias[...]
    return pallas_kernels.linear(
        x.astype(dtype), up.kernel[...].astype(dtype), bias=bias, activation="gelu_tanh", implementation="mosaic"
    )


def normalise_and_expand(
    config: BlockConfig, x: Array, scale: Array, up: nnx.Linear, gate: nnx.Linear
) -> tuple[Array, Array]:
    """Runs norm and `expand` in one launch; also returns `x` for the residual stream.

    Its gradient is that of `normalise` and `expand`.
    """

    def together(x, scale, gate, up):
        return _expand_gated(config, x, Norm(scale, epsilon=config.epsilon), gate, up), x

    def apart(x, scale, gate, up):
        normed, stream = normalise(config, x, scale, None)
        return _expand_gated(config, normed, None, gate, up), stream

    return differentiated_as(apart, together)(*varying_alike((x, scale, gate.kernel[...], up.kernel[...])))


def _expand_gated(config: BlockConfig, x: Array, norm: Norm | None, gate: Array, up: Array) -> Array:
    dtype = jnp.dtype(config.dtype)
    return pallas_kernels.gated_linear(
        x.astype(dtype), gate.astype(dtype), up.astype(dtype), norm=norm, implementation="mosaic"
    )


def project(config: BlockConfig, x: Array, layer: nnx.Linear, *, residual: Array | None) -> Array:
    """Computes a layer's `x @ kernel + bias + residual`, (B, T, hidden), in the residual's dtype if there is one."""
    dtype = jnp.dtype(config.dtype)
    bias = None if layer.bias is None else layer.bias[...]
    out_dtype = dtype if residual is None else jnp.promote_types(dtype, residual.dtype)
    return pallas_kernels.linear(
        x.astype(dtype),
        layer.kernel[...].astype(dtype),
        bias=bias,
        residual=None if residual is None else residual.astype(out_dtype),
        out_dtype=out_dtype,
        implementation="mosaic",
    )
