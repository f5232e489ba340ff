"""Attention's registry entry: how tests and benchmarks call it, its traffic and FLOPs, and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.backward.config import backward_candidates
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.forward.config import forward_candidates, known
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import Problem, masking_of, problem_of, segments_of, widened
from pallas_kernels.ops.attention.reference import attention_reference, backward_of_xla
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, Fill, OpSpec, Traffic, array_bytes


def _call(
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    key_heads: int,
    size: int,
    *,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    deviation: float = 1.0,
    documents: int = 0,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    tags: tuple[str, ...] = ("test",),
    **static: Any,
) -> ArgSpec:
    """documents: so many segments, packed in order, of about the same length."""
    query = ArraySpec(shape=(batch, queries, heads, size), dtype=dtype, fill=fill, deviation=deviation)
    key = ArraySpec(shape=(batch, keys, key_heads, size), dtype=dtype, fill=fill, deviation=deviation)
    value = ArraySpec(shape=(batch, keys, key_heads, size), dtype=dtype)
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, **static}
    name = f"{batch}x{queries}x{keys}x{heads}x{key_heads}x{size}-{dtype}"
    name += f"-{fill}" if fill != "normal" else ""
    name += f"-deviation_{deviation:g}" if deviation != 1 else ""
    if documents:
        arguments["segment_ids"] = ArraySpec(shape=(batch, queries), dtype="int32", fill="sorted", maximum=documents)
        name += f"-{documents}_documents"
    if mask is not None:
        arguments["mask"] = ArraySpec(shape=mask, dtype="bool", fill="integers")
        name += "-mask_" + "x".join(map(str, mask))
    if bias is not None:
        arguments["bias"] = ArraySpec(shape=bias, dtype=dtype)
        name += "-bias_" + "x".join(map(str, bias))
    if static.get("dropout_rate"):
        arguments["dropout_key"] = ArraySpec(shape=(2,), dtype="uint32", fill="bits")
    words = {"is_causal": "causal", "window": "window", "dropout_rate": "dropout", "softcap": "softcap"}
    for key_word, value_ in static.items():
        name += f"-{words[key_word]}" if value_ is True else f"-{words.get(key_word, key_word)}_{_text(value_)}"
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


def _text(value: Any) -> str:
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)


DOCUMENTS = 8
"""In the benchmark's packed sequence."""

_GPU = ("gpu",)
_BENCH = ("bench",)
_BLOCK = ("bench", "block")

ARG_SPECS = (
    _call(1, 16, 24, 2, 1, 64),
    _call(1, 72, 136, 1, 1, 64, is_causal=True, window=(60, 0), softcap=5.0),
    _call(1, 24, 24, 1, 1, 64, dtype="float16", bias=(24, 24), documents=2, dropout_rate=0.25),
    _call(1, 24, 24, 2, 2, 80, is_causal=True, tags=("test", "ragged")),
    _call(1, 16, 16, 1, 1, 288, tags=("test", "ragged")),
    _call(0, 16, 16, 2, 1, 64, tags=("test", "empty")),
    _call(2, 0, 16, 2, 1, 64, tags=("test", "empty")),
    _call(1, 2048, 2048, 8, 2, 128, tags=_GPU),  # backward blocks share a group's heads
    _call(1, 2304, 2304, 4, 1, 128, is_causal=True, tags=_GPU),
    _call(1, 2048, 2176, 8, 2, 64, tags=_GPU),
    _call(2, 2048, 2048, 8, 2, 64, is_causal=True, tags=_GPU),
    _call(1, 2176, 1024, 8, 2, 128, tags=_GPU),  # 136 tiles: four more than an H200 has multiprocessors
    _call(1, 1, 4097, 4, 4, 128, tags=_GPU),
    _call(2, 127, 1000, 4, 2, 128, is_causal=True, tags=_GPU),
    _call(1, 1000, 127, 4, 2, 64, is_causal=True, dtype="float16", tags=_GPU),
    _call(1, 1030, 1030, 4, 2, 64, tags=_GPU),
    _call(1, 640, 640, 4, 2, 96, is_causal=True, tags=_GPU),
    _call(1, 640, 700, 4, 2, 192, tags=_GPU),
    _call(1, 640, 640, 2, 1, 256, is_causal=True, tags=_GPU),
    _call(1, 1024, 1024, 2, 1, 128, window=(100, 60), documents=4, tags=_GPU),
    _call(1, 1024, 1024, 2, 1, 128, is_causal=True, window=(200, 0), softcap=20.0, tags=_GPU),
    _call(2, 1024, 1024, 2, 1, 128, is_causal=True, documents=5, tags=_GPU),
    _call(2, 300, 500, 2, 1, 128, mask=(2, 1, 300, 500), dropout_rate=0.2, tags=_GPU),
    _call(2, 512, 640, 2, 1, 128, mask=(2, 1, 1, 640), is_causal=True, tags=_GPU),
    _call(2, 512, 512, 4, 2, 64, bias=(4, 512, 512), is_causal=True, tags=_GPU),
    _call(1, 600, 600, 2, 1, 128, bias=(1, 2, 600, 600), mask=(600, 600), softcap=30.0, tags=_GPU),
    _call(1, 512, 512, 2, 1, 128, documents=3, dropout_rate=0.1, dtype="float16", tags=_GPU),
    _call(1, 520, 640, 2, 1, 128, is_causal=True, dropout_rate=0.1, tags=_GPU),  # one feature: in pairs
    _call(1, 1000, 1000, 2, 1, 128, is_causal=True, window=(300, 0), tags=_GPU),  # one feature: dealt out
    _call(1, 512, 512, 2, 1, 128, deviation=4.0, is_causal=True, tags=(*_GPU, "extreme")),
    _call(2, 5, 8192, 8, 2, 128, tags=_GPU),  # few queries: forward by the kernel of decoding
    _call(2, 1, 1000, 12, 12, 64, tags=_GPU),
    _call(5, 5, 1032, 32, 8, 128, tags=_GPU),  # rows of the backward pass are queries of a group's heads
    _call(2, 1, 1, 8, 2, 128, is_causal=True, tags=_GPU),
    _call(2, 16, 16, 8, 2, 128, is_causal=True, tags=_GPU),  # and are loaded from where they are
    _call(2, 32, 200, 8, 2, 128, tags=_GPU),
    _call(2, 63, 77, 4, 2, 128, is_causal=True, tags=_GPU),  # one warpgroup computes
    _call(1, 256, 256, 4, 1, 256, is_causal=True, tags=_GPU),  # few steps of a large head
    _call(1, 300, 196, 4, 1, 256, tags=_GPU),
    _call(8, 512, 512, 16, 8, 128, tags=_GPU),  # blocks enough for one backward kernel
    _call(8, 500, 500, 16, 8, 128, deviation=4.0, tags=(*_GPU, "extreme")),  # and keys of zeros behind the last
    _call(8, 600, 600, 16, 8, 64, is_causal=True, tags=_GPU),
    _call(8, 512, 512, 16, 8, 96, tags=_GPU),
    _call(1, 2050, 2050, 32, 8, 96, is_causal=True, tags=_GPU),  # whose blocks share a group's heads
    _call(2, 64, 1450, 8, 1, 96, tags=_GPU),  # backward blocks share keys
    # Lengths that are no whole groups of eight: tiles in panels.
    _call(2, 197, 197, 4, 4, 64, tags=_GPU),
    _call(1, 133, 133, 2, 1, 96, is_causal=True, tags=_GPU),
    _call(1, 250, 250, 4, 1, 256, is_causal=True, tags=_GPU),
    _call(2, 300, 300, 8, 2, 128, is_causal=True, window=(100, 0), tags=_GPU),
    _call(1, 301, 301, 2, 1, 128, is_causal=True, documents=3, tags=_GPU),
    _call(1, 203, 301, 4, 2, 64, bias=(1, 4, 203, 301), tags=_GPU),
    # Heads that are no tile's size.
    _call(1, 640, 640, 4, 2, 80, is_causal=True, tags=_GPU),
    _call(2, 300, 300, 4, 4, 72, tags=_GPU),
    # One round or a little more: how many queries and keys a block has.
    _call(1, 512, 512, 16, 16, 128, tags=_GPU),  # one warpgroup computes, on 128 multiprocessors
    _call(1, 300, 300, 32, 8, 64, is_causal=True, tags=_GPU),  # two blocks a multiprocessor
    _call(1, 1216, 170, 16, 16, 128, tags=_GPU),  # 96 keys a tile
    _call(4, 264, 264, 32, 8, 128, tags=_GPU),
    _call(8, 128, 128, 32, 8, 256, tags=_GPU),  # a large head in a loop over tiles
    _call(8, 200, 200, 32, 8, 192, is_causal=True, tags=_GPU),
    _call(8, 82, 82, 32, 8, 192, is_causal=True, tags=_GPU),  # and not
    _call(4, 4096, 4096, 32, 8, 128, tags=_BENCH),
    _call(4, 4096, 4096, 32, 8, 128, is_causal=True, tags=_BLOCK),
    _call(2, 4096, 4096, 32, 8, 128, is_causal=True, tags=_BLOCK),
    _call(1, 16384, 16384, 32, 8, 128, tags=_BENCH),
    _call(1, 16384, 16384, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(4, 4096, 4096, 32, 8, 64, tags=_BENCH),
    _call(4, 4096, 4096, 32, 8, 64, is_causal=True, tags=_BENCH),
    _call(4, 4096, 4096, 16, 4, 256, tags=_BENCH),
    _call(4, 4096, 4096, 16, 4, 256, is_causal=True, tags=_BENCH),
    _call(1, 16384, 16384, 32, 8, 128, is_causal=True, window=(1023, 0), tags=_BENCH),
    _call(1, 16384, 16384, 32, 8, 128, is_causal=True, documents=DOCUMENTS, tags=_BENCH),
    _call(4, 4096, 4096, 32, 8, 128, is_causal=True, dropout_rate=0.1, tags=_BENCH),
    # Few queries or short sequences.
    _call(16, 1, 1, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(1, 1, 1, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(16, 1, 4096, 32, 8, 128, tags=_BENCH),
    _call(16, 16, 4096, 32, 8, 128, tags=_BENCH),
    _call(16, 16, 16, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(16, 128, 128, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(1, 512, 512, 32, 8, 128, is_causal=True, tags=_BENCH),
    _call(16, 512, 512, 32, 8, 128, is_causal=True, tags=_BENCH),
    # A vision transformer's images, and a length that is no whole groups of eight either.
    _call(64, 197, 197, 12, 12, 64, tags=_BENCH),
    _call(2, 1002, 1002, 32, 8, 128, is_causal=True, tags=_BENCH),
)


def forward_traffic(arguments: Arguments) -> Traffic:
    """Queries, keys and values read, masks and biases too; the output written."""
    return Traffic(read=_read(arguments), written=(array_bytes(arguments["query"]),))


def backward_traffic(arguments: Arguments) -> Traffic:
    """Queries, keys, values, output and its cotangent read; three gradients written."""
    query, key = array_bytes(arguments["query"]), array_bytes(arguments["key"])
    return Traffic(read=(*_read(arguments), query, query), written=(query, key, key))


def _read(arguments: Arguments) -> tuple[int, ...]:
    names = ("query", "key", "value", "mask", "bias")
    return tuple(array_bytes(arguments[name]) for name in names if arguments.get(name) is not None)


def flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of a phase's products, counting only pairs of query and key that are seen.

    Of segments, where they are described by their shape alone, as the benchmark packs them: `DOCUMENTS` of one length.
    """
    query, keys = arguments["query"], arguments["key"].shape[1]
    batch, queries, heads, size = query.shape
    segments = arguments.get("segment_ids")
    documents = 1
    if segments is not None and not isinstance(segments, jax.Array | np.ndarray | tuple):
        documents = DOCUMENTS
    lengths = (queries // documents, keys // documents)
    masking = masking_of(*lengths, bool(arguments.get("is_causal")), arguments.get("window"), has_segments=False)
    if segments is not None and documents == 1:
        pairs = _segment_pairs(segments, masking)
    else:
        assert masking.pairs is not None  # it has no segments
        pairs = batch * documents * masking.pairs
    return (4 if phase == "forward" else 10) * heads * size * pairs


def _segment_pairs(segments: Any, masking: Any) -> int:
    own, other = (np.asarray(array) for array in segments_of(segments))
    column = np.arange(masking.keys)
    pairs = 0
    for mine, theirs in zip(own, other, strict=True):
        for row, segment in enumerate(mine):
            pairs += int((np.asarray(masking.visible(row, column)) & (theirs == segment)).sum())
    return pairs


_NAMES = ("bias", "mask", "is_causal", "scale", "window", "segment_ids", "softcap", "dropout_rate", "dropout_key")


def _problem(arguments: Mapping[str, Any]):
    given: dict[str, Any] = {name: arguments.get(name) for name in _NAMES}
    given |= {"is_causal": bool(given["is_causal"]), "dropout_rate": given["dropout_rate"] or 0.0}
    return problem_of(arguments["query"], arguments["key"], **given)


def _described(arguments: Mapping[str, Any]) -> Problem:
    """The launch of arguments that may be shapes alone."""
    arrays = ("bias", "mask", "segment_ids", "dropout_key")
    problem, _ = _problem({**arguments, **dict.fromkeys(arrays)})
    bias, mask, segments = (arguments.get(name) is not None for name in arrays[:3])
    dense = "bias" if bias else "mask" if mask else None
    return replace(problem, dense=dense, masking=replace(problem.masking, has_segments=segments))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    problem = _described(arguments)
    if phase == "backward":
        candidates = backward_candidates(problem)
        return {name: partial(_gradients, config=config) for name, config in candidates.items()}
    return {name: partial(_forward, config=config) for name, config in forward_candidates(problem).items()}


def _forward(*, query, key, value, config=None, **others):
    problem, extras = _problem({"query": query, "key": key, **others})
    wide, (query, key, value) = widened(problem, query, key, value)
    out, _ = attention_forward(query, key, value, extras, problem=wide, config=config)
    return (out[..., : problem.head_size],)


def _gradients(*, cotangents, config=None, **arguments):
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    (dout,) = cotangents
    problem, extras = _problem(arguments)
    # query stands for the output. The work is the same.
    lse = _lse(query, key)
    wide, (query, key, value, dout) = widened(problem, query, key, value, dout)
    dq, dk, dv, ddense = attention_backward(query, key, value, query, lse, dout, extras, problem=wide, config=config)
    gradients = tuple(gradient[..., : problem.head_size] for gradient in (dq, dk, dv))
    return gradients if ddense is None else (*gradients, ddense)


def _lse(query: jax.Array, key: jax.Array) -> jax.Array:
    """The log-sum-exp of scores of zero, which stands for the true one."""
    return jnp.full((query.shape[0], query.shape[2], query.shape[1]), math.log(max(1, key.shape[1])), jnp.float32)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _gradients(**arguments, cotangents=cotangents)
    return backward_of_xla(arguments, _lse(arguments["query"], arguments["key"]), cotangents[0])


ATTENTION = OpSpec(
    name="attention",
    function=attention,
    reference=attention_reference,
    implementations=("mosaic", "xla"),
    differentiable=("query", "key", "value", "bias"),
    batched=("query", "key", "value"),
    arg_specs=ARG_SPECS,
    forward_traffic=forward_traffic,
    backward_traffic=backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=flops,
    problem=lambda arguments: known(_described(arguments)),
    tuned_phases=("forward", "backward"),
)
