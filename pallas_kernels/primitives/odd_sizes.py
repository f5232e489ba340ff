"""Products of sizes that no library's kernel takes, computed by XLA at padded sizes.

A library's kernels for 16-bit operands need rows in memory that begin at multiples of 16 bytes. XLA computes other
products in a Triton kernel. On an H100, those of BERT and GPT-2 with vocabularies of 30522 and 50257 take 2.2, 2.4 and
2.9 times as long where it loads rows of an operand in small pieces, and 1.0 and 1.2 times elsewhere.
With zeros at the end of the operands' rows, and a part of the result, all are fast, and so are those of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.typing import DTypeLike

from pallas_kernels.primitives.gradients import differentiated_as
from pallas_kernels.primitives.platform import target_device

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Contracting and batch axes of both operands, as `lax.dot_general` takes them."""

MATRICES: Dimensions = (((1,), (0,)), ((), ()))
"""Those of (rows, features) @ (features, outputs)."""
_ROW_BYTES, _WORD_BYTES = 16, 4
"""Rows that a product does not sum over are loaded slowly only if they begin between multiples of 4 bytes."""
_MULTIPLE, _LARGE_MULTIPLE, _LARGE = 8, 64, 4096
"""Sizes from 4096 on become multiples of 64, which fill tiles better: at most 1.6 % more work."""
_MOST_GROWTH = 1.25
"""Of a size: what is padded by more loses what alignment gains."""
_FLOPS_PER_COPIED_BYTE = 210
"""The FLOPs of a product that pay for a byte read or written to pad it. GPT-2's head runs at about 700 TFLOP/s on an
H100 at a padded size, and at less than half of that without, while copies run at 2.7 TB/s."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How the operands of a product are padded with zeros.

    lhs, rhs: the padded shapes. result: the shape of the product without padding. serves_gradients_only: whether only
    the products of the gradient get faster, as with a table of embeddings, of which the result alone has odd rows.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    result: tuple[int, ...]
    serves_gradients_only: bool


def padded_size(size: int) -> int:
    """Returns the next size that a library's kernels take."""
    multiple = _LARGE_MULTIPLE if size >= _LARGE else _MULTIPLE
    return size if size % _MULTIPLE == 0 else -(-size // multiple) * multiple


def padding_of(
    lhs: Any,
    rhs: Any,
    dimensions: Dimensions,
    *,
    result_dtype: DTypeLike | None = None,
    minor: tuple[int, int] | None = None,
    copies_result: bool = False,
) -> Padding | None:
    """Returns how to pad a product so that it, or its gradient, gets faster; None where that does not pay.

    Args:
        lhs, rhs: the operands, or anything with their shapes and dtypes.
        dimensions: of the product.
        result_dtype: the product's dtype, if not the operands'.
        minor: the axis of each operand whose elements are neighbours in memory, if not the last.
        copies_result: whether the result without the padding is a copy, as something reads it that takes no part of an
            array.
    """
    operands, shapes = (lhs, rhs), (tuple(lhs.shape), tuple(rhs.shape))
    contracting, batch = dimensions
    if target_device().platform != "cuda" or batch[0] or not all(map(_may_be_padded, operands)):
        return None
    dtype = jnp.dtype(result_dtype or lhs.dtype)
    free = [[axis for axis in range(len(shape)) if axis not in contracting[i]] for i, shape in enumerate(shapes)]
    ends = minor or (len(shapes[0]) - 1, len(shapes[1]) - 1)
    # Of each array the operand with its last axis, that axis, the bytes of its rows, and whether they are summed over.
    rows = [
        (i, ends[i], _row(shapes[i], ends[i], axes) * 2, axes is contracting[i])
        for i in (0, 1)
        for axes in (free[i], contracting[i])
        if ends[i] in axes
    ]
    i = 1 if free[1] else 0
    of_result = [(i, free[i][-1], _row(shapes[i], free[i][-1], free[i]) * dtype.itemsize, False)] if free[i] else []
    padded = [list(shape) for shape in shapes]
    for i, axis, size, is_summed in (*rows, *of_result):
        if size % _ROW_BYTES:
            padded[i][axis] = padded_size(shapes[i][axis])
            if is_summed:
                padded[1 - i][contracting[1 - i][list(contracting[i]).index(axis)]] = padded[i][axis]
    result = tuple(shapes[i][axis] for i in (0, 1) for axis in free[i])
    changed = [i for i in (0, 1) if tuple(padded[i]) != shapes[i]]
    copied = sum(2 * 2 * math.prod(shapes[i]) for i in changed)
    copied += 2 * dtype.itemsize * math.prod(result) if copies_result else 0
    flops = 2 * math.prod(result) * math.prod(shapes[0][axis] for axis in contracting[0])
    if not changed or any(math.prod(padded[i]) > _MOST_GROWTH * math.prod(shapes[i]) for i in changed):
        return None
    is_slow = any(_loads_slowly(size, is_summed) for _, _, size, is_summed in rows)
    # The gradient of an operand sums over the free axes of the other one, which the cotangent has, too.
    cotangent = [row[2] for row in of_result if dtype.itemsize == 2]
    slow_gradients = sum(
        any(_loads_slowly(size, not is_summed) for i, _, size, is_summed in rows if i != own)
        or any(_loads_slowly(size, own == 0) for size in cotangent)
        for own in (0, 1)
    )
    serves_gradients_only = not is_slow or flops < _FLOPS_PER_COPIED_BYTE * copied
    if serves_gradients_only and flops * slow_gradients < 2 * _FLOPS_PER_COPIED_BYTE * copied:
        return None
    return Padding(
        lhs=tuple(padded[0]), rhs=tuple(padded[1]), result=result, serves_gradients_only=serves_gradients_only
    )


def padded_product(
    lhs: jax.Array, rhs: jax.Array, dimensions: Dimensions, padding: Padding, **params: Any
) -> jax.Array:
    """Computes `lax.dot_general(lhs, rhs, dimensions, **params)` of padded operands, and leaves the padding out."""

    def padded(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        operands = (_padded_to(padding.lhs, lhs), _padded_to(padding.rhs, rhs))
        product = lax.dot_general(*operands, dimensions, **params)
        return lax.slice(product, (0,) * product.ndim, padding.result)

    if not padding.serves_gradients_only:
        return padded(lhs, rhs)
    return differentiated_as(padded, lambda lhs, rhs: lax.dot_general(lhs, rhs, dimensions, **params))(lhs, rhs)


def matmul(x: jax.Array, w: jax.Array, *, preferred_element_type: DTypeLike | None = None) -> jax.Array:
    """Computes x (rows, features) @ w (features, outputs) by XLA, at a padded size where that pays."""
    padding = padding_of(x, w, MATRICES, result_dtype=preferred_element_type, copies_result=True)
    if padding is None:
        return jnp.matmul(x, w, preferred_element_type=preferred_element_type)
    return padded_product(x, w, MATRICES, padding, preferred_element_type=preferred_element_type)


def _may_be_padded(operand: Any) -> bool:
    """Returns whether an operand has 16 bits, known sizes, and lies on one device as far as a trace can tell."""
    aval = jax.typeof(operand) if isinstance(operand, jax.Array) else operand
    is_known = not any(map(is_symbolic_dim, aval.shape))
    is_sharded = any(each is not None for each in getattr(getattr(aval, "sharding", None), "spec", ()))
    return is_known and not is_sharded and aval.dtype in (jnp.bfloat16, jnp.float16)


def _loads_slowly(row_bytes: int, is_summed: bool) -> bool:
    """Returns whether a product loads rows of so many bytes slowly, by whether it sums over their elements."""
    return bool(row_bytes % (_ROW_BYTES if is_summed else _WORD_BYTES))


def _row(shape: Sequence[int], axis: int, axes: Sequence[int]) -> int:
    """Returns the elements of a row in memory: those of an axis, and of the axes of the same kind before it."""
    row = 1
    while axis in axes:
        row *= shape[axis]
        axis -= 1
    return row


def _padded_to(shape: tuple[int, ...], operand: jax.Array) -> jax.Array:
    widths = [(0, size - own) for own, size in zip(operand.shape, shape, strict=True)]
    return jnp.pad(operand, widths) if any(more for _, more in widths) else operand
