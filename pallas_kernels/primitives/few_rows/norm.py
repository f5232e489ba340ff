"""A norm of x's rows inside the product's launch. A separate launch would take a fifth of the product's time.

Every block reads all columns of its rows, a step at a time. It squares a step's part of x and multiplies it by the
scale in shared memory, before the tensor cores read it. The sums of squares go with the products to the warpgroup that
finishes them, which divides the products there. The kernel rounds x times its scale, not the normalised x. So float16
could overflow where the normalised x would not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.row_tiles import RowTiles
from pallas_kernels.primitives.transposed import GROUP

_MOST_LINES = 256
"""The most lines of 64 columns that TMA loads at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrologueNorm:
    """An RMS norm: divides rows by the root of their mean square plus `epsilon`, then multiplies by `scale`.

    scale: (K,), any floating dtype of at most 32 bits, or None.
    """

    epsilon: float = field(metadata={"static": True})
    scale: jax.Array | None = None

    def operands(self, problem: Problem) -> dict[str, jax.Array]:
        """Returns the scale in the kernel's form: padded to the end of the last step, in lines of 64."""
        scale = padded_vector(self.scale, problem.steps * problem.config.splits * problem.config.depth)
        return {} if scale is None else {"norm_scale": scale.reshape(-1, GROUP)}

    def scratch_types(self, problem: Problem) -> dict[str, Any]:
        """Returns the scratch types of a block's share of the scale and of its barrier.

        Loading the scale from device memory in each step would take longer than all other work of the norm.
        """
        if self.scale is None:
            return {}
        lines = problem.steps * problem.config.depth // GROUP
        barrier = plgpu.Barrier(num_arrivals=-(-lines // _MOST_LINES))
        return {"scale": plgpu.SMEM((lines, GROUP), self.scale.dtype), "here": barrier}

    def load(self, refs: Mapping[str, Any], scratch: Mapping[str, Any], rank: jax.Array, warpgroup: jax.Array) -> None:
        """Starts the TMA copy of the scale; one warpgroup issues it."""
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
        """Waits for the scale; called before a warpgroup's first step."""
        if self.scale is not None:
            plgpu.barrier_wait(scratch["here"])

    def scales(self, problem: Problem, scratch: Mapping[str, Any], step: jax.Array) -> list[jax.Array] | None:
        """Returns the scales of the columns of one step, 64 at a time."""
        if self.scale is None:
            return None
        lines = problem.config.depth // GROUP
        layout = plgpu.Layout.WGMMA.reduce(1)
        places = [scratch["scale"].at[step * lines + i] for i in range(lines)]
        return [plgpu.load(place, layout=layout, optimized=False) for place in places]

    def factors(self, problem: Problem, squares: jax.Array) -> jax.Array:
        """Returns the rows' factors, (64, tokens) like the products. squares: x's squares, as `scaled` sums them."""
        mean = jnp.sum(squares, axis=0) * (1.0 / problem.k)
        return lax.broadcast_in_dim(lax.rsqrt(mean + self.epsilon), squares.shape, (1,))


def no_squares(problem: Problem) -> jax.Array:
    """Returns the initial sums for `scaled`."""
    return plgpu.layout_cast(jnp.zeros((GROUP, problem.tokens), jnp.float32), plgpu.Layout.WGMMA)


def scaled(problem: Problem, x: RowTiles, scales: list[jax.Array] | None, squares: jax.Array) -> jax.Array:
    """Multiplies a step's x (tokens, depth) by its scales in place, and adds its squares to `squares`.

    A write waits for all threads of the warpgroup. So all values are read before the first write, and squared after the
    last one, when the tensor cores may already read x.
    """
    refs = [panel.transpose((1, 0)) for _, panel in x.panels(GROUP)]
    values = [plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False) for ref in refs]
    if scales is not None:
        # A product of two 16-bit values of one dtype is rounded once, with the same result as by way of float32.
        dtype = problem.dtype if scales[0].dtype == problem.dtype else jnp.float32
        for ref, value, scale in zip(refs, values, scales, strict=True):
            wide = lax.broadcast_in_dim(scale.astype(dtype), value.shape, (0,))
            ref[...] = (value.astype(dtype) * wide).astype(problem.dtype)
        plgpu.commit_smem()
    for value in values:
        wide = value.astype(jnp.float32)
        squares = squares + wide * wide
    return squares
