"""The layer's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.specs import (
    behind_product,
    gradients_of,
    product_bytes,
    product_call,
    product_flops,
    rows_of,
    weight,
)
from pallas_kernels.ops.linear_residual_norm.api import linear_residual_norm
from pallas_kernels.ops.linear_residual_norm.config import candidates
from pallas_kernels.ops.linear_residual_norm.mosaic_gpu import linear_residual_norm_forward
from pallas_kernels.ops.linear_residual_norm.reference import linear_residual_norm_reference
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic


def _call(
    *leading: int,
    features: int,
    outputs: int,
    dtype: str = "bfloat16",
    bias: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    x = ArraySpec(shape=(*leading, features), dtype=dtype)
    residual = ArraySpec(shape=(*leading, outputs), dtype=dtype)
    operands = {"x": x, "w": weight(features, outputs, dtype), "residual": residual}
    return product_call(f"{features}-{outputs}", operands, behind_product(x, outputs, bias=bias), tags=tags)


_ARG_SPECS = (
    _call(2, 5, features=64, outputs=320, bias=True),
    _call(130, features=64, outputs=128, dtype="float16"),
    _call(5, features=100, outputs=96, dtype="float32", bias=True, tags=("test", "ragged")),
    _call(0, features=64, outputs=128, tags=("test", "empty")),
    _call(1000, features=4096, outputs=1024, tags=GPU),
    _call(777, features=1024, outputs=4032, bias=True, tags=GPU),
    _call(600, features=1024, outputs=1088, dtype="float16", tags=GPU),
    _call(17, features=1024, outputs=4096, bias=True, tags=GPU),
    *(_call(rows, features=14336, outputs=4096, tags=BENCH) for rows in (8192, 512, 16, 1)),
    *(_call(rows, features=4096, outputs=4096, tags=BENCH) for rows in (8192, 512)),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    read, (total,) = product_bytes(arguments, "w")
    return Traffic(read=(*read, total), written=(total,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    read, (total,) = product_bytes(arguments, "w")
    return Traffic(read=(*read, total, total), written=(*read, total))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":
        return {}
    return {name: partial(_forward_variant, config=c) for name, c in candidates(rows_of(arguments)).items()}


def _forward_variant(*, x, w, residual, bias=None, config):
    total, mean_square = linear_residual_norm_forward(as_rows(x), w, bias, as_rows(residual), config=config)
    return total.reshape(residual.shape), mean_square.reshape(x.shape[:-1])


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return gradients_of(LINEAR_RESIDUAL_NORM, implementation, arguments, cotangents)


LINEAR_RESIDUAL_NORM = OpSpec(
    name="linear_residual_norm",
    function=linear_residual_norm,
    reference=linear_residual_norm_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "w", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=product_flops,
)
