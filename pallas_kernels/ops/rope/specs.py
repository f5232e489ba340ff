"""Rope's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.rope.api import rope
from pallas_kernels.ops.rope.mosaic_gpu import rope_rotate
from pallas_kernels.ops.rope.reference import rope_reference
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic, array_bytes


def _call(
    batch: int,
    tokens: int,
    heads: int,
    key_heads: int,
    head_size: int,
    *,
    dtype: str = "bfloat16",
    interleaved: bool = False,
    per_batch: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    name = f"{batch}x{tokens}x{heads}+{key_heads}x{head_size}-{dtype}"
    name += "-interleaved" if interleaved else ""
    name += "-positions_a_batch" if per_batch else ""
    arguments = {
        "query": ArraySpec(shape=(batch, tokens, heads, head_size), dtype=dtype),
        "key": ArraySpec(shape=(batch, tokens, key_heads, head_size), dtype=dtype),
        "positions": ArraySpec(shape=(batch, tokens) if per_batch else (tokens,), dtype="int32", deviation=1000.0),
        **({"interleaved": True, "theta": 500000.0} if interleaved else {}),
    }
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(1, 3, 8, 4, 128),
    _call(2, 2, 16, 8, 128, dtype="float32", per_batch=True),
    _call(2, 2, 8, 8, 64, interleaved=True),
    _call(1, 3, 4, 4, 256, dtype="float16", per_batch=True),
    _call(1, 2, 4, 4, 64, dtype="float32", interleaved=True),
    _call(1, 2, 12, 1, 128, tags=("test", "ragged")),
    _call(1, 2, 4, 4, 80, tags=("test", "ragged")),
    _call(0, 2, 4, 4, 64, tags=("test", "empty")),
    _call(2, 500, 32, 8, 128, tags=GPU),
    _call(2, 333, 32, 8, 128, dtype="float32", per_batch=True, tags=GPU),
    _call(2, 333, 12, 12, 64, dtype="float16", tags=GPU),
    _call(2, 333, 16, 4, 256, tags=GPU),
    _call(2, 333, 32, 8, 128, interleaved=True, per_batch=True, tags=GPU),
    _call(2, 333, 32, 32, 64, dtype="float32", interleaved=True, tags=GPU),
    _call(2, 333, 16, 8, 128, dtype="float16", interleaved=True, tags=GPU),
    _call(2, 4096, 32, 8, 128, tags=(*BENCH, "block")),
    _call(8, 4096, 32, 8, 128, tags=BENCH),
    _call(8, 4096, 32, 8, 128, interleaved=True, tags=BENCH),
    _call(4, 4096, 32, 8, 128, dtype="float32", tags=BENCH),
    _call(4, 4096, 32, 8, 128, dtype="float32", interleaved=True, tags=BENCH),
    _call(16, 1, 32, 8, 128, per_batch=True, tags=BENCH),
    _call(1, 1, 32, 8, 128, tags=BENCH),
)


def _traffic(arguments: Arguments) -> Traffic:
    sizes = (array_bytes(arguments["query"]), array_bytes(arguments["key"]))
    return Traffic(read=sizes, written=sizes)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    fixed = {name: value for name, value in arguments.items() if name not in ("query", "key")}
    if implementation == "mosaic":
        options = {"theta": 10000.0, "interleaved": False, **fixed}
        return rope_rotate(*cotangents, **options, inverse=True)

    def forward(query, key):
        return rope_reference(query, key, **fixed)

    zeros = (jnp.zeros_like(arguments[name]) for name in ("query", "key"))  # linear: the point does not matter
    return jax.vjp(forward, *zeros)[1](cotangents)


ROPE = OpSpec(
    name="rope",
    function=rope,
    reference=rope_reference,
    implementations=("mosaic", "xla"),
    differentiable=("query", "key"),
    batched=("query", "key"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_traffic,
    backward_traffic=_traffic,
    backward=_backward,
    variants=lambda phase, arguments: {},
)
