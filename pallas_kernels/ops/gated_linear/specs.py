"""The gated linear layer's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.norm import as_rows, can_fuse_norm, prologue, row_norm
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    gradients_of,
    norm_arguments,
    product_bytes,
    product_call,
    product_flops,
    rows_of,
    weight,
    with_norm,
)
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.gated_linear.api import gated_linear
from pallas_kernels.ops.gated_linear.config import candidates, problem
from pallas_kernels.ops.gated_linear.mosaic_gpu import gated_linear_forward
from pallas_kernels.ops.gated_linear.mosaic_gpu_vjp import gated_linear_backward
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.specs import BENCH, GPU, ArgSpec, Arguments, ArraySpec, Fill, OpSpec, Traffic

_WEIGHTS = ("w_gate", "w_up")


def _call(
    *leading: int,
    features: int,
    outputs: int,
    dtype: str = "bfloat16",
    activation: str = "silu",
    fill: Fill = "normal",
    norm: str | None = None,
    scaled: bool = True,
    mean_square: bool = False,
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    """Products of deviation 2, as those before an activation often have."""
    w = weight(features, outputs, dtype, deviation=2)
    x = ArraySpec(shape=(*leading, features), dtype=dtype, fill=fill)
    return product_call(
        f"{features}-{outputs}",
        {"x": x, "w_gate": w, "w_up": w},
        ({"activation": activation}, activation),
        norm_arguments(norm, x, scaled=scaled, mean_square=mean_square),
        tags=tags,
    )


_ARG_SPECS = (
    _call(2, 72, features=128, outputs=192),
    _call(70, features=192, outputs=128, dtype="float16", activation="gelu_tanh"),
    _call(3, features=64, outputs=128, activation="gelu"),
    _call(5, features=100, outputs=96, tags=("test", "ragged")),
    _call(0, features=64, outputs=128, tags=("test", "empty")),
    _call(24, features=64, outputs=128, fill="zeros", tags=("test", "extreme")),
    _call(4, features=128, outputs=128, norm="rms"),
    _call(40, features=128, outputs=128, norm="rms", scaled=False, mean_square=True),
    _call(1000, features=4096, outputs=1024, tags=GPU),
    _call(600, features=1024, outputs=2048, norm="layer", tags=GPU),
    _call(520, features=1024, outputs=2048, norm="rms", scaled=False, mean_square=True, tags=GPU),
    _call(777, features=1024, outputs=4032, activation="gelu_tanh", tags=GPU),
    _call(2, 300, features=2048, outputs=2048, dtype="float16", activation="relu", tags=GPU),
    _call(1, features=4096, outputs=4096, tags=GPU),
    _call(17, features=1024, outputs=4096, tags=GPU),
    *(_call(rows, features=4096, outputs=14336, tags=(*BENCH, "block")) for rows in (8192, 512, 16, 1)),
    *(_call(rows, features=4096, outputs=14336, norm="rms", tags=BENCH) for rows in (8192, 512, 16, 1)),
    *(
        _call(rows, features=4096, outputs=14336, norm="rms", scaled=False, mean_square=True, tags=BENCH)
        for rows in (8192, 512)
    ),
)


def _function(*, implementation=None, **arguments):
    return gated_linear(**with_norm(arguments), implementation=implementation)


def _reference(**arguments):
    return gated_linear_reference(**with_norm(arguments))


def _forward_traffic(arguments: Arguments) -> Traffic:
    read, (y, _) = product_bytes(arguments, *_WEIGHTS)
    return Traffic(read=tuple(read), written=(y,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    read, (y, _) = product_bytes(arguments, *_WEIGHTS)
    return Traffic(read=(*read, y, y, y), written=tuple(read))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":  # its products are XLA's
        return {}
    norm, x = with_norm(arguments).get("norm"), arguments["x"]
    return {
        name: partial(_forward_variant, config=config)
        for name, config in candidates(rows_of(arguments)).items()
        if can_fuse_norm(config, norm, x) == getattr(config, "fuses_norm", False)
    }


def _forward_variant(*, config=None, **arguments):
    called = with_norm(arguments)
    x, function = called["x"], get_activation("gated_linear", called["activation"])
    norm, normed, row_scale, inside = called.get("norm"), as_rows(x), None, None
    if norm is not None and can_fuse_norm(config, norm, normed):
        inside = row_norm(norm)
    else:
        normed, row_scale = prologue(norm, normed)
    (y,) = gated_linear_forward(
        normed, called["w_gate"], called["w_up"], activation=function, row_scale=row_scale, norm=inside, config=config
    )
    return (y.reshape(*x.shape[:-1], -1),)


def _backward_variant(*, x, w_gate, w_up, activation, cotangents):
    (dy,) = cotangents
    rows = dy.reshape(-1, dy.shape[-1])
    # dy stands for both products that the forward pass keeps: of their shape and dtype.
    dx, dw_gate, dw_up, _ = gated_linear_backward(
        x.reshape(-1, x.shape[-1]),
        w_gate,
        w_up,
        rows,
        rows,
        rows,
        activation=get_activation("gated_linear", activation),
    )
    return dx.reshape(x.shape), dw_gate, dw_up


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if "norm" in arguments:
        return gradients_of(GATED_LINEAR, implementation, arguments, cotangents)
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    x, w_gate, w_up = (arguments[name] for name in ("x", *_WEIGHTS))
    (dy,) = cotangents

    def gating(gate, up):
        return gated_activation_reference(gate, up, activation=arguments["activation"])

    products = jax.vjp(lambda *operands: (operands[0] @ operands[1], operands[0] @ operands[2]), x, w_gate, w_up)[1]
    return products(jax.vjp(gating, dy, dy)[1](dy))


GATED_LINEAR = OpSpec(
    name="gated_linear",
    function=_function,
    reference=_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", *_WEIGHTS, *NORM_ARRAYS),
    batched=("x", "mean_square"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    problem=lambda arguments: problem(arguments["x"], arguments["w_gate"], arguments["activation"]),
    flops=partial(product_flops, weights=_WEIGHTS),
)
