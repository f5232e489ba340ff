"""The bias and activation's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.bias_activation.api import bias_activation
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_forward
from pallas_kernels.ops.bias_activation.mosaic_gpu_vjp import bias_activation_backward, column_sum_candidates
from pallas_kernels.ops.bias_activation.reference import bias_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.elementwise import elementwise_candidates
from pallas_kernels.primitives.random import key_words
from pallas_kernels.specs import (
    BENCH,
    GPU,
    ArgSpec,
    Arguments,
    ArraySpec,
    Fill,
    OpSpec,
    Traffic,
    array_bytes,
    call_name,
)

_KEY = ArraySpec(shape=(2,), dtype="uint32", fill="bits")


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    activation: str = "gelu_tanh",
    bias: str | None = "same",
    residual: bool = False,
    rate: float = 0.0,
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    """`bias`: its dtype, "same" as x's, or None."""
    x = ArraySpec(shape=shape, dtype=dtype, fill=fill, deviation=2.0)
    bias_dtype = dtype if bias == "same" else bias
    which_bias = "no_bias" if bias is None else bias != "same" and f"{bias}_bias"
    dropout = bool(rate) and f"dropout_{rate}"
    name = call_name(shape, dtype, activation, which_bias, residual and "residual", dropout, fill=fill)
    arguments = {
        "x": x,
        "bias": None if bias_dtype is None else ArraySpec(shape=shape[-1:], dtype=bias_dtype),
        "activation": activation,
        **({"residual": x} if residual else {}),
        **({"dropout_rate": rate, "dropout_key": _KEY} if rate else {}),
    }
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(6, 1024),
    _call(9, 300, activation="gelu", dtype="float32"),
    _call(5, 1152, activation="silu", bias="float32"),
    _call(4, 1001, activation="relu", dtype="float16", residual=True),
    _call(3, 256, activation="relu_squared", dtype="float32", residual=True),
    _call(2, 3, 1024, rate=0.1, residual=True),
    _call(3, 1001, bias=None, rate=0.5, activation="gelu"),
    _call(1025, bias=None, dtype="float32", residual=True),
    _call(4, 127, tags=("test", "ragged")),
    _call(16, 100, rate=0.3, residual=True, tags=("test", "ragged")),
    _call(3, 1, dtype="float32", tags=("test", "ragged")),
    _call(2, 512, fill="extreme", tags=("test", "extreme")),
    _call(2, 512, fill="extreme", bias=None, activation="gelu", tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(4, 0, bias=None, tags=("test", "empty")),
    _call(1000, 4096, activation="gelu", residual=True, tags=GPU),
    _call(333, 8192, activation="silu", bias="float32", tags=GPU),
    _call(517, 4096, dtype="float32", tags=GPU),
    _call(517, 4096, dtype="float32", activation="gelu", rate=0.1, tags=GPU),
    _call(2000, 1152, rate=0.1, residual=True, tags=GPU),
    _call(1001, 4097, activation="gelu", tags=GPU),
    _call(700, 4100, activation="relu", dtype="float16", residual=True, tags=GPU),
    _call(1001, 4097, bias=None, rate=0.1, tags=GPU),
    _call(4, 262144, tags=GPU),
    _call(2048, 1001, rate=0.1, residual=True, tags=GPU),
    _call(1000, 127, activation="gelu", tags=GPU),
    _call(4096, 1, dtype="float32", tags=GPU),
    _call(8192, 16384, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(8192, 8192, activation="gelu", tags=BENCH),
    _call(8192, 8192, bias=None, tags=BENCH),
    _call(8192, 8192, rate=0.1, residual=True, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(8192, 4097, tags=BENCH),
    _call(1, 4096, tags=BENCH),
    _call(64, 4096, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * (1 if arguments.get("residual") is None else 2), written=(size,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    # Reads x and dy; the residual's gradient is dy itself.
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * 2, written=(size,))


def _as_rows(array: Any, bias: Any) -> Any:
    return None if array is None else array.reshape((1, -1) if bias is None else (-1, array.shape[-1]))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    has_bias = arguments.get("bias") is not None
    if phase == "forward":
        configs = elementwise_candidates(has_bias=has_bias)
        return {name: partial(_forward_variant, config=config) for name, config in configs.items()}
    configs = column_sum_candidates() if has_bias else elementwise_candidates()
    return {name: partial(_backward_variant, config=config) for name, config in configs.items()}


def _forward_variant(*, x, bias, activation, residual=None, dropout_rate=0.0, dropout_key=None, config):
    y = bias_activation_forward(
        _as_rows(x, bias),
        bias,
        _as_rows(residual, bias),
        key_words(dropout_key) if dropout_key is not None else None,
        activation=get_activation("bias_activation", activation),
        rate=dropout_rate,
        config=config,
    )
    return (y.reshape(x.shape),)


def _backward_variant(
    *, x, bias, activation, residual=None, dropout_rate=0.0, dropout_key=None, cotangents, config=None
):
    del residual
    dx, dbias = bias_activation_backward(
        _as_rows(x, bias),
        bias,
        key_words(dropout_key) if dropout_key is not None else None,
        _as_rows(cotangents[0], bias),
        activation=get_activation("bias_activation", activation),
        rate=dropout_rate,
        config=config,
    )
    dx = dx.reshape(x.shape)
    return (dx,) if dbias is None else (dx, dbias)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    # Without the residual, whose gradient is the cotangent itself.
    fixed = {name: value for name, value in arguments.items() if name not in ("x", "bias", "residual")}
    operands = [array for array in (arguments["x"], arguments["bias"]) if array is not None]

    def forward(x, bias=None):
        return bias_activation_reference(x, bias, **fixed)

    return jax.vjp(forward, *operands)[1](jnp.asarray(cotangents[0]))


BIAS_ACTIVATION = OpSpec(
    name="bias_activation",
    function=bias_activation,
    reference=bias_activation_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
