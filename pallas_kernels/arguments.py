"""Arguments for the operations fused with a matrix product: norms and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """A norm of the input of matrix products, over the features of each row; a pytree of its arrays.

    scale: (features,), any floating dtype, or None for ones. Pass None if `fold_scale` has multiplied the scale into
        the weights. Folding once, before decoding, saves the pass over x that would multiply by the scale.
    bias: (features,), any floating dtype, or None. Only for "layer".
    kind: "rms" (see `pallas_kernels.rms_norm`) or "layer" (see `pallas_kernels.layer_norm`).
    epsilon: added to the mean square or variance; a non-negative Python number.
    mean_square: (...), floating, the mean square of each row of x, as `pallas_kernels.linear_residual_norm` returns it;
        None: the operation computes it. Only for "rms".
    rounds_before_scale: whether the normalised rows are rounded before the scale, as in `pallas_kernels.rms_norm` and
        `pallas_kernels.layer_norm`. A launch that computes norm and product of few rows rounds x times the scale alone.
    """

    scale: jax.Array | None
    bias: jax.Array | None = None
    kind: Literal["rms", "layer"] = field(default="rms", metadata={"static": True})
    epsilon: float = field(default=1e-6, metadata={"static": True})
    mean_square: jax.Array | None = None
    rounds_before_scale: bool = field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """A rotary position embedding of a product's heads; see `pallas_kernels.rope`. It has positions or both tables.

    positions: integers, one per row of x, (tokens,) or (batch, tokens), or a shape that broadcasts to that of the rows.
    cos, sin: tables, (..., columns) or (..., 1, columns) for the rows' shape, or one that broadcasts to it.
    theta: the base of the frequencies, a positive Python number.
    interleaved: True: columns 2i and 2i + 1 of a head form a pair (GPT-J). False: columns i and i + size / 2 do
        (GPT-NeoX, Llama).
    """

    positions: jax.Array | None = None
    theta: float = field(default=10000.0, metadata={"static": True})
    interleaved: bool = field(default=False, metadata={"static": True})
    cos: jax.Array | None = None
    sin: jax.Array | None = None
