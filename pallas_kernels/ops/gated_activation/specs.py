"""The gated activation's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops.gated_activation.api import gated_activation
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward, gated_activation_forward
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.elementwise import elementwise_candidates
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


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    activation: str = "silu",
    packed: bool = False,
    fill: Fill = "normal",
    deviation: float = 2.0,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    """`shape` is the result's."""
    gate = ArraySpec(
        shape=(*shape[:-1], 2 * shape[-1]) if packed else shape, dtype=dtype, fill=fill, deviation=deviation
    )
    name = call_name(shape, dtype, activation, packed and "packed", fill=fill)
    return ArgSpec(
        name=name,
        arguments={"gate": gate, **({} if packed else {"up": gate}), "activation": activation},
        tags=frozenset(tags),
    )


_ARG_SPECS = (
    _call(3, 1024),
    _call(2, 3, 1000, activation="gelu_tanh"),
    _call(5, 999, dtype="float32", activation="gelu"),
    _call(2, 3000, dtype="float16", activation="relu"),
    _call(3, 1024, packed=True, activation="gelu"),
    _call(2, 2, 1001, packed=True),
    _call(3, 300, packed=True, dtype="float32", activation="gelu_tanh"),
    _call(2, 512, activation="relu_squared", dtype="float32"),
    _call(1, 127, tags=("test", "ragged")),
    _call(300, 5, packed=True, tags=("test", "ragged")),
    _call(2, 512, fill="extreme", tags=("test", "extreme")),
    _call(2, 512, fill="extreme", activation="gelu_tanh", tags=("test", "extreme")),
    _call(2, 512, fill="zeros", activation="gelu", tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(4, 0, packed=True, tags=("test", "empty")),
    _call(333, 8192, activation="gelu", tags=GPU),
    _call(333, 8192, activation="gelu_tanh", dtype="float32", tags=GPU),
    _call(300, 4099, activation="relu", dtype="float16", tags=GPU),
    _call(700, 14336, packed=True, tags=GPU),
    _call(700, 4100, packed=True, activation="gelu", tags=GPU),
    _call(301, 4097, packed=True, activation="relu_squared", dtype="float32", tags=GPU),
    _call(8192, 14336, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(8192, 8192, activation="gelu_tanh", tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(1, 4096, tags=BENCH),
    _call(64, 4096, tags=BENCH),
)


def _sizes(arguments: Arguments) -> tuple[int, ...]:
    """Bytes of the arrays that hold gate and up."""
    names = ("gate",) if arguments.get("up") is None else ("gate", "up")
    return tuple(array_bytes(arguments[name]) for name in names)


def _forward_traffic(arguments: Arguments) -> Traffic:
    sizes = _sizes(arguments)
    return Traffic(read=sizes, written=(sum(sizes) // 2,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    sizes = _sizes(arguments)
    return Traffic(read=(*sizes, sum(sizes) // 2), written=sizes)


def _one_row(arguments: Arguments) -> tuple[Any, Any]:
    """Gate and up as the kernels take them."""
    gate, up = arguments["gate"], arguments.get("up")
    if up is None:
        return gate.reshape(-1, 2, gate.shape[-1] // 2), None
    return gate.reshape(1, -1), up.reshape(1, -1)


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    del arguments
    variant = _forward_variant if phase == "forward" else _backward_variant
    return {name: partial(variant, config=config) for name, config in elementwise_candidates().items()}


def _forward_variant(*, activation, config, **arrays):
    y = gated_activation_forward(
        *_one_row(arrays), activation=get_activation("gated_activation", activation), config=config
    )
    gate = arrays["gate"]
    return (y.reshape(*gate.shape[:-1], -1),)


def _backward_variant(*, activation, cotangents, config=None, **arrays):
    gate, up = _one_row(arrays)
    (dy,) = cotangents
    gradients = gated_activation_backward(
        gate,
        up,
        dy.reshape(gate.shape[0], gate.shape[-1]),
        activation=get_activation("gated_activation", activation),
        config=config,
    )
    return tuple(gradient.reshape(arrays["gate"].shape) for gradient in gradients if gradient is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    names = ("gate",) if arguments.get("up") is None else ("gate", "up")

    def forward(*arrays):
        return gated_activation_reference(*arrays, activation=arguments["activation"])

    return jax.vjp(forward, *(arguments[name] for name in names))[1](*cotangents)


GATED_ACTIVATION = OpSpec(
    name="gated_activation",
    function=gated_activation,
    reference=gated_activation_reference,
    implementations=("mosaic", "xla"),
    differentiable=("gate", "up"),
    batched=("gate", "up"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
