"""A norm of x's rows inside the product: a launch of its own takes a fifth of the product's time.

Every block has all of its rows' columns pass by, a step at a time. A step's part of x is squared and multiplied by the
scale where it lies in shared memory, before the tensor cores read it; the squares' sums then go the way of the
products, to the warpgroup that finishes these, and divide them there. What is rounded is x times its scale, so that
float16 could overflow where the normalised x does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.config import GROUP
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.gemm.operands import padded_vector


@dataclass(frozen=True, kw_only=True)
class RowNorm:
    """Rows divided by the root of their mean square plus `epsilon`, then multiplied by `scale`.

    scale: (K,), any floating dtype of at most 32 bits, or None.
    """

    epsilon: float
    scale: jax.Array | None = None

    def operands(self, problem: Problem) -> dict[str, jax.Array]:
        """The scale as the kernel reads it: up to the end of the last step."""
        scale = padded_vector(self.scale, problem.steps * problem.config.splits * problem.config.depth)
        return {} if scale is None else {"norm_scale": scale}

    def scales(self, problem: Problem, refs: Mapping[str, Any], step: jax.Array) -> list[jax.Array] | None:
        """Those of a step's columns, 64 at a time: sent for a step ahead, since they come from the L2 cache."""
        if self.scale is None:
            return None
        starts = range(0, problem.config.depth, GROUP)
        places = [pl.ds(step * problem.config.depth + start, GROUP) for start in starts]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return [plgpu.load(refs["norm_scale"].at[place], layout=layout, optimized=False) for place in places]

    def factors(self, problem: Problem, squares: jax.Array) -> jax.Array:
        """What to multiply products by, (64, tokens) like them. squares: of all x, as `scaled` adds them up."""
        mean = jnp.sum(squares, axis=0) * (1.0 / problem.k)
        return lax.broadcast_in_dim(lax.rsqrt(mean + self.epsilon), squares.shape, (1,))


def no_squares(problem: Problem) -> jax.Array:
    """What `scaled` adds to first."""
    return plgpu.layout_cast(jnp.zeros((GROUP, problem.tokens), jnp.float32), plgpu.Layout.WGMMA)


def scaled(problem: Problem, x: Any, scales: list[jax.Array] | None, squares: jax.Array) -> jax.Array:
    """Multiplies a step's x (tokens, depth) by scales where it lies; returns squares plus its own, column by column."""
    for i in range(problem.config.depth // GROUP):
        ref = x.at[slice(None), pl.ds(i * GROUP, GROUP)].transpose((1, 0))
        value = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        squares = squares + value * value
        if scales is not None:
            scale = lax.broadcast_in_dim(scales[i].astype(jnp.float32), value.shape, (0,))
            ref[...] = (value * scale).astype(problem.dtype)
    if scales is not None:
        plgpu.commit_smem()
    return squares
