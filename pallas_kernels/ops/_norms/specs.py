"""Parts of the norms' registry entries: parameters, backward passes, traffic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ops._norms.backward import NormGradients, norm_backward, xla_gradients
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.random import key_words
from pallas_kernels.spec_builders import Arrays, backward_passes, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


def parameter(name: str, x: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """Makes a scale near one, or a bias near zero, for the features of x."""
    return ArraySpec(shape=x.shape[-1:], dtype=dtype or x.dtype, mean=float(name == "scale"), deviation=0.1)


def norm_op(norm: Norm, function: Callable[..., Any], reference: Callable[..., Any], **others: Any) -> OpSpec:
    """Makes the registry entry of a norm with an optional residual and no dropout."""
    return OpSpec(
        name=norm.name,
        function=function,
        reference=reference,
        implementations=("mosaic", "triton", "xla"),
        batched=("x", "residual"),
        forward_traffic=traffic(read=("x", "residual"), written=("x", "residual")),
        # Reads the normalised rows, dy, and the sum's cotangent if there is one.
        backward_traffic=traffic(read=("x", "x", "residual"), written=("x",)),
        backward=backward_passes(
            mosaic=partial(norm_gradients, norm_backward, norm),
            triton=partial(norm_gradients, _triton_gradients, norm),
            xla=partial(norm_gradients, xla_gradients, norm),
        ),
        **others,
    )


def _saved_gradients(
    gradients: Callable[..., NormGradients],
    norm: Norm,
    *,
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    key: jax.Array | None = None,
    cotangents: Arrays,
) -> NormGradients:
    """Runs a backward pass, such as `norm_backward`, with x and made-up statistics in place of saved values.

    The work is the same. The statistics are a constant that no launch has to fill.
    """
    dy, *dtotal = cotangents
    kinds, rows = norm.statistics(x.shape[0], x.dtype).shape
    statistics = np.stack([np.linspace(0.9, 1.1, rows)] + [np.linspace(-0.1, 0.1, rows)] * (kinds - 1))
    return gradients(
        norm,
        x,
        jnp.asarray(statistics, jnp.float32),
        dy,
        scale=scale,
        bias=bias,
        dtotal=dtotal[0] if dtotal else None,
        words=None if key is None else key_words(key),
    )


def norm_gradients(
    gradients: Callable[..., NormGradients], norm: Norm, *, rounds_before_scale: bool = False, **arguments: Any
) -> Arrays:
    """Computes a call's gradients, such as by `norm_backward`, in the order of its arguments."""
    del rounds_before_scale  # gradients do not round
    found = _saved_gradients(gradients, norm, **arguments)
    of_x, of_sum = (found.dtotal, None) if found.dx is None else (found.dx, found.dtotal)
    return tuple(each for each in (of_x, found.dscale, found.dbias, of_sum) if each is not None)


def _triton_gradients(norm, x, statistics, dy, *, scale, bias, dtotal, words) -> NormGradients:
    from pallas_kernels.ops._norms.triton import backward  # imports Triton

    if dtotal is not None or scale is None:
        raise NotImplementedError("the Triton kernels take a scale and no residual")
    dx, dscale, dbias = backward(norm, x, statistics, dy, scale, bias)
    return NormGradients(dtotal=dx, dx=None, dscale=dscale, dbias=dbias)
