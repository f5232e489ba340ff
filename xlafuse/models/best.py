"""Picks the implementation of a site that was measured to be the fastest, for the device and shape of a trace."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp

from pallas_kernels.ops.gated_linear import config as gated_linear
from pallas_kernels.ops.linear import config as linear
from pallas_kernels.ops.qkv_projection import config as qkv_projection
from pallas_kernels.primitives.platform import target_device
from xlafuse.models import kernels, support
from xlafuse.models.config import BlockConfig
from xlafuse.models.plan import FusionPlan


def settled(plan: FusionPlan, config: BlockConfig, shape: tuple[int, int], *, arrays: Iterable[Any] = ()) -> FusionPlan:
    """Returns `plan` with the name of an implementation in place of every "best".

    Args:
      plan: the fusion plan.
      config: the block's configuration.
      shape: batch and length.
      arrays: the tokens and weights. If one is sharded over an explicit mesh, every site goes to XLA, since a kernel
        sees one device. Inside `jax.shard_map` no array is sharded.
    """
    asked = [site for site, implementation in plan.fused_sites.items() if implementation == "best"]
    is_spread = any(map(_is_spread, arrays))
    return dataclasses.replace(plan, **{site: "xla" if is_spread else _best(site, config, shape) for site in asked})


def _is_spread(array: Any) -> bool:
    return any(axes is not None for axes in jax.typeof(array).sharding.spec)


def _best(site: str, config: BlockConfig, shape: tuple[int, int]) -> str:
    if site == "attention":
        return _best_attention(config, shape)
    runs = support.refusal(site, config) is None
    return "mosaic" if runs and _is_faster(site, config, math.prod(shape)) else "xla"


def _best_attention(config: BlockConfig, shape: tuple[int, int]) -> str:
    """Returns the first of our operation's preferences that runs here, else "cudnn"; "xla" for a single token."""
    device = target_device()
    if shape[1] == 1 or device.is_interpreted:  # jax's interpreter does not support accumulators with initial values
        return "xla"
    is_cuda, takes = device.platform == "cuda", config.dtype in ("bfloat16", "float16")
    can_run = {"mosaic": support.refusal("attention", config) is None, "cudnn": is_cuda and takes}
    found = (name for name in (*kernels.attention_order(config, shape), "cudnn") if can_run.get(name, False))
    return next(found, "xla")


def _is_faster(site: str, config: BlockConfig, rows: int) -> bool:
    """Tells whether our kernel beats XLA: always for norms, RoPE and activations; products have rules of their own."""

    def array(*sizes: int) -> jax.Array:
        return cast(jax.Array, jax.ShapeDtypeStruct(sizes, jnp.dtype(config.dtype)))

    hidden, mlp = config.hidden_size, config.mlp_size
    if site == "qkv_projection":
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        weights = [array(hidden, count * config.head_dim) for count in counts]
        is_rotated = config.rope_theta is not None
        order = qkv_projection.preferred(array(rows, hidden), weights, head_size=config.head_dim, is_rotated=is_rotated)
        return "mosaic" in order
    if site == "up_projection" and config.mlp == "swiglu":
        return "mosaic" in gated_linear.preferred(array(rows, hidden), array(hidden, mlp), "silu")
    if site == "up_projection":
        features, outputs, activation, residual = hidden, mlp, "gelu_tanh", None
    elif site in ("output_projection", "down_projection"):
        features = mlp if site == "down_projection" else config.num_heads * config.head_dim
        outputs, activation, residual = hidden, None, array(rows, hidden)
    else:
        return True
    x, w, bias = array(rows, features), array(features, outputs), array(outputs) if config.use_bias else None
    return "mosaic" in linear.preferred(x, w, bias, activation, residual, x.dtype)
