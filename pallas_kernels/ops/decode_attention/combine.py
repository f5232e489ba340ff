"""Puts the parts of sequences together: a small kernel, a warpgroup a row."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings

LANES = 128


def combine(
    partial: jax.Array,
    statistics: jax.Array,
    *,
    tokens: int,
    group: int,
    head_size: int,
    factor: float,
    dtype: jnp.dtype,
) -> jax.Array:
    """Returns (B, tokens, heads, head_size) of `dtype`; zeros where no key was seen.

    partial: (parts, B, K, rows, head size rounded up to 128) float32, sums of weighted values. statistics: (parts, 2,
    B, K, at least rows) float32, maxima of scores and sums of weights. Row t * group + g is of token t and the group's
    head g. factor: from a difference of scores to the exponent of two.
    """
    parts, batch, heads, _, width = partial.shape

    def decode_attention_combine(partial_ref, statistics_ref, out_ref, *buffer):
        sequence, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        place = (sequence, head, row)
        result_ref = out_ref.at[sequence, row // group, head * group + lax.rem(row, group)]
        values = [plgpu.load(partial_ref.at[(part, *place)], optimized=False) for part in range(parts)]
        maxima = [statistics_ref[(part, 0, *place)] for part in range(parts)]
        totals = [statistics_ref[(part, 1, *place)] for part in range(parts)]
        highest = functools.reduce(jnp.maximum, maxima)
        shrinks = [jnp.exp2((maximum - highest) * factor) for maximum in maxima]
        total = sum(shrink * part for shrink, part in zip(shrinks, totals, strict=True))
        inverse = 1 / jnp.where(total == 0, 1.0, total)
        result = (sum(value * shrink for value, shrink in zip(values, shrinks, strict=True)) * inverse).astype(dtype)
        if not buffer:
            result_ref[...] = result
            return
        buffer[0][...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer[0].at[pl.ds(0, head_size)], result_ref)
        plgpu.wait_smem_to_gmem(0)

    return settings.kernel(
        decode_attention_combine,
        out_type=jax.ShapeDtypeStruct((batch, tokens, heads * group, head_size), dtype),
        grid=(tokens * group, heads, batch),
        grid_names=("row", "head", "batch"),
        scratch_types=() if width == head_size else (plgpu.SMEM((width,), dtype),),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(partial, statistics)
