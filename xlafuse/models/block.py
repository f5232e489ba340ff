"""Pre-norm transformer block; each site can use its own implementation."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from xlafuse.errors import InapplicablePlanError
from xlafuse.models import kernels, layers
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


def normalised(
    config: BlockConfig, x: Array, scale: Array, bias: Array | None, implementation: str
) -> tuple[Array, Array]:
    """Normalises `x` (B, T, hidden) by a plan's `implementation`; see `Norm`."""
    if implementation != "xla":
        return kernels.normalise(config, x, scale, bias, named(implementation))
    if bias is not None:
        return layers.layer_norm(x, scale, bias, epsilon=config.epsilon), x
    return layers.rms_norm(x, scale, epsilon=config.epsilon), x


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
        y, _ = self._apply(x, positions, plan, None, None, layout)
        return y if layout is None else layout.placed(y)

    def with_cache(
        self,
        x: Array,
        positions: Array | None,
        cache: KeyValueCache,
        filled: Array,
        *,
        plan: FusionPlan | None = None,
    ) -> tuple[Array, KeyValueCache]:
        """Applies the block with a cache of `filled` (int32 scalar) tokens; also returns the cache with `x` appended.

        A single token per sequence attends to the whole cache. Several tokens are the prompt: they attend to each
        other, and `filled` is 0.
        """
        y, extended = self._apply(x, positions, plan, cache, filled)
        return y, cast(KeyValueCache, extended)

    def _apply(
        self,
        x: Array,
        positions: Array | None,
        plan: FusionPlan | None,
        cache: KeyValueCache | None,
        filled: Array | None,
        layout: Layout | None = None,
    ) -> tuple[Array, KeyValueCache | None]:
        if x.ndim != 3 or x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"x must have the shape (batch, length, {self.config.hidden_size}), got {x.shape}.")
        try:
            with jax.named_scope("block"):
                return self._planned(x, positions, plan or FusionPlan(), cache, filled, layout)
        except NotImplementedError as error:
            raise InapplicablePlanError(str(error)) from error

    def _planned(
        self,
        x: Array,
        positions: Array | None,
        plan: FusionPlan,
        cache: KeyValueCache | None,
        filled: Array | None,
        layout: Layout | None,
    ) -> tuple[Array, KeyValueCache | None]:
        config = self.config
        (query, key, value), x = self._normed_heads(x, positions, plan)
        if layout is not None:
            query, key, value = map(layout.placed_wide, (query, key, value))
        with jax.named_scope("attention"):
            if cache is not None and x.shape[1] == 1:
                mixed, cache = self._mix_cached(query, key, value, cache, cast(Array, filled), plan.attention)
            else:
                mixed = self._mix(query, key, value, plan.attention)
                if cache is not None:
                    cache = cache.appended(key, value, cast(Array, filled))
            mixed = mixed.reshape(*x.shape[:2], config.num_heads * config.head_dim)
        x = self._add_projected(x, mixed, plan.output_projection, self.output, ("output", "attention"))
        if config.num_experts:
            return self._add_experts(x, plan), cache
        hidden, x = self._expand(x, plan)
        hidden = hidden if layout is None else layout.placed_wide(hidden)
        return self._add_projected(x, hidden, plan.down_projection, self.down, ("down", "mlp")), cache

    def _normed_heads(
        self, x: Array, positions: Array | None, plan: FusionPlan
    ) -> tuple[tuple[Array, Array, Array], Array]:
        """Returns query, key and value, (B, T, heads, head_dim), after RoPE, and the residual stream."""
        norm = kernels.norm_in_product(self.config, x, self.attention_norm.scale[...])
        if norm is not None and plan.attention_norm == plan.qkv_projection in _FUSES:
            return self._heads(x, positions, plan, norm), x
        with jax.named_scope("attention_norm"):
            normed, stream = self.attention_norm(x, plan.attention_norm)
        return self._heads(normed, positions, plan), stream

    def _heads(
        self, x: Array, positions: Array | None, plan: FusionPlan, norm: pallas_kernels.Norm | None = None
    ) -> tuple[Array, Array, Array]:
        config = self.config
        projections = (self.query, self.key, self.value)
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        with jax.named_scope("qkv_projection"):
            how = plan.qkv_projection
            if how in _FUSES:
                return kernels.project_heads(config, x, projections, positions, named(how), norm=norm)
            query, key, value = (
                (layer(x) if how == "xla" else kernels.project(config, x, layer, named(how))).reshape(
                    *x.shape[:2], heads, config.head_dim
                )
                for layer, heads in zip(projections, counts, strict=True)
            )
        if config.rope_theta is not None:
            with jax.named_scope("rope"):
                query, key = self._rotate(query, key, positions)
        return query, key, value

    def _mix(self, query: Array, key: Array, value: Array, implementation: str) -> Array:
        is_causal = self.config.is_causal
        if implementation == "xla":
            return layers.attention(query, key, value, is_causal=is_causal)
        if implementation == "cudnn":
            return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation="cudnn")
        return kernels.attend(query, key, value, is_causal=is_causal, implementation=named(implementation))

    def _mix_cached(
        self, query: Array, key: Array, value: Array, cache: KeyValueCache, filled: Array, implementation: str
    ) -> tuple[Array, KeyValueCache]:
        lengths = jnp.broadcast_to(filled + 1, query.shape[:1])
        if implementation in _FUSES:
            made: Any = pallas_kernels.decode_attention(query, *cache, lengths, new_key=key, new_value=value)
            return made[0], KeyValueCache(*made[1:])
        cache = cache.appended(key, value, filled)
        mixed = jax.nn.dot_product_attention(
            query, *cache, key_value_seq_lengths=lengths, implementation="cudnn" if implementation == "cudnn" else "xla"
        )
        return mixed, cache

    def _add_projected(
        self,
        stream: Array,
        x: Array,
        implementation: str,
        layer: nnx.Linear,
        names: tuple[str, str],
    ) -> Array:
        """Returns `stream + layer(x)`; `names` are the scopes of the projection and of the addition."""
        with jax.named_scope(f"{names[0]}_projection"):
            if implementation != "xla":
                return kernels.project(self.config, x, layer, named(implementation), residual=stream)
            update = layer(x)
        with jax.named_scope(f"{names[1]}_residual"):
            return stream + update

    def _add_experts(self, x: Array, plan: FusionPlan) -> Array:
        with jax.named_scope("mlp_norm"):
            normed, stream = self.mlp_norm(x, plan.mlp_norm)
        update = self.experts(normed, plan)
        with jax.named_scope("mlp_residual"):
            return stream + update

    def _rotate(self, query: Array, key: Array, positions: Array | None) -> tuple[Array, Array]:
        if positions is None:
            positions = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
        wide = jnp.promote_types(query.dtype, jnp.float32)
        theta = cast(float, self.config.rope_theta)
        cosine, sine = layers.rotation(positions, self.config.head_dim, theta=theta, dtype=wide)
        return layers.rotate(query, cosine, sine), layers.rotate(key, cosine, sine)

    def _expand(self, x: Array, plan: FusionPlan) -> tuple[Array, Array]:
        """Returns the MLP's activations, (B, T, mlp), for tokens (B, T, hidden), and the residual stream."""
        config = self.config
        how = plan.up_projection
        if config.mlp == "swiglu" and config.use_bias and how == "best":
            how = "xla"  # the operation has no biases
        norm = kernels.norm_in_product(config, x, self.mlp_norm.scale[...])
        if norm is not None and config.mlp == "swiglu" and plan.mlp_norm == how in _FUSES:
            with jax.named_scope("gate_up_projection"):
                return kernels.expand_gated(config, x, self.gate, self.up, named(how), norm=norm), x
        with jax.named_scope("mlp_norm"):
            normed, stream = self.mlp_norm(x, plan.mlp_norm)
        return (self._expand_gated if config.mlp == "swiglu" else self._expand_plain)(normed, how), stream

    def _expand_gated(self, x: Array, implementation: str) -> Array:
        with jax.named_scope("gate_up_projection"):
            if implementation in _FUSES:
                return kernels.expand_gated(self.config, x, self.gate, self.up, named(implementation))
            if implementation == "triton":
                gate = kernels.project(self.config, x, self.gate, "triton", activation="silu")
                up = kernels.project(self.config, x, self.up, "triton")
            else:
                gate, up = self.gate(x), self.up(x)
        with jax.named_scope("activation"):
            return gate * up if implementation == "triton" else jax.nn.silu(gate) * up

    def _expand_plain(self, x: Array, implementation: str) -> Array:
        with jax.named_scope("up_projection"):
            if implementation != "xla":
                return kernels.project(self.config, x, self.up, named(implementation), activation="gelu_tanh")
            up = self.up(x)
        with jax.named_scope("activation"):
            return jax.nn.gelu(up, approximate=True)
