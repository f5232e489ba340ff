"""Elementwise work on (rows, features) arrays, cut into blocks of one warpgroup.

A block takes neighbouring values of one row, with all its loads in flight together. An array whose row length does not
matter is treated as one row.
"""

from __future__ import annotations

import math
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
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import dropped, mixed_words
from pallas_kernels.primitives.rows import ACCESS_BYTES, THREADS, Segment, split_row
from pallas_kernels.primitives.settings import named_kernel

COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)
"""For kernels whose threads read back only what they wrote themselves, or what an explicit barrier protects."""
MAX_ELEMENTS = 2**31 - 1
"""The most values of a row: column indices are int32."""
FEW_BLOCKS = 1024
"""With fewer blocks than about this, a GPU is not full and smaller blocks finish sooner."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The columns of a row that a block works on at a time, and their layout in registers."""

    columns: pl.Slice
    segment: Segment

    def segment_columns(self) -> jax.Array:
        """The position of each value in the part, int32.

        It is computed as (accesses, values of an access). So the compiler sees each value's position in its access,
        which is the same in all threads.
        """
        vector = self.segment.vector
        shape = (self.segment.size // vector, vector)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
        access, place = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2))
        return (access * jnp.int32(vector) + place).reshape(self.segment.size)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Splits (rows, features) arrays into blocks of `at_once` rows by `columns` columns.

    `columns` is a whole number of 16-byte accesses of every thread, for values of `itemsize` bytes. Where columns or
    rows are left over, the last block overlaps the one before: both compute the same values for what they share. A row
    shorter than two blocks is one block with two parts, if two suffice and unless `is_one_part`; 16384 x 1088 bf16
    values take 25 µs so, 30 with two blocks (bias_activation, H100). Other rows shorter than `columns` have smaller
    blocks.

    `stride` is the distance between the starts of two rows (default: `features` with several rows). It decides how
    accesses are aligned.
    """

    rows: int
    features: int
    columns: int
    itemsize: int
    stride: int | None = None
    is_one_part: bool = False
    at_once: int = 1

    @property
    def width(self) -> int:
        """The number of columns of a block."""
        if self.features < 2 * self.columns and not self.is_one_part and len(self._split(self.features)) <= 2:
            return self.features
        return min(self.columns, THREADS * 2 ** int(math.log2(self.features // THREADS)))

    @property
    def blocks_per_row(self) -> int:
        """The number of blocks per row."""
        return -(-self.features // self.width)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.rows // self.at_once) * self.blocks_per_row

    def run(self, block: jax.Array, work: Callable[[jax.Array, Part], None]) -> None:
        """Calls `work` with the block's first row and each of its parts, in a kernel."""
        group, chunk = lax.div(block, self.blocks_per_row), lax.rem(block, self.blocks_per_row)
        last, final = self.blocks_per_row - 1, self.features - self.width
        whole = self._split(self.width)
        row = jnp.minimum(group * self.at_once, self.rows - self.at_once)

        def work_at(start: jax.Array | int, segments: tuple[Segment, ...]) -> None:
            for segment in segments:
                work(row, Part(columns=pl.ds(start + segment.offset, segment.size), segment=segment))

        if not last:
            work_at(0, whole)
        elif final % (vector := whole[0].vector) == 0:
            # In units of accesses, by which the compiler sees that the start is aligned.
            work_at(jnp.minimum(chunk * (self.width // vector), final // vector) * vector, whole)
        else:
            pl.when(chunk < last)(lambda: work_at(chunk * self.width, whole))
            pl.when(chunk == last)(lambda: work_at(0, self._split(self.width, final)))

    def _split(self, columns: int, start: int = 0) -> tuple[Segment, ...]:
        """Cuts `columns` columns of a row from `start` on into segments."""
        stride = self.stride or (self.features if self.rows > 1 else self.columns)
        return split_row(columns, self.itemsize, offset=start, stride=stride)


def elementwise_blocks(
    rows: int, features: int, itemsize: int, *, has_bias: bool = False, stride: int | None = None
) -> Blocks:
    """Returns blocks of one or two accesses of each thread, in one row or several.

    A block takes at least one access of every thread: a GPU starts only 1.6 blocks a nanosecond. 34596 rows of two
    times 484 bf16 values take 43 µs with a block for each, 34 with two rows a block (H100). A bias is read once for all
    rows of a block.
    """
    short = -(-access_columns(1, itemsize) // features)
    vectors, at_once = (1, min(rows, max(2, short))) if has_bias else (2, min(rows, short))
    if -(-rows // at_once) * -(-features // access_columns(vectors, itemsize)) < FEW_BLOCKS:
        vectors = at_once = 1
    columns = access_columns(vectors, itemsize)
    return Blocks(rows=rows, features=features, columns=columns, itemsize=itemsize, stride=stride, at_once=at_once)


def column_blocks(units: int, features: int, itemsize: int, *, warpgroups: int, blocks_per_core: int) -> Blocks:
    """Returns persistent blocks for column sums: strips of columns by groups of rows, of one part each.

    units: what the groups' `warpgroups` take in turns, such as rows.
    """
    columns = access_columns(1, itemsize)
    strips = Blocks(rows=1, features=features, columns=columns, itemsize=itemsize, stride=features, is_one_part=True)
    most = target_device().core_count * blocks_per_core // strips.count
    return replace(strips, rows=max(1, min(-(-units // warpgroups), most)))


def launch(
    name: str,
    operands: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    blocks: Blocks,
    make_work: Callable[[dict[str, Any]], Callable[[jax.Array, Part], None]],
) -> dict[str, jax.Array]:
    """Runs a `named_kernel` over all blocks; returns the outputs by name.

    make_work: called in the kernel with all references by name; returns the function that `Blocks.run` calls.
    """

    def body(refs: dict[str, Any]) -> None:
        blocks.run(lax.axis_index("block"), make_work(refs))

    grid = {"block": blocks.count}
    return named_kernel(body, operands, outputs, name=name, grid=grid, compiler_params=COMPILER_PARAMS)


def launch_column_sums(
    name: str,
    operands: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    blocks: Blocks,
    make_sums: Callable[[dict[str, Any]], Callable[[jax.Array, jax.Array, Part], Sequence[jax.Array]]],
    *,
    warpgroups: int,
    kinds: int,
) -> dict[str, jax.Array]:
    """Sums over rows in persistent blocks, whose warpgroups add up their sums; returns the outputs by name.

    outputs: with "sums", (groups of rows, `kinds` or more, features).
    make_sums: called in the kernel with all references by name; returns a function of a group, a warpgroup and a part,
        which returns the sums of `kinds` terms, float32, and what else "sums" has, the same for all warpgroups.
    """

    def body(refs: dict[str, Any]) -> None:
        own, sums, sums_of = refs["own"], refs["sums"], make_sums(refs)
        warpgroup = lax.axis_index("warpgroup")

        def work(group: jax.Array, part: Part) -> None:
            found = sums_of(group, warpgroup, part)
            for kind in range(kinds):
                own[warpgroup, kind] = found[kind]
            for kind in range(kinds, len(found)):
                pl.when(warpgroup == 0)(lambda kind=kind: store(sums.at[group, kind, part.columns], found[kind]))
            meet(refs["met"])

            @pl.when(warpgroup == 0)
            def _():
                for kind in range(kinds):
                    layout = part.segment.layout
                    first, *others = (
                        plgpu.load(own.at[i, kind], layout=layout, optimized=False) for i in range(warpgroups)
                    )
                    store(sums.at[group, kind, part.columns], sum(others, start=first).astype(sums.dtype))

        blocks.run(lax.axis_index("block"), work)

    scratch = {
        "own": plgpu.SMEM((warpgroups, kinds, blocks.width), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=warpgroups),
    }
    options = {"grid": {"block": blocks.count}, "warpgroups": warpgroups, "compiler_params": COMPILER_PARAMS}
    return named_kernel(body, operands, outputs, scratch, name=name, **options)


def rows_from(ref: Any, first: jax.Array | int, count: int) -> list[Any]:
    """Returns references to `count` rows of `ref`.

    A row is a slice of a slice: else the compiler does not see how rows but the first are aligned, and cuts accesses.
    """
    rows = ref.at[pl.ds(first, count)]
    return [rows.at[i] for i in range(count)]


def load_part[Name](refs: Mapping[Name, Any], part: Part) -> dict[Name, jax.Array]:
    """Loads a part of a row from each reference to a row."""
    return {
        name: plgpu.load(ref.at[part.columns], layout=part.segment.layout, optimized=False)
        for name, ref in refs.items()
    }


def load_wide[Name](refs: Mapping[Name, Any], part: Part) -> dict[Name, jax.Array]:
    """Loads what `load_part` does, as float32."""
    return {name: value.astype(jnp.float32) for name, value in load_part(refs, part).items()}


def zeros_part(part: Part) -> jax.Array:
    """Returns float32 zeros of a part, to accumulate into."""
    return plgpu.layout_cast(jnp.zeros(part.segment.shape, jnp.float32), part.segment.layout)


def access_columns(vectors: int, itemsize: int) -> int:
    """Returns how many values of `itemsize` bytes a warpgroup reads in `vectors` 16-byte accesses per thread."""
    return vectors * THREADS * (ACCESS_BYTES // itemsize)


def elementwise_unsupported(rows: int, features: int) -> str | None:
    """Returns why rows of this length cannot be split, or None where they can. Empty arrays need no kernel."""
    if not rows * features:
        return None
    if features < THREADS:
        return f"rows have {features} values, a warpgroup shares at least {THREADS}"
    if features > MAX_ELEMENTS:
        return f"rows have {features} values, the kernels count at most {MAX_ELEMENTS}"
    return None


Keep = Callable[[jax.Array, jax.Array, Part], jax.Array]
"""Applies dropout to a part of a row: takes its values, the row and the part."""


def elementwise_kernel(
    name: str, operands: Mapping[str, jax.Array | None], step: Callable[..., jax.Array], *, rate: float
) -> jax.Array:
    """Launches `step` over all parts of `operands["x"]`; returns its results in x's shape and dtype.

    step: takes the row, the part, each operand's values in it, and the dropout function (None: no dropout).
    """
    x = operands["x"]
    assert x is not None
    rows, features = x.shape
    blocks = elementwise_blocks(rows, features, x.dtype.itemsize, has_bias=operands.get("bias") is not None)

    def make_work(refs):
        y_ref, keep = refs.pop("y"), make_keep(refs.pop("words", None), features=features, rate=rate)
        bias_ref = {"bias": refs.pop("bias")} if "bias" in refs else {}

        def work(first, part):
            bias = load_part(bias_ref, part)
            row_refs = {name: rows_from(ref, first, blocks.at_once) for name, ref in refs.items()}
            loaded = [
                load_part({name: rows[i] for name, rows in row_refs.items()}, part) for i in range(blocks.at_once)
            ]
            for i, (values, y_row) in enumerate(zip(loaded, rows_from(y_ref, first, blocks.at_once), strict=True)):
                y = step(first + i, part, {**values, **bias}, keep)
                store(y_row.at[part.columns], y.astype(y_ref.dtype))

        return work

    return launch(name, operands, {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)}, blocks, make_work)["y"]


def make_keep(words_ref: Any, *, features: int, rate: float) -> Keep | None:
    """Returns the function that applies dropout to a part of a row, or None without dropout."""
    if words_ref is None:
        return None
    words = mixed_words(words_ref)

    def keep(value, row, part):
        column = part.segment_columns() + part.columns.start
        return dropped(value, words, row, column, features=features, rate=rate)

    return keep
