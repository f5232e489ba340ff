"""The dot interaction's registry entry."""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels.ops.dot_interaction.api import dot_interaction
from pallas_kernels.ops.dot_interaction.mosaic_gpu import Triangle, dot_interaction_backward
from pallas_kernels.ops.dot_interaction.reference import dot_interaction_reference
from pallas_kernels.spec_builders import array_call, backward_passes, calls, gradients_of, traffic
from pallas_kernels.specs import Arguments, OpSpec


@array_call
def _call(features, *, self_interaction=False):
    arguments = {"features": features, "self_interaction": self_interaction}
    return arguments, self_interaction and "self"


def _result_bytes(arguments: Arguments) -> int:
    x = arguments["features"]
    triangle = Triangle(fields=x.shape[-2], has_diagonal=arguments.get("self_interaction", False))
    return math.prod(x.shape[:-2]) * triangle.pairs * jnp.dtype(x.dtype).itemsize


def _flops(arguments: Arguments, phase: str) -> int:
    """Counts the FLOPs of full matrix products: x x^T forward, G x and G^T x backward."""
    *batch, fields, features = arguments["features"].shape
    forward = 2 * math.prod(batch) * fields * fields * features
    return forward if phase == "forward" else 2 * forward


def _backward(*, features, self_interaction=False, cotangents):
    samples = features.reshape(-1, *features.shape[-2:])
    dy = cotangents[0].reshape(samples.shape[0], -1)
    (dx,) = dot_interaction_backward(samples, dy, has_diagonal=self_interaction)
    return (dx.reshape(features.shape),)


DOT_INTERACTION = OpSpec(
    name="dot_interaction",
    function=dot_interaction,
    reference=dot_interaction_reference,
    differentiable=("features",),
    batched=("features",),
    arg_specs=(
        _call(3, 27, 64),
        _call(2, 16, 128, self_interaction=True),
        _call(2, 1, 18, 16, dtype="float16"),
        _call(2, 64, 48, self_interaction=True, dtype="float16"),
        _call(1, 33, 192),
        *calls(_call, (2, 8, 64), (2, 65, 16), (2, 18, 20), (2, 1, 64), tags="test ragged"),
        _call(2, 18, 64, dtype="float32", tags="test ragged"),
        _call(2, 27, 64, fill="extreme", tags="test extreme"),
        _call(0, 27, 64, tags="test empty"),
        *calls(_call, (333, 27, 128), (100, 64, 512), (777, 17, 16), tags="gpu"),
        _call(300, 40, 80, self_interaction=True, dtype="float16", tags="gpu"),
        *calls(_call, (8192, 27, 128), (65536, 27, 128), tags="gpu bench"),
        _call(8192, 64, 256, self_interaction=True, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("features",), written=("y",), y=_result_bytes),
    backward_traffic=traffic(read=("features", "y"), written=("features",), y=_result_bytes),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(dot_interaction_reference, "features")),
    flops=_flops,
)
