"""The two large kernels of batch normalisation: sums down the columns, and then work on each element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.batch_norm.few_rows import moderate_or_zero
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import (
    COMPILER_PARAMS,
    FEW_BLOCKS,
    Blocks,
    Part,
    access_columns,
    launch,
    rows_at_once,
)
from pallas_kernels.primitives.platform import target_device, varying_like

Values = Mapping[str, jax.Array]
Index = jax.Array | int

SHIFT_ROWS = 8
"""Rows whose mean is the shift of a block."""


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig:
    """How both kernels split their work: the one that reduces, and the one that applies the column's numbers.

    rows, warpgroups, blocks_per_core: of the reducing kernel, whose blocks are persistent: rows that a warpgroup reads
        at once, warpgroups of a block, blocks a streaming multiprocessor.
    apply_rows: rows that a block of one warpgroup takes in the applying kernel; the columns' numbers are read once for
        them.
    """

    rows: int = 4
    warpgroups: int = 8
    blocks_per_core: int = 1
    apply_rows: int = 4


def default_config(rows: int, features: int, itemsize: int, *, arrays: int = 1) -> BatchNormConfig:
    """The untuned choice for a reduction over so many arrays: forward one, backward two."""
    if rows < 1024:
        return BatchNormConfig(rows=1, warpgroups=1, blocks_per_core=2, apply_rows=1)
    blocks = rows * features // (4 * access_columns(1, itemsize))
    return BatchNormConfig(rows=4 // arrays, apply_rows=4 if blocks >= FEW_BLOCKS else 1)


def candidates() -> dict[str, BatchNormConfig]:
    """The configurations worth measuring, by name, in both phases."""
    shapes = ((2, 8, 4), (4, 8, 4), (4, 8, 2), (4, 8, 8), (4, 4, 4))
    return {
        f"{r} rows {w} warpgroups, {a} rows": BatchNormConfig(rows=r, warpgroups=w, apply_rows=a) for r, w, a in shapes
    }


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """`units` of `at_once` rows each, taken in turn by `lanes` warpgroups of each of `groups` groups."""

    units: int
    at_once: int
    groups: int
    lanes: int

    @property
    def together(self) -> int:
        """Warpgroups that share the rows."""
        return self.groups * self.lanes

    def unit(self, group: Index, lane: Index, trip: Index) -> Any:
        """The unit of a warpgroup in its `trip`-th turn."""
        return trip * self.together + group * self.lanes + lane

    def trips(self, group: Index, lane: Index) -> Any:
        """The number of turns of a warpgroup."""
        return lax.div(self.units - group * self.lanes - lane + self.together - 1, self.together)

    def count(self, group: jax.Array) -> jax.Array:
        """Rows of a group: at least one for those there are."""
        whole, left = divmod(self.units, self.together)
        rest = jnp.minimum(jnp.maximum(left - group * self.lanes, 0), self.lanes)
        return self.at_once * (self.lanes * whole + rest)


@dataclass(frozen=True, kw_only=True)
class Partials:
    """The sums of each group of rows.

    found: (groups, 2 or 3, features) float32: both sums and, where there is one, what was subtracted from an array.
    """

    found: jax.Array
    split: RowSplit


def sum_columns(
    name: str,
    arrays: Mapping[str, jax.Array],
    columns: Mapping[str, jax.Array],
    terms: Callable[[Values], tuple[jax.Array, jax.Array]],
    *,
    shifted: str | None = None,
    config: BatchNormConfig,
) -> Partials:
    """Sums two terms of every row down the columns.

    Blocks are persistent: each keeps a strip of columns for a group of rows, which its warpgroups share out.

    arrays: (rows, features), of one dtype. columns: (features,).
    terms: what a row adds, from its and the columns' values.
    shifted: an array from which each block first subtracts the mean of a few of its rows (0 where that is huge or
        NaN), so that sums of squares do not cancel.
    """
    first_array = next(iter(arrays.values()))
    rows, features = first_array.shape
    itemsize, warpgroups = first_array.dtype.itemsize, config.warpgroups
    at_once = rows_at_once(config.rows, rows)
    units = rows // at_once  # what a warpgroup does in one step
    width = access_columns(1, itemsize)
    strips = max(1, features // width)
    groups = max(1, min(-(-units // warpgroups), target_device().core_count * config.blocks_per_core // strips))
    split = RowSplit(units=units, at_once=at_once, groups=groups, lanes=warpgroups)
    blocks = Blocks(rows=groups, features=features, columns=width, itemsize=itemsize, stride=features)
    operands = {**arrays, **columns}
    results = 3 if shifted else 2

    def kernel(*all_refs):
        refs = dict(zip(operands, all_refs, strict=False))
        partial_ref, sums, done = all_refs[len(operands) :]
        warpgroup = lax.axis_index("warpgroup")

        def block_shift(group, part, shifted):
            """The same in all warpgroups of a block, and a value of the array's dtype: 16-bit ones differ exactly."""
            first = group * (warpgroups * at_once)
            few = [jnp.minimum(first + j, rows - 1) for j in range(SHIFT_ROWS)]
            values = [_load({shifted: refs[shifted].at[row, part.columns]}, part)[shifted] for row in few]
            mean = moderate_or_zero(sum(values[1:], start=values[0]) * (1.0 / SHIFT_ROWS))
            return mean.astype(arrays[shifted].dtype).astype(jnp.float32)

        def work(group, parts):
            trips = split.trips(group, warpgroup)
            for part in parts:
                shift = block_shift(group, part, shifted) if shifted else None
                column_values = _load({key: refs[key].at[part.columns] for key in columns}, part)

                def add(trip, total, part=part, shift=shift, column_values=column_values):
                    unit_rows = [split.unit(group, warpgroup, trip) * at_once + j for j in range(at_once)]
                    loaded = [
                        _load({key: refs[key].at[row, part.columns] for key in arrays}, part) for row in unit_rows
                    ]
                    for values in loaded:
                        if shifted and shift is not None:
                            values[shifted] -= shift
                        total = tuple(a + b for a, b in zip(total, terms({**values, **column_values}), strict=True))
                    return total

                zero = plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)
                for s, value in enumerate(lax.fori_loop(0, trips, add, (zero, zero))):
                    sums[warpgroup, s, _local(part)] = value
                if shift is not None:
                    pl.when(warpgroup == 0)(lambda part=part, shift=shift: _store(partial_ref, group, 2, part, shift))
            plgpu.commit_smem()
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)

            @pl.when(warpgroup == 0)
            def _():
                for part in parts:
                    for s in range(2):
                        every = [_load_sum(sums, other, s, part) for other in range(warpgroups)]
                        _store(partial_ref, group, s, part, sum(every[1:], start=every[0]))

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
            plgpu.SMEM((warpgroups, 2, blocks.widest), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    return Partials(found=varying_like(found, *operands.values()), split=split)


def apply_columns(
    name: str,
    arrays: Mapping[str, jax.Array],
    columns: Mapping[str, jax.Array],
    step: Callable[[Values], jax.Array],
    *,
    config: BatchNormConfig,
) -> jax.Array:
    """`step` of every row of `arrays` and the values of `columns`; the result is like the first array.

    Goes through the rows backwards: those that a reduction read last are in the L2 cache yet.
    """
    first_array = next(iter(arrays.values()))
    rows, features = first_array.shape
    itemsize = first_array.dtype.itemsize
    at_once = rows_at_once(config.apply_rows, rows)
    blocks = Blocks(
        rows=rows // at_once,
        features=features,
        columns=access_columns(1, itemsize),
        itemsize=itemsize,
        stride=features,
    )

    def make_work(refs, result_ref):
        def work(group, parts):
            first = (blocks.rows - 1 - group) * at_once
            for part in parts:
                mine = [first + i for i in range(at_once)]
                loaded = [_load({key: refs[key].at[row, part.columns] for key in arrays}, part) for row in mine]
                column_values = _load({key: refs[key].at[part.columns] for key in columns}, part)
                for row, values in zip(mine, loaded, strict=True):
                    store(result_ref.at[row, part.columns], step({**values, **column_values}).astype(result_ref.dtype))

        return work

    out_type = jax.ShapeDtypeStruct(first_array.shape, first_array.dtype)
    return launch(name, {**arrays, **columns}, out_type, blocks, make_work)


def _load(refs: Mapping[str, Any], part: Part) -> dict[str, jax.Array]:
    return {
        name: plgpu.load(ref, layout=part.segment.layout, optimized=False).astype(jnp.float32)
        for name, ref in refs.items()
    }


def _local(part: Part) -> Any:
    return pl.ds(part.start, part.segment.size)


def _load_sum(sums: Any, warpgroup: int, s: int, part: Part) -> jax.Array:
    return plgpu.load(sums.at[warpgroup, s, _local(part)], layout=part.segment.layout, optimized=False)


def _store(ref: Any, group: jax.Array, s: int, part: Part, value: jax.Array) -> None:
    store(ref.at[group, s, part.columns], value)
