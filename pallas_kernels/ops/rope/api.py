"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernel."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.rope.mosaic_gpu import rope_rotate
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.primitives.checks import as_arrays, positive_number, static_flag
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike
from pallas_kernels.primitives.settings import usual_promotion

HEAD_SIZES = (16, 32, 64, 128, 256, 512)


@usual_promotion
def rope(
    query: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotates pairs of query and key columns by angles proportional to their tokens' positions.

    Equivalent to this, for each head, in float32 between the casts:

        angle = positions[..., None] * theta ** (-arange(head_size / 2) / (head_size / 2))
        first, second = x[..., : head_size // 2], x[..., head_size // 2 :]     # interleaved: x[..., 0::2], x[..., 1::2]
        y = first * cos(angle) - second * sin(angle), second * cos(angle) + first * sin(angle)     # in the same places

    Args:
        query: (batch, tokens, query heads, head size), bfloat16, float16 or float32 (float64 with "xla").
        key: (batch, tokens, key heads, head size), of query's dtype.
        positions: (tokens,) or (batch, tokens), integers that fit into int32.
        theta: the base of the frequencies, a positive Python number.
        interleaved: True: columns 2i and 2i + 1 of a head form a pair (GPT-J). False: columns i and i + head size / 2
            do (GPT-NeoX, Llama).
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": one Mosaic GPU kernel, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`. Its angles are exact
            for all positions. Head sizes must be powers of two, from 16 to 512.
            "xla": always runs; its angles are float32.
            None: "mosaic" if it can run, for at least 4 tokens; else "xla".

    Returns:
        The rotated query and key.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    https://arxiv.org/abs/2104.09864
    """
    query, key, positions = as_arrays("rope", query=query, key=key, positions=positions)
    theta = positive_number("rope", "theta", theta)
    interleaved = static_flag("rope", "interleaved", interleaved)
    _check(query, key, positions)
    support = {"mosaic": partial(mosaic_unsupported, query), "xla": lambda: None}
    has_tile = query.shape[0] * query.shape[1] >= 4  # fewer tokens are padded, which takes launches
    chosen = choose("rope", implementation, support, preferred=("mosaic",) if has_tile else ())
    if chosen == "xla" or query.size == 0 or key.size == 0:
        return rope_reference(query, key, positions, theta=theta, interleaved=interleaved)
    operands = varying_alike((query, key, positions))
    rotated: tuple[jax.Array, jax.Array] = _rope_mosaic(theta, interleaved, *operands)  # pyright: ignore
    return rotated


def mosaic_unsupported(query: jax.Array) -> str | None:
    """Returns why the Mosaic GPU kernel cannot take these arguments here, or None if it can."""
    if reason := dtypes_unsupported(query=query):
        return reason
    if query.shape[-1] not in HEAD_SIZES:
        return f"heads are {query.shape[-1]} wide; the kernel rotates heads of {', '.join(map(str, HEAD_SIZES))}"
    return mosaic_gpu_unsupported()


def _check(query: jax.Array, key: jax.Array, positions: jax.Array) -> None:
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(f"rope: query must be floating, got {query.dtype.name}; cast it first.")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"rope: positions must be integers, got {positions.dtype.name}.")
    if query.ndim != 4 or query.shape[-1] % 2 or not query.shape[-1]:
        raise ValueError(f"rope: query must be (batch, tokens, heads, even head size), got {query.shape}.")
    batch, tokens, _, head_size = query.shape
    if key.ndim != 4 or (*key.shape[:2], key.shape[3]) != (batch, tokens, head_size) or key.dtype != query.dtype:
        raise ValueError(
            f"rope: key must be {query.dtype.name}[{batch}, {tokens}, key heads, {head_size}] as query is, got "
            f"{key.dtype.name}{list(key.shape)}."
        )
    if positions.shape not in ((tokens,), (batch, tokens)):
        raise ValueError(
            f"rope: positions must be one a token, ({tokens},) or ({batch}, {tokens}), got {positions.shape}."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rope_mosaic(
    theta: float, interleaved: bool, query: jax.Array, key: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rope_rotate(query, key, positions.astype(jnp.int32), theta=theta, interleaved=interleaved)


def _mosaic_fwd(theta, interleaved, query, key, positions):
    positions = positions.astype(jnp.int32)
    return rope_rotate(query, key, positions, theta=theta, interleaved=interleaved), positions


def _mosaic_bwd(theta, interleaved, positions, cotangents):
    dquery, dkey = cotangents
    gradients = rope_rotate(dquery, dkey, positions, theta=theta, interleaved=interleaved, inverse=True)
    return *gradients, None


_rope_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
