"""Decoding attention's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops.decode_attention.api import decode_attention
from pallas_kernels.ops.decode_attention.config import DecodeConfig, candidates
from pallas_kernels.ops.decode_attention.mosaic_gpu import decode_forward
from pallas_kernels.ops.decode_attention.plan import Scores
from pallas_kernels.ops.decode_attention.reference import decode_attention_reference
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, Fill, OpSpec, Traffic, array_bytes


def _call(
    batch: int,
    keys: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    *,
    tokens: int = 1,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    shortest: int | None = None,
    page_size: int | None = None,
    tags: tuple[str, ...] = ("test",),
    **options: Any,
) -> ArgSpec:
    """shortest: lengths are random from this on; None: all caches are full. page_size: of caches in pages, in random
    order; a page may be of several sequences."""
    shape = (batch, keys) if page_size is None else (batch * keys // page_size, page_size)
    cache = ArraySpec(shape=(*shape, kv_heads, head_size), dtype=dtype, fill=fill)
    name = f"{batch}x{keys}-{heads}-{kv_heads}-{head_size}-{dtype}"
    if tokens > 1:
        name += f"-{tokens}tokens"
    if shortest is not None:
        name += f"-lengths{shortest}"
    if page_size is not None:
        name += f"-pages{page_size}"
        options["page_table"] = ArraySpec(
            shape=(batch, keys // page_size), dtype="int32", fill="integers", maximum=shape[0]
        )
    name += "".join(f"-{option}{value:g}" for option, value in options.items() if option != "page_table")
    return ArgSpec(
        name=name + (f"-{fill}" if fill != "normal" else ""),
        arguments={
            "query": ArraySpec(shape=(batch, tokens, heads, head_size), dtype=dtype, fill=fill),
            "key_cache": cache,
            "value_cache": cache,
            "lengths": ArraySpec(
                shape=(batch,),
                dtype="int32",
                fill="integers",
                minimum=keys if shortest is None else shortest,
                maximum=keys + 1,
            ),
            **options,
        },
        tags=frozenset(tags),
    )


_GPU = ("gpu",)
_BENCH = ("gpu", "bench")

_ARG_SPECS = (
    _call(2, 192, 4, 2, 64, shortest=0),
    _call(1, 136, 4, 1, 128, tokens=3, shortest=1, window=70),
    _call(2, 64, 2, 2, 64, dtype="float16", shortest=0, softcap=2.0, scale=0.3),
    _call(2, 17, 2, 1, 64, shortest=0, tags=("test", "ragged")),
    _call(0, 64, 2, 1, 64, tags=("test", "empty")),
    _call(1, 72, 2, 1, 64, fill="extreme", tags=("test", "extreme")),
    _call(2, 96, 2, 1, 64, shortest=0, page_size=16),
    _call(4, 4096, 16, 4, 128, tokens=2, shortest=0, page_size=16, tags=_GPU),
    _call(3, 2048, 8, 8, 64, shortest=0, window=500, page_size=256, tags=_GPU),
    _call(4, 4104, 32, 8, 128, shortest=0, tags=_GPU),
    _call(3, 1000, 8, 8, 64, tokens=8, shortest=0, dtype="float16", tags=_GPU),
    _call(2, 2048, 16, 2, 128, tokens=5, shortest=100, window=300, tags=_GPU),
    _call(2, 2048, 8, 1, 256, tokens=2, shortest=1, softcap=20.0, tags=_GPU),
    _call(2, 1016, 96, 1, 96, shortest=1, tags=_GPU),
    _call(2, 1024, 6, 3, 192, shortest=0, scale=0.2, tags=_GPU),
    _call(16, 32768, 32, 8, 128, tags=(*_BENCH, "block")),
    _call(64, 4096, 32, 8, 128, tags=_BENCH),
    _call(1, 8192, 32, 8, 128, tags=_BENCH),
    _call(16, 32768, 32, 8, 64, tags=_BENCH),
    _call(16, 32768, 32, 8, 128, tokens=4, tags=_BENCH),
    _call(16, 32768, 32, 8, 128, window=4096, tags=_BENCH),
    _call(16, 32768, 32, 8, 128, page_size=64, tags=_BENCH),
    _call(16, 32768, 32, 8, 128, page_size=16, tags=_BENCH),
)


def _keys(arguments: Arguments) -> int:
    """That a sequence has room for."""
    keys, table = arguments["key_cache"].shape[1], arguments.get("page_table")
    return keys if table is None else keys * table.shape[1]


def _forward_traffic(arguments: Arguments) -> Traffic:
    """Of full caches."""
    query, keys = arguments["query"], _keys(arguments)
    seen = keys
    if arguments.get("window") is not None:
        seen = min(keys, arguments["window"] + query.shape[1])
    part = array_bytes(arguments["key_cache"]) * seen // max(1, keys)
    return Traffic(read=(array_bytes(query), part, part), written=(array_bytes(query),))


def _backward_traffic(arguments: Arguments) -> Traffic:
    """Nothing: there is no backward kernel."""
    return Traffic(read=(), written=())


def flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of both products over full caches."""
    query = arguments["query"]
    return 4 * array_bytes(query) // query.dtype.itemsize * _keys(arguments) if phase == "forward" else 0


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":
        return {}
    found = candidates(arguments["key_cache"].shape[1])
    return {name: partial(_forward_variant, config=config) for name, config in found.items()}


def _forward_variant(
    *,
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    page_table: jax.Array | None = None,
    config: DecodeConfig,
) -> tuple[jax.Array]:
    rule = Scores(scale=query.shape[-1] ** -0.5 if scale is None else scale, window=window, softcap=softcap)
    return (decode_forward(query, key_cache, value_cache, lengths, scores=rule, page_table=page_table, config=config),)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return ()


DECODE_ATTENTION = OpSpec(
    name="decode_attention",
    function=decode_attention,
    reference=decode_attention_reference,
    implementations=("mosaic", "xla"),
    differentiable=(),
    batched=("query", "key_cache", "value_cache", "lengths"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=flops,
)
