"""One launch of the matrix product's main loop with this operation's own store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.consumer import consume
from pallas_kernels.primitives.gemm.launch import launcher
from pallas_kernels.primitives.gemm.pipeline import Ring, produce, ring_types
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Pieces
from pallas_kernels.primitives.references import in_place
from pallas_kernels.primitives.row_tiles import shared

Extras = Mapping[str, Any]
"""Further operands by name: arrays, or references to them in a kernel."""


def problem_of(
    m: int,
    n: int,
    k: int,
    dtype: jnp.dtype,
    config: GemmConfig,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    stored_bytes: int,
) -> Problem:
    """Returns an (m, n, k) product with as many stages as fit beside buffers of `stored_bytes` per element."""
    config = config.fitted(itemsize=dtype.itemsize, stored_bytes=stored_bytes)
    return Problem(
        m=m,
        widths=(n,),
        k=k,
        dtype=dtype,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        config=config,
    )


def product_kernel(
    problem: Problem,
    a: jax.Array,
    b: jax.Array,
    *,
    name: str,
    make_store: Callable[[Extras, Sequence[Any], Any], Any],
    extras: Extras,
    changed: Extras | None = None,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    buffer_dtype: jnp.dtype | None = None,
    view_b: Callable[[Any, Extras], Any] = lambda ref, extras: ref,
) -> tuple[jax.Array, ...]:
    """Returns the outputs of `out_type`, then the changed arrays of `changed`.

    changed: further extras, whose memory the kernel changes.
    make_store: makes the warpgroup's store, whose `begin` and `finish` `consume` calls. It takes the references of the
        extras and the outputs, and the warpgroup's buffers in shared memory, (slots, rows, columns) of `Pieces` in
        `buffer_dtype`, None without one.
    view_b: returns the part of b's reference that is multiplied.
    """
    config, pieces = problem.config, Pieces.of(problem)

    def roles(a_ref, b_ref, extra_refs, *refs):
        outputs, (ring_refs, buffers, _) = refs[: len(out_type)], refs[len(out_type) :]
        ring = Ring.of(problem, ring_refs)

        def multiply(warpgroup):
            own = buffers[0].at[warpgroup] if buffers else None
            consume(problem, ring, [make_store(extra_refs, outputs, own)], warpgroup)

        def load():
            produce(problem, [a_ref], [view_b(b_ref, extra_refs)], ring)

        return load, multiply

    buffer_shape = (config.warpgroups, pieces.slots, pieces.rows, pieces.columns)
    kernel = launcher(
        problem,
        roles,
        name=name,
        out_type=list(out_type),
        scratch_types=(
            ring_types(problem),
            [shared(buffer_shape, buffer_dtype)] if buffer_dtype is not None else [],
            plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
        ),
    )
    if not changed:
        return tuple(kernel(a, b, dict(extras)))

    @in_place
    def launch(a, b, extras, changed):
        references = jax.tree.map(jax.new_ref, changed)
        outputs = kernel(a, b, {**extras, **references})
        return *outputs, *map(jax.freeze, references.values())

    return launch(a, b, dict(extras), dict(changed))


@dataclass(frozen=True, kw_only=True)
class TileStore:
    """Stores tiles in pieces, or lets TMA add them to the output; each element is added to once in a launch.

    results: returns, for a tile's product, its row and its column, a function from a piece's first column to the values
    that are stored; None: those of the product.
    """

    pieces: Pieces
    output: Any
    buffer: Any
    adds: bool = False
    results: Callable[[jax.Array, jax.Array, jax.Array], Callable[[int], jax.Array]] | None = None

    def begin(self, row: jax.Array, column: jax.Array) -> None:
        """Does nothing before the products."""

    def finish(self, products: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Stores the tile after its products."""
        (product,), pieces = products, self.pieces
        values = self.results and self.results(product, row, column)
        for piece in range(pieces.count):
            slot, start = piece % pieces.slots, piece * pieces.columns
            plgpu.wait_smem_to_gmem(pieces.slots - 1, wait_read_only=True)
            value = values(start) if values else product[:, start : start + pieces.columns]
            self.buffer[slot] = value.astype(self.buffer.dtype)
            plgpu.commit_smem()
            place = self.output.at[pl.ds(row, pieces.rows), pl.ds(column + start, pieces.columns)]
            plgpu.copy_smem_to_gmem(self.buffer.at[slot], place, reduction_op="add" if self.adds else None)
