"""The registry entry: how the operation is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._norms.backward import norm_backward
from pallas_kernels.ops._norms.config import norm_variants
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.dropout_residual_norm.api import dropout_residual_norm
from pallas_kernels.ops.dropout_residual_norm.reference import dropout_residual_norm_reference
from pallas_kernels.primitives.random import array_keep_mask, key_words
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
    norm: str = "rms_norm",
    affine: tuple[str, ...] | None = None,
    rate: float = 0.1,
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    x = ArraySpec(shape=shape, dtype=dtype, fill=fill)
    parameters = {
        "scale": ArraySpec(shape=shape[-1:], dtype=dtype, mean=1.0, deviation=0.1),
        "bias": ArraySpec(shape=shape[-1:], dtype=dtype, deviation=0.1),
    }
    has_all = affine is None
    if affine is None:
        affine = ("scale",) if norm == "rms_norm" else ("scale", "bias")
    arguments = {
        "x": x,
        **{name: parameters[name] for name in affine},
        "residual": x,
        "rate": rate,
        "key": ArraySpec(shape=(2,), dtype="uint32", fill="bits"),
        "norm": norm,
    }
    which = not has_all and ("_".join(affine) or "plain")
    name = call_name(shape, dtype, norm, f"rate{rate:g}", which, fill=fill)
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(3, 512),
    _call(2, 2, 512, norm="layer_norm", rate=0.5),
    _call(3, 256, dtype="float32", norm="layer_norm"),
    _call(3, 256, dtype="float16", rate=0.9),
    _call(3, 256, affine=()),
    _call(3, 256, rate=0.0),
    _call(256, norm="layer_norm", affine=("bias",)),
    _call(3, 1000, tags=("test", "ragged")),
    _call(2, 1153, norm="layer_norm", tags=("test", "ragged")),
    _call(3, 127, tags=("test", "ragged")),
    _call(2, 16384 + 1028, tags=("test", "ragged", "long")),
    _call(3, 256, fill="extreme", tags=("test", "extreme")),
    _call(3, 256, fill="zeros", norm="layer_norm", tags=("test", "extreme")),
    _call(0, 256, tags=("test", "empty")),
    _call(1000, 4096, tags=GPU),
    _call(333, 8192, norm="layer_norm", tags=GPU),
    _call(300, 16384, tags=GPU),
    _call(300, 8192, dtype="float32", tags=GPU),
    _call(2000, 1152, tags=(*GPU, "ragged")),
    _call(1000, 4097, norm="layer_norm", tags=(*GPU, "ragged")),
    _call(700, 4100, tags=(*GPU, "ragged")),
    _call(64, 65536, norm="layer_norm", tags=(*GPU, "long")),
    _call(40, 65537, tags=(*GPU, "ragged", "long")),
    _call(8192, 4096, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(32768, 4096, norm="layer_norm", tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(1, 4096, tags=BENCH),
    _call(64, 4096, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    size = array_bytes(arguments["x"])
    return Traffic(read=(size, size), written=(size, size))


def _backward_traffic(arguments: Arguments) -> Traffic:
    # Reads the sum, dy and the sum's cotangent; writes the gradients of x and of the residual.
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * 3, written=(size,) * 2)


def _norm(norm: str, rate: float) -> Norm:
    return Norm(name=norm, epsilon=1e-6, rate=rate)  # pyright: ignore[reportArgumentType]


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    return norm_variants(
        phase,
        arguments,
        forward=_forward_variant,
        backward=_backward_variant,
        centered=arguments["norm"] == "layer_norm",
        has_dropout=True,
    )


def _forward_variant(*, x, residual, rate, key, norm, scale=None, bias=None, config):
    return norm_forward(
        _norm(norm, rate), x, scale=scale, bias=bias, residual=residual, words=key_words(key), config=config
    )


def _backward_variant(*, x, residual, rate, key, norm, scale=None, bias=None, cotangents, config=None):
    del residual
    dy, dtotal = cotangents
    gradients = norm_backward(
        _norm(norm, rate), x, dy, scale=scale, bias=bias, dtotal=dtotal, words=key_words(key), config=config
    )
    found = (gradients.dx, gradients.dscale, gradients.dbias, gradients.dtotal)
    return tuple(gradient for gradient in found if gradient is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # x stands for the saved sum, so that the residual's own array is not read again.
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    dy, dtotal = cotangents
    affine = {name: arguments[name] for name in ("scale", "bias") if arguments.get(name) is not None}
    total, rate = arguments["x"], arguments["rate"]

    def norm_of(total, affine):
        zeros = jnp.zeros_like(total)
        reference = dropout_residual_norm_reference(
            zeros, **affine, residual=total, rate=0.0, key=None, norm=arguments["norm"]
        )
        return reference[0]

    dresidual, daffine = jax.vjp(norm_of, total, affine)[1](dy)
    dresidual = dresidual + dtotal
    keep = array_keep_mask(arguments["key"], total.shape, rate=rate)
    dx = jnp.where(keep, dresidual * (1.0 / (1.0 - rate)), 0).astype(total.dtype)
    return dx, *(daffine[name] for name in affine), dresidual


DROPOUT_RESIDUAL_NORM = OpSpec(
    name="dropout_residual_norm",
    function=dropout_residual_norm,
    reference=dropout_residual_norm_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "scale", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
