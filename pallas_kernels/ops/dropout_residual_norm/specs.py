"""The registry entry of dropout, residual sum and norm in one."""

from __future__ import annotations

from functools import partial

from pallas_kernels.ops._norms.backward import norm_backward, xla_gradients
from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops._norms.specs import norm_gradients, parameter
from pallas_kernels.ops.dropout_residual_norm.api import dropout_residual_norm
from pallas_kernels.ops.dropout_residual_norm.reference import dropout_residual_norm_reference
from pallas_kernels.spec_builders import array_call, backward_passes, calls, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


@array_call
def _call(x, *, norm="rms_norm", affine=None, rate=0.1, rounds=False):
    which = affine is not None and ("_".join(affine) or "plain")
    if affine is None:
        affine = ("scale",) if norm == "rms_norm" else ("scale", "bias")
    parameters = {name: parameter(name, x) for name in affine}
    key = ArraySpec(shape=(2,), dtype="uint32", fill="bits")
    arguments = {"x": x, **parameters, "residual": x, "rate": rate, "key": key, "norm": norm}
    arguments["rounds_before_scale"] = rounds
    return arguments, norm, f"rate{rate:g}", which, rounds and "rounds_before_scale"


def _backward(gradients, *, norm, rate, **arguments):
    return norm_gradients(gradients, Norm(name=norm, epsilon=1e-6, rate=rate), **arguments)


DROPOUT_RESIDUAL_NORM = OpSpec(
    name="dropout_residual_norm",
    function=dropout_residual_norm,
    reference=dropout_residual_norm_reference,
    differentiable=("x", "scale", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=(
        _call(3, 512),
        _call(2, 2, 512, norm="layer_norm", rate=0.5),
        _call(3, 256, dtype="float32", norm="layer_norm"),
        _call(3, 256, dtype="float16", rate=0.9),
        _call(3, 256, rate=0.0),
        _call(3, 256, rounds=True),
        _call(256, norm="layer_norm", affine=("bias",)),
        _call(2, 1153, norm="layer_norm", tags="test ragged"),
        _call(3, 127, tags="test ragged"),
        _call(2, 16384 + 1028, tags="test ragged long"),
        _call(3, 256, fill="extreme", tags="test extreme"),
        _call(0, 256, tags="test empty"),
        _call(1000, 4096, tags="gpu"),
        _call(1001, 256, norm="layer_norm", tags="gpu"),  # a row for each warp
        _call(333, 8192, norm="layer_norm", tags="gpu"),
        _call(300, 16384, tags="gpu"),
        _call(300, 8192, dtype="float32", tags="gpu"),
        _call(2000, 1152, tags="gpu ragged"),
        _call(1000, 4097, norm="layer_norm", tags="gpu ragged"),
        _call(8192, 4096, tags="gpu bench block"),
        _call(32768, 4096, tags="gpu bench"),
        _call(32768, 4096, norm="layer_norm", tags="gpu bench"),
        _call(8192, 8192, tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
        *calls(_call, (1, 4096), (64, 4096), tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "residual"), written=("x", "residual")),
    # Reads the sum, dy and the sum's cotangent; writes the gradients of x and of the residual.
    backward_traffic=traffic(read=("x", "x", "x"), written=("x", "residual")),
    backward=backward_passes(mosaic=partial(_backward, norm_backward), xla=partial(_backward, xla_gradients)),
)
