"""The normalised linear layer's registry entry: how it is called in tests and benchmarks, and its traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.norm import as_rows, can_fuse_norm, prologue, row_norm
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    behind_product,
    flat,
    gradients_of,
    norm_arguments,
    product_bytes,
    product_call,
    product_flops,
    rows_of,
    weight,
    with_norm,
)
from pallas_kernels.ops.linear.config import candidates
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.norm_linear.api import norm_linear
from pallas_kernels.ops.norm_linear.reference import norm_linear_reference
from pallas_kernels.primitives.few_rows.config import MOST_FUSED_NORM_ROWS, fused_norm_candidates
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, OpSpec, Traffic


def _call(
    *leading: int,
    features: int,
    outputs: int,
    dtype: str = "bfloat16",
    norm: str = "rms",
    scaled: bool = True,
    mean_square: bool = False,
    tags: tuple[str, ...] = ("test",),
    **behind: Any,
) -> ArgSpec:
    """behind: as `behind_product` has them."""
    x = ArraySpec(shape=(*leading, features), dtype=dtype)
    return product_call(
        f"{features}-{outputs}",
        {"x": x, "w": weight(features, outputs, dtype)},
        norm_arguments(norm, x, scaled=scaled, mean_square=mean_square),
        behind_product(x, outputs, **behind),
        tags=tags,
    )


_ARG_SPECS = (
    _call(2, 3, features=128, outputs=192, bias=True, activation="gelu_tanh"),
    _call(4, features=128, outputs=128, dtype="float16", norm="layer"),
    _call(40, features=128, outputs=128, scaled=False, mean_square=True, bias=True, activation="silu"),
    _call(40, features=192, outputs=128, mean_square=True),
    _call(2, features=100, outputs=96, dtype="float32", bias=True, activation="gelu_tanh", tags=("test", "ragged")),
    _call(0, features=128, outputs=128, tags=("test", "empty")),
    _call(1000, features=4096, outputs=1024, tags=GPU),
    _call(777, features=1024, outputs=4032, norm="layer", bias=True, activation="gelu_tanh", tags=GPU),
    _call(600, features=1024, outputs=2048, scaled=False, mean_square=True, activation="silu", tags=GPU),
    _call(17, features=1024, outputs=4096, bias=True, tags=GPU),
    _call(13, features=2048, outputs=4096, bias=True, activation="silu", tags=GPU),
    _call(9, features=2048, outputs=14336, tags=GPU),
    *(_call(rows, features=4096, outputs=4096, tags=BENCH) for rows in (8192, 512, 16, 1)),
    *(
        _call(rows, features=4096, outputs=16384, norm="layer", bias=True, activation="gelu_tanh", tags=BENCH)
        for rows in (8192, 512)
    ),
)


def _function(*, implementation=None, **arguments):
    return norm_linear(**with_norm(arguments), implementation=implementation)


def _reference(**arguments):
    return norm_linear_reference(**with_norm(arguments))


def _forward_traffic(arguments: Arguments) -> Traffic:
    read, written = product_bytes(arguments, "w")
    return Traffic(read=tuple(read), written=tuple(written))


def _backward_traffic(arguments: Arguments) -> Traffic:
    read, written = product_bytes(arguments, "w")
    kept = written if arguments.get("activation") else []
    return Traffic(read=(*read, *written, *kept), written=tuple(read))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":
        return {}
    rows = rows_of(arguments)
    found = {**candidates(rows), **(fused_norm_candidates() if rows <= MOST_FUSED_NORM_ROWS else {})}
    norm, x = with_norm(arguments)["norm"], arguments["x"]
    return {
        name: partial(_forward_variant, config=config)
        for name, config in found.items()
        if can_fuse_norm(config, norm, x) == getattr(config, "fuses_norm", False)
    }


def _forward_variant(*, config, **arguments):
    called = with_norm(arguments)
    x, w = called["x"], called["w"]
    norm, normed, row_scale, inside = called["norm"], as_rows(x), None, None
    if can_fuse_norm(config, norm, normed):
        inside = row_norm(norm)
    else:
        normed, row_scale = prologue(norm, normed)
    y, _ = linear_forward(
        normed,
        w,
        called.get("bias"),
        flat(called.get("residual")),
        activation=optional_activation("norm_linear", called.get("activation")),
        row_scale=row_scale,
        norm=inside,
        out_dtype=x.dtype,
        config=config,
    )
    return (y.reshape(*x.shape[:-1], -1),)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return gradients_of(NORM_LINEAR, implementation, arguments, cotangents)


NORM_LINEAR = OpSpec(
    name="norm_linear",
    function=_function,
    reference=_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x", "w", "bias", *NORM_ARRAYS),
    batched=("x", "mean_square"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    flops=product_flops,
)
