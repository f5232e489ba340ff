"""The embedding's registry entry."""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels.ops.embedding.api import embedding, embedding_backward
from pallas_kernels.ops.embedding.reference import embedding_reference
from pallas_kernels.spec_builders import arg_spec, backward_passes, call_name, calls, gradients_of, traffic
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, OpSpec


def _call(
    rows: int,
    features: int,
    *ids: int,
    dtype: str = "bfloat16",
    mode: str = "fill",
    distinct: int | None = None,
    tags: str = "test",
) -> ArgSpec:
    """Makes the spec of a call. ids: their shape. distinct: how many rows they name, if not all."""
    name = call_name(ids, f"{rows}x{features}", dtype, mode != "fill" and mode, distinct and f"{distinct}_distinct")
    arguments = {
        "table": ArraySpec(shape=(rows, features), dtype=dtype),
        "ids": ArraySpec(shape=ids, dtype="int32", fill="integers", maximum=distinct or rows),
        "mode": mode,
    }
    return arg_spec(name, arguments, tags)


def _row_bytes(arguments: Arguments) -> int:
    """Counts the bytes of the rows of the result, which are also those read from the table."""
    table = arguments["table"]
    return math.prod(arguments["ids"].shape) * table.shape[1] * jnp.dtype(table.dtype).itemsize


def _backward(*, table, ids, mode, cotangents):
    return (embedding_backward(ids, *cotangents, rows=table.shape[0], dtype=table.dtype, mode=mode),)


EMBEDDING = OpSpec(
    name="embedding",
    function=embedding,
    reference=embedding_reference,
    differentiable=("table",),
    batched=("ids",),
    arg_specs=(
        _call(17, 128, 5, 29, dtype="float32"),
        _call(18, 300, 4, 17, dtype="float32", mode="promise_in_bounds"),
        _call(20, 1152, 33, dtype="float32", mode="clip"),
        _call(257, 256, 70),
        _call(3, 128, 5, 9),
        _call(2, 128, 150, dtype="float16", mode="clip"),
        *calls(_call, (9, 16, 5, 3), tags="test ragged"),
        *calls(_call, (9, 128, 0, 3), tags="test empty"),
        _call(300, 1024, 3000, tags="gpu"),
        _call(2, 768, 16, 128, dtype="float32", tags="gpu"),
        _call(999, 300, 3330, mode="clip", tags="gpu"),
        _call(9000, 4100, 1000, dtype="float16", tags="gpu"),
        _call(300, 4095, 2000, dtype="float32", tags="gpu"),
        _call(30522, 768, 64, 512, dtype="float32", tags="gpu bench"),
        _call(2, 1024, 16, 512, tags="gpu bench"),
        _call(30522, 1024, 16, 512, tags="gpu bench"),
        _call(30522, 1024, 16, 512, distinct=1, tags="gpu bench"),
        _call(128256, 4096, 2, 8192, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("rows", "ids"), written=("y",), rows=_row_bytes, y=_row_bytes),
    backward_traffic=traffic(read=("y", "ids"), written=("table",), y=_row_bytes),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(embedding_reference, "table")),
)
