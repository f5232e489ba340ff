"""Column sums over few rows in one launch: rows of a short x, or the partial sums of a long one's blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.elementwise import Blocks, Part
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import LANES

WARPGROUPS = 8
"""Warpgroups of a block, which divide the rows of its 128 columns among them."""
HELD_ROWS = 64
"""The most rows that a block holds: 8 per warpgroup. With two arrays they take half of its registers."""
_TERMS = 2
"""The most terms of a pass."""
_AT_ONCE = 3
"""Rows that a warpgroup reads at once if it does not hold them."""

_HUGE = 1e30
"""The neighbours of such a float32 are so far from it that the distance's square is infinite."""

Values = Mapping[str, jax.Array]
Sums = tuple[jax.Array, ...]
"""Sums over all rows, each with one float32 value per column."""


def sum_few_rows(
    name: str,
    arrays: Mapping[str, jax.Array] | tuple[tuple[str, ...], jax.Array],
    columns: Mapping[str, jax.Array],
    *,
    passes: Sequence[Callable[[Values, Sums], Sums]],
    finish: Callable[[Sums, Values], Values],
    out_types: Mapping[str, jax.typing.DTypeLike],
    step: Callable[[Values], jax.Array] | None = None,
    count_of: Callable[[jax.Array], jax.Array] | None = None,
    first_of: str | None = None,
) -> dict[str, jax.Array]:
    """Sums terms over the rows in a fixed order, and computes numbers of each column from the sums.

    arrays: (rows, features); or the names of the (rows, names, features) parts of one array, whose places differ by
        constants, which saves registers. columns: (features,). All are seen as float32.
    passes: each computes a row's terms from its values, the columns' and the sums of earlier passes.
    finish: computes columns' numbers from the sums; those named in `out_types` are returned, (features,).
    step: computes a row of a result like the first array from its values and all columns'; returned as "result".
        All rows must fit in registers.
    count_of: a row's "count" among its values, an integer.
    first_of: the array whose first row is the columns' value "first", or 0 where that is huge or NaN.
    """
    if isinstance(arrays, Mapping):
        first_array = next(iter(arrays.values()))
        operands = {**arrays, **columns}
        places = {key: (key, ()) for key in arrays}
    else:
        parts, first_array = arrays
        operands = {"parts": first_array, **columns}
        places = {key: ("parts", (i,)) for i, key in enumerate(parts)}
    rows, features, dtype = first_array.shape[0], first_array.shape[-1], first_array.dtype
    names, column_names = tuple(operands), tuple(columns)
    warpgroups = min(WARPGROUPS, rows)
    turns = -(-rows // warpgroups)
    is_held = rows <= HELD_ROWS and len(places) <= 2
    if step is not None and not is_held:
        raise ValueError(f"{rows} rows of {len(places)} arrays are too many for one launch, which holds {HELD_ROWS}.")
    blocks = Blocks(
        rows=1, features=features, columns=LANES, itemsize=dtype.itemsize, stride=features, is_one_part=True
    )
    results = {} if step is None else {"result": jax.ShapeDtypeStruct(first_array.shape, dtype)}
    results |= {key: jax.ShapeDtypeStruct((features,), out_dtype) for key, out_dtype in out_types.items()}

    def kernel(*all_refs):
        refs = dict(zip(names, all_refs, strict=False))
        out_refs = dict(zip(results, all_refs[len(names) :], strict=False))
        held, done = all_refs[-2:]
        warpgroup = lax.axis_index("warpgroup")

        def load(ref, part):
            return plgpu.load(ref, layout=part.segment.layout, optimized=False).astype(jnp.float32)

        def place(key, row, part):
            name, index = places[key]
            return refs[name].at[(row, *index, part.columns)]

        def row_of(turn):
            return turn * warpgroups + warpgroup

        def load_row(turn, part):
            there = jnp.minimum(row_of(turn), rows - 1)
            values = {key: load(place(key, there, part), part) for key in places}
            return values if count_of is None else {**values, "count": count_of(there).astype(jnp.float32)}

        def is_surely_there(turn):
            return isinstance(turn, int) and (turn + 1) * warpgroups <= rows

        def sum_turns(first_turn, row_values, terms, totals):
            """Adds the terms of the rows of some turns to the totals."""
            for turn, values in enumerate(row_values):
                found = terms(values)
                if not is_surely_there(first_turn + turn):
                    # Select instead of multiplying by zero: the row read in its place may have infinities.
                    there = lax.broadcast(row_of(first_turn + turn) < rows, found[0].shape)
                    found = tuple(jnp.where(there, value, jnp.zeros_like(value)) for value in found)
                totals = found if not totals else tuple(a + b for a, b in zip(totals, found, strict=True))
            return totals

        def sum_own_rows(part, row_values, terms):
            if is_held:
                return sum_turns(0, row_values, terms, ())

            def some(i, totals):
                first = i * _AT_ONCE
                return sum_turns(first, [load_row(first + j, part) for j in range(_AT_ONCE)], terms, totals)

            first = sum_turns(0, [load_row(j, part) for j in range(_AT_ONCE)], terms, ())
            return lax.fori_loop(1, -(-turns // _AT_ONCE), some, first)

        def work(_, part: Part):
            row_values = [load_row(turn, part) for turn in range(turns) if is_held]
            column_values = {key: load(refs[key].at[part.columns], part) for key in column_names}
            if first_of is not None:
                column_values["first"] = moderate_or_zero(load(place(first_of, 0, part), part))
            sums: Sums = ()
            for p, terms in enumerate(passes):

                def terms_of(values, sums=sums, terms=terms):
                    return terms({**values, **column_values}, sums)

                found = sum_own_rows(part, row_values, terms_of)
                for t, value in enumerate(found):
                    held[p, warpgroup, t] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                for t in range(len(found)):
                    every = [load(held.at[p, other, t], part) for other in range(warpgroups)]
                    sums += (sum(every[1:], start=every[0]),)
            numbers = finish(sums, column_values)

            @pl.when(warpgroup == 0)
            def _():
                for key in out_types:
                    store(out_refs[key].at[part.columns], numbers[key].astype(out_refs[key].dtype))

            if step is not None:
                write_rows(part, row_values, {**column_values, **numbers}, step)

        def write_rows(part, row_values, numbers, step):
            for turn, values in enumerate(row_values):
                result = step({**numbers, **values}).astype(dtype)

                def write(turn=turn, result=result):
                    store(out_refs["result"].at[row_of(turn), part.columns], result)

                if is_surely_there(turn):
                    write()
                else:
                    pl.when(row_of(turn) < rows)(write)

        blocks.run(lax.axis_index("block"), work)

    kernel.__name__ = name
    outputs: Any = settings.kernel(
        kernel,
        out_type=tuple(results.values()),
        grid=(blocks.count,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((len(passes), warpgroups, _TERMS, blocks.width), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=512),
    )(*operands.values())
    return {key: varying_like(value, *operands.values()) for key, value in zip(results, outputs, strict=True)}


def moderate_or_zero(value: jax.Array) -> jax.Array:
    """Returns the value, or 0 if it is huge: distances from it would be NaN, or their squares infinite."""
    return jnp.where(jnp.abs(value) < _HUGE, value, jnp.zeros_like(value))
