"""The end of a product whose sums meet in shared memory: what threads read, add up and write, a number at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.extend.mlir.dialects import arith

from pallas_kernels.primitives.few_rows.warp_products import Share
from pallas_kernels.primitives.integer_gemm.words import (
    Word,
    as_array,
    in_device_memory,
    in_shared_memory,
    inlined,
    load_number,
    load_shared,
    of_array,
    store_number,
    word_type,
)


@dataclass(frozen=True, kw_only=True)
class Values:
    """The threads of a block, `columns` of them to a row, as many rows at a time as there are threads for.

    A turn is its first row. References in device memory begin where the first of these columns is.
    """

    share: Share
    columns: int

    @property
    def turns(self) -> range:
        """The first rows of what the block finishes at a time."""
        return range(0, self.share.rows, 32 * self.share.warps // self.columns)

    def of_columns(self, ref: Any) -> jax.Array:
        """For each thread what a vector has for its column; float32, or int32 of such."""
        dtype = _wide(ref.dtype)

        def load(_, vector_ref):
            _, column = self._own(0)
            address = in_device_memory(vector_ref, column * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, column, self.columns), dtype)

        return inlined(load, ref, result=self._result(dtype))

    def of_rows(self, ref: Any, turn: int) -> jax.Array:
        """For each thread what a vector has for its row; float32, or int32 of such."""
        dtype = _wide(ref.dtype)

        def load(_, vector_ref):
            token, _ = self._own(turn)
            address = in_device_memory(vector_ref, token * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, token, self.share.rows), dtype)

        return inlined(load, ref, result=self._result(dtype))

    def load(self, ref: Any, turn: int, width: int) -> jax.Array:
        """For each thread its number of rows of `width`, float32."""

        def load(_, rows_ref):
            token, column = self._own(turn)
            address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
            return self._array(load_number(address, ref.dtype, token, self.share.rows))

        return inlined(load, ref, result=self._result())

    def store(self, values: jax.Array, ref: Any, turn: int, width: int) -> None:
        """Likewise rounds and writes it."""

        def store(_, array, rows_ref):
            token, column = self._own(turn)
            address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
            store_number(address, of_array(array), ref.dtype, token, self.share.rows)

        inlined(store, values, ref, arrays=(self._result().layout,))

    def sums(self, arriving: Any, turn: int, start: int = 0) -> jax.Array:
        """The sums of all warps for the columns from `start` on, always added up in the same order."""
        share = self.share

        def gather(_, ref):
            token, column = self._own(turn)
            address = in_shared_memory(ref, token * share.pitch + column + start)
            return self._gathered(address, 4 * share.rows * share.pitch, token)

        return inlined(gather, arriving, result=self._result())

    def squares(self, squares: Any, turn: int) -> jax.Array:
        """Likewise those of each row's squares."""

        def gather(_, ref):
            token, _ = self._own(turn)
            return self._gathered(in_shared_memory(ref, token * self.share.warps), 4, token)

        return inlined(gather, squares, result=self._result())

    def _own(self, turn: int) -> tuple[Word, Word]:
        """A thread's row, and its column."""
        thread = Word.special("tid.x")
        return thread // self.columns + turn, thread % self.columns

    def _gathered(self, address: Any, size: int, token: Word) -> Any:
        parts = [load_shared(address, i * size, token, self.share.rows) for i in range(self.share.warps)]
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
