"""The registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.specs import behind_product, bench_tags, flat, product_call, rows_of
from pallas_kernels.ops.quantized_linear.api import quantized_linear
from pallas_kernels.ops.quantized_linear.config import candidates
from pallas_kernels.ops.quantized_linear.mosaic_gpu import quantized_linear_forward
from pallas_kernels.ops.quantized_linear.mosaic_gpu_vjp import quantized_linear_backward
from pallas_kernels.ops.quantized_linear.reference import quantized_linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight
from pallas_kernels.primitives.few_rows.config import MOST_ROWS
from pallas_kernels.primitives.integer_gemm.packing import SPAN
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, Fill, OpSpec, Traffic, array_bytes


def _call(
    *leading: int,
    features: int,
    outputs: int,
    bits: int = 8,
    group_size: int | None = None,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
    **behind: Any,
) -> ArgSpec:
    """Weights of the deviation that keeps the size of features: uniform integers, and scales that differ a little.

    Integers of eight bits are as `quantize` has them: any bits at all, in the lanes' order where features allow it.

    behind: as `behind_product` has them.
    """
    limit = 2 ** (bits - 1) - 1
    size = math.sqrt(3 / features) / limit
    groups = 1 if group_size is None else features // group_size
    x = ArraySpec(shape=(*leading, features), dtype=dtype, fill=fill)
    operands = {
        "x": x,
        "values": ArraySpec(shape=(outputs, features), dtype="uint8", fill="bits")
        if bits == 8 and features % SPAN == 0
        else ArraySpec(
            shape=(outputs, features), dtype=f"int{bits}", fill="integers", minimum=-limit, maximum=limit + 1
        ),
        "scales": ArraySpec(shape=(groups, outputs), dtype="float32", mean=size, deviation=size / 8),
        "group_size": group_size,
    }
    integers = f"int{bits}" + (f"-groups-of-{group_size}" if group_size else "")
    return product_call(
        f"{features}-{outputs}", operands, ({}, integers), behind_product(x, outputs, **behind), tags=tags
    )


def _bench_calls() -> tuple[ArgSpec, ...]:
    """A Llama-3-8B block's linear layers, for training, short prompts and decoding."""
    specs = []
    for rows in (8192, 512, 16, 1):
        tags = bench_tags(rows)
        specs += [
            _call(rows, features=4096, outputs=4096, tags=(*tags, "block")),
            _call(rows, features=4096, outputs=14336, tags=(*tags, "block")),
        ]
        if rows <= MOST_ROWS:
            specs.append(_call(rows, features=14336, outputs=4096, residual=True, tags=(*tags, "block")))
    specs.append(_call(16, features=4096, outputs=4096, bits=4, group_size=128, tags=BENCH))
    return tuple(specs)


_ARG_SPECS = (
    _call(2, 3, features=128, outputs=192, bias=True, activation="gelu_tanh", residual=True),
    _call(12, features=256, outputs=64, bits=4, group_size=128, dtype="float16"),
    _call(1, features=128, outputs=64, group_size=64, residual=True, out_dtype="float32"),
    _call(5, features=100, outputs=96, tags=("test", "ragged")),
    _call(66, features=128, outputs=64, bias=True),
    _call(65, features=256, outputs=64, bits=4, group_size=64, tags=("test", "ragged")),
    _call(0, features=128, outputs=64, tags=("test", "empty")),
    _call(8, features=128, outputs=64, fill="zeros", activation="gelu", tags=("test", "extreme")),
    _call(64, features=1024, outputs=4032, bias=True, activation="silu", residual=True, tags=GPU),
    _call(17, features=2048, outputs=2048, bits=4, group_size=64, dtype="float16", tags=GPU),
    _call(2, 3, features=16384, outputs=512, group_size=128, out_dtype="float32", tags=GPU),
    _call(1001, features=1024, outputs=4032, bias=True, activation="gelu_tanh", residual=True, tags=GPU),
    _call(300, features=2048, outputs=1088, bits=4, dtype="float16", out_dtype="float32", tags=GPU),
    _call(33, features=4096, outputs=1024, bits=4, tags=GPU),
    _call(500, features=512, outputs=14080, bias=True, activation="gelu_tanh", residual=True, tags=GPU),
    _call(4500, features=512, outputs=1984, bias=True, activation="silu", residual=True, tags=GPU),
    _call(13, features=2048, outputs=3968, bias=True, activation="gelu_tanh", residual=True, tags=GPU),
    _call(3, features=7168, outputs=4096, dtype="float16", residual=True, out_dtype="float32", tags=GPU),
    *_bench_calls(),
)


def _weight(values: Any, scales: Any, group_size: int | None) -> QuantizedWeight:
    return QuantizedWeight(values=values, scales=scales, bits=_bits(values), group_size=group_size)


def _bits(values: Any) -> Literal[8, 4]:
    return 4 if jnp.dtype(values.dtype).name == "int4" else 8


def _function(*, x, values, scales, group_size, **others):
    return quantized_linear(x, _weight(values, scales, group_size), **others)


def _reference(*, x, values, scales, group_size, **others):
    return quantized_linear_reference(x, _weight(values, scales, group_size), **others)


def _sizes(arguments: Arguments) -> tuple[int, int]:
    """Bytes of weights with scales and of the result."""
    x, values = arguments["x"], arguments["values"]
    dtype = jnp.dtype(arguments.get("out_dtype") or x.dtype)
    weights = math.prod(values.shape) * _bits(values) // 8 + array_bytes(arguments["scales"])
    return weights, rows_of(arguments) * values.shape[0] * dtype.itemsize


def _forward_traffic(arguments: Arguments) -> Traffic:
    weights, y = _sizes(arguments)
    read = (array_bytes(arguments["x"]), weights)
    return Traffic(read=(*read, y) if arguments.get("residual") is not None else read, written=(y,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    weights, y = _sizes(arguments)
    x = array_bytes(arguments["x"])
    return Traffic(read=(weights, y, x) if arguments.get("activation") else (weights, y), written=(x,))


def _flops(arguments: Arguments, phase: str) -> int:
    products = 1 if phase == "forward" or not arguments.get("activation") else 2
    return 2 * products * rows_of(arguments) * math.prod(arguments["values"].shape)


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":
        return {}
    found = candidates(rows_of(arguments), arguments["values"].dtype)
    return {name: partial(_forward_variant, config=config) for name, config in found.items()}


def _forward_variant(
    *, x, values, scales, group_size, bias=None, activation=None, residual=None, out_dtype=None, config=None
):
    y = quantized_linear_forward(
        x.reshape(-1, x.shape[-1]),
        _weight(values, scales, group_size),
        bias,
        flat(residual),
        activation=optional_activation("quantized_linear", activation),
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        config=config,
    )
    return (y.reshape(*x.shape[:-1], -1),)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    del implementation  # the gradient is XLA's in any case
    (dy,) = cotangents
    x = arguments["x"]
    dx, dbias = quantized_linear_backward(
        x.reshape(-1, x.shape[-1]),
        _weight(arguments["values"], arguments["scales"], arguments["group_size"]),
        arguments.get("bias"),
        dy.reshape(-1, dy.shape[-1]),
        activation=arguments.get("activation"),
    )
    return (dx.reshape(x.shape),) if dbias is None else (dx.reshape(x.shape), dbias)


QUANTIZED_LINEAR = OpSpec(
    name="quantized_linear",
    function=_function,
    reference=_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=_flops,
)
