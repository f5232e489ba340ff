"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.attention.arguments import Options, Segments, Window, checked
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.cudnn import cudnn_attention, cudnn_unsupported
from pallas_kernels.ops.attention.few_queries import decoded, decodes
from pallas_kernels.ops.attention.forward.config import preferred
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import HEAD_SIZES, Extras, Problem, averaged, extras_of, facts_of, tiles_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.primitives.checks import as_arrays, optional_arrays
from pallas_kernels.primitives.exponents import LOWEST_SCORE
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.settings import usual_promotion

MOSAIC_DTYPES = ("bfloat16", "float16")


@operation(
    "query: b !t (g r) !d, key: b !s g d, value: b s g d, bias: b (g r) t s, mask: b (g r) t s, "
    "dropout_mask: b (g r) t s, dropout_key: key of b (g r) _, "
    "segment_ids: b t, segment_ids.0: b t, segment_ids.1: b s, sinks: (g r) -> b t (g r) d, b (g r) t"
)
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
    dropout_mask: jax.Array | None = None,
    mask_value: float | None = None,
    sinks: jax.Array | None = None,
    deterministic: bool = True,
    return_residuals: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes scaled dot-product attention without writing scores to memory.

    Equivalent to this, for each head, in float32 between the casts:

        score = scale * query @ key.T
        score = softcap * tanh(score / softcap) + bias      # each only if given
        score = where(seen, score, mask_value)              # mask, is_causal, window and segment_ids together
        weight = softmax([score, sinks[head]])[:-1]         # see mask_value for a query that sees no key
        weight = where(keep, weight / (1 - dropout_rate), 0)
        out = weight.astype(dtype) @ value

    Args:
        query: (batch, queries, heads, head size), floating.
        key: (batch, keys, key heads, head size), of query's dtype. The number of heads is a multiple of the number of
            key heads; query head n uses key head n // (heads / key heads).
        value: like key, but its head size may be another, which the output has, too.
        bias: floating, broadcastable to (batch, heads, queries, keys), or None. It has a gradient.
        mask: boolean (True keeps), broadcastable to (batch, heads, queries, keys), or None.
        is_causal: query i sees only keys j <= i, also if there are more keys than queries.
        scale: a Python number; None: 1 / sqrt(head size).
        window: a pair (left, right) of integers: query i sees only keys i - left <= j <= i + right. An integer stands
            for both. None in place of either, or of the pair: no bound.
        segment_ids: integers (batch, length), or a pair of (batch, queries) and (batch, keys): queries see only keys of
            their own segment. "mosaic" skips tiles of keys that have other segments only.
        softcap: a positive finite Python number, or None.
        dropout_rate: a Python number, 0 <= rate < 1.
        dropout_key: one key from `jax.random.key` or `jax.random.PRNGKey`; it or dropout_mask is needed if the rate is
            above 0. The mask depends only on the key and the element's position, and has the nearest multiple of 2**-15
            as its rate. Members of a `jax.vmap`, and devices of a `jax.shard_map`, that share a key get the same mask.
        dropout_mask: the weights to keep, in place of dropout_key: boolean (True keeps), broadcastable to
            (batch, heads, queries, keys), usually `jax.random.bernoulli(key, 1 - dropout_rate, shape)`. "mosaic" keeps
            a bit for each weight for the gradient, as with a key.
        mask_value: the score of hidden keys, a Python number below 0 such as -1e9. A query that sees no key then
            averages all values; hidden scores have no gradient. None: -inf, and such a query has weights of zero.
            "mosaic" takes scores to be above -1e30, and no seen one to be near a mask value below -1e5. It visits all
            tiles, unless the value is below -1e30, or out of reach of float16 or softcap, so that what is skipped has
            no weight beside a key that is seen; and each query sees one, or XLA gives the average to those that see
            none: with 512 keys or more, and neither bias nor dropout.
        sinks: floating (heads,), or None. A score of each head that takes its share of the weights and has no value: a
            query that sees no key then has weights of zero, and its log-sum-exp is the sink. It has a gradient.
        deterministic: whether gradients have the same bits in every run. False: a long backward pass of "mosaic" adds
            the parts of query's gradient in any order, so that its rounding may differ between runs; the other
            gradients do not depend on that order. On an H100, under a causal mask from 8192 queries on, both passes
            took 8 to 14 % less time with head size 64 and 1 to 2 % less with 128. "xla" and "cudnn" ignore it: JAX has
            no option for the order of cuDNN's sums.
        return_residuals: whether to return the scores' log-sum-exp, too.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; bfloat16 and float16;
            head sizes that are multiples of 8, up to 256. Tiles have 64, 96, 128, 160, 192 or 256 features, with zeros
            beyond a smaller head. Without a gradient, a few queries that see all keys run in `decode_attention`'s
            kernel. With few keys, the gradients of key and value are rounded for each query head, as in cuDNN, before
            the sum over the heads of a group.
            "cudnn": through `jax.nn.dot_product_attention`, for NVIDIA GPUs; no mask, mask_value, sinks, segments,
            softcap, dropout, residuals or another head size of value. Gradients may differ between runs. At 4096
            queries they took longer than those of "mosaic", which needed 11 % less time with a causal mask and 3 % less
            without.
            "xla": always runs.
            None: "mosaic" if it can run, else "xla". Also "xla" for one token that sees itself, for heads of fewer than
            32 features, and for one query that does not see all keys, with fewer than 32 key heads of all batch
            entries. For NVIDIA's other GPUs, pass ("mosaic", "cudnn", "xla").

    Returns:
        out, (batch, queries, heads, value's head size), of query's dtype. With `return_residuals`, the pair (out, lse):
        lse (batch, heads, queries) float32, the natural logarithm, -inf for a query that sees no key; with mask_value,
        mask_value + log(keys).

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.
    """
    query, key, value = as_arrays("attention", query=query, key=key, value=value)
    bias, mask, dropout_mask, sinks = optional_arrays(
        "attention", bias=bias, mask=mask, dropout_mask=dropout_mask, sinks=sinks
    )
    given = Options(
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        scale=scale,
        window=window,
        segment_ids=segment_ids,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dropout_mask=dropout_mask,
        mask_value=mask_value,
        sinks=sinks,
        deterministic=deterministic,
    )
    options = checked(query, key, value, given)
    is_empty = query.size == 0 or key.size == 0
    problem = None if is_empty else facts_of(query, key, value, options)
    support = {
        "mosaic": partial(mosaic_unsupported, query, value),
        "cudnn": partial(cudnn_unsupported, query, key, value, options, return_residuals),
        "xla": lambda: None,
    }
    untuned = () if problem is None else partial(preferred, problem, query.shape[3])
    chosen = choose("attention", implementation, support, preferred=untuned)
    if chosen == "xla" or problem is None:
        return attention_reference(query, key, value, return_residuals=return_residuals, **vars(options))
    if chosen == "cudnn":
        return cudnn_attention(query, key, value, options)
    operands = varying_alike((query, key, value, extras_of(problem, options)))
    out, lse = _mosaic(problem, return_residuals, *operands)  # pyright: ignore[reportGeneralTypeIssues]
    out, lse = averaged(problem, out, lse, value)
    if not return_residuals:
        return out
    if problem.mask_value is not None and problem.hidden == LOWEST_SCORE:
        lse = jnp.where(lse < LOWEST_SCORE / 2, problem.mask_value, lse)
    return out, lse


def mosaic_unsupported(query: jax.Array, value: jax.Array) -> str | None:
    """Why the Mosaic GPU kernels cannot take this query and value here, or None where they can."""
    if query.dtype.name not in MOSAIC_DTYPES:
        return f"query is {query.dtype.name}, the kernels take {' and '.join(MOSAIC_DTYPES)}"
    sizes = query.shape[3], value.shape[3]
    if tiles_of(*sizes) is None:
        odd = next((size for size in sizes if size % 8), max(sizes))
        return f"the head size is {odd}, the kernels take multiples of 8 up to {max(HEAD_SIZES)}"
    return mosaic_gpu_unsupported()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mosaic(
    problem: Problem, returns_lse: bool, query: jax.Array, key: jax.Array, value: jax.Array, extras: Extras
) -> tuple[jax.Array, jax.Array]:
    """The output and log-sum-exp."""
    if decodes(problem) and not returns_lse:
        # The caller does not read lse.
        lse = jnp.zeros((problem.batch, problem.heads, problem.masking.queries), jnp.float32)
        return decoded(query, key, value, problem=problem), lse
    return attention_forward(query, key, value, extras, problem=problem)


def _mosaic_fwd(problem, returns_lse, query, key, value, extras):
    del returns_lse
    out, lse = attention_forward(query, key, value, extras, problem=problem)
    return (out, lse), (query, key, value, out, lse, extras)


@usual_promotion()
def _mosaic_bwd(problem, returns_lse, saved, cotangents):
    query, key, value, out, lse, extras = saved
    dout, dlse = cotangents
    dlse = dlse if returns_lse else None
    return attention_backward(query, key, value, out, lse, dout, extras, problem=problem, dlse=dlse)


_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
