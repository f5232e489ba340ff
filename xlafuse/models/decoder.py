"""Decoder-only language model of transformer blocks: logits, training steps, prefill, and decoding with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import pallas_kernels
from xlafuse.errors import UnknownNameError
from xlafuse.models.block import KeyValueCache, TransformerBlock, normalised
from xlafuse.models.config import BlockConfig, get_preset
from xlafuse.models.plan import FusionPlan
from xlafuse.models.shardings import Layout

Params = dict[str, Any]
"""Weights by name.

embedding (vocabulary, hidden); head (hidden, vocabulary); scale (hidden,) of the last norm; bias if that is a
LayerNorm; positions if they are learned; layers, the weights of each block in a tuple or stacked.
"""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of a model: its block, the number of `layers`, and the vocabulary.

    learned_positions: how many learned positions there are; None uses the block's RoPE.
    is_scanned: compiles one layer and loops over stacked weights; otherwise every layer is compiled.
    """

    block: BlockConfig
    layers: int
    vocabulary: int
    learned_positions: int | None = None
    is_scanned: bool = False


PRESETS: dict[str, DecoderConfig] = {
    # arXiv:2407.21783, table 3; the released configuration of GPT-2 medium, here with an untied head.
    "llama3-8b": DecoderConfig(block=get_preset("llama3-8b"), layers=32, vocabulary=128256),
    "gpt2-medium": DecoderConfig(block=get_preset("gpt2-medium"), layers=24, vocabulary=50304, learned_positions=1024),
    "mixtral-8x7b": DecoderConfig(block=get_preset("mixtral-8x7b"), layers=32, vocabulary=32000),
    "qwen3-30b-a3b": DecoderConfig(block=get_preset("qwen3-30b-a3b"), layers=48, vocabulary=151936),
    "tiny": DecoderConfig(block=get_preset("tiny"), layers=2, vocabulary=512),
}
"""Models by name. GPT-2's vocabulary of 50257 is padded to a multiple of 128, as its users train it."""


def get_decoder(name: str) -> DecoderConfig:
    """Returns the model called `name`; raises `UnknownNameError` with the nearest names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UnknownNameError("model", name, PRESETS) from None


class Decoder:
    """Pure functions of a model's weights under one fusion plan, to be jitted.

    tokens are (B, T) int32; logits are (B, T, vocabulary) in the block's dtype. layout: of the weights on several
    devices, for the loss.
    """

    def __init__(self, config: DecoderConfig, plan: FusionPlan | None = None, layout: Layout | None = None) -> None:
        self.config = config
        self.plan = plan or FusionPlan()
        self.layout = layout

    @cached_property
    def _split(self) -> tuple[Any, Any]:
        return nnx.split(nnx.eval_shape(lambda: TransformerBlock(self.config.block, rngs=nnx.Rngs(0))))

    def _block(self, layer: Any) -> TransformerBlock:
        graph, state = self._split
        return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(layer)))

    def params(self, key: Array) -> Params:
        """Draws random weights, scaled so that activations keep their size; the norms' scales are 1.

        With a `layout`, each device draws its parts.
        """
        config, block = self.config, self.config.block
        dtype = jnp.dtype(block.param_dtype)
        abstract = nnx.to_pure_dict(self._split[1])

        def placed(made: Params) -> Params:
            if self.layout is None:
                return made
            return jax.lax.with_sharding_constraint(made, self.layout.of_weights(made))

        def weight(key: Array, shape: tuple[int, ...]) -> Array:
            return (jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5).astype(dtype)

        @jax.jit  # compiled once for all layers
        def layer(key: Array) -> Any:
            leaves, structure = jax.tree.flatten_with_path(abstract)
            keys = jax.random.split(key, len(leaves))
            made = [
                weight(k, leaf.shape)
                if len(leaf.shape) > 1
                else jnp.full(leaf.shape, float("scale" in jax.tree_util.keystr(path)), dtype)
                for k, (path, leaf) in zip(keys, leaves, strict=True)
            ]
            return placed(jax.tree.unflatten(structure, made))

        @jax.jit
        def others(embedding_key: Array, head_key: Array, position_key: Array) -> Params:
            made: Params = {
                "embedding": weight(embedding_key, (config.vocabulary, block.hidden_size)) * config.vocabulary**0.5,
                "head": weight(head_key, (block.hidden_size, config.vocabulary)),
                "scale": jnp.ones((block.hidden_size,), dtype),
            }
            if block.norm == "layer_norm":
                made["bias"] = jnp.zeros((block.hidden_size,), dtype)
            if config.learned_positions is not None:
                made["positions"] = weight(position_key, (config.learned_positions, block.hidden_size))
            return placed(made)

        *keys_of_others, layer_key = jax.random.split(key, 4)
        keys = jax.random.split(layer_key, config.layers)
        layers = jax.lax.map(layer, keys) if config.is_scanned else tuple(map(layer, keys))
        return {**others(*keys_of_others), "layers": layers}

    def empty_cache(self, batch: int, length: int) -> Any:
        """Returns zero caches of all layers, for `length` tokens a sequence."""
        config, block = self.config, self.config.block
        shape = (batch, length, block.num_kv_heads, block.head_dim)
        shape = (config.layers, *shape) if config.is_scanned else shape

        def one() -> KeyValueCache:
            return KeyValueCache(*(jnp.zeros(shape, jnp.dtype(block.dtype)) for _ in range(2)))

        return one() if config.is_scanned else tuple(one() for _ in range(config.layers))

    def logits(self, params: Params, tokens: Array) -> Array:
        """Returns the logits of the next token at each position."""
        return self._hidden(params, tokens, remat=False) @ params["head"]

    def loss(self, params: Params, tokens: Array, *, remat: bool = True) -> Array:
        """Returns the mean next-token cross-entropy for tokens (B, T + 1); `remat` keeps only the layers' inputs."""
        hidden = self._hidden(params, tokens[:, :-1], remat=remat)
        with jax.named_scope("loss"):
            if self.plan.up_projection in ("mosaic", "best"):
                head = params["head"].astype(hidden.dtype)
                return pallas_kernels.linear_cross_entropy(hidden, head, tokens[:, 1:], reduction="mean")
            logits = (hidden @ params["head"]).astype(jnp.float32)
            at_label = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)

    def train_step(
        self, optimizer: Any, params: Params, state: Any, tokens: Array, *, loss: Callable[..., Array] | None = None
    ) -> tuple[Params, Any, Array]:
        """Takes one step with an optax `optimizer`; returns the new weights, its new state, and the loss.

        loss: what to differentiate in place of `self.loss`, such as its fused form.
        """
        value, gradients = jax.value_and_grad(loss or self.loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state, value

    def step(self, params: Params, tokens: Array, cache: Any, filled: Array) -> tuple[Array, Any, Array]:
        """Returns each sequence's likeliest next token, (B, 1), the cache with `tokens` appended, and its new length.

        tokens: the prompts, (B, T), with an empty cache (`filled` is 0), or the last token of each sequence, (B, 1).
        """
        config, length = self.config, tokens.shape[1]
        x = self._embed(params, tokens, filled)
        positions = None if config.learned_positions is not None else filled + self._positions(tokens)

        def layer(x: Array, each: tuple[Any, KeyValueCache]) -> tuple[Array, KeyValueCache]:
            weights, cache = each
            return self._block(weights).with_cache(x, positions, cache, filled, plan=self.plan)

        x, cache = self._over_layers(layer, x, params["layers"], cache)
        logits = self._norm(params, x[:, -1:]) @ params["head"]
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, filled + length

    def _hidden(self, params: Params, tokens: Array, *, remat: bool) -> Array:
        positions = None if self.config.learned_positions is not None else self._positions(tokens)

        def layer(x: Array, each: tuple[Any]) -> tuple[Array, None]:
            return self._block(each)(x, positions, plan=self.plan, layout=self.layout), None

        layer = jax.checkpoint(layer) if remat else layer
        x = self._embed(params, tokens, jnp.int32(0))
        x = x if self.layout is None else self.layout.placed(x)
        x, _ = self._over_layers(layer, x, params["layers"])
        return self._norm(params, x)

    def _over_layers(self, layer: Callable[..., tuple[Array, Any]], x: Array, *each: Any) -> tuple[Array, Any]:
        """Applies a function to x and the arrays of one layer after the other; also returns its further results."""
        if self.config.is_scanned:
            return jax.lax.scan(layer, x, each)
        results = []
        for own in zip(*each, strict=True):
            x, result = layer(x, own)
            results.append(result)
        return x, tuple(results)

    def _positions(self, tokens: Array) -> Array:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def _embed(self, params: Params, tokens: Array, filled: Array) -> Array:
        with jax.named_scope("embedding"):
            x = params["embedding"][tokens].astype(self.config.block.dtype)
            if self.config.learned_positions is None:
                return x
            return x + jax.lax.dynamic_slice_in_dim(params["positions"], filled, tokens.shape[1], axis=0)

    def _norm(self, params: Params, x: Array) -> Array:
        config, bias = self.config.block, params.get("bias")
        with jax.named_scope("final_norm"):
            how = self.plan.mlp_norm if self.plan.mlp_norm in ("mosaic", "best") else "xla"
            return normalised(config, x, params["scale"], bias, how)[0]
