"""The rotation of heads: columns i and i + size / 2 of each head are rotated as a pair, by their row's angle.

A tile holds whole heads, and one warpgroup finishes both halves, so both columns of a pair are in its registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.epilogue import Rotation
from pallas_kernels.primitives.transposed import GROUP

HEAD_SIZES = (128, 256)
"""Head sizes whose halves are whole groups of columns."""


def head_operands(rotation: Rotation, tokens: int) -> dict[str, jax.Array]:
    """Returns the cosines and sines in the kernel's form, for this number of rows."""
    missing = ((0, tokens - rotation.cos.shape[0]), (0, 0))
    return {"cos": jnp.pad(rotation.cos, missing).T, "sin": jnp.pad(rotation.sin, missing).T}


def load_angles(rotation: Rotation, refs: Mapping[str, Any], group: int) -> tuple[jax.Array, jax.Array]:
    """Reads cosines and sines, (64, tokens) each, for a group of columns in the first half of a head."""
    place = pl.ds(group * GROUP % (rotation.size // 2), GROUP)
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
