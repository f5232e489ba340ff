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

_MOST_LINES = 256
"""That TMA loads at once."""


@dataclass(frozen=True, kw_only=True)
class RowNorm:
    """Rows divided by the root of their mean square plus `epsilon`, then multiplied by `scale`.

    scale: (K,), any floating dtype of at most 32 bits, or None.
    """

    epsilon: float
    scale: jax.Array | None = None

    def operands(self, problem: Problem) -> dict[str, jax.Array]:
        """The scale as the kernel reads it: up to the end of the last step, in lines of 64."""
        scale = padded_vector(self.scale, problem.steps * problem.config.splits * problem.config.depth)
        return {} if scale is None else {"norm_scale": scale.reshape(-1, GROUP)}

    def scratch_types(self, problem: Problem) -> dict[str, Any]:
        """Of a block's share of the scale, and its barrier: from device memory, a step would wait for it longer than
        for all else that the norm does."""
        if self.scale is None:
            return {}
        lines = problem.steps * problem.config.depth // GROUP
        barrier = plgpu.Barrier(num_arrivals=-(-lines // _MOST_LINES))
        return {"scale": plgpu.SMEM((lines, GROUP), self.scale.dtype), "here": barrier}

    def load(self, refs: Mapping[str, Any], scratch: Mapping[str, Any], rank: jax.Array, warpgroup: jax.Array) -> None:
        """Has the first warpgroup send for the scale."""
        if self.scale is None:
            return
        lines = scratch["scale"].shape[0]

        @pl.when(warpgroup == 0)
        def _():
            for start in range(0, lines, _MOST_LINES):
                count = min(_MOST_LINES, lines - start)
                place = refs["norm_scale"].at[pl.ds(rank * lines + start, count)]
                plgpu.copy_gmem_to_smem(place, scratch["scale"].at[pl.ds(start, count)], scratch["here"])

    def wait(self, scratch: Mapping[str, Any]) -> None:
        """Until it is there, before a warpgroup's first step."""
        if self.scale is not None:
            plgpu.barrier_wait(scratch["here"])

    def scales(self, problem: Problem, scratch: Mapping[str, Any], step: jax.Array) -> list[jax.Array] | None:
        """Those of the columns of a step of the block's share, 64 at a time."""
        if self.scale is None:
            return None
        lines = problem.config.depth // GROUP
        layout = plgpu.Layout.WGMMA.reduce(1)
        places = [scratch["scale"].at[step * lines + i] for i in range(lines)]
        return [plgpu.load(place, layout=layout, optimized=False) for place in places]

    def factors(self, problem: Problem, squares: jax.Array) -> jax.Array:
        """What to multiply products by, (64, tokens) like them. squares: of all x, as `scaled` adds them up."""
        mean = jnp.sum(squares, axis=0) * (1.0 / problem.k)
        return lax.broadcast_in_dim(lax.rsqrt(mean + self.epsilon), squares.shape, (1,))


def no_squares(problem: Problem) -> jax.Array:
    """What `scaled` adds to first."""
    return plgpu.layout_cast(jnp.zeros((GROUP, problem.tokens), jnp.float32), plgpu.Layout.WGMMA)


def scaled(problem: Problem, x: Any, scales: list[jax.Array] | None, squares: jax.Array) -> jax.Array:
    """Multiplies a step's x (tokens, depth) by scales where it lies; returns squares plus its own, column by column.

    All is read before the first is written, and squared when the tensor cores may already read it: a write waits for
    all the warpgroup's threads.
    """
    places = [pl.ds(start, GROUP) for start in range(0, problem.config.depth, GROUP)]
    refs = [x.at[slice(None), place].transpose((1, 0)) for place in places]
    values = [plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False) for ref in refs]
    if scales is not None:
        # Products of 16-bit values of one dtype are rounded once, as those in float32 are.
        dtype = problem.dtype if scales[0].dtype == problem.dtype else jnp.float32
        for ref, value, scale in zip(refs, values, scales, strict=True):
            wide = lax.broadcast_in_dim(scale.astype(dtype), value.shape, (0,))
            ref[...] = (value.astype(dtype) * wide).astype(problem.dtype)
        plgpu.commit_smem()
    for value in values:
        wide = value.astype(jnp.float32)
        squares = squares + wide * wide
    return squares
