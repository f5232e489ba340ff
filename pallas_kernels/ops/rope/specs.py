"""Rope's registry entry."""

from __future__ import annotations

from pallas_kernels.ops.rope.api import rope
from pallas_kernels.ops.rope.heads import rope_rotate
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.ops.rope.tables import row_tables
from pallas_kernels.spec_builders import arg_spec, backward_passes, gradients_of, traffic
from pallas_kernels.specs import ArgSpec, ArraySpec, OpSpec


def _call(
    *sizes: int,
    dtype: str = "bfloat16",
    interleaved: bool = False,
    per_batch: bool = False,
    columns: int | None = None,
    rotated: int | None = None,
    tags: str = "test",
) -> ArgSpec:
    """Makes a call. sizes: batch, tokens, query heads, key heads (0 for no key) and columns of a head.

    columns: those of tables; None for positions.
    """
    batch, tokens, heads, key_heads, head_size = sizes
    name = f"{batch}x{tokens}x{heads}+{key_heads}x{head_size}-{dtype}"
    name += "-interleaved" * interleaved + "-positions_a_batch" * per_batch
    name += f"-tables_of_{columns}" * (columns is not None) + f"-rotated_{rotated}" * (rotated is not None)
    shape = (batch, tokens) if per_batch else (tokens,)
    table = columns is not None and ArraySpec(shape=(*shape, columns), dtype=dtype)
    arguments = {
        "query": ArraySpec(shape=(batch, tokens, heads, head_size), dtype=dtype),
        "key": key_heads > 0 and ArraySpec(shape=(batch, tokens, key_heads, head_size), dtype=dtype),
        "positions": columns is None and ArraySpec(shape=shape, dtype="int32", deviation=1000.0),
        "cos": table,
        "sin": table,
        "rotated": rotated is not None and rotated,
        "interleaved": interleaved,
        "theta": interleaved and columns is None and 500000.0,
    }
    return arg_spec(name, arguments, tags)


def _backward(*, query, theta=10000.0, rotated=None, interleaved=False, cotangents, **arguments):
    size = query.shape[-1] if rotated is None else rotated
    positions, cos, sin = (arguments.get(name) for name in ("positions", "cos", "sin"))
    tables = row_tables(positions, cos, sin, query.shape[:2], size=size, theta=theta, repeats=True)
    return rope_rotate(cotangents, *tables, rotated=size, interleaved=interleaved, inverse=True)


_TRAFFIC = traffic(read=("query", "key"), written=("query", "key"))

ROPE = OpSpec(
    name="rope",
    function=rope,
    reference=rope_reference,
    differentiable=("query", "key", "cos", "sin"),
    batched=("query", "key"),
    arg_specs=(
        _call(1, 5, 8, 4, 128),
        _call(2, 2, 16, 8, 128, dtype="float32", per_batch=True),
        _call(2, 2, 8, 8, 64, interleaved=True),
        _call(1, 2, 4, 4, 80, tags="test ragged"),
        _call(2, 5, 14, 2, 64, dtype="float16", per_batch=True),
        _call(2, 4, 4, 2, 64, columns=32),
        _call(2, 3, 4, 2, 64, columns=64, per_batch=True, interleaved=True, dtype="float32", tags="test gpu"),
        _call(1, 5, 6, 2, 64, columns=16, rotated=32),
        _call(1, 4, 3, 0, 64, columns=32, rotated=32, per_batch=True, interleaved=True),
        _call(1, 3, 2, 1, 80, columns=32, rotated=32, tags="test ragged"),
        _call(0, 2, 4, 4, 64, tags="test empty"),
        _call(2, 500, 32, 8, 128, tags="gpu"),
        _call(2, 333, 32, 8, 128, dtype="float32", per_batch=True, tags="gpu"),
        _call(2, 333, 12, 12, 64, dtype="float16", tags="gpu"),
        _call(2, 333, 16, 4, 256, tags="gpu"),
        _call(2, 333, 14, 2, 64, per_batch=True, tags="gpu"),
        _call(1, 6790, 12, 1, 128, dtype="float16", tags="gpu"),
        _call(2, 333, 32, 8, 128, interleaved=True, per_batch=True, tags="gpu"),
        _call(2, 333, 32, 32, 64, dtype="float32", interleaved=True, tags="gpu"),
        _call(2, 333, 16, 8, 128, dtype="float16", interleaved=True, tags="gpu"),
        _call(2, 333, 32, 8, 128, columns=64, per_batch=True, tags="gpu"),
        _call(2, 333, 32, 8, 128, columns=128, tags="gpu"),
        _call(2, 333, 32, 32, 64, columns=8, rotated=16, tags="gpu"),
        _call(2, 333, 32, 0, 128, columns=64, rotated=64, interleaved=True, tags="gpu"),
        _call(2, 4096, 32, 8, 128, tags="gpu bench block"),
        _call(8, 4096, 32, 8, 128, tags="gpu bench"),
        _call(8, 4096, 32, 8, 128, interleaved=True, tags="gpu bench"),
        _call(4, 4096, 32, 8, 128, dtype="float32", tags="gpu bench"),
        _call(4, 4096, 32, 8, 128, dtype="float32", interleaved=True, tags="gpu bench"),
        _call(16, 1, 32, 8, 128, per_batch=True, tags="gpu bench"),
        _call(1, 1, 32, 8, 128, tags="gpu bench"),
    ),
    forward_traffic=_TRAFFIC,
    backward_traffic=_TRAFFIC,
    backward=backward_passes(mosaic=_backward, xla=gradients_of(rope_reference, "query", "key")),
)
