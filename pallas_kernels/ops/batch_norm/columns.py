"""The kernels of batch normalisation: one sums over the rows, a small one adds the sums of all groups of rows and
computes each column's numbers from them, and one applies these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.barriers import meet
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    FEW_BLOCKS,
    Blocks,
    Part,
    access_columns,
    column_blocks,
    launch,
    launch_column_sums,
    load_wide,
    rows_from,
    zeros_part,
)
from pallas_kernels.primitives.rows import THREADS
from pallas_kernels.primitives.settings import named_kernel

WARPGROUPS = 8
"""Warpgroups of a block, which divide the groups of its 128 columns among them."""
_TERMS = 2
"""The most column sums that a pass over the rows adds up."""
_AT_ONCE = 3
"""Groups that a warpgroup reads at once."""
_HUGE = 1e30
"""The neighbours of such a float32 are so far from it that the distance's square is infinite."""
Values = Mapping[str, jax.Array]
Sums = tuple[jax.Array, ...]
"""Sums over all groups, each with one float32 value per column."""
Index = jax.Array | int
FEW_VALUES = 2**21
"""With so few values, adding the sums of more than `_MOST_GROUPS` takes longer than more blocks save."""
_MOST_GROUPS = 64
SHIFT_ROWS = 8
"""The number of rows whose mean is a block's shift."""


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig:
    """How the reducing kernel and the applying kernel split their work.

    rows: rows that a warpgroup of the reducing kernel reads at a time. warpgroups: warpgroups of one of its blocks.
    blocks_per_core: its persistent blocks on each streaming multiprocessor.
    apply_rows: rows for each block of one warpgroup in the applying kernel, which reads the columns' numbers once for
        all of them.
    """

    rows: int = 4
    warpgroups: int = 8
    blocks_per_core: int = 1
    apply_rows: int = 4


def default_config(rows: int, features: int, itemsize: int, *, arrays: int = 1) -> BatchNormConfig:
    """Returns the untuned configuration for a reduction over this number of arrays: one forward, two backward.

    A block of the applying kernel takes at least one access of every thread.
    """
    columns = access_columns(1, itemsize)
    apply_rows = max(4, -(-columns // features))
    blocks = rows // apply_rows * -(-features // columns)
    return BatchNormConfig(rows=4 // arrays, apply_rows=apply_rows if blocks >= FEW_BLOCKS else 1)


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Divides `units` of `at_once` rows among `groups` groups, whose `lanes` warpgroups each take every n-th unit."""

    units: int
    at_once: int
    groups: int
    lanes: int

    @property
    def together(self) -> int:
        """The number of warpgroups that share the rows."""
        return self.groups * self.lanes

    def unit(self, group: Index, lane: Index, trip: Index) -> Any:
        """The unit of a warpgroup in its `trip`-th turn."""
        return trip * self.together + group * self.lanes + lane

    def trips(self, group: Index, lane: Index) -> Any:
        """The number of turns of a warpgroup."""
        return lax.div(self.units - group * self.lanes - lane + self.together - 1, self.together)

    def count(self, group: jax.Array) -> jax.Array:
        """The number of rows of a group, at least one."""
        whole, left = divmod(self.units, self.together)
        rest = jnp.minimum(jnp.maximum(left - group * self.lanes, 0), self.lanes)
        return self.at_once * (self.lanes * whole + rest)


def sum_columns(
    name: str,
    arrays: Mapping[str, jax.Array],
    columns: Mapping[str, jax.Array],
    terms: Callable[[Values], tuple[jax.Array, jax.Array]],
    *,
    shifted: str | None = None,
    config: BatchNormConfig,
) -> tuple[jax.Array, RowSplit]:
    """Sums two terms over the rows, for every column.

    Blocks are persistent: each has a strip of columns and a group of rows, which its warpgroups divide among them.
    Returns partial sums, (groups, 2 or 3, features) float32: both sums and, with a shifted array, the value subtracted
    from it; and the groups.

    arrays: (rows, features), of one dtype. columns: (features,).
    terms: computes a row's summands from its values and the columns'.
    shifted: an array from which each block first subtracts the mean of a few of its rows (0 where that is huge or
        NaN), so that sums of squares do not cancel.
    """
    first_array = next(iter(arrays.values()))
    (rows, features), dtype = first_array.shape, first_array.dtype
    itemsize, warpgroups = dtype.itemsize, config.warpgroups
    at_once = next(n for n in range(config.rows, 0, -1) if rows % n == 0)
    units = rows // at_once  # a warpgroup reads one unit per step
    blocks = column_blocks(units, features, itemsize, warpgroups=warpgroups, blocks_per_core=config.blocks_per_core)
    if rows * features <= FEW_VALUES:
        blocks = replace(blocks, rows=min(blocks.rows, _MOST_GROUPS))
    groups, array_names, column_names = blocks.rows, tuple(arrays), tuple(columns)
    split = RowSplit(units=units, at_once=at_once, groups=groups, lanes=warpgroups)

    def make_sums(refs):
        def block_shift(group, part, shifted):
            """Returns the block's shift, in the array's dtype, so that differences of 16-bit values are exact."""
            first = group * (warpgroups * at_once)
            few = [jnp.minimum(first + j, rows - 1) for j in range(SHIFT_ROWS)]
            values = [load_wide({shifted: refs[shifted].at[row]}, part)[shifted] for row in few]
            mean = moderate_or_zero(sum(values[1:], start=values[0]) * (1.0 / SHIFT_ROWS))
            return mean.astype(dtype).astype(jnp.float32)

        def sums(group, warpgroup, part):
            shift = block_shift(group, part, shifted) if shifted else None
            column_values = load_wide({key: refs[key] for key in column_names}, part)

            def add(trip, total):
                unit_rows = [split.unit(group, warpgroup, trip) * at_once + j for j in range(at_once)]
                loaded = [load_wide({key: refs[key].at[row] for key in array_names}, part) for row in unit_rows]
                for values in loaded:
                    if shifted and shift is not None:
                        values[shifted] -= shift
                    total = tuple(a + b for a, b in zip(total, terms({**values, **column_values}), strict=True))
                return total

            zero = zeros_part(part)
            found = lax.fori_loop(0, split.trips(group, warpgroup), add, (zero, zero))
            return found if shift is None else (*found, shift)

        return sums

    outputs = {"sums": jax.ShapeDtypeStruct((groups, 3 if shifted else 2, features), jnp.float32)}
    found = launch_column_sums(name, {**arrays, **columns}, outputs, blocks, make_sums, warpgroups=warpgroups, kinds=2)
    return found["sums"], split


def merge_groups(
    name: str,
    partials: jax.Array,
    parts: Sequence[str],
    columns: Mapping[str, jax.Array],
    *,
    passes: Sequence[Callable[[Values, Sums], Sums]],
    finish: Callable[[Sums, Values], Values],
    out_types: Mapping[str, jax.typing.DTypeLike],
    count_of: Callable[[jax.Array], jax.Array] | None = None,
    first_of: str | None = None,
) -> dict[str, jax.Array]:
    """Sums terms over the groups in a fixed order, and computes numbers of each column from the sums.

    partials: (groups, parts, features) float32. parts: the names of its second axis. columns: (features,). All are seen
        as float32.
    passes: each computes a group's terms from its values, the columns' and the sums of earlier passes.
    finish: computes columns' numbers from the sums; those named in `out_types` are returned, (features,).
    count_of: a group's "count" among its values, an integer.
    first_of: the part whose first group is the columns' value "first", or 0 where that is huge or NaN.
    """
    (groups, _, features), names = partials.shape, tuple(columns)
    warpgroups = min(WARPGROUPS, groups)
    turns = -(-groups // warpgroups)
    blocks = Blocks(rows=1, features=features, columns=THREADS, itemsize=4, stride=features, is_one_part=True)

    def body(refs: dict[str, Any]) -> None:
        partials_ref, totals_ref, warpgroup = refs["partials"], refs["totals"], lax.axis_index("warpgroup")

        def load(ref, part):
            return plgpu.load(ref, layout=part.segment.layout, optimized=False).astype(jnp.float32)

        def load_group(turn, part):
            group = jnp.minimum(turn * warpgroups + warpgroup, groups - 1)
            values = {key: load(partials_ref.at[group, i, part.columns], part) for i, key in enumerate(parts)}
            return values if count_of is None else {**values, "count": count_of(group).astype(jnp.float32)}

        def sum_turns(first, part, terms, totals):
            """Adds the terms of the groups of some turns to the totals."""
            for i, values in enumerate([load_group(first + i, part) for i in range(_AT_ONCE)]):
                turn, found = first + i, terms(values)
                if not isinstance(turn, int) or (turn + 1) * warpgroups > groups:
                    # Select instead of multiplying by zero: the group read in its place may have infinities.
                    there = lax.broadcast(turn * warpgroups + warpgroup < groups, found[0].shape)
                    found = tuple(jnp.where(there, value, jnp.zeros_like(value)) for value in found)
                totals = found if not totals else tuple(a + b for a, b in zip(totals, found, strict=True))
            return totals

        def work(_, part: Part):
            column_values = {key: load(refs[key].at[part.columns], part) for key in names}
            if first_of is not None:
                first = load(partials_ref.at[0, parts.index(first_of), part.columns], part)
                column_values["first"] = moderate_or_zero(first)
            sums: Sums = ()
            for p, terms in enumerate(passes):

                def terms_of(values, sums=sums, terms=terms):
                    return terms({**values, **column_values}, sums)

                def some(i, totals, terms_of=terms_of):
                    return sum_turns(i * _AT_ONCE, part, terms_of, totals)

                found = lax.fori_loop(1, -(-turns // _AT_ONCE), some, sum_turns(0, part, terms_of, ()))
                for t, value in enumerate(found):
                    totals_ref[p, warpgroup, t] = value
                meet(refs["met"])
                for t in range(len(found)):
                    every = [load(totals_ref.at[p, other, t], part) for other in range(warpgroups)]
                    sums += (sum(every[1:], start=every[0]),)
            numbers = finish(sums, column_values)

            @pl.when(warpgroup == 0)
            def _():
                for key, dtype in out_types.items():
                    store(refs[key].at[part.columns], numbers[key].astype(dtype))

        blocks.run(lax.axis_index("block"), work)

    return named_kernel(
        body,
        {"partials": partials, **columns},
        {key: jax.ShapeDtypeStruct((features,), dtype) for key, dtype in out_types.items()},
        {
            "totals": plgpu.SMEM((len(passes), warpgroups, _TERMS, blocks.width), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=warpgroups),
        },
        name=name,
        grid={"block": blocks.count},
        warpgroups=warpgroups,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=512),
    )


def moderate_or_zero(value: jax.Array) -> jax.Array:
    """Returns the value, or 0 if it is huge: distances from it would be NaN, or their squares infinite."""
    return jnp.where(jnp.abs(value) < _HUGE, value, jnp.zeros_like(value))


def apply_columns(
    name: str,
    arrays: Mapping[str, jax.Array],
    columns: Mapping[str, jax.Array],
    step: Callable[[Values], jax.Array],
    *,
    config: BatchNormConfig,
) -> jax.Array:
    """Applies `step` to every row of `arrays` and the values of `columns`; the result is like the first array.

    It goes through the rows backwards, since the L2 cache still has those that the reduction read last.
    """
    first_array = next(iter(arrays.values()))
    rows, features = first_array.shape
    itemsize = first_array.dtype.itemsize
    at_once, array_names, column_names = min(config.apply_rows, rows), tuple(arrays), tuple(columns)
    blocks = Blocks(
        rows=rows,
        features=features,
        columns=access_columns(1, itemsize),
        itemsize=itemsize,
        stride=features,
        at_once=at_once,
    )

    def make_work(refs):
        result_ref = refs["result"]

        def work(first, part):
            first = rows - at_once - first
            row_refs = {key: rows_from(refs[key], first, at_once) for key in array_names}
            loaded = [load_wide({key: rows[i] for key, rows in row_refs.items()}, part) for i in range(at_once)]
            column_values = load_wide({key: refs[key] for key in column_names}, part)
            for values, row_ref in zip(loaded, rows_from(result_ref, first, at_once), strict=True):
                store(row_ref.at[part.columns], step({**values, **column_values}).astype(result_ref.dtype))

        return work

    outputs = {"result": jax.ShapeDtypeStruct(first_array.shape, first_array.dtype)}
    return launch(name, {**arrays, **columns}, outputs, blocks, make_work)["result"]
