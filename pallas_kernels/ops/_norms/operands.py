"""What the backward kernels take and give, and where each array is among a kernel's references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.random import Words
from pallas_kernels.primitives.rows import LANES, RowValues, Segment, split_row, store_row


@dataclass(frozen=True, kw_only=True)
class BackwardOperands:
    """One call of a backward kernel.

    streams: the normalised rows, dy, and the sum's cotangent where there is one; each (rows, features).
    scale: (features,); words: the dropout's key, (2,); or None.
    sums: the gradients summed over columns, of "scale" and "bias", with their dtypes.
    """

    norm: Norm
    streams: tuple[jax.Array, ...]
    scale: jax.Array | None
    words: jax.Array | None
    sums: dict[str, Any]
    blocks: int
    config: BackwardConfig

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.streams[0].shape[0]

    @property
    def features(self) -> int:
        """The length of a row."""
        return self.streams[0].shape[1]

    @property
    def dtype(self) -> Any:
        """Of the streams and the rows written."""
        return self.streams[0].dtype

    @property
    def kernel_name(self) -> str:
        """What traces and HLO show."""
        has_dropout = self.words is not None
        return self.norm.kernel_name(has_residual=False, has_dropout=has_dropout) + "_gradient"

    @property
    def separate_tail(self) -> int:
        """How many columns of a ragged row's last segment have column sums of their own, behind the others.

        That segment repeats columns of the one before. Where sums live in memory (chunked) and not in registers, adding
        to the repeated ones would count them twice.
        """
        if self.config.loads != "chunked":
            return 0
        last = split_row(self.features, self.dtype.itemsize)[-1]
        return last.size - last.repeated if last.repeated else 0

    @property
    def inputs(self) -> dict[str, jax.Array]:
        """The kernel's operands, by name."""
        named = dict(zip(("total", "dy", "dtotal_in"), self.streams, strict=False))
        named |= {} if self.scale is None else {"scale": self.scale}
        return named | ({} if self.words is None else {"words": self.words})

    def out_types(self, parts: tuple[int, ...] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The kernel's outputs, by name; `parts` is the shape that kernel sees a row in.

        A single block writes its column sums as they are to be, unless it adds them up in memory; else they are one
        (blocks, sums, ...) array in float32.
        """
        columns = parts or (self.features,)
        row = jax.ShapeDtypeStruct((self.rows, *columns), self.dtype)
        named = {"dtotal": row} | ({} if self.words is None else {"dx": row})
        summed = parts or (self.features + (LANES if self.separate_tail else 0),)
        if self.sums and self.blocks > 1:
            named["sums"] = jax.ShapeDtypeStruct((self.blocks, len(self.sums), *summed), jnp.float32)
        elif self.blocks == 1:
            in_memory = self.config.loads == "chunked"
            for name, dtype in self.sums.items():
                named["d" + name] = jax.ShapeDtypeStruct((1, *summed), jnp.float32 if in_memory else dtype)
        return named

    def sums_at(self, refs: dict[str, Any], block, name: str) -> Any:
        """The reference of one block's column sums for the gradient called `name`."""
        return refs["d" + name].at[0] if self.blocks == 1 else refs["sums"].at[block, tuple(self.sums).index(name)]

    def store_gradient(
        self,
        refs: dict[str, Any],
        words: Words | None,
        row: jax.Array,
        columns: Any,
        segments: tuple[Segment, ...],
        gradient: RowValues,
    ) -> None:
        """Writes part of a row's gradient, and of the gradient of what was dropped out.

        columns: a slice of the row, in which the segments are. words: the dropout's mixed key, or None.
        """
        store_row(refs["dtotal"].at[row, columns], gradient, segments)
        if words is not None:
            start = jnp.asarray(columns.start).astype(jnp.uint32)
            places = tuple(s.columns(jnp.uint32) + start for s in segments)
            dropped = self.norm.drop(gradient, words, row, places, self.features)
            store_row(refs["dx"].at[row, columns], dropped, segments)
