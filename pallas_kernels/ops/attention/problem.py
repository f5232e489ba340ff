"""What a launch of the attention kernels computes, beside its arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.masking import Masking
from pallas_kernels.primitives.flop_metadata import Products, product

LOG2_E = 1.4426950408889634

LOWEST = -1e30
"""Where running maxima begin, in base 2. Far below every score, so that exp2(masked - LOWEST) is 0, and finite."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static facts of a launch.

    heads: of the queries; a multiple of key_heads, that of keys and values.
    scale: of the scores.
    softcap: scores become softcap * tanh(score / softcap), after the scale and before bias and mask.
    dropout_rate: the share of weights set to zero, the others divided by what is left.
    bounds_weights: weights are kept from being more than 1, as those of keys could be that are not there, and are
        zeros: a gradient by weights that are finite, and keys of zeros, is zero.
    dense: an array that masks ("mask", int8, 0 hides) or is added to the scores ("bias"), or None.
    """

    batch: int
    heads: int
    key_heads: int
    head_size: int
    dtype: jnp.dtype
    masking: Masking
    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0
    dense: str | None = None
    bounds_weights: bool = False

    @property
    def product(self) -> Products | None:
        """One product of head size by pairs of query and key that are seen; None where their number is not known."""
        pairs = self.masking.pairs
        return None if pairs is None else product(self.batch * self.heads * pairs, 1, self.head_size, self.dtype)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extras:
    """The further arrays of a launch; None what it has not.

    query_segments, key_segments: (batch, queries), (batch, keys), integers.
    dense: (1 or batch, 1 or heads, 1 or queries, keys); int8 where `Problem.dense` is "mask", else floating.
    words: (2,) uint32, `primitives.random.key_words` of the dropout key.
    """

    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    dense: jax.Array | None = None
    words: jax.Array | None = None
