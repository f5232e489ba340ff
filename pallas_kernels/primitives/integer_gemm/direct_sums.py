"""The end of a product whose parts of the depth meet in shared memory: their sum, and what a thread reads and writes of
vectors and rows, a value each."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.extend.mlir.dialects import arith

from pallas_kernels.primitives.integer_gemm.direct_products import PITCH, TILE, Share
from pallas_kernels.primitives.integer_gemm.words import (
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
)

_SHAPE = (128 // TILE, TILE)
"""Of what a warpgroup finishes at a time, (tokens, columns), a value a thread."""


def _result() -> Any:
    return plgpu.ShapeDtypeStruct(_SHAPE, jnp.float32, layout=plgpu.Layout.WG_STRIDED(_SHAPE, vec_size=1))


def _array(value: Any) -> Any:
    return as_array(value, _SHAPE, _result().layout)


def _own(first_token: int) -> tuple[Word, Word]:
    """A thread's token, and its column."""
    thread = Word.special("tid.x")
    return thread // TILE + first_token, thread % TILE


def load_vector(ref: Any) -> Any:
    """For each thread the value of its column, float32. ref: from the block's first column on."""

    def load(_, vector_ref):
        _, column = _own(0)
        address = in_device_memory(vector_ref, column * ref.dtype.itemsize)
        return _array(load_number(address, ref.dtype, column, TILE))

    return inlined(load, ref, result=_result())


def load_rows(share: Share, ref: Any, width: int, first_token: int) -> Any:
    """For each thread its value of `ref`, which begins at the block's first column and has rows of `width`; float32."""

    def load(_, rows_ref):
        token, column = _own(first_token)
        address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
        return _array(load_number(address, ref.dtype, token, share.rows))

    return inlined(load, ref, result=_result())


def store_rows(share: Share, values: Any, ref: Any, width: int, first_token: int) -> None:
    """Likewise writes it."""

    def store(_, array, rows_ref):
        token, column = _own(first_token)
        address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
        store_number(address, of_array(array), ref.dtype, token, share.rows)

    inlined(store, values, ref, arrays=(_result().layout,))


def keep_order() -> None:
    """The compiler would put off what is needed late until the weights have come; over a branch it moves nothing."""

    def branch(_):
        text = "{ .reg .pred p; .reg .b32 t; AGAIN: mov.u32 t, %clock; setp.eq.u32 p, t, 1; @p bra AGAIN; }"
        instruct(None, [], text, "~{memory}", ordered=True)

    inlined(branch)


def gathered(share: Share, arriving: Any, first_token: int) -> Any:
    """The sums of all parts of the depth, always added up in the same order."""

    def gather(_, arriving_ref):
        token, column = _own(first_token)
        address = in_shared_memory(arriving_ref, token * PITCH + column)
        size = 4 * share.tokens * PITCH
        parts = [load_shared(address, part * size, token, share.rows) for part in range(share.warps)]
        while len(parts) > 1:
            parts = [arith.addf(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return _array(parts[0])

    return inlined(gather, arriving, result=_result())
