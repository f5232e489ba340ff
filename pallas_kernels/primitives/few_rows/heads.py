"""The rotation of heads: columns i and i + size / 2 of each head are rotated as a pair, by their row's angle.

A tile holds whole heads, and one warpgroup finishes both halves, so both columns of a pair are in its registers. It
computes the angles, too, 64 for each row. A table of them would need a separate launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.transposed import GROUP

HEAD_SIZES = (128, 256)
"""Head sizes whose halves are whole groups of columns."""
Angles = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotation of the heads of all results except the last.

    size: columns of a head, one of `HEAD_SIZES`.
    positions: (rows,) int32.
    whole, fraction: (size / 2,) each, int32 and float32: the frequencies, as `angles` takes them.
    angles: returns cosines and sines for positions, whole and fraction, all of one shape.
    """

    size: int = field(metadata={"static": True})
    positions: jax.Array
    whole: jax.Array
    fraction: jax.Array
    angles: Angles = field(metadata={"static": True})

    def operands(self, tokens: int) -> dict[str, jax.Array]:
        """Returns the arrays in the kernel's form, for this number of rows."""
        rows = self.positions.shape[0]
        positions = self.positions if rows in (1, tokens) else jnp.pad(self.positions, (0, tokens - rows))
        return {"positions": positions, "whole": self.whole, "fraction": self.fraction}

    def load(self, refs: Mapping[str, Any], group: int, tokens: int) -> tuple[jax.Array, jax.Array]:
        """Computes cosines and sines, (64, tokens) each, for a group of columns in the first half of a head."""
        shape = (GROUP, tokens)
        place = pl.ds(group * GROUP % (self.size // 2), GROUP)
        columns = [
            plgpu.load(refs[name].at[place], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            for name in ("whole", "fraction")
        ]
        if self.positions.shape[0] == 1:
            positions = plgpu.layout_cast(jnp.full(shape, refs["positions"][0]), plgpu.Layout.WGMMA)
        else:
            rows = plgpu.load(refs["positions"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            positions = lax.broadcast_in_dim(rows, shape, (1,))
        return self.angles(positions, *(lax.broadcast_in_dim(column, shape, (0,)) for column in columns))


def rotated(
    halves: Sequence[jax.Array], cosine: jax.Array, sine: jax.Array, column: jax.Array, end: int
) -> tuple[jax.Array, jax.Array]:
    """Rotates both halves of the pairs if `column`, a scalar, is before `end`; else returns them unchanged."""
    first, second = halves
    # The lowering needs a condition of the values' shape.
    is_rotated = lax.broadcast_in_dim(column, first.shape, ()) < end
    one = jnp.where(is_rotated, first * cosine - second * sine, first)
    return one, jnp.where(is_rotated, second * cosine + first * sine, second)
