"""The way out: from values (columns, tokens) in registers to results (tokens, columns) in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.few_rows.config import GROUP
from pallas_kernels.primitives.few_rows.problem import Problem
from pallas_kernels.primitives.transposed import store_transposed


def store_from_registers(
    problem: Problem, outputs: Sequence[Any], values: Sequence[Sequence[jax.Array]], columns: Sequence[jax.Array]
) -> None:
    """Writes each group's results, `GROUP` columns from one of `columns` on: neighbours are exchanged, and a thread
    writes two columns at once. Behind the last product that is sooner done than the way through shared memory."""
    for results, column in zip(values, columns, strict=True):
        places = _places(problem, outputs, column)
        for value, (output, start, is_own) in zip([*results] * (len(places) // len(results)), places, strict=True):
            write = partial(_write, problem, value, output, start)
            write() if is_own is None else pl.when(is_own)(write)


def store_through_shared(
    problem: Problem,
    outputs: Sequence[Any],
    values: Sequence[Sequence[jax.Array]],
    columns: Sequence[jax.Array],
    buffers: Sequence[Any],
    slots: Sequence[int],
) -> None:
    """Likewise, by TMA, through `slots` of each output's (or of all outputs' one) buffer."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for slot, results in zip(slots, values, strict=True):
        for value, buffer in zip(results, buffers, strict=True):
            store_transposed(value, buffer.at[slot])
    plgpu.commit_smem()
    for slot, column in zip(slots, columns, strict=True):
        places = _places(problem, outputs, column, clips=True)
        for buffer, (output, start, is_own) in zip([*buffers] * (len(places) // len(buffers)), places, strict=True):
            place = output.at[pl.ds(0 * start, problem.tokens), pl.ds(start, GROUP)]
            copy = partial(plgpu.copy_smem_to_gmem, buffer.at[slot], place)
            copy() if is_own is None else pl.when(is_own)(copy)


def _places(
    problem: Problem, outputs: Sequence[Any], column: jax.Array, *, clips: bool = False
) -> list[tuple[Any, jax.Array, jax.Array | None]]:
    """Each output, where the group begins in it, and whether it is there at all; None where that is certain.

    clips: whether columns behind the last one are dropped anyway.
    """
    widths = problem.widths
    is_whole = clips or problem.config.columns == GROUP
    if len(widths) == 1:
        return [(output, column, None if is_whole else column < widths[0]) for output in outputs]
    places = []
    for output, width, (is_own, first) in zip(outputs, widths, problem.owners(column), strict=True):
        start = column - first
        places.append((output, start, is_own if is_whole else is_own & (start < width)))
    return places


def _write(problem: Problem, value: jax.Array, output: Any, start: jax.Array) -> None:
    if problem.rows == 1:
        first = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=plgpu.Layout.WGMMA) == 0
        row = jnp.sum(jnp.where(first, value, 0.0), axis=1)
        output.at[0, pl.ds(start, GROUP)][...] = row.astype(output.dtype)
        return
    pairs = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED).astype(output.dtype)
    place = output.at[pl.ds(0, problem.tokens), pl.ds(start, GROUP)]
    place.transpose((1, 0))[...] = pairs
