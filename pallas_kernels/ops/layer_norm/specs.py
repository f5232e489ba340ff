"""LayerNorm's registry entry: how it is called in tests and benchmarks, its traffic, and its kernel variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.ops._norms.backward import norm_backward
from pallas_kernels.ops._norms.config import norm_variants
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops.layer_norm.api import layer_norm
from pallas_kernels.ops.layer_norm.reference import layer_norm_reference
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

_NORM = Norm(name="layer_norm", epsilon=1e-6)


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    affine: tuple[str, ...] = ("scale", "bias"),
    residual: bool = True,
    mean: float = 0.0,
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    x = ArraySpec(shape=shape, dtype=dtype, fill=fill, mean=mean)
    parameters = {
        "scale": ArraySpec(shape=shape[-1:], dtype=dtype, mean=1.0, deviation=0.1),
        "bias": ArraySpec(shape=shape[-1:], dtype=dtype, deviation=0.1),
    }
    arguments = {"x": x, **{name: parameters[name] for name in affine}, **({"residual": x} if residual else {})}
    which = len(affine) < 2 and ("_".join(affine) or "plain")
    name = call_name(shape, dtype, which, residual and "residual", bool(mean) and f"mean{mean:g}", fill=fill)
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(3, 512),
    _call(2, 2, 1024, residual=False),
    _call(3, 512, dtype="float32"),
    _call(3, 256, dtype="float16", residual=False),
    _call(3, 256, affine=("scale",)),
    _call(3, 256, affine=("bias",), residual=False),
    _call(3, 256, affine=(), residual=False),
    _call(512, residual=False),
    # A mean far from zero, where a variance of E[x**2] - E[x]**2 would have no right digits.
    _call(3, 1024, dtype="float32", mean=3e3, residual=False),
    _call(3, 1152, tags=("test", "ragged")),
    _call(3, 1000, dtype="float32", residual=False, tags=("test", "ragged")),
    _call(2, 4097, tags=("test", "ragged")),
    _call(4, 127, tags=("test", "ragged")),
    _call(4, 1, dtype="float32", tags=("test", "ragged")),
    _call(2, 20004, tags=("test", "ragged", "long")),
    _call(3, 256, fill="extreme", tags=("test", "extreme")),
    _call(3, 256, fill="zeros", tags=("test", "extreme")),
    _call(3, 256, fill="ones", residual=False, tags=("test", "extreme")),
    _call(0, 512, tags=("test", "empty")),
    _call(4, 0, residual=False, tags=("test", "empty")),
    _call(1000, 4096, tags=GPU),
    _call(300, 4096, dtype="float32", mean=3e3, residual=False, tags=GPU),
    _call(333, 8192, tags=GPU),
    _call(300, 16384, tags=GPU),
    _call(300, 8192, dtype="float32", tags=GPU),
    _call(500, 4096, affine=(), tags=GPU),
    _call(2000, 1152, tags=(*GPU, "ragged")),
    _call(1000, 4097, tags=(*GPU, "ragged")),
    _call(700, 4100, residual=False, tags=(*GPU, "ragged")),
    _call(64, 65536, tags=(*GPU, "long")),
    _call(40, 65537, tags=(*GPU, "ragged", "long")),
    _call(8192, 1024, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(32768, 4096, residual=False, tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(8192, 8192, residual=False, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
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
    return norm_variants(phase, arguments, forward=_forward_variant, backward=_backward_variant, centered=True)


def _forward_variant(*, x, scale=None, bias=None, residual=None, config):
    return norm_forward(_NORM, x, scale=scale, bias=bias, residual=residual, config=config)


def _backward_variant(*, x, scale=None, bias=None, residual=None, cotangents, config=None):
    del residual
    dy, *dtotal = cotangents
    dtotal = dtotal[0] if dtotal else None
    gradients = norm_backward(_NORM, x, dy, scale=scale, bias=bias, dtotal=dtotal, config=config)
    return tuple(g for g in (gradients.dtotal, gradients.dscale, gradients.dbias) if g is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    # x stands for the saved sum, so that the residual's own array is not read again.
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    dy, *dtotal = cotangents
    if implementation == "triton":
        from pallas_kernels.ops._norms.triton import norm_gradients  # imports Triton

        return norm_gradients(
            "layer_norm", arguments["x"], dy, *dtotal, **{k: arguments.get(k) for k in ("scale", "bias")}
        )
    given = {name: arguments[name] for name in ("x", "scale", "bias") if arguments.get(name) is not None}
    gradients = jax.vjp(lambda given: layer_norm_reference(**given), given)[1](dy)[0]
    if dtotal:
        gradients["x"] += dtotal[0]
    return tuple(gradients[name] for name in given)


LAYER_NORM = OpSpec(
    name="layer_norm",
    function=layer_norm,
    reference=layer_norm_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x", "scale", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
