"""The block's sites on Mosaic GPU kernels: which operation serves a site, and which blocks it cannot serve.

Every function runs its kernel or raises `NotImplementedError` with the operation's own reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, ShapeDtypeStruct
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import Norm
from pallas_kernels.ops._products.norm_inside import has_norm_inside
from pallas_kernels.ops.attention import api as attention
from pallas_kernels.ops.attention.arguments import problem_of
from pallas_kernels.ops.attention.config import preferred
from pallas_kernels.ops.bias_activation import api as bias_activation
from pallas_kernels.ops.gated_activation import api as gated_activation
from pallas_kernels.ops.gated_linear import config as gated_linear
from pallas_kernels.ops.layer_norm import api as layer_norm
from pallas_kernels.ops.layer_norm.mosaic_gpu_vjp import layer_norm_backward
from pallas_kernels.ops.linear import api as linear
from pallas_kernels.ops.qkv_projection import api as qkv_projection
from pallas_kernels.ops.qkv_projection.mosaic_gpu import HeadForm, can_norm_inside, chosen_config
from pallas_kernels.ops.rms_norm import api as rms_norm
from pallas_kernels.ops.rms_norm.mosaic_gpu_vjp import rms_norm_backward
from pallas_kernels.ops.rope import api as rope
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from xlafuse.models.config import BlockConfig


def normalise(config: BlockConfig, x: Array, scale: Array, bias: Array | None) -> tuple[Array, Array]:
    """The block's norm of `x` (B, T, hidden), and `x` for the residual stream.

    What comes back along the residual stream in the backward pass goes through the norm's kernel, which adds it to its
    own gradient: else that sum would be a launch of its own. The forward sum is left to the matrix product before it,
    whose epilogue adds for one array more to read; in the norm it would be one more to read and one more to write.
    """
    operands = varying_alike((x.reshape(-1, config.hidden_size), scale, bias))
    y, stream = _norm_and_stream(config.norm, config.epsilon, *operands)  # pyright: ignore
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


def project_heads(
    config: BlockConfig, x: Array, layers: Sequence[nnx.Linear], positions: Array | None
) -> tuple[Array, Array, Array]:
    """Query, key and value of `x` (B, T, hidden), each (B, T, heads, head_dim); the first two are rotated."""
    return _project_heads(config, x, None, _arrays_of(layers), _positions(config, x, positions))


def normalise_and_project_heads(
    config: BlockConfig, x: Array, scale: Array, layers: Sequence[nnx.Linear], positions: Array | None
) -> tuple[tuple[Array, Array, Array], Array]:
    """`project_heads` of the normed `x` in one launch, and `x` for the residual stream.

    Its gradient is that of `normalise` and `project_heads`.
    """

    def together(x, scale, arrays, positions):
        return _project_heads(config, x, Norm(scale, epsilon=config.epsilon), arrays, positions), x

    def apart(x, scale, arrays, positions):
        normed, stream = normalise(config, x, scale, None)
        return _project_heads(config, normed, None, arrays, positions), stream

    positions = _positions(config, x, positions)
    return _differentiated_as(apart, together)(*varying_alike((x, scale, _arrays_of(layers), positions)))


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


def _differentiated_as(apart: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
    """`together`, with the gradient of `apart`, which computes the same."""
    function = jax.custom_vjp(together)
    function.defvjp(partial(jax.vjp, apart), lambda pullback, cotangents: pullback(cotangents))
    return function


def rotate(config: BlockConfig, query: Array, key: Array, positions: Array | None) -> tuple[Array, Array]:
    """Rotary embedding of query and key (B, T, N, H) at `positions` (B, T); None counts from 0."""
    if positions is None:
        positions = jnp.arange(query.shape[1], dtype=jnp.int32)
    return pallas_kernels.rope(query, key, positions, theta=cast(float, config.rope_theta), implementation="mosaic")


def attend(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Scaled dot-product attention; shapes as for `layers.attention`."""
    return cast(Array, pallas_kernels.attention(query, key, value, is_causal=is_causal, implementation="mosaic"))


def attention_order(config: BlockConfig, shape: tuple[int, int]) -> Sequence[str]:
    """Which implementations of attention were measured to be the fastest at `shape` (batch, length), in that order."""

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
    """`silu(gate) * up`, all (B, T, mlp)."""
    return pallas_kernels.gated_activation(gate, up, activation="silu", implementation="mosaic")


def gelu(up: Array, bias: Array | None) -> Array:
    """`gelu(up + bias)` in its tanh form; `up` is (B, T, mlp), `bias` (mlp,)."""
    return pallas_kernels.bias_activation(up, bias, activation="gelu_tanh", implementation="mosaic")


def expand(config: BlockConfig, x: Array, up: nnx.Linear, gate: nnx.Linear | None) -> Array:
    """The MLP's first product and its activation: of `x` (B, T, hidden) to (B, T, mlp).

    With a gate `silu(x @ gate) * (x @ up)`, which has no biases, else `gelu(x @ up + bias)` in its tanh form.
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
    """`expand` of the normed `x` in one launch, and `x` for the residual stream.

    Its gradient is that of `normalise` and `expand`.
    """

    def together(x, scale, gate, up):
        return _expand_gated(config, x, Norm(scale, epsilon=config.epsilon), gate, up), x

    def apart(x, scale, gate, up):
        normed, stream = normalise(config, x, scale, None)
        return _expand_gated(config, normed, None, gate, up), stream

    return _differentiated_as(apart, together)(*varying_alike((x, scale, gate.kernel[...], up.kernel[...])))


def _expand_gated(config: BlockConfig, x: Array, norm: Norm | None, gate: Array, up: Array) -> Array:
    dtype = jnp.dtype(config.dtype)
    return pallas_kernels.gated_linear(
        x.astype(dtype), gate.astype(dtype), up.astype(dtype), norm=norm, implementation="mosaic"
    )


def project(config: BlockConfig, x: Array, layer: nnx.Linear, *, residual: Array | None) -> Array:
    """`x @ kernel + bias + residual` of a layer, (B, T, hidden), in the residual's dtype if there is one."""
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


def takes_norm(site: str, config: BlockConfig, rows: int) -> bool:
    """Whether the product at `site` does the norm before it in the same launch, of so many rows."""
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
        return can_norm_inside(chosen_config(x, weights, form), norm, x, form)
    if site != "up_projection" or config.mlp != "swiglu":
        return False
    known = gated_linear.problem(x, array(config.hidden_size, config.mlp_size), "silu")
    return has_norm_inside(gated_linear.tuned_config(known, rows, is_normed=True), norm, x)


def unsupported(site: str, config: BlockConfig) -> str | None:
    """Why the kernel of `site` cannot serve a block of `config` at every batch and length, or None where it can."""
    # The interpreter takes what a Hopper GPU takes, and asks for no device.
    with plgpu.force_gpu_interpret_mode():
        return refusal(site, config)


def refusal(site: str, config: BlockConfig) -> str | None:
    """The same for the device of the current trace."""

    def token(*shape: int) -> Array:
        return cast(Array, ShapeDtypeStruct((1, 1, *shape), jnp.dtype(config.dtype)))

    def weight(size: int) -> Array:
        return cast(Array, ShapeDtypeStruct((size,), jnp.dtype(config.param_dtype)))

    def matrix(inputs: int, outputs: int) -> Array:
        return cast(Array, ShapeDtypeStruct((inputs, outputs), jnp.dtype(config.dtype)))

    if site in ("attention_norm", "mlp_norm"):
        x, scale = token(config.hidden_size), weight(config.hidden_size)
        if config.norm == "layer_norm":
            return layer_norm.mosaic_unsupported(x, scale, scale)
        return rms_norm.mosaic_unsupported(x, scale)
    if site == "rope" and config.rope_theta is None:
        return f"{config.name} has no rotary embedding"
    if site == "rope":
        query, key = token(config.num_heads, config.head_dim), token(config.num_kv_heads, config.head_dim)
        return rope.mosaic_unsupported(query, key, interleaved=False)
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
        query, key = token(config.num_heads, config.head_dim), token(config.num_kv_heads, config.head_dim)
        return attention.mosaic_unsupported(query, key)
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
