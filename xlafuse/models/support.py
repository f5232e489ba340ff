"""Tells which sites of a plan cannot serve a block, by asking the operations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from hlo_analysis.capture.meshes import traced_for_one
from hlo_analysis.targets import load_target
from pallas_kernels.primitives.triton_calls import LONGEST_ROW, SHORTEST_ROW, TRITON_DTYPES
from xlafuse.models.block import TransformerBlock
from xlafuse.models.config import BlockConfig
from xlafuse.models.plan import FusionPlan


def inapplicable(plan: FusionPlan, config: BlockConfig) -> dict[str, str]:
    """Returns the sites where a plan cannot serve a block of `config`, with the reason.

    The answer depends on the block alone: a kernel that serves it does so at every batch and length.
    """
    reasons = {site: _unsupported(site, how, config) for site, how in plan.fused_sites.items()}
    return {site: reason for site, reason in reasons.items() if reason is not None}


def applicable(plan: FusionPlan, config: BlockConfig) -> FusionPlan:
    """Returns the plan with every inapplicable site given back to XLA."""
    return dataclasses.replace(plan, **dict.fromkeys(inapplicable(plan, config), "xla"))


@functools.cache
def _unsupported(site: str, implementation: str, config: BlockConfig) -> str | None:
    """Returns why a site cannot have an implementation in a block of `config` at every batch and length, or None.

    Of "mosaic" the operation is asked that the block calls there, for one token on an H200.
    """
    if implementation == "best":
        return None
    if implementation == "cudnn":
        is_wide = config.dtype not in ("bfloat16", "float16")
        return f"cuDNN computes in bfloat16 or float16, and {config.name} in {config.dtype}" if is_wide else None
    if implementation == "triton":
        if config.dtype not in TRITON_DTYPES:
            return f"{config.name} is {config.dtype}, the Triton kernels take {', '.join(TRITON_DTYPES)}"
        if config.num_experts and site in ("up_projection", "down_projection"):
            return "no Triton kernel multiplies groups of rows by matrices of their own"
        if site.endswith("_norm") and not SHORTEST_ROW <= config.hidden_size <= LONGEST_ROW:
            return f"rows have {config.hidden_size} features, the Triton kernels take {SHORTEST_ROW} to {LONGEST_ROW}"
        return None
    block = nnx.eval_shape(lambda: TransformerBlock(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(block)
    plan = FusionPlan(**{site: implementation})
    x = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.dtype(config.dtype))
    try:
        with traced_for_one(load_target("h200")):
            made = pallas_kernels.choice(lambda state, x: nnx.merge(graph, state)(x, plan=plan), state, x)
    except NotImplementedError as error:
        return str(error)
    return made.reasons[implementation]
