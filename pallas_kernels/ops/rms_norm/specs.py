"""RMSNorm's registry entry."""

from __future__ import annotations

from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops._norms.reference import rms_norm_reference
from pallas_kernels.ops._norms.specs import norm_op, parameter
from pallas_kernels.ops.rms_norm.api import rms_norm
from pallas_kernels.spec_builders import array_call, calls


@array_call
def _call(x, *, scale_dtype=None, residual=True, rounds=False):
    arguments = {"x": x, "scale": parameter("scale", x, scale_dtype), "residual": residual and x}
    arguments["rounds_before_scale"] = rounds
    return arguments, scale_dtype and f"{scale_dtype}_scale", residual and "residual", rounds and "rounds_before_scale"


RMS_NORM = norm_op(
    Norm(name="rms_norm", epsilon=1e-6),
    rms_norm,
    rms_norm_reference,
    differentiable=("x", "scale", "residual"),
    arg_specs=(
        _call(6, 1024),
        _call(2, 3, 1024, residual=False),
        _call(4, 512, scale_dtype="float32"),
        _call(4, 512, dtype="float32"),
        _call(4, 256, dtype="float16", residual=False),
        _call(256, residual=False),
        _call(6, 1024, rounds=True),
        _call(4, 1000, dtype="float32", residual=False, tags="test ragged"),
        *calls(_call, (2, 4097), (4, 127), tags="test ragged"),
        _call(4, 1, dtype="float32", tags="test ragged"),
        _call(2, 20004, tags="test ragged long"),
        _call(4, 512, fill="extreme", tags="test extreme"),
        _call(4, 512, fill="ones", residual=False, tags="test extreme"),
        _call(0, 512, tags="test empty"),
        _call(4, 0, residual=False, tags="test empty"),
        _call(1000, 4096, tags="gpu"),
        _call(1003, 128, residual=False, tags="gpu"),  # a row for each warp
        _call(700, 201, tags="gpu ragged"),
        _call(1000, 4096, rounds=True, tags="gpu"),
        _call(300, 16384, tags="gpu"),
        *calls(_call, (517, 4096), (300, 8192), dtype="float32", tags="gpu"),
        *calls(_call, (2000, 1152), (1000, 4097), tags="gpu ragged"),
        _call(8192, 4096, tags="gpu bench block"),
        _call(32768, 4096, tags="gpu bench"),
        _call(32768, 4096, residual=False, tags="gpu bench"),
        _call(8192, 8192, tags="gpu bench"),
        _call(8192, 8192, residual=False, tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
        _call(16384, 1024, tags="gpu bench"),
        _call(65536, 1152, tags="gpu bench ragged"),
        *calls(_call, (4096, 16384), (1, 4096), (64, 4096), tags="gpu bench"),
    ),
)
