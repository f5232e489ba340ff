"""The registry entry of the low-rank corrected linear layer: calls for tests and benchmarks, traffic, variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.specs import behind_product, product_bytes, product_call, rows_of, weight
from pallas_kernels.ops.lora_linear.api import lora_linear
from pallas_kernels.ops.lora_linear.config import candidates
from pallas_kernels.ops.lora_linear.mosaic_gpu import lora_linear_forward
from pallas_kernels.ops.lora_linear.mosaic_gpu_vjp import lora_linear_backward
from pallas_kernels.ops.lora_linear.reference import lora_linear_reference
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic


def _call(
    *leading: int,
    features: int,
    outputs: int,
    rank: int = 16,
    dtype: str = "bfloat16",
    bias: bool = False,
    alpha: float = 2.0,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    x = ArraySpec(shape=(*leading, features), dtype=dtype)
    operands = {
        "x": x,
        "w": weight(features, outputs, dtype),
        "a": weight(features, rank, dtype),
        "b": weight(rank, outputs, dtype),
        "alpha": alpha,
    }
    sizes = f"{features}-{outputs}-rank{rank}"
    return product_call(sizes, operands, behind_product(x, outputs, bias=bias), tags=tags)


_ARG_SPECS = (
    _call(2, 12, features=128, outputs=192, rank=8, bias=True),
    _call(40, features=64, outputs=128, rank=72, dtype="float16"),
    _call(0, features=64, outputs=128, rank=4, tags=("test", "empty")),
    _call(777, features=1024, outputs=4032, rank=4, bias=True, tags=GPU),
    _call(515, features=4160, outputs=1088, rank=128, tags=GPU),
    _call(2200, features=1024, outputs=2048, rank=16, dtype="float16", tags=GPU),
    _call(2060, features=1024, outputs=2048, rank=72, bias=True, tags=GPU),
    _call(600, features=1024, outputs=2048, rank=64, tags=GPU),
    *(
        _call(rows, features=4096, outputs=outputs, rank=16, tags=(*BENCH, "block"))
        for rows in (8192, 512)
        for outputs in (4096, 14336)
    ),
    _call(8192, features=4096, outputs=4096, rank=64, tags=("bench",)),
)


def _sizes(arguments: Arguments) -> tuple[int, int, int]:
    """Bytes of x, of w with a and b, and of the result."""
    (x, *weights), (y, *_) = product_bytes(arguments, "w", "a", "b")
    return x, sum(weights), y


def _forward_traffic(arguments: Arguments) -> Traffic:
    x, weights, y = _sizes(arguments)
    return Traffic(read=(x, weights), written=(y,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    x, weights, y = _sizes(arguments)
    return Traffic(read=(x, weights, y), written=(x, weights))


def flops(arguments: Arguments, phase: str) -> int:
    """Multiplications and additions of a phase's products."""
    (features, outputs), rank = arguments["w"].shape, arguments["a"].shape[1]
    forward = 2 * rows_of(arguments) * (features * outputs + rank * (features + outputs))
    return forward if phase == "forward" else 2 * forward


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    found = candidates(rows_of(arguments), arguments["a"].shape[1])
    if phase == "forward":
        return {name: partial(_forward_variant, config=config) for name, config in found.items()}
    return {"XLA": _backward_variant}


def _forward_variant(*, x, w, a, b, alpha=1.0, bias=None, config):
    y = lora_linear_forward(x.reshape(-1, x.shape[-1]), w, a, b, bias, alpha=alpha, config=config)
    return (y.reshape(*x.shape[:-1], -1),)


def _backward_variant(*, x, w, a, b, cotangents, alpha=1.0, bias=None):
    (dy,) = cotangents
    rows = x.reshape(-1, x.shape[-1])
    dx, *rest = lora_linear_backward(rows, w, a, b, bias, dy.reshape(-1, dy.shape[-1]), alpha=alpha)
    return tuple(value for value in (dx.reshape(x.shape), *rest) if value is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    names = [name for name in ("x", "w", "a", "b", "bias") if arguments.get(name) is not None]

    def forward(*values):
        arrays = dict(zip(names, values, strict=True))
        return lora_linear_reference(**arrays, alpha=arguments.get("alpha", 1.0))

    return jax.vjp(forward, *(arguments[name] for name in names))[1](cotangents[0])


LORA_LINEAR = OpSpec(
    name="lora_linear",
    function=lora_linear,
    reference=lora_linear_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "w", "a", "b", "bias"),
    batched=("x",),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=flops,
)
