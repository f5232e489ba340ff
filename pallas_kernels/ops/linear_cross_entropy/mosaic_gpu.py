"""Linear layer and cross-entropy forward on Mosaic GPU: a product that writes statistics of rows, not logits.

Each tile of logits is summarised on the accumulator, in float32: for every row its maximum, the sum of exponentials
under it, the label's logit if it is in the tile, and with label smoothing the sum. It writes a few numbers for every
256 logits, which XLA combines. For the gradient it can keep the rounded logits of the first rows; their statistics are
then of the rounded logits.

All launches of this operation are the matrix product's main loop with their own store (`product_kernel`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.cross_entropy.formula import Exponential, Slope, Terms, Token
from pallas_kernels.primitives.exponents import LOG2_E, LOWEST_LOGIT
from pallas_kernels.primitives.gemm.config import GemmConfig, choose_config
from pallas_kernels.primitives.gemm.consumer import consume
from pallas_kernels.primitives.gemm.launch import launcher
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.gemm.pipeline import Ring, produce, ring_types
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.references import changed_in_place
from pallas_kernels.primitives.row_tiles import shared

Extras = Mapping[str, Any]
"""Further operands by name: arrays, or references to them in a kernel."""
BINARY = Exponential(is_binary=True)
PIECE = 64
"""Columns of a tile that are computed at a time."""


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
        outputs = kernel(a, b, dict(extras))
        return tuple(varying_like(output, a, b, *jax.tree.leaves(extras)) for output in outputs)

    launch = lambda a, b, extras, references: kernel(a, b, {**extras, **references})  # noqa: E731
    outputs, own = changed_in_place(launch, (a, b, dict(extras)), dict(changed))
    return *outputs, *own.values()


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of each row of logits, float32; see `formula`.

    total: the sum of exponentials under the shift that belongs to `maximum`. target: the label's logit, where it names
    a token. logit_sum: with label smoothing.
    """

    maximum: jax.Array
    total: jax.Array
    target: jax.Array
    logit_sum: jax.Array | None

    def losses(self, terms: Terms, token: Token) -> jax.Array:
        """Returns the losses of rows with these tokens, times their weights."""
        total = BINARY.total(self.total, BINARY.shift(self.maximum), self.maximum)
        return terms.loss(token, self.maximum, total, self.target, self.logit_sum)

    def slope(self, terms: Terms, token: Token) -> Slope:
        """Returns the parameters of the gradients of rows with these tokens, times their weights."""
        shift = BINARY.shift(self.maximum)
        return terms.slope(self.maximum, self.total, token, exponential=BINARY, shift=shift)


def logits_statistics(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    terms: Terms,
    keeps_logits: bool = False,
) -> tuple[Statistics, jax.Array | None]:
    """Returns the statistics of hidden @ w, and an array like w whose first rows are the logits, or None.

    hidden: (rows, features), rows and features as the main loop takes them. w: (features, columns), of its dtype, whose
    columns behind the vocabulary of `terms` do not count.
    labels: (rows,) int32 from 0 to below vocabulary. keeps_logits: only with at most as many rows as features. The
    other rows of that array are not initialised.
    """
    (rows, features), columns, dtype = hidden.shape, w.shape[1], hidden.dtype
    config = choose_config(rows, columns)
    problem = problem_of(rows, columns, features, dtype, config, stored_bytes=dtype.itemsize if keeps_logits else 0)
    pieces = Pieces.of(problem)
    height = problem.rows
    tiles, block = -(-columns // problem.columns), problem.config.warpgroup_rows
    numbers = 4 if terms.label_smoothing else 3
    out_type = [jax.ShapeDtypeStruct((tiles, height), jnp.float32)] * numbers
    if keeps_logits:
        out_type.append(jax.ShapeDtypeStruct(w.shape, dtype))

    def make_store(extras, outputs, buffer):
        store = None
        if keeps_logits:
            kept = outputs[-1].at[pl.ds(0, rows)]
            store = Store.of_one_result(pieces, output=kept, buffer=pieces.tiles(buffer, dtype))
        return StatisticsStore(
            vocabulary=terms.vocabulary,
            labels=extras["labels"],
            labelled=extras["labelled"],
            partial=outputs[:numbers],
            store=store,
            block=block,
            width=problem.columns,
        )

    outputs = product_kernel(
        problem,
        hidden,
        w,
        name="linear_cross_entropy",
        make_store=make_store,
        extras={
            "labels": padded_vector(labels, height),
            "labelled": _labelled(labels, height // block, block, tiles, problem.columns),
        },
        out_type=out_type,
        buffer_dtype=dtype if keeps_logits else None,
    )
    statistics = _together(outputs[:numbers], labels, problem.columns)
    return statistics, outputs[-1] if keeps_logits else None


def _labelled(labels: jax.Array, blocks: int, block: int, tiles: int, width: int) -> jax.Array:
    """Returns whether each warpgroup's part of each tile contains labels, (blocks, tiles) int32. Few do."""
    label_tiles = jnp.pad(labels // width, (0, blocks * block - labels.shape[0]), constant_values=-1)
    hits = label_tiles.reshape(blocks, block, 1) == jnp.arange(tiles)
    return jnp.any(hits, axis=1).astype(jnp.int32)


def _together(partial: Sequence[jax.Array], labels: jax.Array, width: int) -> Statistics:
    """Combines the statistics of tiles, (tiles, padded rows) each, into those of rows."""
    rows = labels.shape[0]
    maxima, totals, targets, *sums = (array[:, :rows] for array in partial)
    maximum = jnp.max(maxima, axis=0)
    totals = totals * BINARY.ratio(BINARY.shift(maxima), BINARY.shift(maximum))
    return Statistics(
        maximum=maximum,
        total=jnp.sum(totals, axis=0),
        target=jnp.take_along_axis(targets, (labels // width)[None], axis=0)[0],
        logit_sum=jnp.sum(sums[0], axis=0) if sums else None,
    )


@dataclass(frozen=True, kw_only=True)
class StatisticsStore:
    """The store of a warpgroup's tile of logits: it writes their statistics.

    labels: (padded rows,) in device memory. labelled: see `_labelled`. partial: the outputs, (tiles, padded rows) each.
    store: for the logits, if they are kept. early: the values that `begin` loads.
    """

    vocabulary: int
    labels: Any
    labelled: Any
    partial: Sequence[Any]
    store: Store | None
    block: int
    width: int
    early: dict[str, jax.Array] = field(default_factory=dict)

    def begin(self, row: jax.Array, column: jax.Array) -> None:
        """Loads before the products whether the tile has labels, so that no thread waits for memory after them."""
        self.early["is_labelled"] = self.labelled[row // self.block, column // self.width] != 0

    def finish(self, products: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        """Writes the tile's statistics, and its logits if they are kept."""
        (logits,) = products
        if self.store is not None:
            # The gradient is computed from the rounded logits, so it needs the sum of their exponentials.
            logits = logits.astype(self.store.outputs[0].dtype).astype(jnp.float32)
            self.store.finish([logits], row, column)
        self._summarise(logits, row, column)

    def _summarise(self, logits: jax.Array, row: jax.Array, column: jax.Array) -> None:
        rows, width = logits.shape
        piece = min(PIECE, width)
        columns = plgpu.broadcasted_iota(jnp.int32, (rows, piece), 1, layout=plgpu.Layout.WGMMA) + column
        starts = range(0, width, piece)
        parts = [logits[:, start : start + piece] for start in starts]
        is_cut = self.vocabulary % width != 0
        if is_cut:  # the last tile has zeros from outside the vocabulary
            ends = [self.vocabulary - start for start in starts]
            parts = [jnp.where(columns < end, part, LOWEST_LOGIT) for end, part in zip(ends, parts, strict=True)]
        highest = jnp.max(functools.reduce(jnp.maximum, parts), axis=1)
        highest = jnp.maximum(highest, LOWEST_LOGIT)
        shift = spread(BINARY.shift(highest), piece)
        total = jnp.sum(added(jnp.exp2(part * LOG2_E - shift) for part in parts), axis=1)
        place = (column // width, pl.ds(row, rows))
        maximum_ref, total_ref, target_ref, *sum_ref = self.partial
        maximum_ref[place], total_ref[place] = highest, total
        for ref in sum_ref:
            ref[place] = jnp.sum(added(_counted(part) if is_cut else part for part in parts), axis=1)

        @pl.when(self.early["is_labelled"])
        def _():
            label = spread(load_rows(self.labels, row, rows), piece)
            found = (jnp.where(columns == label - start, part, 0.0) for start, part in zip(starts, parts, strict=True))
            target_ref[place] = jnp.sum(added(found), axis=1)


def _counted(part: jax.Array) -> jax.Array:
    return jnp.where(part > LOWEST_LOGIT, part, 0.0)


def added(values: Iterable[jax.Array]) -> jax.Array:
    """Adds arrays element by element."""
    return functools.reduce(operator.add, values)


def load_rows(ref: Any, row: jax.Array, rows: int) -> jax.Array:
    """Loads one number for each row of a tile, in the layout of the accumulator's rows."""
    return plgpu.load(ref.at[pl.ds(row, rows)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def spread(numbers: jax.Array, columns: int) -> jax.Array:
    """Broadcasts one number of each row to its columns."""
    return lax.broadcast_in_dim(numbers, (numbers.shape[0], columns), (0,))
