"""The registry entry of the linear layer with quantized weights."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.ops._products.specs import bench_tags, epilogue, product_call, rows_of
from pallas_kernels.ops.quantized_linear.api import quantized_linear
from pallas_kernels.ops.quantized_linear.reference import quantized_linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight
from pallas_kernels.primitives.few_rows.config import MOST_ROWS
from pallas_kernels.primitives.integers import SPAN
from pallas_kernels.spec_builders import as_taken, gradients_of, traffic
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, OpSpec, array_bytes


@product_call
def _call(x, *, outputs, bits=8, group_size=None, **after):
    """Makes a call with weights that keep the size of features: uniform integers, and scales that differ a little.

    8-bit integers are random bits, packed like the result of `quantize` if the features allow it.
    """
    features, limit = x.shape[-1], 2 ** (bits - 1) - 1
    size, groups = math.sqrt(3 / features) / limit, 1 if group_size is None else features // group_size
    if bits == 8 and features % SPAN == 0:
        values = ArraySpec(shape=(outputs, features), dtype="uint8", fill="bits")
    else:
        shape, dtype = (outputs, features), f"int{bits}"
        values = ArraySpec(shape=shape, dtype=dtype, fill="integers", minimum=-limit, maximum=limit + 1)
    scales = ArraySpec(shape=(groups, outputs), dtype="float32", mean=size, deviation=size / 8)
    integers = f"int{bits}" + (f"-groups-of-{group_size}" if group_size else "")
    operands = {"x": x, "values": values, "scales": scales, "group_size": group_size}
    return outputs, operands, ({}, integers), epilogue(x, outputs, **after)


def _bench_calls(rows: int) -> tuple[ArgSpec, ...]:
    tags = bench_tags(rows, block=True)
    down = (_call(rows, features=14336, outputs=4096, residual=True, tags=tags),) if rows <= MOST_ROWS else ()
    return *(_call(rows, features=4096, outputs=outputs, tags=tags) for outputs in (4096, 14336)), *down


def _bits(values: Any) -> Literal[8, 4]:
    return 4 if jnp.dtype(values.dtype).name == "int4" else 8


def _weight(values: Any, scales: Any, group_size: int | None) -> QuantizedWeight:
    return QuantizedWeight(values=values, scales=scales, bits=_bits(values), group_size=group_size)


def _as_called(arguments: Arguments) -> dict[str, Any]:
    others = dict(arguments)
    return {"w": _weight(*(others.pop(name) for name in ("values", "scales", "group_size"))), **others}


def _weight_bytes(arguments: Arguments) -> int:
    values = arguments["values"]
    return math.prod(values.shape) * _bits(values) // 8 + array_bytes(arguments["scales"])


def _result_bytes(arguments: Arguments) -> int:
    dtype = jnp.dtype(arguments.get("out_dtype") or arguments["x"].dtype)
    return rows_of(arguments) * arguments["values"].shape[0] * dtype.itemsize


def _kept_bytes(arguments: Arguments) -> int | None:
    return array_bytes(arguments["x"]) if arguments.get("activation") else None


def _flops(arguments: Arguments, phase: str) -> int:
    products = 1 if phase == "forward" or not arguments.get("activation") else 2
    return 2 * products * rows_of(arguments) * math.prod(arguments["values"].shape)


_SIZES = {"weights": _weight_bytes, "y": _result_bytes, "kept": _kept_bytes}

_REFERENCE = as_taken(quantized_linear_reference, _as_called)
_GRADIENTS = gradients_of(_REFERENCE, "x", "bias")

QUANTIZED_LINEAR = OpSpec(
    name="quantized_linear",
    function=as_taken(quantized_linear, _as_called),
    reference=_REFERENCE,
    differentiable=("x", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=(
        _call(2, 3, features=128, outputs=192, bias=True, activation="gelu_tanh", residual=True),
        _call(12, features=256, outputs=64, bits=4, group_size=128, dtype="float16"),
        _call(1, features=128, outputs=64, group_size=64, residual=True, out_dtype="float32"),
        _call(5, features=100, outputs=96, tags="test ragged"),
        _call(66, features=128, outputs=192, bias=True),
        _call(65, features=256, outputs=64, bits=4, group_size=64, tags="test ragged"),
        _call(0, features=128, outputs=64, tags="test empty"),
        _call(8, features=128, outputs=64, fill="zeros", activation="gelu", tags="test extreme"),
        _call(64, features=1024, outputs=4032, bias=True, activation="silu", residual=True, tags="gpu"),
        _call(17, features=2048, outputs=2048, bits=4, group_size=64, dtype="float16", tags="gpu"),
        _call(2, 3, features=16384, outputs=512, group_size=128, out_dtype="float32", tags="gpu"),
        _call(1001, features=1024, outputs=4032, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(300, features=2048, outputs=1088, bits=4, dtype="float16", out_dtype="float32", tags="gpu"),
        _call(33, features=4096, outputs=1024, bits=4, tags="gpu"),
        _call(500, features=512, outputs=14080, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(4500, features=512, outputs=1984, bias=True, activation="silu", residual=True, tags="gpu"),
        _call(13, features=2048, outputs=3968, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(3, features=7168, outputs=4096, dtype="float16", residual=True, out_dtype="float32", tags="gpu"),
        *(call for rows in (8192, 512, 16, 1) for call in _bench_calls(rows)),
        _call(16, features=4096, outputs=4096, bits=4, group_size=128, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "weights", "residual"), written=("y",), **_SIZES),
    backward_traffic=traffic(read=("weights", "y", "kept"), written=("x",), **_SIZES),
    backward=lambda _, arguments, cotangents: _GRADIENTS(**arguments, cotangents=cotangents),  # XLA's for all
    flops=_flops,
)
