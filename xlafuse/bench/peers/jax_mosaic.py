"""JAX's own Mosaic GPU attention (`jax.experimental.pallas.ops.gpu.attention_mgpu`), for Hopper GPUs.

It takes float16 alone and has no scale: what is cast and scaled for it is so outside the timing. Its backward pass has
no mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig
from jax.experimental.pallas.ops.gpu.attention_mgpu import attention as mosaic_attention

from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate

_ROWS = 128
"""Queries of a block, of both its warpgroups: it takes multiples of them."""
_KEYS = {64: 256, 128: 128, 256: 64}
"""Keys of a step, by head size: the most that fit in shared memory, as its own benchmark takes them."""


def attention(query, key, value, *, is_causal=False, **others) -> jax.Array:
    """See `pallas_kernels.attention`; of float16, and queries that have been scaled."""
    unknown = [name for name, wanted in others.items() if name not in ("scale", "dropout_key") and wanted]
    size, keys = query.shape[3], key.shape[1]
    if unknown or size not in _KEYS or query.shape[1] % _ROWS or keys % _KEYS[size]:
        raise NotImplementedError("JAX's attention is causal or without a mask, for head sizes 64, 128 and 256")
    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    forward = {"block_q": _ROWS // 2, "block_kv": _KEYS[size], "max_concurrent_steps": 2, "causal": is_causal}
    config = TuningConfig(**forward, **blocks, compute_wgs_bwd=2 if size <= 128 else 1)
    return mosaic_attention(query, key, value, config)  # pyright: ignore[reportReturnType]: custom_vjp hides it


def candidate(operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """See `xlafuse.bench.peers`."""
    if operation != "attention":
        raise NotImplementedError(f"JAX has no {operation} on Mosaic GPU here, only attention")
    first = plain(cases[0].arguments)
    scale = first.get("scale")
    scale = first["query"].shape[3] ** -0.5 if scale is None else scale
    half = [_as_float16(case, scale) for case in cases]
    found, results = attention_candidate("jax_mosaic", attention, operation, phase, half)
    of_query = "gradient of query"
    return found, {name: value * scale if name == of_query else value for name, value in results.items()}


def _as_float16(case: Case, scale: float) -> Case:
    cast = {name: case.arguments[name].astype(jnp.float16) for name in ("query", "key", "value")}
    cast["query"] *= scale
    return replace(
        case,
        arguments={**case.arguments, **cast},
        cotangents=jax.tree.map(lambda array: array.astype(jnp.float16), case.cotangents),
    )
