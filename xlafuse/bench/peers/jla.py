"""Mosaic GPU kernels of jax-linear-attention (`jla`): attention, SwiGLU's products and the loss of a model's head.

Attention is causal, with windows and segments. Weights are put into the kernels' layout outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jla.ops import cross_entropy  # pyright: ignore[reportMissingImports]
from jla.ops.mosaic_gpu.attention import flash_attention  # pyright: ignore[reportMissingImports]
from jla.ops.mosaic_gpu.fused_gemm import interleave, swiglu_gate_up  # pyright: ignore[reportMissingImports]

from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers import is_joint
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate

_TILE_ROWS = 128
"""The kernel takes multiples of this many rows."""


def attention(query, key, value, *, is_causal=False, window=None, segment_ids=None, **others):
    """Runs `pallas_kernels.attention` by jla."""
    unknown = [name for name, wanted in others.items() if name != "dropout_key" and wanted]
    if unknown or not is_causal or query.shape[3] not in (64, 128):
        raise NotImplementedError("jla's attention is causal, for head sizes 64 and 128, without bias or dropout")
    left = None if window is None else window[0]
    size = None if left is None else left + 1
    return flash_attention(query, key, value, segment_ids=segment_ids, sliding_window=size)


def _gated_linear(phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    first = plain(cases[0].arguments)
    others = set(first) - {"x", "w_gate", "w_up", "activation"}
    rows = first["x"].size // first["x"].shape[-1]
    if phase != "forward" or others or first["activation"] != "silu" or rows % _TILE_ROWS:
        raise NotImplementedError("jla's products with SwiGLU are compared forward, without a norm, with whole tiles")

    def prepared(case: Case):
        arguments = case.arguments
        weights = jax.jit(lambda gate, up: interleave(jnp.stack((gate, up), 1)))(arguments["w_gate"], arguments["w_up"])
        return arguments["x"].reshape(rows, -1), weights

    return _jitted(lambda x, w: (swiglu_gate_up(x, w, save_gu=False),), [prepared(case) for case in cases])


def _linear_cross_entropy(phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    first = plain(cases[0].arguments)
    if first.get("reduction") != "mean" or set(first) - {"hidden", "w", "labels", "reduction"}:
        raise NotImplementedError("jla's loss is compared as a mean, without options")

    def loss(hidden, w, labels):
        found = cross_entropy.linear_cross_entropy(hidden, w, labels, ignore_index=-1, impl="mosaic_gpu")
        return (_mean(found.loss_sum, labels),)

    def both(hidden, w, labels):
        def objective(hidden, w):
            found = cross_entropy.linear_cross_entropy_objective(hidden, w, labels, ignore_index=-1, impl="mosaic_gpu")
            return _mean(found.objective_sum, labels)

        loss, (dhidden, dw) = jax.value_and_grad(objective, argnums=(0, 1))(hidden, w)
        return loss, dhidden, dw

    def prepared(case: Case):
        arguments = case.arguments
        hidden = arguments["hidden"]
        return hidden.reshape(-1, hidden.shape[-1]), arguments["w"].T.copy(), arguments["labels"].reshape(-1)

    if phase == "forward":
        return _jitted(loss, [prepared(case) for case in cases])
    if not is_joint(cases[0]):
        raise NotImplementedError("jla's gradient is compared together with its loss")
    candidate, results = _jitted(both, [prepared(case) for case in cases])
    _, dhidden, dw = results.values()
    named = {"gradient of hidden": dhidden.reshape(first["hidden"].shape), "gradient of w": dw.T}
    return candidate, named


def _mean(total: jax.Array, labels: jax.Array) -> jax.Array:
    return total / jnp.maximum(1, jnp.sum(labels != -1))


def _jitted(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> tuple[Candidate, dict[str, Any]]:
    call = jax.jit(function)
    results = call(*inputs[0])
    named = {f"output {i}": result for i, result in enumerate(results)}
    return Candidate(name="jla", kind="peer", call=call, inputs=inputs), named


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    products = {"gated_linear": _gated_linear, "linear_cross_entropy": _linear_cross_entropy}
    if operation in products:
        return products[operation](phase, cases)
    return attention_candidate(name, attention, operation, phase, cases)
