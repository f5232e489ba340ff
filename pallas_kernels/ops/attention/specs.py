"""Attention's registry entry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.attention.api import attention
from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.backward.config import backward_candidates
from pallas_kernels.ops.attention.backward.gradients import attention_backward
from pallas_kernels.ops.attention.forward.config import forward_candidates, known
from pallas_kernels.ops.attention.forward.kernel import attention_forward
from pallas_kernels.ops.attention.problem import Problem, facts_of, masking_of, problem_of
from pallas_kernels.ops.attention.reference import attention_reference
from pallas_kernels.spec_builders import arg_spec, backward_passes, call_name, calls, traffic, variants
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, ErrorBound, Fill, OpSpec

_OPERANDS = ("query", "key", "value")
_WORDS = {"is_causal": "causal", "dropout_rate": "dropout"}


def _call(
    *sizes: int,
    value_size: int | None = None,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    deviation: float = 1.0,
    documents: int = 0,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    dropout_mask: tuple[int, ...] | None = None,
    sinks: bool = False,
    is_atomic: bool = False,
    tags: str = "test",
    **static: Any,
) -> ArgSpec:
    """sizes: batch, queries, keys, query heads, key heads and columns of a head.

    value_size: columns of a value's head; None: as many. documents: the number of segments, packed in order, of about
    the same length. is_atomic: not `deterministic`.
    """
    batch, queries, keys, heads, key_heads, size = sizes
    static = {name: value for name, value in static.items() if value is not False and value is not None}
    key = ArraySpec(shape=(batch, keys, key_heads, size), dtype=dtype, fill=fill, deviation=deviation)
    arguments = {
        "query": replace(key, shape=(batch, queries, heads, size)),
        "key": key,
        "value": ArraySpec(shape=(*key.shape[:3], value_size or size), dtype=dtype),
        **static,
        "segment_ids": documents > 0
        and ArraySpec(shape=(batch, queries), dtype="int32", fill="sorted", maximum=documents),
        "mask": mask is not None and ArraySpec(shape=mask, dtype="bool", fill="integers"),
        "bias": bias is not None and ArraySpec(shape=bias, dtype=dtype),
        "dropout_key": "dropout_rate" in static
        and dropout_mask is None
        and ArraySpec(shape=(2,), dtype="uint32", fill="bits"),
        "dropout_mask": dropout_mask is not None and ArraySpec(shape=dropout_mask, dtype="bool", fill="integers"),
        "sinks": sinks and ArraySpec(shape=(heads,), dtype="float32"),
    }
    details = (
        value_size is not None and f"values_{value_size}",
        fill != "normal" and fill,
        deviation != 1 and f"deviation_{deviation:g}",
        documents > 0 and f"{documents}_documents",
        mask and f"mask_{_text(mask, 'x')}",
        bias and f"bias_{_text(bias, 'x')}",
        dropout_mask and f"dropout_mask_{_text(dropout_mask, 'x')}",
        sinks and "sinks",
        *(_WORDS.get(k, k) + ("" if v is True else f"_{_text(v)}") for k, v in static.items()),
        is_atomic and "atomic",
    )
    spec = arg_spec(call_name(sizes, dtype, *details), arguments, tags)
    return replace(spec, arguments={**spec.arguments, "deterministic": False}) if is_atomic else spec


def _text(value: Any, separator: str = "_") -> str:
    return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)


DOCUMENTS = 8
"""Segments of the benchmark's packed sequence."""


def _flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of a phase's products, counting only pairs of query and key that are seen.

    Segments that are described by their shape alone count as the benchmark packs them: `DOCUMENTS` of one length.
    """
    keys, value_size = arguments["value"].shape[1::2]
    batch, queries, heads, size = arguments["query"].shape
    options = _options(arguments)
    if isinstance(options.segment_ids, jax.Array | np.ndarray | tuple):
        masking = masking_of(queries, keys, replace(options, segment_ids=None))
        seen = masking.visible(np.arange(queries)[:, None], np.arange(keys))
        own, other = (np.asarray(array) for array in options.segments or ())
        pairs = int((seen & (own[:, :, None] == other[:, None])).sum())
    else:
        documents = 1 if options.segment_ids is None else DOCUMENTS
        masking = masking_of(queries // documents, keys // documents, replace(options, segment_ids=None))
        assert masking.pairs is not None  # it has no segments
        pairs = batch * documents * masking.pairs
    columns = size + value_size if phase == "forward" else 3 * size + 2 * value_size
    return 2 * heads * columns * pairs


def _out_bytes(arguments: Arguments) -> int:
    query, value = arguments["query"], arguments["value"]
    return query.dtype.itemsize * math.prod(query.shape[:3]) * value.shape[3]


def _options(arguments: Mapping[str, Any]) -> Options:
    return Options(**{name: each for name, each in arguments.items() if name not in _OPERANDS})


def _problem(arguments: Mapping[str, Any]) -> Problem:
    """The facts of arguments that may be shapes alone."""
    query, key, value = (arguments[name] for name in _OPERANDS)
    return facts_of(query, key, value, _options(arguments))


def _forward(*, query, key, value, config=None, **others):
    problem, extras = problem_of(query, key, value, **others)
    return attention_forward(query, key, value, extras, problem=problem, config=config)[:1]


def _backward(*, query, key, value, cotangents, config=None, **others):
    """dout stands for the output. The work is the same."""
    problem, extras = problem_of(query, key, value, **others)
    (dout,), lse = cotangents, stand_in_lse(query, key)
    *gradients, of_extras = attention_backward(
        query, key, value, dout, lse, dout, extras, problem=problem, config=config
    )
    return (*gradients, *(each for each in (of_extras.bias, of_extras.sinks) if each is not None))


def stand_in_lse(query: jax.Array, key: jax.Array) -> jax.Array:
    """The log-sum-exp of scores of zero, which stands for the true one in a backward pass alone."""
    return jnp.full((query.shape[0], query.shape[2], query.shape[1]), math.log(max(1, key.shape[1])), jnp.float32)


def _gpu(*specs: ArgSpec) -> tuple[ArgSpec, ...]:
    """The specs, for tests on a GPU in place of those without."""
    return tuple(replace(spec, tags=spec.tags - {"test"} | {"gpu"}) for spec in specs)


_LLAMA_8B, _LLAMA_1B = (32, 8, 128), (32, 8, 64)
_VIT_B, _VIT_H, _SIGLIP = (12, 12, 64), (16, 16, 80), (16, 16, 72)
_GPT_2, _BERT_LARGE, _GPT_OSS = (12, 12, 64), (16, 16, 64), (64, 8, 64)
"""Query heads, key heads, and columns of a head."""

_HALF: dict[str, Any] = {"dropout_rate": 0.5}

_READ = (*_OPERANDS, "mask", "bias", "dropout_mask")

ATTENTION = OpSpec(
    name="attention",
    function=attention,
    reference=attention_reference,
    differentiable=("query", "key", "value", "bias", "sinks"),
    batched=("query", "key", "value"),
    # A query that sees one key has no gradient: two float32 sums of as many products as a head has values cancel.
    error_bound=ErrorBound(least_error=2.0**-18),
    arg_specs=(
        _call(1, 16, 24, 2, 1, 64),
        _call(1, 72, 136, 1, 1, 64, is_causal=True, window=(60, 0), softcap=5.0),
        _call(1, 24, 24, 1, 1, 64, dtype="float16", bias=(24, 24), documents=2, dropout_rate=0.25),
        _call(1, 24, 40, 2, 1, 64, **_HALF, dropout_mask=(1, 2, 24, 40), is_causal=True, mask=(40,), mask_value=-1e9),
        _call(1, 24, 24, 2, 2, 80, is_causal=True, tags="test ragged"),  # in tiles of 96
        _call(1, 24, 72, 2, 1, 192, value_size=128, sinks=True, is_causal=True),
        _call(1, 16, 16, 1, 1, 288, tags="test ragged"),
        *calls(_call, (0, 16, 16, 2, 1, 64), (2, 0, 16, 2, 1, 64), tags="test empty"),
        *_gpu(
            _call(1, 3072, 3072, 8, 2, 128),  # backward blocks share a group's heads
            _call(2, 2048, 2048, 8, 2, 64, is_causal=True),
            _call(1, 1, 4097, 4, 4, 128),
            _call(1, 1000, 127, 4, 2, 64, is_causal=True, dtype="float16"),
            _call(1, 640, 700, 4, 2, 192),
            _call(1, 512, 512, 2, 1, 128, is_causal=True, deviation=4.0, tags="extreme"),
            # Features, and two of them at once.
            _call(1, 1000, 1000, 2, 1, 128, is_causal=True, window=(300, 0)),
            _call(1, 520, 640, 2, 1, 128, is_causal=True, dropout_rate=0.1),
            _call(2, 1024, 1024, 2, 1, 128, is_causal=True, documents=5),
            _call(2, 512, 640, 2, 1, 128, is_causal=True, mask=(2, 1, 1, 640)),
            _call(2, 512, 512, 4, 2, 64, is_causal=True, bias=(4, 512, 512)),
            _call(1, 1024, 1024, 2, 1, 128, window=(100, 60), documents=4),
            _call(1, 1024, 1024, 2, 1, 128, is_causal=True, window=(200, 0), softcap=20.0),
            _call(1, 600, 600, 2, 1, 128, bias=(1, 2, 600, 600), mask=(600, 600), softcap=30.0),
            # Masks of a program's dropout as in GPT-2, and hidden scores of a finite value as in BERT; causal queries
            # at the front may see no key.
            _call(8, 1024, 1024, *_GPT_2, is_causal=True, dropout_mask=(8, 12, 1024, 1024), dropout_rate=0.1),
            _call(16, 512, 512, *_BERT_LARGE, mask=(16, 1, 1, 512), mask_value=-1e9),
            _call(2, 512, 512, 4, 2, 128, is_causal=True, mask=(2, 1, 1, 512), mask_value=-1e30),
            _call(
                2, 301, 301, 2, 1, 128, window=(9, 0), documents=3, bias=(2, 301, 301), mask=(301, 301), mask_value=-1e9
            ),
            # Few queries, and short sequences.
            _call(2, 5, 8192, 8, 2, 128),  # forward by the kernel of decoding
            _call(2, 1, 1000, *_VIT_B),
            _call(2, 1, 1, 8, 2, 128, is_causal=True),
            _call(2, 63, 77, 4, 2, 128, is_causal=True),  # one warpgroup computes dquery
            _call(1, 256, 256, 4, 1, 256, is_causal=True),  # few steps of a large head
            # One backward kernel, in order and in any order.
            _call(8, 500, 500, 16, 8, 128, deviation=4.0, tags="extreme"),  # keys of zeros behind the last
            _call(8, 600, 600, 16, 8, 64, is_causal=True),
            _call(1, 2050, 2050, 32, 8, 96, is_causal=True),  # whose blocks share a group's heads
            *(_call(4, 2048, 2048, 8, 8, n, is_causal=n == 64, is_atomic=True) for n in (64, 96, 128)),
            # Lengths that are no whole groups of eight: tiles in panels.
            *calls(_call, (1, 133, 133, 2, 1, 96), (1, 250, 250, 4, 1, 256), is_causal=True),
            _call(2, 300, 300, 8, 2, 128, is_causal=True, window=(100, 0)),
            _call(1, 301, 301, 2, 1, 128, is_causal=True, documents=3),
            # Heads that are no tile's size.
            _call(1, 640, 640, 4, 2, 80, is_causal=True),
            _call(8, 512, 512, *_SIGLIP),
            _call(2, 512, 512, 4, 2, 160, is_causal=True),
            # Values of another size than queries and keys: as in DeepSeek, and in one size of tiles.
            *(_call(2, 640, 640, 4, 4, 192, value_size=128, is_causal=x) for x in (True, False)),
            _call(2, 133, 133, 4, 4, 192, value_size=128, is_causal=True, documents=2),
            _call(2, 1100, 1100, 4, 2, 64, is_causal=True, mask=(2, 1, 1, 1100), mask_value=-3e38),  # tiles are skipped
            _call(2, 300, 300, 4, 2, 96, value_size=64, is_causal=True),
            # Sinks: as in gpt-oss, with and without a window; and of queries that see no key.
            *(_call(1, 1024, 1024, *_GPT_OSS, sinks=True, is_causal=True, window=w) for w in (None, (127, 0))),
            _call(2, 300, 200, 4, 2, 128, sinks=True, window=(20, 0)),
            # One round or a little more: how many queries and keys a block has.
            _call(1, 512, 512, 16, 16, 128),  # one warpgroup computes, on 128 multiprocessors
            _call(1, 300, 300, *_LLAMA_1B, is_causal=True),
            _call(8, 128, 128, 32, 8, 256),  # a large head in a loop over tiles
        ),
        _call(4, 4096, 4096, *_LLAMA_8B, tags="bench"),
        *(_call(n, 4096, 4096, *_LLAMA_8B, is_causal=True, tags="bench block") for n in (4, 2)),
        *(_call(1, 16384, 16384, *_LLAMA_8B, is_causal=x, tags="bench") for x in (False, True)),
        _call(1, 16384, 16384, *_LLAMA_8B, is_causal=True, is_atomic=True, tags="bench"),
        *(_call(1, 8192, 8192, *_LLAMA_8B, is_causal=True, is_atomic=x, tags="bench") for x in (False, True)),
        *(_call(4, 2048, 2048, 32, 32, 128, is_atomic=x, tags="bench") for x in (False, True)),
        *(_call(4, 4096, 4096, *_LLAMA_1B, is_causal=x, tags="bench") for x in (False, True)),
        *calls(_call, (8, 2048, 2048, *_VIT_H), (4, 2048, 2048, 16, 16, 112), tags="bench"),
        *(_call(4, 4096, 4096, 16, 4, 256, is_causal=x, tags="bench") for x in (False, True)),
        _call(1, 16384, 16384, *_LLAMA_8B, is_causal=True, window=(1023, 0), tags="bench"),
        _call(1, 16384, 16384, *_LLAMA_8B, is_causal=True, documents=DOCUMENTS, tags="bench"),
        _call(4, 4096, 4096, *_LLAMA_8B, is_causal=True, dropout_rate=0.1, tags="bench"),
        # Few queries or short sequences.
        *(_call(n, 1, 1, *_LLAMA_8B, is_causal=True, tags="bench") for n in (16, 1)),
        *(_call(16, n, 4096, *_LLAMA_8B, tags="bench") for n in (1, 16)),
        *(_call(16, n, n, *_LLAMA_8B, is_causal=True, tags="bench") for n in (16, 128)),
        *(_call(n, 512, 512, *_LLAMA_8B, is_causal=True, tags="bench") for n in (1, 16)),
        # Images, and a length that is no whole groups of eight either.
        _call(64, 197, 197, *_VIT_B, tags="bench"),
        _call(2, 1002, 1002, *_LLAMA_8B, is_causal=True, tags="bench"),
    ),
    forward_traffic=traffic(read=_READ, written=("out",), out=_out_bytes),
    # Reads the output and its cotangent, too.
    backward_traffic=traffic(read=(*_READ, "out", "out"), written=_OPERANDS, out=_out_bytes),
    backward=backward_passes(mosaic=_backward),
    variants=variants(
        (_forward, lambda arguments: forward_candidates(_problem(arguments))),
        (_backward, lambda arguments: backward_candidates(_problem(arguments))),
    ),
    flops=_flops,
    tuned_key=lambda arguments: known(_problem(arguments)),
    tuned_phases=("forward", "backward"),
)
