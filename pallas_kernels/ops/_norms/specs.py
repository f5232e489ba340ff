"""Parts of the norms' registry entries: parameters, backward passes, traffic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pallas_kernels.ops._norms.backward import NormGradients, norm_backward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.random import key_words
from pallas_kernels.spec_builders import Arrays, backward_passes, gradients_of, traffic
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
            mosaic=partial(backward_kernel, norm),
            triton=partial(_triton_backward, norm),
            xla=partial(_xla_backward, reference),
        ),
        **others,
    )


def kernel_gradients(norm: Norm, *, x, scale=None, bias=None, residual=None, key=None, cotangents) -> NormGradients:
    """Runs the backward kernel alone, with x in place of the saved sum, so that the residual is not read again."""
    dy, *dtotal = cotangents
    words = None if key is None else key_words(key)
    dtotal = dtotal[0] if dtotal else None
    return norm_backward(norm, x, dy, scale=scale, bias=bias, dtotal=dtotal, words=words)


def backward_kernel(norm: Norm, **arguments: Any) -> Arrays:
    """Computes the gradients of x, and of scale and bias if given, with the backward kernel."""
    found = kernel_gradients(norm, **arguments)
    return tuple(each for each in (found.dtotal, found.dscale, found.dbias) if each is not None)


def _triton_backward(norm, *, x, scale=None, bias=None, residual=None, cotangents):
    from pallas_kernels.ops._norms.triton import norm_gradients  # imports Triton

    return norm_gradients(norm.name, x, *cotangents, scale=scale, bias=bias)


def _xla_backward(reference, *, residual=None, cotangents, **arguments):
    dy, *dtotal = cotangents
    dx, *rest = gradients_of(reference, "x", "scale", "bias")(**arguments, cotangents=(dy,))
    return dx + dtotal[0] if dtotal else dx, *rest
