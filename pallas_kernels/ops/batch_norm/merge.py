"""Adds the partial sums of all groups of rows, and computes each column's numbers from them, in one small launch."""

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
from pallas_kernels.primitives.rows import THREADS

WARPGROUPS = 8
"""Warpgroups of a block, which divide the groups of its 128 columns among them."""
_TERMS = 2
"""The most terms of a pass."""
_AT_ONCE = 3
"""Groups that a warpgroup reads at once."""
_HUGE = 1e30
"""The neighbours of such a float32 are so far from it that the distance's square is infinite."""

Values = Mapping[str, jax.Array]
Sums = tuple[jax.Array, ...]
"""Sums over all groups, each with one float32 value per column."""


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

    def kernel(partials_ref, *all_refs):
        refs = dict(zip(names, all_refs, strict=False))
        out_refs = dict(zip(out_types, all_refs[len(names) :], strict=False))
        totals_ref, done = all_refs[-2:]
        warpgroup = lax.axis_index("warpgroup")

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
            column_values = {key: load(ref.at[part.columns], part) for key, ref in refs.items()}
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
                plgpu.commit_smem()
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                for t in range(len(found)):
                    every = [load(totals_ref.at[p, other, t], part) for other in range(warpgroups)]
                    sums += (sum(every[1:], start=every[0]),)
            numbers = finish(sums, column_values)

            @pl.when(warpgroup == 0)
            def _():
                for key, ref in out_refs.items():
                    store(ref.at[part.columns], numbers[key].astype(ref.dtype))

        blocks.run(lax.axis_index("block"), work)

    kernel.__name__ = name
    outputs: Any = settings.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct((features,), dtype) for dtype in out_types.values()),
        grid=(blocks.count,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((len(passes), warpgroups, _TERMS, blocks.width), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=512),
    )(partials, *columns.values())
    operands = (partials, *columns.values())
    return {key: varying_like(value, *operands) for key, value in zip(out_types, outputs, strict=True)}


def moderate_or_zero(value: jax.Array) -> jax.Array:
    """Returns the value, or 0 if it is huge: distances from it would be NaN, or their squares infinite."""
    return jnp.where(jnp.abs(value) < _HUGE, value, jnp.zeros_like(value))
