"""The rotation of heads: columns i and i + size / 2 of each head are rotated as a pair, by their row's angle.

A tile holds whole heads, and one warpgroup finishes both halves, so both columns of a pair are in its registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotation of the heads of all results except the last.

    size: columns of a head, one of `HEAD_SIZES`.
    cos, sin: (rows, size / 2) float32.
    """

    size: int = field(metadata={"static": True})
    cos: jax.Array
    sin: jax.Array

    def operands(self, tokens: int) -> dict[str, jax.Array]:
        """Returns the arrays in the kernel's form, for this number of rows."""
        missing = ((0, tokens - self.cos.shape[0]), (0, 0))
        return {"cos": jnp.pad(self.cos, missing).T, "sin": jnp.pad(self.sin, missing).T}

    def load(self, refs: Mapping[str, Any], group: int) -> tuple[jax.Array, jax.Array]:
        """Reads cosines and sines, (64, tokens) each, for a group of columns in the first half of a head."""
        place = pl.ds(group * GROUP % (self.size // 2), GROUP)
        cosine, sine = (
            plgpu.load(refs[name].at[place], layout=plgpu.Layout.WGMMA, optimized=False) for name in ("cos", "sin")
        )
        return cosine, sine


def rotated(
    halves: Sequence[jax.Array], cosine: jax.Array, sine: jax.Array, column: jax.Array, end: int
) -> tuple[jax.Array, jax.Array]:
    """Rotates both halves of the pairs if `column`, a scalar, is before `end`; else returns them unchanged."""
    first, second = halves
    # The lowering needs a condition of the values' shape.
    is_rotated = lax.broadcast_in_dim(column, first.shape, ()) < end
    one = jnp.where(is_rotated, first * cosine - second * sine, first)
    return one, jnp.where(is_rotated, second * cosine + first * sine, second)
