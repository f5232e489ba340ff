"""Pre-norm transformer block; each site can use its own implementation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from pallas_kernels.ops.norms.reference import layer_norm_reference, rms_norm_reference
from xlafuse.errors import InapplicablePlanError
from xlafuse.models import layers
from xlafuse.models.config import BlockConfig
from xlafuse.models.experts import Experts
from xlafuse.models.plan import FusionPlan, named
from xlafuse.models.shardings import Layout

_FUSES = ("mosaic", "best")
"""Implementations of a product that compute what is around it, too."""


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the hidden axis, with its weights."""

    def __init__(self, config: BlockConfig):
        dtype = jnp.dtype(config.param_dtype)
        self.config = config
        self.scale = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        if config.norm == "layer_norm":
            self.bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))

    def __call__(self, x: Array, implementation: str) -> tuple[Array, Array]:
        """Normalises `x` (B, T, hidden); returns the result and the `x` for the residual stream."""
        bias = self.bias[...] if self.config.norm == "layer_norm" else None
        return normalised(self.config, x, self.scale[...], bias, implementation)

    def in_product(self, x: Array) -> pallas_kernels.Norm | None:
        """Returns the norm of `x` as an argument of the product after it; None: it is a launch of its own.

        The rows must be so few that their norm may be computed in the product's launch.
        """
        config = self.config
        fuses = config.norm == "rms_norm" and x.shape[0] * x.shape[1] <= pallas_kernels.MOST_FUSED_NORM_ROWS
        fuses = fuses and x.dtype == jnp.dtype(config.dtype)
        return pallas_kernels.Norm(self.scale[...], epsilon=config.epsilon) if fuses else None


def normalised(
    config: BlockConfig, x: Array, scale: Array, bias: Array | None, implementation: str
) -> tuple[Array, Array]:
    """Normalises `x` (B, T, hidden) by a plan's `implementation`; also returns `x` for the residual stream.

    In the backward pass, the residual stream's gradient goes through the norm's kernel, which adds it to its own
    gradient; otherwise that sum would be a launch of its own. The forward sum belongs to the matrix product before the
    norm, whose epilogue reads only one more array. In the norm it would cost one more read and one more write.
    """
    if implementation == "xla":
        norm = rms_norm_reference if bias is None else functools.partial(layer_norm_reference, bias=bias)
        return cast(Array, norm(x, scale, epsilon=config.epsilon)), x
    norm = pallas_kernels.rms_norm if bias is None else functools.partial(pallas_kernels.layer_norm, bias=bias)
    if implementation == "triton":  # has no such second result
        return cast(Array, norm(x, scale, epsilon=config.epsilon, implementation="triton")), x
    return cast(Any, norm(x, scale, returns_total=True, epsilon=config.epsilon, implementation=named(implementation)))


class KeyValueCache(NamedTuple):
    """Keys and values so far, each (B, S, kv heads, head_dim) in the block's dtype; S is a multiple of 8."""

    key: Array
    value: Array

    def appended(self, key: Array, value: Array, filled: Array) -> KeyValueCache:
        """Returns the cache with `key` and `value`, (B, T, kv heads, head_dim), written at position `filled`."""
        caches = zip(self, (key, value), strict=True)
        return KeyValueCache(
            *(jax.lax.dynamic_update_slice_in_dim(old, new, filled, axis=1) for old, new in caches),
        )


class TransformerBlock(nnx.Module):
    """One layer of Llama 3, GPT-2 or Mixtral, as `config` says: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Each site has a named scope under `block`, so that whatever the compiler makes can be traced back to it. The weights
    do not depend on the plan.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        def linear(in_features: int, out_features: int) -> nnx.Linear:
            return nnx.Linear(
                in_features,
                out_features,
                use_bias=config.use_bias,
                dtype=jnp.dtype(config.dtype),
                param_dtype=jnp.dtype(config.param_dtype),
                rngs=rngs,
            )

        kv_size = config.num_kv_heads * config.head_dim
        self.config = config
        self.attention_norm = Norm(config)
        self.query = linear(config.hidden_size, config.num_heads * config.head_dim)
        self.key = linear(config.hidden_size, kv_size)
        self.value = linear(config.hidden_size, kv_size)
        self.output = linear(config.num_heads * config.head_dim, config.hidden_size)
        self.mlp_norm = Norm(config)
        if config.num_experts:
            self.experts = Experts(config, rngs=rngs)
            return
        if config.mlp == "swiglu":
            self.gate = linear(config.hidden_size, config.mlp_size)
        self.up = linear(config.hidden_size, config.mlp_size)
        self.down = linear(config.mlp_size, config.hidden_size)

    def __call__(
        self,
        x: Array,
        positions: Array | None = None,
        *,
        plan: FusionPlan | None = None,
        layout: Layout | None = None,
    ) -> Array:
        """Applies the block to `x` (B, T, hidden).

        `positions` (B, T), int32, are the tokens' positions for RoPE; None counts from 0. `plan` names the
        implementation of each site; None leaves all to XLA. With a `layout` of several devices, activations have its
        shardings. Raises `InapplicablePlanError` if the plan asks for a kernel that this block cannot use.
        """
        y, _ = self._apply(x, positions, plan, layout=layout)
        return y if layout is None else layout.placed(y)

    def with_cache(
        self, x: Array, positions: Array | None, cache: KeyValueCache, filled: Array, *, plan: FusionPlan | None = None
    ) -> tuple[Array, KeyValueCache]:
        """Applies the block with a cache of `filled` (int32 scalar) tokens; also returns the cache with `x` appended.

        A single token per sequence attends to the whole cache. Several tokens are the prompt: they attend to each
        other, and `filled` is 0.
        """
        y, extended = self._apply(x, positions, plan, cache=(cache, filled))
        return y, cast(KeyValueCache, extended)

    def _apply(
        self,
        x: Array,
        positions: Array | None,
        plan: FusionPlan | None,
        *,
        cache: tuple[KeyValueCache, Array] | None = None,
        layout: Layout | None = None,
    ) -> tuple[Array, KeyValueCache | None]:
        if x.ndim != 3 or x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"x must have the shape (batch, length, {self.config.hidden_size}), got {x.shape}.")
        plan = plan or FusionPlan()
        try:
            with jax.named_scope("block"):
                x, extended = self._add_attention(x, positions, plan, cache, layout)
                return self._add_mlp(x, plan, layout), extended
        except NotImplementedError as error:
            raise InapplicablePlanError(str(error)) from error

    def _add_attention(
        self,
        x: Array,
        positions: Array | None,
        plan: FusionPlan,
        cache: tuple[KeyValueCache, Array] | None,
        layout: Layout | None,
    ) -> tuple[Array, KeyValueCache | None]:
        normed, x, norm = self._normed(x, "attention_norm", plan.attention_norm, plan.qkv_projection)
        query, key, value = self._heads(normed, positions, plan.qkv_projection, norm)
        if layout is not None:
            query, key, value = map(layout.placed_wide, (query, key, value))
        extended = None
        with jax.named_scope("attention"):
            if cache is not None and x.shape[1] == 1:
                mixed, extended = self._mix_cached(query, key, value, *cache, plan.attention)
            else:
                mixed = self._mix(query, key, value, plan.attention)
                if cache is not None:
                    extended = cache[0].appended(key, value, cache[1])
            mixed = mixed.reshape(*x.shape[:2], -1)
        return self._add_projected(x, mixed, plan.output_projection, self.output, ("output", "attention")), extended

    def _add_mlp(self, x: Array, plan: FusionPlan, layout: Layout | None) -> Array:
        config, how = self.config, plan.up_projection
        product = how if config.mlp == "swiglu" and not config.num_experts else None
        normed, x, norm = self._normed(x, "mlp_norm", plan.mlp_norm, product)
        if config.num_experts:
            update = self.experts(normed, plan)
            with jax.named_scope("mlp_residual"):
                return x + update
        hidden = self._expand_gated(normed, how, norm) if config.mlp == "swiglu" else self._expand_plain(normed, how)
        hidden = hidden if layout is None else layout.placed_wide(hidden)
        return self._add_projected(x, hidden, plan.down_projection, self.down, ("down", "mlp"))

    def _normed(
        self, x: Array, site: str, how: str, product: str | None
    ) -> tuple[Array, Array, pallas_kernels.Norm | None]:
        """Returns the input of the product after a norm, the residual stream, and the norm if the product computes it.

        product: the implementation of that product; None: it is none that computes norms.
        """
        norm = getattr(self, site)
        if how == product in _FUSES and (fused := norm.in_product(x)) is not None:
            return x, x, fused
        with jax.named_scope(site):
            return *norm(x, how), None

    def _heads(
        self, x: Array, positions: Array | None, how: str, norm: pallas_kernels.Norm | None
    ) -> tuple[Array, Array, Array]:
        """Returns query, key and value of `x` (B, T, hidden), each (B, T, heads, head_dim), with RoPE if there is."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        projections = (self.query, self.key, self.value)
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        if positions is None and config.rope_theta is not None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        with jax.named_scope("qkv_projection"):
            if how in _FUSES:
                return pallas_kernels.qkv_projection(
                    x.astype(dtype),
                    *(layer.kernel[...].astype(dtype) for layer in projections),
                    bias=[cast(nnx.Param, layer.bias)[...] for layer in projections] if config.use_bias else None,
                    head_size=config.head_dim,
                    norm=norm,
                    rope=None if config.rope_theta is None else pallas_kernels.Rope(positions, config.rope_theta),
                    implementation=named(how),
                )
            query, key, value = (
                (layer(x) if how == "xla" else self._project(x, layer, how)).reshape(*x.shape[:2], heads, -1)
                for layer, heads in zip(projections, counts, strict=True)
            )
        if config.rope_theta is not None:
            with jax.named_scope("rope"):
                wide = jnp.promote_types(query.dtype, jnp.float32)
                angles = layers.rotation(cast(Array, positions), config.head_dim, theta=config.rope_theta, dtype=wide)
                query, key = layers.rotate(query, *angles), layers.rotate(key, *angles)
        return query, key, value

    def _mix(self, query: Array, key: Array, value: Array, how: str) -> Array:
        """Computes attention; by Triton, the softmax of scores that are written out: no kernel computes all of it."""
        is_causal = self.config.is_causal
        if how == "cudnn":
            return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn")
        if how in _FUSES:
            made = pallas_kernels.attention(query, key, value, is_causal=is_causal, implementation=named(how))
            return cast(Array, made)
        softmax = layers.softmax
        if how == "triton":  # XLA computes rows with fewer scores than the kernel takes
            softmax = functools.partial(pallas_kernels.softmax, implementation=("triton", "xla"))
        return layers.attention(query, key, value, is_causal=is_causal, softmax=softmax)

    def _mix_cached(
        self, query: Array, key: Array, value: Array, cache: KeyValueCache, filled: Array, how: str
    ) -> tuple[Array, KeyValueCache]:
        lengths = jnp.broadcast_to(filled + 1, query.shape[:1])
        if how in _FUSES:
            made: Any = pallas_kernels.decode_attention(query, *cache, lengths, new_key=key, new_value=value)
            return made[0], KeyValueCache(*made[1:])
        cache = cache.appended(key, value, filled)
        implementation = "cudnn" if how == "cudnn" else "xla"
        mixed = jax.nn.dot_product_attention(
            query, *cache, key_value_seq_lengths=lengths, implementation=implementation
        )
        return mixed, cache

    def _add_projected(self, stream: Array, x: Array, how: str, layer: nnx.Linear, names: tuple[str, str]) -> Array:
        """Returns `stream + layer(x)`; `names` are the scopes of the projection and of the addition."""
        with jax.named_scope(f"{names[0]}_projection"):
            if how != "xla":
                return self._project(x, layer, how, residual=stream)
            update = layer(x)
        with jax.named_scope(f"{names[1]}_residual"):
            return stream + update

    def _expand_gated(self, x: Array, how: str, norm: pallas_kernels.Norm | None) -> Array:
        """Returns `silu(x @ gate) * (x @ up)`, (B, T, mlp)."""
        dtype, pair = jnp.dtype(self.config.dtype), {"gate": self.gate, "up": self.up}
        with jax.named_scope("gate_up_projection"):
            if how in _FUSES:
                weights = (layer.kernel[...].astype(dtype) for layer in pair.values())
                biases = {f"bias_{name}": layer.bias[...] for name, layer in pair.items() if layer.bias is not None}
                return pallas_kernels.gated_linear(
                    x.astype(dtype), *weights, **biases, norm=norm, implementation=named(how)
                )
            if how == "triton":
                gate, up = self._project(x, self.gate, how, activation="silu"), self._project(x, self.up, how)
            else:
                gate, up = self.gate(x), self.up(x)
        with jax.named_scope("activation"):
            return (gate if how == "triton" else jax.nn.silu(gate)) * up

    def _expand_plain(self, x: Array, how: str) -> Array:
        with jax.named_scope("up_projection"):
            if how != "xla":
                return self._project(x, self.up, how, activation="gelu_tanh")
            up = self.up(x)
        with jax.named_scope("activation"):
            return jax.nn.gelu(up, approximate=True)

    def _project(
        self, x: Array, layer: nnx.Linear, how: str, *, activation: str | None = None, residual: Array | None = None
    ) -> Array:
        """Computes a layer's `activation(x @ kernel + bias) + residual`, in the residual's dtype if there is one."""
        dtype = jnp.dtype(self.config.dtype)
        out_dtype = dtype if residual is None else jnp.promote_types(dtype, residual.dtype)
        return pallas_kernels.linear(
            x.astype(dtype),
            layer.kernel[...].astype(dtype),
            bias=None if layer.bias is None else layer.bias[...],
            activation=activation,
            residual=None if residual is None else residual.astype(out_dtype),
            out_dtype=out_dtype,
            implementation=named(how),
        )
