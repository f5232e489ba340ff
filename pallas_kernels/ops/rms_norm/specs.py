"""RMSNorm's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.ops._norms.backward import norm_backward
from pallas_kernels.ops._norms.config import norm_variants
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.rms_norm.api import rms_norm
from pallas_kernels.ops.rms_norm.reference import rms_norm_reference
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

_NORM = Norm(name="rms_norm", epsilon=1e-6)


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    scale_dtype: str | None = None,
    residual: bool = True,
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    x = ArraySpec(shape=shape, dtype=dtype, fill=fill)
    arguments = {
        "x": x,
        "scale": ArraySpec(shape=shape[-1:], dtype=scale_dtype or dtype, mean=1.0, deviation=0.1),
        **({"residual": x} if residual else {}),
    }
    name = call_name(shape, dtype, scale_dtype and f"{scale_dtype}_scale", residual and "residual", fill=fill)
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(6, 1024),
    _call(2, 3, 1024, residual=False),
    _call(4, 512, scale_dtype="float32"),
    _call(4, 512, dtype="float32"),
    _call(4, 256, dtype="float16", residual=False),
    _call(256, residual=False),
    _call(4, 1152, scale_dtype="float32", tags=("test", "ragged")),
    _call(4, 1000, tags=("test", "ragged")),
    _call(4, 1000, dtype="float32", residual=False, tags=("test", "ragged")),
    _call(2, 4097, tags=("test", "ragged")),
    _call(4, 127, tags=("test", "ragged")),
    _call(4, 1, dtype="float32", tags=("test", "ragged")),
    _call(2, 20004, tags=("test", "ragged", "long")),
    _call(2, 16384 + 4096, residual=False, tags=("test", "long")),
    _call(4, 512, fill="extreme", tags=("test", "extreme")),
    _call(4, 512, fill="zeros", tags=("test", "extreme")),
    _call(4, 512, fill="ones", residual=False, tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(4, 0, residual=False, tags=("test", "empty")),
    _call(1000, 4096, tags=GPU),
    _call(333, 8192, scale_dtype="float32", tags=GPU),
    _call(300, 16384, tags=GPU),
    _call(517, 4096, dtype="float32", tags=GPU),
    _call(300, 8192, dtype="float32", tags=GPU),
    _call(2000, 1152, tags=(*GPU, "ragged")),
    _call(1000, 4097, tags=(*GPU, "ragged")),
    _call(700, 4100, residual=False, tags=(*GPU, "ragged")),
    _call(64, 65536, tags=(*GPU, "long")),
    _call(40, 65537, tags=(*GPU, "ragged", "long")),
    _call(8, 262144, residual=False, tags=(*GPU, "long")),
    _call(8192, 4096, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(32768, 4096, residual=False, tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(8192, 8192, residual=False, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(16384, 1024, tags=BENCH),
    _call(65536, 1152, tags=(*BENCH, "ragged")),
    _call(4096, 16384, tags=BENCH),
    _call(1, 4096, tags=BENCH),
    _call(64, 4096, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    size = array_bytes(arguments["x"])
    count = 1 if arguments.get("residual") is None else 2
    return Traffic(read=(size,) * count, written=(size,) * count)


def _backward_traffic(arguments: Arguments) -> Traffic:
    # Reads the normalised rows, dy, and the cotangent of the sum where there is one.
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * (2 if arguments.get("residual") is None else 3), written=(size,))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    return norm_variants(phase, arguments, forward=_forward_variant, backward=_backward_variant)


def _forward_variant(*, x, scale, residual=None, config):
    return norm_forward(_NORM, x, scale=scale, residual=residual, config=config)


def _backward_variant(*, x, scale, residual=None, cotangents, config=None):
    del residual
    dy, *dtotal = cotangents
    gradients = norm_backward(_NORM, x, dy, scale=scale, dtotal=dtotal[0] if dtotal else None, config=config)
    return tuple(g for g in (gradients.dtotal, gradients.dscale) if g is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # x stands for the saved sum, so that the residual's own array is not read again.
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    dy, *dtotal = cotangents
    x, scale = arguments["x"], arguments["scale"]
    if implementation == "triton":
        from pallas_kernels.ops._norms.triton import norm_gradients  # imports Triton

        return norm_gradients("rms_norm", x, dy, *dtotal, scale=scale)
    dx, dscale = jax.vjp(rms_norm_reference, x, scale)[1](dy)
    return dx + dtotal[0] if dtotal else dx, dscale


RMS_NORM = OpSpec(
    name="rms_norm",
    function=rms_norm,
    reference=rms_norm_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x", "scale", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
