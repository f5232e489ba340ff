"""Llama layers with the same kernels inside `jax.shard_map`, and the collectives written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallas_kernels import Norm, Rope, attention, gated_linear, linear, qkv_projection, rms_norm
from xlafuse.models import BlockConfig
from xlafuse.models.shardings import Layout


def stack(config: BlockConfig, layout: Layout) -> Callable[..., Any]:
    """Builds `(layers, x, positions) -> y`, a stack of layers under a hand-written `jax.shard_map`.

    Raises:
        NotImplementedError: the block is not Llama's, or the mesh has several axes.
    """
    if config.norm != "rms_norm" or config.mlp != "swiglu" or config.num_experts or len(layout.mesh.axis_names) > 1:
        raise NotImplementedError("the layers written by hand are Llama's, on a mesh of one axis")
    axis, parallel = str(next(iter(layout.mesh.axis_names))), layout.parallel

    def layer(weights: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        if parallel == "fsdp":
            weights = jax.tree.map(
                lambda each: lax.all_gather(each, axis, tiled=True) if each.ndim > 1 else each, weights
            )

        def whole(x: Any) -> jax.Array:
            if parallel == "sp":
                return lax.all_gather(x, axis, axis=1, tiled=True)
            return lax.pcast(x, axis, to="varying") if parallel == "tp" else x

        def added(part: jax.Array, name: str, x: jax.Array) -> jax.Array:
            weight = weights[name]["kernel"]
            if parallel == "sp":
                return x + lax.psum_scatter(linear(part, weight), axis, scatter_dimension=1, tiled=True)
            return x + lax.psum(linear(part, weight), axis) if parallel == "tp" else linear(part, weight, residual=x)

        scale = weights["attention_norm"]["scale"]
        norm, entering = None, x
        if parallel in ("dp", "fsdp"):
            norm = Norm(scale=scale, epsilon=config.epsilon)
        else:
            entering = whole(rms_norm(x, scale, epsilon=config.epsilon))
        query, key, value = qkv_projection(
            entering,
            *(weights[name]["kernel"] for name in ("query", "key", "value")),
            head_size=config.head_dim,
            norm=norm,
            rope=None if config.rope_theta is None else Rope(positions=positions, theta=config.rope_theta),
        )
        mixed: Any = attention(query, key, value, is_causal=config.is_causal)
        x = added(mixed.reshape(*mixed.shape[:2], -1), "output", x)
        normed = whole(rms_norm(x, weights["mlp_norm"]["scale"], epsilon=config.epsilon))
        return added(gated_linear(normed, *(weights[name]["kernel"] for name in ("gate", "up"))), "down", x)

    def on_each(layers: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        for weights in layers:
            x = layer(weights, x, positions)
        return x

    def call(layers: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        specs = jax.tree.map(lambda each: each.spec, layout.of_weights(layers))
        given = (specs, layout.rows.spec, layout.tokens.spec)
        return jax.shard_map(on_each, mesh=layout.mesh, in_specs=given, out_specs=given[1])(layers, x, positions)

    return call
