"""The block as a pure function of its weights, without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, ShapeDtypeStruct

from xlafuse.models.block import TransformerBlock
from xlafuse.models.config import BlockConfig, get_preset
from xlafuse.models.plan import FusionPlan
from xlafuse.models.shardings import Layout, sharded

BlockFunction = Callable[..., Array]
"""`(params, x, positions=None) -> y`: `x` and `y` are (B, T, hidden), `params` a nested dict."""


def resolve_config(block: str | BlockConfig) -> BlockConfig:
    """Returns the given or named configuration."""
    return get_preset(block) if isinstance(block, str) else block


def block_function(
    block: str | BlockConfig,
    shape: tuple[int, int],
    *,
    plan: FusionPlan | None = None,
    layout: Layout | None = None,
) -> tuple[BlockFunction, tuple[Any, ...]]:
    """Returns the block as a pure function, with abstract arguments of `shape` (batch, length) for tracing.

    The arguments are the weights (a nested dict), `x`, and the tokens' positions if the block has RoPE. Positions are
    arguments because a server's step gets them from its caller; as constants, XLA would fold the angles away. No array
    is allocated, so that any size can be traced on a laptop. With a `layout`, the arguments have its shardings, and the
    result that of `x`.

    Raises `UnknownNameError` for an unknown preset, `ValueError` for a shape that is not two positive integers, and
    `ShardingError` for a layout that cuts what cannot be cut.
    """
    config = resolve_config(block)
    if len(shape) != 2 or any(int(size) < 1 for size in shape):
        raise ValueError(f"a block's shape is (batch, length), two positive integers; got {shape!r}.")
    batch, length = shape
    abstract = nnx.eval_shape(lambda: TransformerBlock(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    params = nnx.to_pure_dict(state)

    def apply(params: Any, x: Array, positions: Array | None = None) -> Array:
        # A State and its plain dictionary flatten in the same order.
        restored = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return nnx.merge(graph, restored)(x, positions, plan=plan, layout=layout)

    apply.__name__ = apply.__qualname__ = "block"
    x = ShapeDtypeStruct((batch, length, config.hidden_size), jnp.dtype(config.dtype))
    positions = ShapeDtypeStruct((batch, length), jnp.int32) if config.rope_theta is not None else None
    if layout is not None:
        params = sharded(params, layout.of_weights(params), "params")
        x = sharded(x, layout.rows, "x")
        positions = positions and sharded(positions, layout.tokens, "positions")
    return apply, (params, x) if positions is None else (params, x, positions)


def initial_params(block: str | BlockConfig, *, seed: int = 0) -> dict[str, Any]:
    """Makes the block's weights, as the tree that `block_function`'s function takes."""
    return nnx.to_pure_dict(nnx.state(TransformerBlock(resolve_config(block), rngs=nnx.Rngs(seed))))
