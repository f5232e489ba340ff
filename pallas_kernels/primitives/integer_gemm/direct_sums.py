"""The end of a product whose parts of the depth meet in shared memory: their sum, and what a thread reads and writes of
vectors and rows, a value each."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.extend.mlir.dialects import arith

from pallas_kernels.primitives.integer_gemm.direct_products import Share
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


def _result(columns: int) -> Any:
    """What a warpgroup finishes at a time, (tokens, columns), a value a thread."""
    shape = (128 // columns, columns)
    return plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1))


def _array(columns: int, value: Any) -> Any:
    result = _result(columns)
    return as_array(value, result.shape, result.layout)


def _own(columns: int, first_token: int) -> tuple[Word, Word]:
    """A thread's token, and its column."""
    thread = Word.special("tid.x")
    return thread // columns + first_token, thread % columns


def load_vector(ref: Any, columns: int) -> Any:
    """For each thread the value of its column, float32. ref: from the block's first column on."""

    def load(_, vector_ref):
        _, column = _own(columns, 0)
        address = in_device_memory(vector_ref, column * ref.dtype.itemsize)
        return _array(columns, load_number(address, ref.dtype, column, columns))

    return inlined(load, ref, result=_result(columns))


def load_rows(share: Share, ref: Any, width: int, first_token: int) -> Any:
    """For each thread its value of `ref`, which begins at the block's first column and has rows of `width`; float32."""

    def load(_, rows_ref):
        token, column = _own(share.columns, first_token)
        address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
        return _array(share.columns, load_number(address, ref.dtype, token, share.rows))

    return inlined(load, ref, result=_result(share.columns))


def store_rows(share: Share, values: Any, ref: Any, width: int, first_token: int) -> None:
    """Likewise writes it."""

    def store(_, array, rows_ref):
        token, column = _own(share.columns, first_token)
        address = in_device_memory(rows_ref, (token * width + column) * ref.dtype.itemsize)
        store_number(address, of_array(array), ref.dtype, token, share.rows)

    inlined(store, values, ref, arrays=(_result(share.columns).layout,))


def keep_order() -> None:
    """The compiler would put off what is needed late until the weights have come; over a branch it moves nothing."""

    def branch(_):
        text = "{ .reg .pred p; .reg .b32 t; AGAIN: mov.u32 t, %clock; setp.eq.u32 p, t, 1; @p bra AGAIN; }"
        instruct(None, [], text, "~{memory}", ordered=True)

    inlined(branch)


def gathered(share: Share, arriving: Any, first_token: int) -> Any:
    """The sums of all parts of the depth, always added up in the same order."""

    def gather(_, arriving_ref):
        token, column = _own(share.columns, first_token)
        address = in_shared_memory(arriving_ref, token * share.pitch + column)
        size = 4 * share.tokens * share.pitch
        parts = [load_shared(address, part * size, token, share.rows) for part in range(share.depth_warps)]
        while len(parts) > 1:
            pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
            parts = [arith.addf(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return _array(share.columns, parts[0])

    return inlined(gather, arriving, result=_result(share.columns))
