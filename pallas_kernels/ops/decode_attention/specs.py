"""Decoding attention's registry entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pallas_kernels.ops.decode_attention.api import decode_attention
from pallas_kernels.ops.decode_attention.reference import decode_attention_reference
from pallas_kernels.spec_builders import arg_spec, calls, joined, traffic
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, Fill, OpSpec, array_bytes


def _call(
    *sizes: int,
    tokens: int = 1,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    shortest: int | None = None,
    page_size: int | None = None,
    appends: bool = False,
    tags: str = "test",
    **options: Any,
) -> ArgSpec:
    """sizes: batch, keys, query heads, key heads and columns of a head.

    shortest: the least of random lengths; None: all caches are full. page_size: of caches in pages, in random order;
    several sequences may share a page. appends: whether the caches get the tokens' keys and values by the call.
    """
    batch, keys, heads, kv_heads, head_size = sizes
    shape, table = (batch, keys), None
    if page_size is not None:
        shape = (batch * keys // page_size, page_size)
        table = ArraySpec(shape=(batch, keys // page_size), dtype="int32", fill="integers", maximum=shape[0])
    cache = ArraySpec(shape=(*shape, kv_heads, head_size), dtype=dtype, fill=fill)
    new = appends and replace(cache, shape=(batch, tokens, kv_heads, head_size))
    least = keys if shortest is None else shortest
    arguments = {
        "query": ArraySpec(shape=(batch, tokens, heads, head_size), dtype=dtype, fill=fill),
        "key_cache": cache,
        "value_cache": cache,
        "lengths": ArraySpec(shape=(batch,), dtype="int32", fill="integers", minimum=least, maximum=keys + 1),
        **options,
        "page_table": table or False,
        "new_key": new,
        "new_value": new,
    }
    details = (
        tokens > 1 and f"{tokens}tokens",
        shortest is not None and f"lengths{shortest}",
        page_size is not None and f"pages{page_size}",
        appends and "appends",
        *(f"{option}{value:g}" for option, value in options.items()),
        fill != "normal" and fill,
    )
    name = f"{batch}x{keys}-{heads}-{kv_heads}-{head_size}-{dtype}"
    return arg_spec(joined(name, *details), arguments, tags)


def _keys(arguments: Arguments) -> int:
    """The keys that a sequence has room for."""
    keys, table = arguments["key_cache"].shape[1], arguments.get("page_table")
    return keys if table is None else keys * table.shape[1]


def _seen_bytes(arguments: Arguments) -> int:
    """Bytes of the keys that full caches have within the window."""
    keys, window = _keys(arguments), arguments.get("window")
    seen = keys if window is None else min(keys, window + arguments["query"].shape[1])
    return array_bytes(arguments["key_cache"]) * seen // max(1, keys)


def _flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of both products over full caches."""
    query = arguments["query"]
    return 4 * array_bytes(query) // query.dtype.itemsize * _keys(arguments) if phase == "forward" else 0


DECODE_ATTENTION = OpSpec(
    name="decode_attention",
    function=decode_attention,
    reference=decode_attention_reference,
    differentiable=(),
    batched=("query", "key_cache", "value_cache", "lengths", "new_key", "new_value"),
    arg_specs=(
        _call(2, 192, 4, 2, 64, shortest=0),
        _call(1, 136, 4, 1, 128, tokens=3, shortest=1, window=70),
        _call(2, 64, 2, 2, 64, dtype="float16", shortest=0, softcap=2.0, scale=0.3),
        _call(2, 17, 2, 1, 64, shortest=0, tags="test ragged"),
        _call(0, 64, 2, 1, 64, tags="test empty"),
        _call(1, 72, 2, 1, 64, fill="extreme", tags="test extreme"),
        _call(2, 96, 2, 1, 64, shortest=0, page_size=16),
        _call(3, 136, 4, 2, 64, tokens=2, shortest=0, appends=True),
        _call(4, 4096, 16, 4, 128, tokens=2, shortest=0, page_size=16, tags="gpu"),
        _call(3, 2048, 8, 8, 64, shortest=0, window=500, page_size=256, tags="gpu"),
        _call(8, 1024, 32, 8, 128, shortest=0, appends=True, tags="gpu"),
        _call(5, 4096, 16, 2, 128, tokens=8, shortest=0, appends=True, tags="gpu"),
        _call(16, 256, 8, 1, 256, tokens=3, shortest=0, window=40, appends=True, tags="gpu"),
        _call(4, 4104, 32, 8, 128, shortest=0, tags="gpu"),
        _call(3, 1000, 8, 8, 64, tokens=8, shortest=0, dtype="float16", tags="gpu"),
        _call(2, 2048, 16, 2, 128, tokens=5, shortest=100, window=300, tags="gpu"),
        _call(2, 2048, 8, 1, 256, tokens=2, shortest=1, softcap=20.0, tags="gpu"),
        _call(2, 1016, 96, 1, 96, shortest=1, tags="gpu"),
        _call(2, 1024, 6, 3, 192, shortest=0, scale=0.2, tags="gpu"),
        _call(16, 32768, 32, 8, 128, tags="gpu bench block"),
        *calls(_call, (64, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (16, 32768, 32, 8, 64), tags="gpu bench"),
        _call(16, 32768, 32, 8, 128, tokens=4, tags="gpu bench"),
        _call(16, 32768, 32, 8, 128, window=4096, tags="gpu bench"),
        _call(16, 32768, 32, 8, 128, page_size=64, tags="gpu bench"),
        _call(16, 32768, 32, 8, 128, page_size=16, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("query", "seen", "seen"), written=("query",), seen=_seen_bytes),
    backward_traffic=traffic(),
    backward=lambda implementation, arguments, cotangents: (),
    flops=_flops,
)
