"""Values that each thread loads, adds and stores, for products whose partial sums are added in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.extend.mlir.dialects import arith

from pallas_kernels.primitives.inline_ptx import (
    Word,
    as_array,
    in_device_memory,
    in_shared_memory,
    inlined,
    instruct,
    load_number,
    load_shared,
    of_array,
    store_number,
    word_type,
)


@dataclass(frozen=True, kw_only=True)
class Values:
    """The assignment of a block's threads to values: `columns` threads per row, and as many rows at a time as fit.

    A turn is identified by its first row. References in device memory begin at the first of these columns.

    rows: rows of the result. warps: warps of the block. pitch: words from one row's sums to the next. sum_rows: rows of
    each warp's sums in shared memory.
    """

    rows: int
    warps: int
    columns: int
    pitch: int
    sum_rows: int

    @property
    def turns(self) -> range:
        """The first row of each turn."""
        return range(0, self.rows, 32 * self.warps // self.columns)

    def of_columns(self, ref: Any) -> jax.Array:
        """Loads each thread's column of a vector, as float32, or int32 for integers."""
        dtype = _wide(ref.dtype)

        def load(_, vector_ref):
            _, column = self._own(0)
            address = in_device_memory(vector_ref, column * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, column, self.columns), dtype)

        return inlined(load, ref, result=self._result(dtype))

    def of_rows(self, ref: Any, turn: int) -> jax.Array:
        """Loads each thread's row of a vector, as float32, or int32 for integers."""
        dtype = _wide(ref.dtype)

        def load(_, vector_ref):
            token, _ = self._own(turn)
            address = in_device_memory(vector_ref, token * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, token, self.rows), dtype)

        return inlined(load, ref, result=self._result(dtype))

    def load(self, ref: Any, turn: int, width: int) -> jax.Array:
        """Loads each thread's value from rows of `width` values, as float32."""

        def load(_, rows_ref):
            token, column = self._own(turn)
            address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, token, self.rows))

        return inlined(load, ref, result=self._result())

    def store(self, values: jax.Array, ref: Any, turn: int, width: int) -> None:
        """Rounds and stores each thread's value."""

        def store(_, array, rows_ref):
            token, column = self._own(turn)
            address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
            store_number(address, of_array(array), ref.dtype, token, self.rows)

        inlined(store, values, ref, arrays=(self._result().layout,))

    def sums(self, partial_sums: Any, turn: int, start: int = 0) -> jax.Array:
        """Adds the sums of all warps for the columns from `start` on, always in the same order."""

        def gather(_, ref):
            token, column = self._own(turn)
            address = in_shared_memory(ref, token * self.pitch + column + start)
            return self._gathered(address, 4 * self.sum_rows * self.pitch, token)

        return inlined(gather, partial_sums, result=self._result())

    def squares(self, squares: Any, turn: int) -> jax.Array:
        """Adds the sums of each row's squares of all warps, always in the same order."""

        def gather(_, ref):
            token, _ = self._own(turn)
            return self._gathered(in_shared_memory(ref, token * self.warps), 4, token)

        return inlined(gather, squares, result=self._result())

    def _own(self, turn: int) -> tuple[Word, Word]:
        """Returns a thread's row and column."""
        thread = Word.special("tid.x")
        return thread // self.columns + turn, thread % self.columns

    def _gathered(self, address: Any, size: int, token: Word) -> Any:
        parts = [load_shared(address, i * size, token, self.rows) for i in range(self.warps)]
        while len(parts) > 1:
            parts = [arith.addf(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return self._array(parts[0])

    def _result(self, dtype: Any = jnp.float32) -> Any:
        shape = (128 // self.columns, self.columns)
        return plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1))

    def _array(self, value: Any, dtype: Any = jnp.float32) -> Any:
        result = self._result(dtype)
        if dtype == jnp.int32:
            return as_array(arith.bitcast(word_type(), value), result.shape, result.layout, is_signed=True)
        return as_array(value, result.shape, result.layout)


def _wide(dtype: jnp.dtype) -> Any:
    return jnp.int32 if dtype == jnp.int32 else jnp.float32


def keep_order() -> None:
    """Keeps earlier loads before later ones by a branch, over which the compiler moves nothing.

    Otherwise it would delay loads whose values are needed late until the weights have arrived.
    """

    def branch(_):
        text = "{ .reg .pred p; .reg .b32 t; AGAIN: mov.u32 t, %clock; setp.eq.u32 p, t, 1; @p bra AGAIN; }"
        instruct(None, [], text, "~{memory}", ordered=True)

    inlined(branch)
