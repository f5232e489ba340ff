"""Calls of the operations with sizes that nobody chose: of rows, columns, lengths and heads.

What a kernel takes depends on its sizes, in more ways than there are specs in the registry.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pallas_kernels.specs import ArgSpec, ArraySpec, OpSpec

_HEADS = ((32, 8), (12, 12), (16, 16), (8, 1), (16, 4), (24, 8), (6, 2), (1, 1))
_MOST_SCORES, _MOST_VALUES = 2**25, 2**23


def random_call(op: OpSpec, seed: int) -> ArgSpec:
    """One of `op`: attention of any sizes, of another operation one of its specs with other sizes."""
    rng = random.Random(seed)
    if op.name == "attention":
        return _attention(rng)
    specs = [spec for spec in op.arg_specs if not spec.tags & {"bench", "ragged", "empty", "extreme"}]
    return _resized(rng, op, rng.choice(specs))


def _length(rng: random.Random, most: int) -> int:
    """Small ones as often as large ones, and whole groups or tiles as often as any number."""
    length = round(2 ** rng.uniform(0, most.bit_length() - 1))
    multiple = rng.choice((1, 1, 8, 64, 128))
    return -(-length // multiple) * multiple


def _attention(rng: random.Random) -> ArgSpec:
    while True:
        batch, queries = rng.choice((1, 1, 2, 3, 8, 16)), _length(rng, 4096)
        keys = queries if rng.random() < 0.6 else _length(rng, 4096)
        (heads, key_heads), size = rng.choice(_HEADS), rng.choice((64, 64, 96, 128, 128, 128, 192, 256))
        if batch * heads * queries * keys <= _MOST_SCORES:
            break
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


def _resized(rng: random.Random, op: OpSpec, spec: ArgSpec) -> ArgSpec:
    arrays = {name: a for name, a in spec.arguments.items() if isinstance(a, ArraySpec) and a.dtype != "uint32"}
    leading, columns = _free(op.name, *(array.shape for array in arrays.values()))
    while True:
        sizes = {size: _length(rng, 2048) for size in leading}
        sizes |= {size: max(64, _length(rng, 8192)) // 8 * 8 for size in columns}
        resized = {name: _with(array, sizes) for name, array in arrays.items()}
        if all(array.struct.size <= _MOST_VALUES for array in resized.values()):
            return _spec({**spec.arguments, **resized})


def _free(name: str, first: tuple[int, ...], *others: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """Sizes that may be others, by arrays' shapes: of leading axes, and of columns. None that another axis has, too."""
    leading, columns, fixed = set(first[:-1]), {first[-1]}, set[int]()
    match name:
        case "rope":
            leading, columns, fixed = set(first[:2]), set(), set(first[2:])
        case "decode_attention":
            leading, columns, fixed = {first[0]}, set(), {*first[1:], *others[0][1:]}
        case "qkv_projection":
            fixed = {shape[-1] for shape in others[:3]}
        case "quantized_linear":
            values, scales = others[:2]
            columns, fixed = {values[0]}, {values[1], scales[0]}
        case (
            "linear" | "gated_linear" | "norm_linear" | "linear_residual_norm" | "lora_linear" | "linear_cross_entropy"
        ):
            columns = {first[-1], others[0][-1]}
    return leading - columns - fixed, columns - leading - fixed


def _with(array: ArraySpec, sizes: Mapping[int, int]) -> ArraySpec:
    shape = tuple(sizes.get(size, size) for size in array.shape)
    # Labels are numbers of columns.
    return replace(array, shape=shape, maximum=sizes.get(array.maximum, array.maximum))


def _spec(arguments: Mapping[str, Any]) -> ArgSpec:
    def told(value: Any) -> str:
        return f"{'x'.join(map(str, value.shape))}-{value.dtype}" if isinstance(value, ArraySpec) else str(value)

    name = "-".join(f"{name}={told(value)}" for name, value in arguments.items())
    return ArgSpec(name=name, arguments=arguments)
