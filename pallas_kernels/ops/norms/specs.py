"""The norms' registry entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops.norms.api import dropout_residual_norm, layer_norm, rms_norm
from pallas_kernels.ops.norms.backward import NormGradients, norm_backward, xla_gradients
from pallas_kernels.ops.norms.norm import NormName, StaticNorm
from pallas_kernels.ops.norms.reference import (
    dropout_residual_norm_reference,
    layer_norm_reference,
    rms_norm_reference,
)
from pallas_kernels.primitives.random import key_words
from pallas_kernels.spec_builders import Arrays, array_call, backward_passes, calls, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


def _affine(x: ArraySpec, norm: str, names: tuple[str, ...] | None, dtype: str | None = None) -> tuple[Any, ...]:
    """Returns a scale near one and a bias near zero, those of `names` (None: all of the norm), and a detail."""
    own = (("scale",) if norm == "rms_norm" else ("scale", "bias")) if names is None else names
    arrays = {
        name: ArraySpec(shape=x.shape[-1:], dtype=dtype or x.dtype, mean=float(name == "scale"), deviation=0.1)
        for name in own
    }
    return arrays, names is not None and ("_".join(names) or "plain")


@array_call
def _call(x, *, norm, affine=None, affine_dtype=None, residual=True, mean=0.0, rounds=False):
    x = replace(x, mean=mean)
    arrays, which = _affine(x, norm, affine, affine_dtype)
    arguments = {"x": x, **arrays, "residual": residual and x, "rounds_before_scale": rounds}
    details = which, affine_dtype and f"{affine_dtype}_scale", residual and "residual", bool(mean) and f"mean{mean:g}"
    return arguments, *details, rounds and "rounds_before_scale"


_rms, _layer = partial(_call, norm="rms_norm"), partial(_call, norm="layer_norm")


@array_call
def _dropout(x, *, norm="rms_norm", affine=None, rate=0.1, rounds=False):
    arrays, which = _affine(x, norm, affine)
    key = ArraySpec(shape=(2,), dtype="uint32", fill="bits")
    arguments = {"x": x, **arrays, "residual": x, "rate": rate, "key": key, "norm": norm, "rounds_before_scale": rounds}
    return arguments, norm, f"rate{rate:g}", which, rounds and "rounds_before_scale"


def _gradients(
    gradients: Callable[..., NormGradients],
    *,
    norm: NormName,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    rate: float = 0.0,
    key: jax.Array | None = None,
    rounds_before_scale: bool = False,
    cotangents: Arrays,
) -> Arrays:
    """Runs a backward pass, such as `norm_backward`; returns gradients in the order of the call's arguments.

    x and made-up statistics take the place of saved values. The work is the same, and no launch has to fill them.
    """
    del residual, rounds_before_scale  # gradients do not round
    static = StaticNorm(name=norm, epsilon=1e-6, rate=rate)
    dy, *dtotal = cotangents
    kinds, rows = static.statistics(x.shape[0], x.dtype).shape
    statistics = np.stack([np.linspace(0.9, 1.1, rows)] + [np.linspace(-0.1, 0.1, rows)] * (kinds - 1))
    given = {"scale": scale, "bias": bias, "dtotal": dtotal[0] if dtotal else None}
    words = None if key is None else key_words(key)
    found = gradients(static, x, jnp.asarray(statistics, jnp.float32), dy, **given, words=words)
    of_x, of_sum = (found.dtotal, None) if found.dx is None else (found.dx, found.dtotal)
    return tuple(each for each in (of_x, found.dscale, found.dbias, of_sum) if each is not None)


def _triton_gradients(*arguments: Any, **keywords: Any) -> NormGradients:
    from pallas_kernels.ops.norms.triton import triton_backward  # imports Triton

    return triton_backward(*arguments, **keywords)


def _op(function: Callable[..., Any], reference: Callable[..., Any], **others: Any) -> OpSpec:
    """Makes the registry entry of a norm with an optional residual and no dropout."""
    passes = {"mosaic": norm_backward, "triton": _triton_gradients, "xla": xla_gradients}
    name = cast(NormName, function.__name__)
    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        implementations=tuple(passes),
        batched=("x", "residual"),
        forward_traffic=traffic(read=("x", "residual"), written=("x", "residual")),
        # Reads the normalised rows, dy, and the sum's cotangent if there is one.
        backward_traffic=traffic(read=("x", "x", "residual"), written=("x",)),
        backward=backward_passes(**{key: partial(_gradients, each, norm=name) for key, each in passes.items()}),
        **others,
    )


RMS_NORM = _op(
    rms_norm,
    rms_norm_reference,
    differentiable=("x", "scale", "residual"),
    arg_specs=(
        _rms(6, 1024),
        _rms(2, 3, 1024, residual=False),
        _rms(4, 512, affine_dtype="float32"),
        _rms(4, 512, dtype="float32"),
        _rms(4, 256, dtype="float16", residual=False),
        _rms(256, residual=False),
        _rms(6, 1024, rounds=True),
        _rms(4, 1000, dtype="float32", residual=False, tags="test ragged"),
        *calls(_rms, (2, 4097), (4, 127), tags="test ragged"),
        _rms(4, 1, dtype="float32", tags="test ragged"),
        _rms(2, 20004, tags="test ragged long"),
        _rms(4, 512, fill="extreme", tags="test extreme"),
        _rms(4, 512, fill="ones", residual=False, tags="test extreme"),
        _rms(0, 512, tags="test empty"),
        _rms(4, 0, residual=False, tags="test empty"),
        *calls(_rms, (1000, 4096), (300, 16384), tags="gpu"),
        _rms(1003, 128, residual=False, tags="gpu"),  # a row for each warp
        _rms(700, 201, tags="gpu ragged"),
        _rms(1000, 4096, rounds=True, tags="gpu"),
        *calls(_rms, (517, 4096), (300, 8192), dtype="float32", tags="gpu"),
        *calls(_rms, (2000, 1152), (1000, 4097), tags="gpu ragged"),
        _rms(8192, 4096, tags="gpu bench block"),
        *calls(_rms, (32768, 4096), (8192, 8192), tags="gpu bench"),
        *calls(_rms, (32768, 4096), (8192, 8192), residual=False, tags="gpu bench"),
        _rms(16384, 4096, dtype="float32", tags="gpu bench"),
        _rms(65536, 1152, tags="gpu bench ragged"),
        *calls(_rms, (16384, 1024), (4096, 16384), (1, 4096), (64, 4096), tags="gpu bench"),
    ),
)

LAYER_NORM = _op(
    layer_norm,
    layer_norm_reference,
    differentiable=("x", "scale", "bias", "residual"),
    arg_specs=(
        _layer(3, 512),
        _layer(2, 2, 1024, residual=False),
        _layer(3, 512, dtype="float32"),
        _layer(3, 256, dtype="float16", residual=False),
        _layer(3, 256, affine=("scale",)),
        _layer(3, 256, affine=("bias",), residual=False),
        _layer(3, 256, affine=(), residual=False),
        _layer(512, residual=False),
        _layer(3, 512, rounds=True),
        _layer(3, 256, affine_dtype="float32", residual=False, rounds=True),
        # A mean so far from zero that a variance computed as E[x**2] - E[x]**2 would have no correct digits.
        _layer(3, 1024, dtype="float32", mean=3e3, residual=False),
        _layer(3, 1000, dtype="float32", residual=False, tags="test ragged"),
        *calls(_layer, (2, 4097), (4, 127), tags="test ragged"),
        _layer(4, 1, dtype="float32", tags="test ragged"),
        _layer(2, 20004, tags="test ragged long"),
        _layer(3, 256, fill="extreme", tags="test extreme"),
        _layer(3, 256, fill="zeros", tags="test extreme"),
        _layer(0, 512, tags="test empty"),
        _layer(4, 0, residual=False, tags="test empty"),
        _layer(1001, 384, tags="gpu"),  # a row for each warp
        _layer(515, 136, dtype="float32", residual=False, tags="gpu"),
        _layer(300, 4096, dtype="float32", mean=3e3, residual=False, tags="gpu"),
        *calls(_layer, (1000, 4096), (333, 8192), (300, 16384), tags="gpu"),
        _layer(300, 8192, dtype="float32", tags="gpu"),
        _layer(1000, 4096, rounds=True, tags="gpu"),
        _layer(500, 4096, affine=(), tags="gpu"),
        *calls(_layer, (2000, 1152), (1000, 4097), tags="gpu ragged"),
        _layer(8192, 1024, tags="gpu bench block"),
        *calls(_layer, (32768, 4096), (8192, 8192), (1, 4096), (64, 4096), tags="gpu bench"),
        *calls(_layer, (32768, 4096), (8192, 8192), residual=False, tags="gpu bench"),
        _layer(16384, 4096, dtype="float32", tags="gpu bench"),
    ),
)

DROPOUT_RESIDUAL_NORM = OpSpec(
    name="dropout_residual_norm",
    function=dropout_residual_norm,
    reference=dropout_residual_norm_reference,
    differentiable=("x", "scale", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=(
        _dropout(3, 512),
        _dropout(2, 2, 512, norm="layer_norm", rate=0.5),
        _dropout(3, 256, dtype="float32", norm="layer_norm"),
        _dropout(3, 256, dtype="float16", rate=0.9),
        _dropout(3, 256, rate=0.0),
        _dropout(3, 256, rounds=True),
        _dropout(256, norm="layer_norm", affine=("bias",)),
        _dropout(2, 1153, norm="layer_norm", tags="test ragged"),
        _dropout(3, 127, tags="test ragged"),
        _dropout(2, 16384 + 1028, tags="test ragged long"),
        _dropout(3, 256, fill="extreme", tags="test extreme"),
        _dropout(0, 256, tags="test empty"),
        _dropout(1001, 256, norm="layer_norm", tags="gpu"),  # a row for each warp
        _dropout(333, 8192, norm="layer_norm", tags="gpu"),
        *calls(_dropout, (1000, 4096), (300, 16384), tags="gpu"),
        _dropout(300, 8192, dtype="float32", tags="gpu"),
        _dropout(2000, 1152, tags="gpu ragged"),
        _dropout(1000, 4097, norm="layer_norm", tags="gpu ragged"),
        _dropout(8192, 4096, tags="gpu bench block"),
        *calls(_dropout, (32768, 4096), (8192, 8192), (1, 4096), (64, 4096), tags="gpu bench"),
        _dropout(32768, 4096, norm="layer_norm", tags="gpu bench"),
        _dropout(16384, 4096, dtype="float32", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "residual"), written=("x", "residual")),
    # Reads the sum, dy and the sum's cotangent; writes the gradients of x and of the residual.
    backward_traffic=traffic(read=("x", "x", "x"), written=("x", "residual")),
    backward=backward_passes(mosaic=partial(_gradients, norm_backward), xla=partial(_gradients, xla_gradients)),
)
