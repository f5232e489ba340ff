"""What stands around a matrix product, as arguments of the operations that fuse it: norms and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """A norm in front of matrix products, over the features of each row; a pytree of its arrays.

    scale: (features,), any floating dtype, or None for ones. None is also right where `fold_scale` has multiplied the
        scale into the weights: done once, before decoding, that saves the pass over x which would multiply it.
    bias: (features,), any floating dtype, or None. Only for "layer".
    kind: "rms" (see `pallas_kernels.rms_norm`) or "layer" (see `pallas_kernels.layer_norm`).
    epsilon: added to the mean square, or variance; a Python number from 0 on.
    mean_square: (...), floating, of each row of x where that is known, as `pallas_kernels.linear_residual_norm` gives
        it; None: it is computed. Only for "rms".
    """

    scale: jax.Array | None
    bias: jax.Array | None = None
    kind: Literal["rms", "layer"] = field(default="rms", metadata={"static": True})
    epsilon: float = field(default=1e-6, metadata={"static": True})
    mean_square: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """A rotary position embedding of a product's heads; see `pallas_kernels.rope`.

    positions: integers, of the shape that rows of x have, or one that broadcasts to it: (tokens,) or (batch, tokens).
    theta: the base of the frequencies, a positive Python number.
    interleaved: whether a pair is two neighbours (GPT-J), or a value of each half (GPT-NeoX, Llama).
    """

    positions: jax.Array
    theta: float = field(default=10000.0, metadata={"static": True})
    interleaved: bool = field(default=False, metadata={"static": True})
