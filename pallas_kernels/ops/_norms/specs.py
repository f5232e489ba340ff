"""Parts of the norms' registry entries: parameters, kernels with a given configuration, traffic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ops._norms.backward import NormGradients, norm_backward
from pallas_kernels.ops._norms.config import BackwardConfig, BackwardShape, forward_candidates
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.primitives.random import key_words
from pallas_kernels.spec_builders import Arrays, backward_passes, given_names, gradients_of, traffic, variants
from pallas_kernels.specs import Arguments, ArraySpec, OpSpec


def parameter(name: str, x: ArraySpec, dtype: str | None = None) -> ArraySpec:
    """Makes a scale near one, or a bias near zero, for the features of x."""
    return ArraySpec(shape=x.shape[-1:], dtype=dtype or x.dtype, mean=float(name == "scale"), deviation=0.1)


def norm_op(norm: Norm, function: Callable[..., Any], reference: Callable[..., Any], **others: Any) -> OpSpec:
    """Makes the registry entry of a norm with an optional residual and no dropout."""
    backward = partial(backward_kernel, norm)
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
            mosaic=backward, triton=partial(_triton_backward, norm), xla=partial(_xla_backward, reference)
        ),
        variants=variants(
            (partial(forward_kernel, norm), forward_configs),
            (backward, partial(backward_configs, centered=norm.centered)),
        ),
        **others,
    )


def forward_kernel(norm: Norm, *, x, scale=None, bias=None, residual=None, key=None, config):
    """Runs the forward kernel alone."""
    words = None if key is None else key_words(key)
    return norm_forward(norm, x, scale=scale, bias=bias, residual=residual, words=words, config=config)


def kernel_gradients(
    norm: Norm, *, x, scale=None, bias=None, residual=None, key=None, cotangents, config=None
) -> NormGradients:
    """Runs the backward kernel alone, with x in place of the saved sum, so that the residual is not read again."""
    dy, *dtotal = cotangents
    words = None if key is None else key_words(key)
    dtotal = dtotal[0] if dtotal else None
    return norm_backward(norm, x, dy, scale=scale, bias=bias, dtotal=dtotal, words=words, config=config)


def backward_kernel(norm: Norm, **arguments: Any) -> Arrays:
    """Computes the gradients of x, and of scale and bias if given, with the backward kernel."""
    found = kernel_gradients(norm, **arguments)
    return tuple(each for each in (found.dtotal, found.dscale, found.dbias) if each is not None)


def forward_configs(arguments: Arguments) -> dict[str, Any]:
    """Returns the forward configurations worth timing."""
    return forward_candidates(arguments["x"].shape[-1])


def backward_configs(
    arguments: Arguments, *, centered: bool = False, has_dropout: bool = False
) -> dict[str, BackwardConfig]:
    """Returns the backward configurations worth timing."""
    x, scale = arguments["x"], arguments.get("scale")
    return BackwardShape(
        features=x.shape[-1],
        itemsize=jnp.dtype(x.dtype).itemsize,
        streams=2 + len(given_names(arguments, "residual")),
        gain_bytes=0 if scale is None else jnp.dtype(scale.dtype).itemsize,
        sums=len(given_names(arguments, "scale", "bias")),
        has_dropout=has_dropout,
        centered=centered,
    ).candidates()


def _triton_backward(norm, *, x, scale=None, bias=None, residual=None, cotangents):
    from pallas_kernels.ops._norms.triton import norm_gradients  # imports Triton

    return norm_gradients(norm.name, x, *cotangents, scale=scale, bias=bias)


def _xla_backward(reference, *, residual=None, cotangents, **arguments):
    dy, *dtotal = cotangents
    dx, *rest = gradients_of(reference, "x", "scale", "bias")(**arguments, cotangents=(dy,))
    return dx + dtotal[0] if dtotal else dx, *rest
