"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.rope.heads import rope_rotate
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.ops.rope.tables import check_tables, rotating, row_tables
from pallas_kernels.primitives.checks import (
    as_arrays,
    check_floating,
    optional_arrays,
    positive_number,
    static_flag,
    static_integer,
)
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike

HEAD_SIZES = (16, 32, 64, 128, 256, 512)


def _dimensions(arguments: Mapping[str, Any]) -> str:
    heads = "h" if arguments["key"] is None else "(g r)"
    tables = "t !c | b t c | b t u c"
    arrays = f"query: b t {heads} !d, key: b t g d, positions: t | b t, cos: {tables}, sin: {tables}"
    return f"{arrays} -> b t {heads} d, b t g d"


@operation(_dimensions)
def rope(
    query: jax.Array,
    key: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    rotated: int | None = None,
    theta: float = 10000.0,
    interleaved: bool = False,
    implementation: Implementation = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Rotates pairs of query and key columns by angles of their tokens: of positions, or of tables.

    Equivalent to this, for each head, in float32 between the casts, with r = `rotated`:

        angle = positions[..., None] * theta ** (-arange(r / 2) / (r / 2))
        cos, sin = cos(angle), sin(angle)                      # or the tables
        first, second = x[..., : r // 2], x[..., r // 2 : r]     # interleaved: x[..., 0:r:2], x[..., 1:r:2]
        y = first * cos - second * sin, second * cos + first * sin     # in the same places
        y[..., r:] = x[..., r:]

    Args:
        query: (batch, tokens, query heads, head size), bfloat16, float16 or float32 (float64 with "xla").
        key: (batch, tokens, key heads, head size), of query's dtype; or None.
        positions: (tokens,) or (batch, tokens), integers that fit into int32; or None with tables.
        cos, sin: cosines and sines, (tokens, columns), (batch, tokens, columns) or (batch, tokens, 1, columns), or a
            shape that broadcasts to that, any floating dtype. Columns are `rotated` / 2, one a pair, or `rotated`, one
            for each column of x. So angles may be scaled for long contexts, or belong to positions of several axes. XLA
            computes the gradients of a call whose tables are differentiated.
        rotated: the number of columns that are rotated, the first ones of each head; None for all.
        theta: the base of the frequencies of positions, a positive Python number.
        interleaved: True: columns 2i and 2i + 1 of a head form a pair (GPT-J). False: columns i and i + `rotated` / 2
            do (GPT-NeoX, Llama).
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Angles of positions
            are exact for all of them. `rotated` must be a power of two, from 16 to 512, that divides the head size.
            "xla": always runs; its angles of positions are float32.
            None: "mosaic" if it can run, for at least 4 tokens; else "xla".

    Returns:
        The rotated query and key; without a key only the query.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    https://arxiv.org/abs/2104.09864
    """
    (query,) = as_arrays("rope", query=query)
    key, positions, cos, sin = optional_arrays("rope", key=key, positions=positions, cos=cos, sin=sin)
    theta = positive_number("rope", "theta", theta)
    interleaved = static_flag("rope", "interleaved", interleaved)
    _check(query, key)
    size = query.shape[-1] if rotated is None else static_integer("rope", "rotated", rotated)
    if size % 2 or not 2 <= size <= query.shape[-1]:
        raise ValueError(f"rope: rotated must be even, from 2 to the head size {query.shape[-1]}, got {size}.")
    _check_angles(query.shape[:2], positions, cos, sin, size)
    support = {"mosaic": partial(mosaic_unsupported, query, size), "xla": lambda: None}
    has_tile = query.shape[0] * query.shape[1] >= 4  # fewer tokens are padded, which takes launches
    chosen = choose("rope", implementation, support, preferred=("mosaic",) if has_tile else ())
    form = {"rotated": size, "interleaved": interleaved}
    if chosen == "xla" or query.size == 0 or (key is not None and key.size == 0):
        return rope_reference(query, key, positions, cos=cos, sin=sin, theta=theta, **form)
    tables = row_tables(positions, cos, sin, query.shape[:2], size=size, theta=theta, repeats=True)

    def forward(arrays, tables):
        return rope_rotate(arrays, *tables, **form), tables

    def backward(tables, cotangents):
        return rope_rotate(cotangents, *tables, **form, inverse=True)

    def reference(arrays, tables):
        by_token = [table.reshape(-1, query.shape[1], table.shape[-1]) for table in tables]
        return tuple(rope_reference(each, cos=by_token[0], sin=by_token[1], **form) for each in arrays)

    arrays = (query,) if key is None else (query, key)
    results = rotating(forward, backward, reference)(*varying_alike((arrays, tables)))
    return results[0] if key is None else results


def mosaic_unsupported(query: jax.Array, rotated: int) -> str | None:
    """Returns why the Mosaic GPU kernel cannot take these arguments here, or None if it can."""
    if reason := dtypes_unsupported(query=query):
        return reason
    if rotated not in HEAD_SIZES or query.shape[-1] % rotated:
        width = f"{query.shape[-1]} wide" + f", of which {rotated} are rotated" * (rotated != query.shape[-1])
        return f"heads are {width}; the kernel rotates {', '.join(map(str, HEAD_SIZES))} that divide the head size"
    return mosaic_gpu_unsupported()


def _check(query: jax.Array, key: jax.Array | None) -> None:
    check_floating("rope", query=query)
    if query.ndim != 4 or query.shape[-1] % 2 or not query.shape[-1]:
        raise ValueError(f"rope: query must be (batch, tokens, heads, even head size), got {query.shape}.")
    batch, tokens, _, head_size = query.shape
    if key is None:
        return
    if key.ndim != 4 or (*key.shape[:2], key.shape[3]) != (batch, tokens, head_size) or key.dtype != query.dtype:
        raise ValueError(
            f"rope: key must be {query.dtype.name}[{batch}, {tokens}, key heads, {head_size}] as query is, got "
            f"{key.dtype.name}{list(key.shape)}."
        )


def _check_angles(
    shape: tuple[int, ...], positions: jax.Array | None, cos: jax.Array | None, sin: jax.Array | None, rotated: int
) -> None:
    """Checks positions or tables for heads of (batch, tokens)."""
    if (cos is None) != (sin is None) or (positions is None) != (cos is not None):
        given = [name for name, each in (("positions", positions), ("cos", cos), ("sin", sin)) if each is not None]
        raise TypeError(f"rope: pass positions, or both cos and sin; got {' and '.join(given) or 'none of them'}.")
    if cos is not None and sin is not None:
        check_tables("rope", cos, sin, shape, rotated)
    if positions is None:
        return
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"rope: positions must be integers, got {positions.dtype.name}.")
    if positions.shape not in (shape[1:], shape):
        raise ValueError(
            f"rope: positions must be one a token, ({shape[1]},) or ({shape[0]}, {shape[1]}), got {positions.shape}."
        )
