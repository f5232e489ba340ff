"""Draws calls of the operations with random sizes: rows, columns, lengths and heads.

A kernel's behaviour depends on its sizes in more ways than the registry has specs. Tests draw calls small enough for a
float64 reference; the benchmark draws calls long enough to be timed. `Limits` sets the range.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels.specs import ArgSpec, ArraySpec, OpSpec, plain

_HEADS = ((32, 8), (32, 32), (12, 12), (16, 16), (8, 1), (16, 4), (24, 8), (6, 2), (1, 1))
_HEAD_SIZES = (64, 64, 96, 128, 128, 128, 192, 256)
_LONGEST_BAG = 128
_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of sizes of a drawn call.

    length: the longest sequence or cache of attention.
    rows, columns: the largest sizes of the other operations' arrays.
    values: the largest number of elements of an array.
    scores: the largest number of attention scores.
    flops: lower and upper limit for the matrix products of a forward pass; see `OpSpec.flops`.
    bytes: lower and upper limit for the bytes that a perfect forward pass reads and writes. The lower limit counts only
        for operations without matrix products.
    """

    length: int
    rows: int
    columns: int
    values: float = math.inf
    scores: float = math.inf
    flops: tuple[float, float] = (0, math.inf)
    bytes: tuple[float, float] = (0, math.inf)

    def allow(self, op: OpSpec, call: ArgSpec) -> bool:
        """Whether the call is within the limits."""
        arrays = {name: a for name, a in call.arguments.items() if isinstance(a, ArraySpec)}
        if op.name in _DRAWN and "key" in arrays:
            largest, most = math.prod(arrays["query"].shape[:3]) * arrays["key"].shape[1], self.scores
        else:
            largest, most = max(math.prod(array.shape) for array in arrays.values()), self.values
        if largest > most:
            return False
        structs = plain(call.structs())
        moved = op.forward_traffic(structs).bytes
        if op.flops is None:
            return self.bytes[0] <= moved <= self.bytes[1]
        return moved <= self.bytes[1] and self.flops[0] <= op.flops(structs, "forward") <= self.flops[1]


def random_call(op: OpSpec, seed: int | str, limits: Limits) -> ArgSpec:
    """Draws a call of `op`; the same seed gives the same call.

    Attention gets arguments and sizes at random. Other operations get one of their registered specs with random sizes.

    Raises:
        ValueError: none of the drawn calls is within the limits.
    """
    rng = random.Random(seed)
    specs = [spec for spec in op.arg_specs if not spec.tags & {"bench", "ragged", "empty", "extreme"}]
    for _ in range(_DRAWS):
        call = _DRAWN[op.name](rng, limits) if op.name in _DRAWN else _resized(rng, op, rng.choice(specs), limits)
        if limits.allow(op, call):
            return call
    raise ValueError(f"none of {_DRAWS} drawn calls of {op.name} is within {limits}")


def _length(rng: random.Random, most: int) -> int:
    """Draws a length of at most `most`, uniform in its logarithm, often rounded up to a multiple of 8, 64 or 128."""
    length = round(2 ** rng.uniform(0, most.bit_length() - 1))
    multiple = rng.choice((1, 1, 8, 64, 128))
    return -(-length // multiple) * multiple


def _attention(rng: random.Random, limits: Limits) -> ArgSpec:
    batch, queries = rng.choice((1, 1, 2, 3, 8, 16)), _length(rng, limits.length)
    keys = queries if rng.random() < 0.6 else _length(rng, limits.length)
    (heads, key_heads), size = rng.choice(_HEADS), rng.choice((*_HEAD_SIZES, 72, 80))
    dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
    given: dict[str, Any] = {}
    if rng.random() < 0.4:
        given["is_causal"] = True
    if rng.random() < 0.15:
        given["window"] = (rng.choice((0, 30, 64, 500)), 0 if "is_causal" in given else rng.choice((0, 17, 200)))
    if rng.random() < 0.1:
        given["softcap"] = 15.0
    if rng.random() < 0.1:
        given |= {"dropout_rate": 0.1, "dropout_key": ArraySpec(shape=(2,), dtype="uint32", fill="bits")}
    if rng.random() < 0.1 and queries == keys:
        given["segment_ids"] = ArraySpec(shape=(batch, queries), dtype="int32", fill="sorted", maximum=3)
    dense = rng.random()
    shape = (rng.choice((1, batch)), rng.choice((1, heads)), rng.choice((1, queries)), keys)
    if dense < 0.1:
        given["mask"] = ArraySpec(shape=shape, dtype="bool", fill="integers")
    elif dense < 0.2:
        given["bias"] = ArraySpec(shape=shape, dtype=dtype)
    query = ArraySpec(shape=(batch, queries, heads, size), dtype=dtype)
    key = ArraySpec(shape=(batch, keys, key_heads, size), dtype=dtype)
    return _spec({"query": query, "key": key, "value": key, **given})


def _decoding(rng: random.Random, limits: Limits) -> ArgSpec:
    batch, tokens = _length(rng, 64), rng.choice((1, 1, 1, 2, 4, 8))
    page = rng.choice((8, 8, 8, 16, 64, 256))
    keys = -(-_length(rng, limits.length) // page) * page
    (heads, key_heads), size = rng.choice(_HEADS), rng.choice(_HEAD_SIZES)
    dtype = rng.choice(("bfloat16", "bfloat16", "float16"))
    given: dict[str, Any] = {}
    caches = (batch, keys)
    if page > 8:
        caches = (batch * keys // page, page)
        table = (batch, keys // page)
        given["page_table"] = ArraySpec(shape=table, dtype="int32", fill="integers", maximum=caches[0])
    if rng.random() < 0.2:
        given["window"] = rng.choice((64, 500, 2000))
    cache = ArraySpec(shape=(*caches, key_heads, size), dtype=dtype)
    shortest = rng.choice((0, keys))
    lengths = ArraySpec(shape=(batch,), dtype="int32", fill="integers", minimum=shortest, maximum=keys + 1)
    query = ArraySpec(shape=(batch, tokens, heads, size), dtype=dtype)
    return _spec({"query": query, "key_cache": cache, "value_cache": cache, "lengths": lengths, **given})


_DRAWN = {"attention": _attention, "decode_attention": _decoding}
"""Operations whose arguments are drawn, too; of the others it is the sizes of registered calls."""

_PRODUCT = {"": "*r c", "w": "_ c", "w_gate": "_ c"}
_GROUPED = {"": "*r c", "w": "f c c", "w_gate": "f c c"}
_AXES: Mapping[str, Mapping[str, str]] = {
    "rope": {"": "r r f f"},
    "qkv_projection": {"": "*r c", "w_q": "_ f", "w_k": "_ f", "w_v": "_ f"},
    "embedding": {"": "r c", "ids": "*r"},
    "dot_interaction": {"": "r *f c"},
    "quantized_linear": {"": "*r _", "values": "c f", "scales": "f *_"},
    "norm_linear": _PRODUCT,
    "linear": _PRODUCT,
    "gated_linear": _PRODUCT,
    "linear_residual_norm": _PRODUCT,
    "lora_linear": _PRODUCT,
    "linear_cross_entropy": _PRODUCT,
    "grouped_linear": _GROUPED,
    "grouped_gated_linear": _GROUPED,
}
"""The axes of arguments, "" being the first: rows, columns and bags, which may be resized, and fixed ones.

`*` stands for any number of axes, `_` for one that is not described. Other operations have rows and columns.
"""


def _resized(rng: random.Random, op: OpSpec, spec: ArgSpec, limits: Limits) -> ArgSpec:
    arrays = {name: a for name, a in spec.arguments.items() if isinstance(a, ArraySpec) and a.dtype != "uint32"}
    rows, columns, bags = _free(_AXES.get(op.name, {"": "*r c"}), arrays)
    sizes = {size: _length(rng, limits.rows) for size in sorted(rows)}
    sizes |= {size: max(64, _length(rng, limits.columns)) // 8 * 8 for size in sorted(columns)}
    sizes |= {size: _length(rng, min(limits.rows, _LONGEST_BAG)) for size in bags}
    return _spec({**spec.arguments, **{name: _with(array, sizes) for name, array in arrays.items()}})


def _free(axes: Mapping[str, str], arrays: Mapping[str, ArraySpec]) -> tuple[set[int], set[int], set[int]]:
    """Returns the sizes of rows, columns and bags that may be replaced.

    Sizes that an axis of another kind has, too, are left out: replacing them would change both.
    """
    found: dict[str, set[int]] = {kind: set() for kind in "rcbf_"}
    for name, text in axes.items():
        array = next(iter(arrays.values())) if name == "" else arrays.get(name)
        kinds = text.split()
        for kind, size in zip(_expanded(kinds, len(array.shape)), array.shape, strict=True) if array else ():
            found[kind].add(size)
    rows, columns, bags, fixed = (found[kind] for kind in "rcbf")
    return rows - columns - bags - fixed, columns - rows - bags - fixed, bags


def _expanded(kinds: list[str], count: int) -> list[str]:
    more = count - len(kinds) + 1
    return [kind[-1] for each in kinds for kind in ([each] * more if each.startswith("*") else [each])]


def _with(array: ArraySpec, sizes: Mapping[int, int]) -> ArraySpec:
    shape = tuple(sizes.get(size, size) for size in array.shape)
    # Labels are column indices, so their maximum changes with the number of columns.
    return replace(array, shape=shape, maximum=sizes.get(array.maximum, array.maximum))


def _spec(arguments: Mapping[str, Any]) -> ArgSpec:
    def told(value: Any) -> str:
        return f"{'x'.join(map(str, value.shape))}-{value.dtype}" if isinstance(value, ArraySpec) else str(value)

    name = "-".join(f"{name}={told(value)}" for name, value in arguments.items())
    return ArgSpec(name=name, arguments=arguments)
