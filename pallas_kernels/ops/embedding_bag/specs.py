"""The embedding bag's registry entry."""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels.ops.embedding_bag.api import embedding_bag, embedding_bag_backward
from pallas_kernels.ops.embedding_bag.reference import embedding_bag_reference
from pallas_kernels.spec_builders import arg_spec, backward_passes, call_name, calls, gradients_of, traffic
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, OpSpec


def _call(
    rows: int,
    features: int,
    *bags: int,
    dtype: str = "bfloat16",
    weights_dtype: str | None = None,
    mode: str = "sum",
    tags: str = "test",
) -> ArgSpec:
    """Makes the spec of a call. bags: the shape of `indices`; its last axis is the bag size."""
    name = call_name(bags, f"{rows}x{features}", dtype, weights_dtype and f"{weights_dtype}_weights", mode)
    arguments = {
        "table": ArraySpec(shape=(rows, features), dtype=dtype),
        "indices": ArraySpec(shape=bags, dtype="int32", fill="integers", maximum=rows),
        "weights": weights_dtype is not None and ArraySpec(shape=bags, dtype=weights_dtype),
        "mode": mode,
    }
    return arg_spec(name, arguments, tags)


def _itemsize(arguments: Arguments) -> int:
    return arguments["table"].shape[1] * jnp.dtype(arguments["table"].dtype).itemsize


def _read_bytes(arguments: Arguments) -> int:
    """Counts the rows read, as if no index occurred twice."""
    return math.prod(arguments["indices"].shape) * _itemsize(arguments)


def _result_bytes(arguments: Arguments) -> int:
    return math.prod(arguments["indices"].shape[:-1]) * _itemsize(arguments)


def _backward(*, table, indices, weights=None, mode, cotangents):
    dtable, _, dweights = embedding_bag_backward(mode, (table, indices, weights), *cotangents)
    return (dtable,) if weights is None else (dtable, dweights)


EMBEDDING_BAG = OpSpec(
    name="embedding_bag",
    function=embedding_bag,
    reference=embedding_bag_reference,
    differentiable=("table", "weights"),
    batched=("indices", "weights"),
    arg_specs=(
        _call(9, 256, 5, 3, weights_dtype="float32"),
        _call(40, 128, 2, 3, 10, dtype="float32"),
        _call(7, 300, 4, 17, dtype="float16", mode="mean"),
        _call(5, 1152, 3, 1),
        _call(16, 128, 3, 9, weights_dtype="bfloat16"),
        *calls(_call, (9, 16, 5, 3), (9, 4160, 2, 3), tags="test ragged"),
        *calls(_call, (9, 128, 0, 3), (9, 128, 3, 0), tags="test empty"),
        _call(1000, 128, 333, 10, weights_dtype="float32", tags="gpu"),
        _call(999, 300, 333, 7, dtype="float32", mode="mean", tags="gpu"),
        _call(500, 4096, 100, 9, dtype="float32", weights_dtype="float32", tags="gpu"),
        _call(500, 4095, 100, 20, dtype="float16", tags="gpu"),
        _call(2**21, 128, 8192, 26, 1, tags="gpu bench"),
        _call(2**21, 128, 8192, 26, 10, tags="gpu bench"),
        _call(2**20, 128, 8192, 26, 10, dtype="float32", weights_dtype="float32", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("rows", "indices", "weights"), written=("y",), rows=_read_bytes, y=_result_bytes),
    # The gradient of the table is dense: it is written whole, besides the sums of the rows that occur.
    backward_traffic=traffic(read=("y", "indices", "weights"), written=("table", "weights"), y=_result_bytes),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(embedding_bag_reference, "table", "weights")),
)
