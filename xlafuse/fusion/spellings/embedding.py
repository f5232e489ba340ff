"""Rows of a table by index, whose gradient XLA computes by a scatter-add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.embedding.config import is_preferred
from pallas_kernels.ops.embedding.reference import gather_rows
from xlafuse.fusion.graph import Equation, Value, behind, constant
from xlafuse.fusion.spelling import Proposal, Spelling, same_order

_MODES = {"FILL_OR_DROP": "fill", "CLIP": "clip", "PROMISE_IN_BOUNDS": "promise_in_bounds"}


def _lookup(table: jax.Array, ids: jax.Array, *, mode: str = "fill", dtype: Any = None, casts_first: bool) -> jax.Array:
    dtype = table.dtype if dtype is None else dtype
    return gather_rows(table.astype(dtype) if casts_first else table, ids, mode).astype(dtype)


def _lookups(value: Value, *, casts_first: bool) -> Iterator[Proposal]:
    """Proposes the table and the indices of a gather of rows, many enough for the kernels.

    A cast to fewer bits, before or after the gather, is part of it: the gradient's sums then need not be rounded to
    them. casts_first: whether the table is cast.
    """
    gather = _before_narrowing(value).equation
    if gather is None or gather.primitive != "gather" or not _takes_many_rows(gather):
        return
    given, places = gather.inputs
    table = _before_narrowing(given) if casts_first else given
    if casts_first != (table is not given) or not jnp.issubdtype(table.dtype, jnp.floating):
        return
    static = {} if (mode := _MODES[gather.params["mode"].name]) == "fill" else {"mode": mode}
    static |= {} if value.dtype == table.dtype else {"dtype": value.dtype.name}
    for dtype in {places.dtype: None, behind(places).dtype: None}:
        if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max >= table.shape[0]:
            ids = jax.ShapeDtypeStruct(value.shape[:-1], dtype)
            arrays = {"table": jax.ShapeDtypeStruct(table.shape, table.dtype), "ids": ids}
            yield Proposal(arrays=arrays, order=same_order(value), static=static)


def _takes_many_rows(gather: Equation) -> bool:
    """Returns whether a gather takes whole rows of a matrix, and its gradient takes the kernels.

    No indices need be added up that are known or promised to be unique.
    """
    (table, places), (rows,), params = gather.inputs, gather.outputs, gather.params
    is_promised = params["unique_indices"] or params["indices_are_sorted"]
    if is_promised or params["mode"].name not in _MODES or len(table.shape) != 2:
        return False
    if (known := constant(places)) is not None and np.unique(known).size == known.size:
        return False
    is_whole = tuple(params["slice_sizes"]) == (1, table.shape[1]) and rows.shape[-1:] == table.shape[1:]
    return is_whole and is_preferred(math.prod(rows.shape[:-1]), table.shape, rows.dtype.itemsize)


def _before_narrowing(value: Value) -> Value:
    """Returns what is cast to fewer bits, or the value itself."""
    if value.primitive == "convert_element_type" and value.equation is not None:
        inner = value.equation.inputs[0]
        return inner if inner.dtype.itemsize > value.dtype.itemsize else value
    return value


SPELLINGS: tuple[Spelling, ...] = tuple(
    Spelling(
        operation="embedding",
        function=partial(_lookup, casts_first=casts_first),
        propose=partial(_lookups, casts_first=casts_first),
        roots=frozenset(("gather", "convert_element_type")),
        needs=frozenset(("gather",)),
        changed=("table",),
    )
    for casts_first in (False, True)
)
