"""Attention's registry entry: how it is called in tests and benchmarks, its traffic and products, and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.arguments import problem_of
from pallas_kernels.ops.attention.backward.choice import backward_candidates, of_seen_keys
from pallas_kernels.ops.attention.calls import ARG_SPECS
from pallas_kernels.ops.attention.counts import backward_traffic, flops, forward_traffic
from pallas_kernels.ops.attention.forward.config import forward_candidates, known
from pallas_kernels.ops.attention.head_sizes import widened
from pallas_kernels.ops.attention.mosaic_gpu import attention_forward
from pallas_kernels.ops.attention.mosaic_gpu_vjp import attention_backward
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.ops.attention.reference_vjp import backward_of_xla
from pallas_kernels.specs import Arguments, OpSpec

_NAMES = ("bias", "mask", "is_causal", "scale", "window", "segment_ids", "softcap", "dropout_rate", "dropout_key")


def _problem(arguments: Mapping[str, Any]):
    given: dict[str, Any] = {name: arguments.get(name) for name in _NAMES}
    given |= {"is_causal": bool(given["is_causal"]), "dropout_rate": given["dropout_rate"] or 0.0}
    return problem_of(arguments["query"], arguments["key"], **given)


def _described(arguments: Mapping[str, Any]) -> Problem:
    """The launch of arguments that may be shapes alone."""
    arrays = ("bias", "mask", "segment_ids", "dropout_key")
    problem, _ = _problem({**arguments, **dict.fromkeys(arrays)})
    bias, mask, segments = (arguments.get(name) is not None for name in arrays[:3])
    dense = "bias" if bias else "mask" if mask else None
    return replace(problem, dense=dense, masking=replace(problem.masking, has_segments=segments))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    problem = _described(arguments)
    if phase == "backward":
        candidates = backward_candidates(of_seen_keys(problem))
        return {name: partial(_gradients, config=config) for name, config in candidates.items()}
    return {name: partial(_forward, config=config) for name, config in forward_candidates(problem).items()}


def _forward(*, query, key, value, config=None, **others):
    problem, extras = _problem({"query": query, "key": key, **others})
    wide, (query, key, value) = widened(problem, query, key, value)
    out, _ = attention_forward(query, key, value, extras, problem=wide, config=config)
    return (out[..., : problem.head_size],)


def _gradients(*, cotangents, config=None, **arguments):
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    (dout,) = cotangents
    problem, extras = _problem(arguments)
    # query stands for the output. The work is the same.
    lse = _lse(query, key)
    wide, (query, key, value, dout) = widened(problem, query, key, value, dout)
    dq, dk, dv, ddense = attention_backward(query, key, value, query, lse, dout, extras, problem=wide, config=config)
    gradients = tuple(gradient[..., : problem.head_size] for gradient in (dq, dk, dv))
    return gradients if ddense is None else (*gradients, ddense)


def _lse(query: jax.Array, key: jax.Array) -> jax.Array:
    """The log-sum-exp of scores of zero, which stands for the true one."""
    return jnp.full((query.shape[0], query.shape[2], query.shape[1]), math.log(max(1, key.shape[1])), jnp.float32)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _gradients(**arguments, cotangents=cotangents)
    return backward_of_xla(arguments, _lse(arguments["query"], arguments["key"]), cotangents[0])


ATTENTION = OpSpec(
    name="attention",
    function=attention,
    reference=attention_reference,
    implementations=("mosaic", "xla"),
    differentiable=("query", "key", "value", "bias"),
    batched=("query", "key", "value"),
    arg_specs=ARG_SPECS,
    forward_traffic=forward_traffic,
    backward_traffic=backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=flops,
    problem=lambda arguments: known(_described(arguments)),
    tuned_phases=("forward", "backward"),
)
