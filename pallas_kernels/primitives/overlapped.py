"""Rings: blocks of rows travel between devices while the rows of other blocks are multiplied.

Where an axis of the mesh cuts the rows of x and the outputs of the weights, as with sequence and tensor parallelism, a
product needs all rows. A device multiplies its own block first, while the next one arrives from its neighbour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.cuts import Cut, part
from pallas_kernels.primitives.dimensions import ROWS, Axes, Rule, axes_at, names_in
from pallas_kernels.primitives.gemm.row_blocks import RowBlock

_ROW = f"{ROWS}0"
"""The last leading dimension, whose blocks travel."""

_overlaps: ContextVar[bool] = ContextVar("overlaps", default=False)


@contextlib.contextmanager
def overlapped_collectives() -> Iterator[None]:
    """Lets products compute while their rows travel between devices, or the sums of their parts.

        @overlapped_collectives()
        def step(x, w_gate, w_up, w_down): ...

        jax.jit(step, compiler_options=BY_COPY_ENGINES)

    It holds for calls that are traced inside, in programs that XLA partitions. `linear`, `gated_linear` and
    `qkv_projection` overlap where the mesh axes that cut their outputs also cut x's last leading dimension; `linear`
    also where the axes that cut its features are to cut that dimension of the result. Mosaic GPU's kernels must be able
    to take the parts. Gradients keep XLA's collectives.
    """
    with assigned(_overlaps, True):
        yield


def is_overlapping() -> bool:
    """Returns whether calls that are traced now overlap with their collectives."""
    return _overlaps.get()


InPlace = Callable[[Sequence[jax.Array], RowBlock], tuple[jax.Array, ...]]
"""Computes an operation's results for one block of rows, which it writes to (batch, blocks, rows, outputs) each."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """A call for which rows travel, so that each device computes those of all.

    axes: that cut the rows. count: of blocks. travels: the places of the operands that are cut so. results: how many
    the operation has. Others are kept for its gradient; each device keeps those of its own rows.
    """

    axes: Axes
    count: int
    travels: tuple[int, ...]
    results: int

    def __str__(self) -> str:
        return f"rows travel over {', '.join(dict.fromkeys(axis.partition('.')[0] for axis in self.axes))}"

    def specs(self, rule: Rule, cut: Cut, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """Returns the partition specs of a call's arrays, with the rows cut that travel and those that are kept."""
        found, first = list(specs), len(rule.operands) + self.results
        kept = [i for i, own in enumerate(rule.arrays) if i >= first and not set(cut.own(own)) & set(self.axes)]
        for i in (*self.travels, *kept):
            places = zip(rule.arrays[i], specs[i], strict=True)
            found[i] = PartitionSpec(*(self.axes if own == (_ROW,) else entry for own, entry in places))
        return found

    def run(
        self, rule: Rule, run: Callable[..., Any], in_place: InPlace, cut: Cut, *arrays: jax.Array
    ) -> list[jax.Array]:
        """Returns what one device computes of its parts.

        run: the call as a function of a cut and parts. cut: with all rows on each device.
        """
        size = rule.sizes[_ROW] // self.count
        device, own = lax.axis_index(self.axes), [arrays[i] for i in self.travels]
        batch = prod(cut.sizes[name] for names in rule.operands[0][:-2] for name in names)
        into: tuple[jax.Array, ...] = ()
        kept: list[jax.Array] = []
        for step in range(self.count):
            index = lax.rem(device + step, self.count)
            following = [moved(each, self.axes, -1) for each in own] if step < self.count - 1 else []
            operands = [_block(each, names, index, size) for each, names in zip(arrays, rule.operands, strict=True)]
            for i, each in zip(self.travels, own, strict=True):
                operands[i] = each
            if step == 0 and len(rule.results) > self.results:
                kept = self._kept(rule, cut, partial(run, replace(cut, sizes={**cut.sizes, _ROW: size})), operands)
            into = in_place(operands, RowBlock(index=index, shape=(batch, self.count), into=into))
            if following:  # or XLA might let the rows of later steps travel at once
                own, into = lax.optimization_barrier((following, into))
        return [*(y.reshape(_shape(cut, own)) for y, own in zip(into, rule.results, strict=False)), *kept]

    def _kept(self, rule: Rule, cut: Cut, run: Callable[..., Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns what the gradient needs of the device's own rows.

        Raises:
            NotImplementedError: it needs a result of the products, which would have to be placed, too.
        """
        with assigned(part, None):  # `in_place` makes the choice, and records it
            traced = jax.make_jaxpr(lambda *arrays: run(*arrays)[self.results :])(*operands)
        kept = jaxpr_as_fun(traced)(*operands)
        for i, own in enumerate(rule.results[self.results :]):
            if set(cut.own(own)) & set(self.axes):
                if any(pe.dce_jaxpr(traced.jaxpr, [i == place for place in range(len(kept))])[1]):
                    raise NotImplementedError("a gradient needs products")
                kept[i] = jnp.full(_shape(cut, own), kept[i].reshape(-1)[0])  # a constant
        return kept


def gather_of(rule: Rule, cut: Cut, sizes: Mapping[str, int], asked: Sequence[Any], results: int) -> Gather | None:
    """Returns how a call's rows travel, or None if it does not compute all of them from rows that are cut.

    sizes: of the mesh axes. asked: the partition spec that XLA has for each array. results: as in `Gather`.
    """
    x = rule.operands[0]
    axes = axes_at(asked[0], len(x) - 2)
    count = prod(sizes[axis] for axis in axes)
    is_forward = rule.overlaps and rule.primal is None and not cut.sums and not rule.wholes
    if not is_forward or x[-2:-1] != ((_ROW,),) or _ROW in cut.axes_of or count < 2 or rule.sizes[_ROW] % count:
        return None
    is_mapped = any(name.startswith("vmap") for name in rule.sizes)
    if is_mapped or not set(axes) <= set(cut.lacked(x)) or any((_ROW,) not in own for own in rule.results):
        return None
    rows = [(i, own.index((_ROW,))) for i, own in enumerate(rule.operands) if _ROW in names_in(own)]
    travels = tuple(i for i, place in rows if axes_at(asked[i], place) == axes)
    return Gather(axes=axes, count=count, travels=travels, results=results)


def moved(array: jax.Array, axes: Axes, step: int) -> jax.Array:
    """Sends an array to the device that is `step` further along the ring, and returns the one that arrives."""
    count = lax.axis_size(axes)
    return lax.ppermute(array, axes, [(i, (i + step) % count) for i in range(count)])


def _shape(cut: Cut, dimensions: Sequence[tuple[str, ...]]) -> list[int]:
    return [prod(cut.sizes[name] for name in names) for names in dimensions]


def _block(array: jax.Array, names: Sequence[tuple[str, ...]], index: jax.Array, size: int) -> jax.Array:
    if (_ROW,) not in names:
        return array
    return lax.dynamic_slice_in_dim(array, index * size, size, names.index((_ROW,)))
