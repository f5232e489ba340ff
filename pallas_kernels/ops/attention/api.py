"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.cudnn import cudnn_attention, cudnn_unsupported
from pallas_kernels.ops.attention.few_queries import few_queries_forward, has_few_queries, packed_forward, packs_forward
from pallas_kernels.ops.attention.forward.config import preferred
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import (
    HEAD_SIZES,
    Extras,
    Problem,
    Segments,
    Window,
    check,
    problem_of,
    size_taken,
    widened,
)
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays, static_flag
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_like
from pallas_kernels.primitives.settings import usual_promotion

MOSAIC_DTYPES = ("bfloat16", "float16")


@usual_promotion
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    segment_ids: Segments = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_residuals: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention, of which no scores reach memory.

    The same as, for each head, in float32 between the casts,

        score = scale * query @ key.T
        score = softcap * tanh(score / softcap) + bias      # each where given
        score = where(seen, score, -inf)                    # mask, is_causal, window and segment_ids together
        weight = softmax(score)                             # a query that sees no key has weights of zero
        weight = where(keep, weight / (1 - dropout_rate), 0)
        out = weight.astype(dtype) @ value

    Args:
        query: (batch, queries, heads, head size), floating.
        key: (batch, keys, key heads, head size), of query's dtype; heads are a multiple of key heads, and query head n
            has key head n // (heads / key heads).
        value: like key.
        bias: floating, broadcastable to (batch, heads, queries, keys). It has a gradient.
        mask: boolean (True keeps), likewise.
        is_causal: query i sees keys j <= i, also where there are more keys than queries.
        scale: a Python number; None: 1 / sqrt(head size).
        window: query i sees keys i - left <= j <= i + right; an integer for both, or a tuple (left, right), None: no
            bound.
        segment_ids: integers (batch, length), or a pair, (batch, queries) and (batch, keys): queries see keys of their
            own segment. Where tiles of keys have other segments, "mosaic" does not compute them.
        softcap: a positive finite Python number, or None.
        dropout_rate: a Python number, 0 <= rate < 1; what is dropped is its nearest multiple of 2**-15. The mask
            depends on the key and the element's place alone.
        dropout_key: one key of `jax.random.key` or `jax.random.PRNGKey`; needed where the rate is above zero. Members
            of a `jax.vmap` and devices of a shard_map that share a key have the same mask.
        return_residuals: whether to return the scores' log-sum-exp too.
        implementation: "mosaic" (one Mosaic GPU kernel; Hopper GPUs, or `plgpu.force_gpu_interpret_mode`; bfloat16 and
            float16, head sizes 64, 96, 128, 192 and 256, and others with zeros up to the next of them), "cudnn"
            (through `jax.nn.dot_product_attention`; NVIDIA GPUs; no mask, segments, softcap, dropout or residuals),
            "xla", a sequence of them in order of preference, or None: "mosaic" where it runs, else "xla"; "xla" too for
            one token that sees itself, and for heads of other sizes with few features or scores, whose zeros are
            expected to take longer than they save. For NVIDIA's other GPUs name ("mosaic", "cudnn", "xla"). Where no
            gradient is asked for, "mosaic" computes a few queries that see all keys by `decode_attention`'s kernel. Its
            gradient gives the same bits each time, which cuDNN's does not; at 4096 queries it took 11 % less time than
            that under a causal mask and 3 % less without. Where there are few keys, it rounds the gradients of key and
            value once for each query head, as cuDNN does, before they are summed over the heads of a group.

    Returns:
        out, like query; with `return_residuals` (out, lse), lse (batch, heads, queries) float32, the natural logarithm,
        -inf for a query that sees no key.

    Raises:
        TypeError, ValueError: arguments that do not belong together, or an unknown implementation.
        NotImplementedError: the requested implementation cannot run, with the reason.
    """
    query, key, value = as_arrays("attention", query=query, key=key, value=value)
    bias, mask = optional_arrays("attention", bias=bias, mask=mask)
    is_causal = static_flag("attention", "is_causal", is_causal)
    masked = {"bias": bias, "mask": mask, "window": window, "segment_ids": segment_ids, "softcap": softcap}
    masked |= {"scale": scale, "dropout_rate": dropout_rate, "dropout_key": dropout_key}
    check(query, key, value, **masked)
    # A float of NumPy would make float64 of what it multiplies, under jax_enable_x64.
    scale, softcap = (None if number is None else float(number) for number in (scale, softcap))
    masked |= {"scale": scale, "softcap": softcap, "dropout_rate": float(dropout_rate), "is_causal": is_causal}
    support = {
        "mosaic": partial(mosaic_unsupported, query, key),
        "cudnn": partial(cudnn_unsupported, query, key, value, **masked, return_residuals=return_residuals),
        "xla": lambda: None,
    }
    if query.size == 0 or key.size == 0:
        choose("attention", implementation, support)
        return attention_reference(query, key, value, **masked, return_residuals=return_residuals)
    problem, extras = problem_of(query, key, **masked)
    chosen = choose("attention", implementation, support, preferred=partial(preferred, problem))
    if chosen == "xla":
        return attention_reference(query, key, value, **masked, return_residuals=return_residuals)
    if chosen == "cudnn":
        return cudnn_attention(query, key, value, bias=bias, is_causal=is_causal, scale=scale, window=window)
    size = problem.head_size
    problem, (query, key, value) = widened(problem, query, key, value)
    operands = jax.tree.leaves((query, key, value, extras))
    # Marked as varying like the others, so that shard_map sums gradients over the devices that those are spread over.
    query, key, value = (varying_like(array, *operands) for array in (query, key, value))
    if extras.dense is not None:
        extras = replace(extras, dense=varying_like(extras.dense, *operands))
    out, lse = _mosaic(  # pyright: ignore[reportGeneralTypeIssues]: custom_vjp hides what it returns
        problem, return_residuals, query, key, value, extras
    )
    out = out if out.shape[3] == size else out[..., :size]
    return (out, lse) if return_residuals else out


def mosaic_unsupported(query: jax.Array, key: jax.Array) -> str | None:
    """Why the Mosaic GPU kernels cannot take these arguments here, or None where they can."""
    del key
    if query.dtype.name not in MOSAIC_DTYPES:
        return f"query is {query.dtype.name}, the kernels take {' and '.join(MOSAIC_DTYPES)}"
    if size_taken(query.shape[3]) is None:
        return f"the head size is {query.shape[3]}, the kernels take {max(HEAD_SIZES)} at most"
    return mosaic_gpu_unsupported()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mosaic(
    problem: Problem,
    returns_lse: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
) -> tuple[jax.Array, jax.Array]:
    if not returns_lse and has_few_queries(problem):
        out = few_queries_forward(query, key, value, problem=problem)
        # Nobody reads it.
        return out, jnp.zeros((problem.batch, problem.heads, problem.masking.queries), jnp.float32)
    return _mosaic_fwd(problem, returns_lse, query, key, value, extras)[0]


def _mosaic_fwd(problem, returns_lse, query, key, value, extras):
    # The backward pass wants 0 of a query that sees no key; the caller, -inf.
    lse_of_nothing = -math.inf if returns_lse else 0.0
    if packs_forward(problem):
        out, lse = packed_forward(query, key, value, problem=problem)
    else:
        out, lse = attention_forward(
            query, key, value, extras, problem=problem, lse_of_nothing=lse_of_nothing, pads_lse=not returns_lse
        )
    return (out, lse[:, :, : problem.masking.queries]), (query, key, value, out, lse, extras)


@usual_promotion
def _mosaic_bwd(problem, returns_lse, saved, cotangents):
    query, key, value, out, lse, extras = saved
    dout, dlse = cotangents
    if returns_lse:
        is_empty = lse == -jnp.inf
        lse, dlse = jnp.where(is_empty, 0, lse), jnp.where(is_empty, 0, dlse)
    dquery, dkey, dvalue, ddense = attention_backward(
        query, key, value, out, lse, dout, extras, problem=problem, dlse=dlse if returns_lse else None
    )
    return dquery, dkey, dvalue, Extras(dense=ddense)


_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
