"""Pre-norm transformer block; each site can use its own implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from xlafuse.errors import InapplicablePlanError
from xlafuse.models import layers
from xlafuse.models.config import BlockConfig
from xlafuse.models.plan import FusionPlan


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
        scale, epsilon = self.scale[...], self.config.epsilon
        bias = self.bias[...] if self.config.norm == "layer_norm" else None
        if implementation == "mosaic":
            from xlafuse.models import kernels

            return kernels.normalise(self.config, x, scale, bias)
        if implementation == "triton":
            from xlafuse.models import triton_kernels

            return triton_kernels.normalise(self.config, x, scale, bias), x
        if bias is not None:
            return layers.layer_norm(x, scale, bias, epsilon=epsilon), x
        return layers.rms_norm(x, scale, epsilon=epsilon), x


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
    """One layer of Llama 3 or GPT-2, as `config` says: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

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
        dropout_key: Array | None = None,
    ) -> Array:
        """Applies the block to `x` (B, T, hidden).

        `positions` (B, T), int32, are the tokens' positions for RoPE; None counts from 0. `plan` names the
        implementation of each site; None leaves all to XLA. Dropout acts only if `dropout_key` is given. Raises
        `InapplicablePlanError` if the plan asks for a kernel that this block cannot use.
        """
        return self._apply(x, positions, plan, None, None, dropout_key)[0]

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
        y, extended = self._apply(x, positions, plan, cache, filled, None)
        return y, cast(KeyValueCache, extended)

    def _apply(
        self,
        x: Array,
        positions: Array | None,
        plan: FusionPlan | None,
        cache: KeyValueCache | None,
        filled: Array | None,
        dropout_key: Array | None,
    ) -> tuple[Array, KeyValueCache | None]:
        config = self.config
        plan = plan or FusionPlan()
        if x.ndim != 3 or x.shape[-1] != config.hidden_size:
            raise ValueError(f"x must have the shape (batch, length, {config.hidden_size}), got {x.shape}.")
        for site, reason in plan.inapplicable(config).items():
            raise InapplicablePlanError(f"{getattr(plan, site)!r} cannot serve the site {site!r}: {reason}.")
        cached_attention = plan.attention
        if "best" in plan.fused_sites.values():
            from xlafuse.models.best import settled

            plan = settled(plan, config, (x.shape[0], x.shape[1]), arrays=(x, *jax.tree.leaves(nnx.state(self))))
        attention_key, mlp_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        with jax.named_scope("block"):
            (query, key, value), x = self._normed_heads(x, positions, plan)
            with jax.named_scope("attention"):
                if cache is not None and x.shape[1] == 1:
                    mixed, cache = self._mix_cached(query, key, value, cache, cast(Array, filled), cached_attention)
                else:
                    mixed = self._mix(query, key, value, plan.attention)
                    if cache is not None:
                        cache = cache.appended(key, value, cast(Array, filled))
                mixed = mixed.reshape(*x.shape[:2], config.num_heads * config.head_dim)
            x = self._add_projected(
                x, mixed, plan.output_projection, self.output, ("output", "attention"), attention_key
            )
            hidden, x = self._expand(x, plan)
            y = self._add_projected(x, hidden, plan.down_projection, self.down, ("down", "mlp"), mlp_key)
            return y, cache

    def _takes_norm(self, norm: str, site: str, x: Array, plan: FusionPlan) -> bool:
        """Tells whether the product at `site` computes the norm too."""
        if not getattr(plan, norm) == getattr(plan, site) == "mosaic" or x.dtype != jnp.dtype(self.config.dtype):
            return False
        from xlafuse.models import support

        return support.takes_norm(site, self.config, x.shape[0] * x.shape[1])

    def _normed_heads(
        self, x: Array, positions: Array | None, plan: FusionPlan
    ) -> tuple[tuple[Array, Array, Array], Array]:
        if self._takes_norm("attention_norm", "qkv_projection", x, plan):
            from xlafuse.models import kernels

            projections = (self.query, self.key, self.value)
            with jax.named_scope("qkv_projection"):
                scale = self.attention_norm.scale[...]
                return kernels.normalise_and_project_heads(self.config, x, scale, projections, positions)
        with jax.named_scope("attention_norm"):
            normed, stream = self.attention_norm(x, plan.attention_norm)
        return self._heads(normed, positions, plan), stream

    def _mix(self, query: Array, key: Array, value: Array, implementation: str) -> Array:
        if implementation == "mosaic":
            from xlafuse.models import kernels

            return kernels.attend(query, key, value, is_causal=self.config.is_causal)
        if implementation == "triton":
            from xlafuse.models import triton_kernels

            return triton_kernels.attend(query, key, value, is_causal=self.config.is_causal)
        attention = layers.cudnn_attention if implementation == "cudnn" else layers.attention
        return attention(query, key, value, is_causal=self.config.is_causal)

    def _mix_cached(
        self, query: Array, key: Array, value: Array, cache: KeyValueCache, filled: Array, implementation: str
    ) -> tuple[Array, KeyValueCache]:
        lengths = jnp.broadcast_to(filled + 1, query.shape[:1])
        if implementation in ("mosaic", "best"):
            from xlafuse.models import kernels

            mixed, *extended = kernels.attend_cached(query, key, value, cache, lengths)
            return mixed, KeyValueCache(*extended)
        cache = cache.appended(key, value, filled)
        mixed = jax.nn.dot_product_attention(
            query, *cache, key_value_seq_lengths=lengths, implementation="cudnn" if implementation == "cudnn" else "xla"
        )
        return mixed, cache

    def _heads(self, x: Array, positions: Array | None, plan: FusionPlan) -> tuple[Array, Array, Array]:
        """Returns query, key and value of the normed tokens, (B, T, heads, head_dim), after RoPE."""
        config = self.config
        projections = (self.query, self.key, self.value)
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        with jax.named_scope("qkv_projection"):
            if plan.qkv_projection == "mosaic":
                from xlafuse.models import kernels

                return kernels.project_heads(config, x, projections, positions)
            project = self._projection(plan.qkv_projection)
            query, key, value = (
                project(layer, x).reshape(*x.shape[:2], heads, config.head_dim)
                for layer, heads in zip(projections, counts, strict=True)
            )
        if config.rope_theta is not None:
            with jax.named_scope("rope"):
                query, key = self._rotate(query, key, positions, plan.rope)
        return query, key, value

    def _projection(self, implementation: str) -> Callable[[nnx.Linear, Array], Array]:
        """Returns the function that multiplies by a layer's weights if nothing is fused into the product."""
        if implementation != "triton":
            return lambda layer, x: layer(x)
        from xlafuse.models import triton_kernels

        return lambda layer, x: triton_kernels.project(self.config, x, layer)

    def _add_projected(
        self,
        stream: Array,
        x: Array,
        implementation: str,
        layer: nnx.Linear,
        names: tuple[str, str],
        dropout_key: Array | None,
    ) -> Array:
        """Returns `stream + dropout(layer(x))`; `names` are the scopes of the projection and of the addition."""
        drops = dropout_key is not None and self.config.dropout_rate > 0
        with jax.named_scope(f"{names[0]}_projection"):
            if implementation == "mosaic":
                from xlafuse.models import kernels

                update = kernels.project(self.config, x, layer, residual=None if drops else stream)
                if not drops:
                    return update
            elif implementation == "triton" and not drops:
                from xlafuse.models import triton_kernels

                return triton_kernels.project(self.config, x, layer, residual=stream)
            else:
                update = self._projection(implementation)(layer, x)
        update = self._dropout(update, dropout_key)
        with jax.named_scope(f"{names[1]}_residual"):
            return stream + update

    def _rotate(self, query: Array, key: Array, positions: Array | None, implementation: str) -> tuple[Array, Array]:
        if implementation == "mosaic":
            from xlafuse.models import kernels

            return kernels.rotate(self.config, query, key, positions)
        if positions is None:
            positions = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
        wide = jnp.promote_types(query.dtype, jnp.float32)
        theta = cast(float, self.config.rope_theta)
        cosine, sine = layers.rotation(positions, self.config.head_dim, theta=theta, dtype=wide)
        return layers.rotate(query, cosine, sine), layers.rotate(key, cosine, sine)

    def _expand(self, x: Array, plan: FusionPlan) -> tuple[Array, Array]:
        """Returns the MLP's activations, (B, T, mlp), for tokens (B, T, hidden), and the residual stream."""
        if self._takes_norm("mlp_norm", "up_projection", x, plan):
            from xlafuse.models import kernels

            with jax.named_scope("gate_up_projection"):
                return kernels.normalise_and_expand(self.config, x, self.mlp_norm.scale[...], self.up, self.gate)
        with jax.named_scope("mlp_norm"):
            normed, stream = self.mlp_norm(x, plan.mlp_norm)
        return self._expand_normed(normed, plan), stream

    def _expand_normed(self, x: Array, plan: FusionPlan) -> Array:
        is_gated = self.config.mlp == "swiglu"
        scope = "gate_up_projection" if is_gated else "up_projection"
        if plan.up_projection == "mosaic":
            from xlafuse.models import kernels

            with jax.named_scope(scope):
                return kernels.expand(self.config, x, self.up, self.gate if is_gated else None)
        if plan.up_projection == "triton":
            from xlafuse.models import triton_kernels

            with jax.named_scope(scope):
                if not is_gated:
                    return triton_kernels.project(self.config, x, self.up, activation="gelu_tanh")
                gate = triton_kernels.project(self.config, x, self.gate, activation="silu")
                up = triton_kernels.project(self.config, x, self.up)
            with jax.named_scope("activation"):
                return gate * up
        if not is_gated:
            return self._activate_up(x, plan.activation)
        with jax.named_scope(scope):
            gate, up = self.gate(x), self.up(x)
        with jax.named_scope("activation"):
            if plan.activation == "xla":
                return jax.nn.silu(gate) * up
            from xlafuse.models import kernels

            return kernels.gate_activation(gate, up)

    def _activate_up(self, x: Array, implementation: str) -> Array:
        if implementation == "xla":
            with jax.named_scope("up_projection"):
                up = self.up(x)
            with jax.named_scope("activation"):
                return jax.nn.gelu(up, approximate=True)
        from xlafuse.models import kernels

        dtype = jnp.dtype(self.config.dtype)
        with jax.named_scope("up_projection"):
            up = jnp.matmul(x.astype(dtype), self.up.kernel[...].astype(dtype))
        with jax.named_scope("activation"):
            return kernels.gelu(up, None if self.up.bias is None else self.up.bias[...])

    def _dropout(self, x: Array, key: Array | None) -> Array:
        if key is None or self.config.dropout_rate == 0.0:
            return x
        with jax.named_scope("dropout"):
            kept = jax.random.bernoulli(key, 1.0 - self.config.dropout_rate, x.shape)
            return jnp.where(kept, x / (1.0 - self.config.dropout_rate), 0).astype(x.dtype)
