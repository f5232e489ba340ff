"""FlashAttention-3 as a JAX call (flash-attn3-jax), and FlashAttention-4's CuTe kernels (flash-attn-4) from PyTorch.

FlashAttention-4's backward pass adds up the gradient of the query with atomics, or in a fixed order if
"fa4_deterministic". Both libraries align causal masks and windows at the last query and key, we at the first, so that
they are compared only for as many keys as queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pallas_kernels.specs import plain
from pallas_kernels.testing import Case
from xlafuse.bench.peers.jax_attention import attention_candidate
from xlafuse.bench.timing import Candidate

HEAD_SIZES = {"fa3": (128,), "fa4": tuple(range(8, 257, 8)), "fa4_deterministic": tuple(range(8, 257, 8))}
"""The wheel of flash-attn3-jax has kernels for one head size."""


def check(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises NotImplementedError, with the reason, for arguments of `pallas_kernels.attention` that `name` lacks."""
    query, key = arguments["query"], arguments["key"]
    if query.dtype.name not in ("bfloat16", "float16") or query.shape[3] not in HEAD_SIZES[name]:
        raise NotImplementedError(f"{name} has no kernel for {query.dtype.name} and head size {query.shape[3]}")
    sides = bounds(arguments.get("is_causal", False), arguments.get("window"))
    if sides != (None, None) and query.shape[1] != key.shape[1]:
        raise NotImplementedError(f"{name} aligns masks at the last query and key, ours are aligned at the first")


def bounds(is_causal: bool, window: Any) -> tuple[int | None, int | None]:
    """Returns how many keys a query sees on each side of itself; None: all."""
    left, right = window if isinstance(window, tuple) else (window, window)
    return left, 0 if is_causal else right


def fa3(query, key, value, scale=None, is_causal=False, window=None):
    """FlashAttention-3 with the arguments of `pallas_kernels.attention`."""
    from flash_attn3_jax import flash_mha  # pyright: ignore[reportMissingImports]

    sides = bounds(is_causal, window)
    size = tuple(-1 if side is None else side for side in sides)
    return flash_mha(query, key, value, softmax_scale=scale, is_causal=sides == (None, 0), window_size=size)


def fa4(query, key, value, scale=None, is_causal=False, window=None, *, is_ordered=False):
    """FlashAttention-4 with the arguments of `pallas_kernels.attention`; is_ordered: adds dq in a fixed order."""
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    sides = bounds(is_causal, window)
    options = {"causal": sides == (None, 0), "window_size": sides, "deterministic": is_ordered}
    return flash_attn_func(query, key, value, softmax_scale=scale, **options)[:1]


def candidate(name: str, operation: str, phase: str, cases: Sequence[Case]) -> tuple[Candidate, Mapping[str, Any]]:
    """Returns the candidate and its first results; see `xlafuse.bench.peers`."""
    if operation != "attention":
        raise NotImplementedError(f"{name} has no {operation}, only attention")
    check(name, plain(cases[0].arguments))
    if name == "fa3":
        return attention_candidate(name, fa3, operation, phase, cases)
    from xlafuse.bench.peers import tensors  # fa3 runs without PyTorch

    return tensors.candidate(name, phase, partial(fa4, is_ordered=name == "fa4_deterministic"), cases)
