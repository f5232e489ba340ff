"""The two large kernels of batch normalisation: one sums over the rows, one applies the columns' coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.batch_norm.merge import moderate_or_zero
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    COMPILER_PARAMS,
    FEW_BLOCKS,
    Blocks,
    Part,
    access_columns,
    column_blocks,
    launch,
    load_part,
    rows_from,
)
from pallas_kernels.primitives.platform import varying_like

Values = Mapping[str, jax.Array]
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
    groups = blocks.rows
    split = RowSplit(units=units, at_once=at_once, groups=groups, lanes=warpgroups)
    operands = {**arrays, **columns}
    array_names, column_names, names = tuple(arrays), tuple(columns), tuple(operands)
    results = 3 if shifted else 2

    def kernel(*all_refs):
        refs = dict(zip(names, all_refs, strict=False))
        partial_ref, sums, done = all_refs[len(names) :]
        warpgroup = lax.axis_index("warpgroup")

        def block_shift(group, part, shifted):
            """Returns the block's shift, in the array's dtype, so that differences of 16-bit values are exact."""
            first = group * (warpgroups * at_once)
            few = [jnp.minimum(first + j, rows - 1) for j in range(SHIFT_ROWS)]
            values = [_load({shifted: refs[shifted].at[row]}, part)[shifted] for row in few]
            mean = moderate_or_zero(sum(values[1:], start=values[0]) * (1.0 / SHIFT_ROWS))
            return mean.astype(dtype).astype(jnp.float32)

        def work(group, part):
            shift = block_shift(group, part, shifted) if shifted else None
            column_values = _load({key: refs[key] for key in column_names}, part)

            def add(trip, total):
                unit_rows = [split.unit(group, warpgroup, trip) * at_once + j for j in range(at_once)]
                loaded = [_load({key: refs[key].at[row] for key in array_names}, part) for row in unit_rows]
                for values in loaded:
                    if shifted and shift is not None:
                        values[shifted] -= shift
                    total = tuple(a + b for a, b in zip(total, terms({**values, **column_values}), strict=True))
                return total

            zero = plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)
            for s, value in enumerate(lax.fori_loop(0, split.trips(group, warpgroup), add, (zero, zero))):
                sums[warpgroup, s] = value
            if shift is not None:
                pl.when(warpgroup == 0)(lambda: store(partial_ref.at[group, 2, part.columns], shift))
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

            @pl.when(warpgroup == 0)
            def _():
                for s in range(2):
                    layout = part.segment.layout
                    every = [plgpu.load(sums.at[i, s], layout=layout, optimized=False) for i in range(warpgroups)]
                    store(partial_ref.at[group, s, part.columns], sum(every[1:], start=every[0]))

        blocks.run(lax.axis_index("block"), work)

    kernel.__name__ = name
    found = settings.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((groups, results, features), jnp.float32),
        grid=(blocks.count,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((warpgroups, 2, blocks.width), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    return varying_like(found, *operands.values()), split


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
    at_once = min(config.apply_rows, rows)
    blocks = Blocks(
        rows=rows,
        features=features,
        columns=access_columns(1, itemsize),
        itemsize=itemsize,
        stride=features,
        at_once=at_once,
    )

    array_names, column_names = tuple(arrays), tuple(columns)

    def make_work(refs, result_ref):
        def work(first, part):
            first = rows - at_once - first
            row_refs = {key: rows_from(refs[key], first, at_once) for key in array_names}
            loaded = [_load({key: rows[i] for key, rows in row_refs.items()}, part) for i in range(at_once)]
            column_values = _load({key: refs[key] for key in column_names}, part)
            for values, row_ref in zip(loaded, rows_from(result_ref, first, at_once), strict=True):
                store(row_ref.at[part.columns], step({**values, **column_values}).astype(result_ref.dtype))

        return work

    out_type = jax.ShapeDtypeStruct(first_array.shape, first_array.dtype)
    return launch(name, {**arrays, **columns}, out_type, blocks, make_work)


def _load(refs: Mapping[str, Any], part: Part) -> dict[str, jax.Array]:
    """Loads a part of a row from each reference to a row, as float32."""
    return {name: value.astype(jnp.float32) for name, value in load_part(refs, part).items()}
