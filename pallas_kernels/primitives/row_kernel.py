"""Kernels in which each block holds one row in the registers of a warpgroup, or several short rows.

An operation is a function of the block's row and of the references by name: it loads the row, reduces it to values of
the row, such as its sum, and finishes it. `HeldRows` lets one function serve both a long row and short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import (
    Row,
    RowValues,
    Segment,
    line_max,
    line_sums,
    load_lines,
    load_row,
    over_lines,
    row_index,
    row_max,
    row_of_block,
    row_sum,
    store_row,
    to_float32,
)


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """The row of a block, or its short rows.

    A value of the row, such as its sum, is a scalar for one row and an array (rows,) for several.

    at: the row's index, or the slice of the rows. segments: how the warpgroup holds them.
    """

    at: Row
    segments: tuple[Segment, ...]

    @property
    def _are_several(self) -> bool:
        return isinstance(self.at, pl.Slice)

    @property
    def index(self) -> jax.Array:
        """The row's index: a scalar for one row, else that of each element."""
        return row_index(self.at, self.segments)

    def load(self, ref: Any) -> RowValues:
        """Reads the row from a reference (rows, features), as float32."""
        return to_float32(load_row(ref.at[self.at], self.segments))

    def store(self, ref: Any, values: RowValues) -> None:
        """Writes the row, cast to the reference's dtype."""
        store_row(ref.at[self.at], values, self.segments)

    def load_value(self, ref: Any) -> jax.Array:
        """Reads the row's value from a reference (rows,)."""
        return load_lines(ref.at[self.at], self.segments) if self._are_several else ref[self.at]

    def store_value(self, ref: Any, value: jax.Array) -> None:
        """Writes the row's value to a reference (rows,)."""
        if self._are_several:
            store(ref.at[self.at], value)
        else:
            ref[self.at] = value

    def sum(self, values: RowValues) -> jax.Array:
        """Sums over the row. Repeated columns count once."""
        return (line_sums if self._are_several else row_sum)(values, self.segments)

    def max(self, values: RowValues) -> jax.Array:
        """Returns the row's maximum."""
        return line_max(values) if self._are_several else row_max(values, self.segments)

    def spread(self, value: jax.Array) -> jax.Array:
        """Broadcasts the row's value, so that it combines with the row's elements."""
        return over_lines(value, self.segments[:1])[0] if self._are_several else value


def row_kernel(
    compute: Callable[[Row, dict[str, Any]], None],
    operands: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    compiler_params: Any,
    rows: int,
    at_once: int = 0,
    parts: int = 1,
) -> dict[str, jax.Array]:
    """Launches a block for each row, or for each `at_once` rows; returns the outputs by name.

    compute: the kernel's body, a function of the block's row or rows and of the references to operands and outputs by
        name. Operands that are None have none.
    name: the kernel's name in traces and HLO.
    parts: equal parts of the rows; the rows of a block are all from one part.
    """
    given = {key: operand for key, operand in operands.items() if operand is not None}
    names = (*given, *outputs)

    def kernel(*refs):
        row = row_of_block(lax.axis_index("block"), rows, at_once, parts=parts)
        compute(row, dict(zip(names, refs, strict=True)))

    results = settings.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        grid=(parts * pl.cdiv(rows // parts, at_once or 1),),
        grid_names=("block",),
        compiler_params=compiler_params,
        kernel_name=name,
    )(*given.values())
    return {key: varying_like(result, *given.values()) for key, result in zip(outputs, results, strict=True)}
