"""LayerNorm's registry entry."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops._norms.norm import Norm
from pallas_kernels.ops._norms.reference import layer_norm_reference
from pallas_kernels.ops._norms.specs import norm_op, parameter
from pallas_kernels.ops.layer_norm.api import layer_norm
from pallas_kernels.spec_builders import array_call, calls


@array_call
def _call(x, *, affine=("scale", "bias"), residual=True, mean=0.0, rounds=False, affine_dtype=None):
    x = replace(x, mean=mean)
    arguments = {"x": x, **{name: parameter(name, x, affine_dtype) for name in affine}, "residual": residual and x}
    arguments["rounds_before_scale"] = rounds
    details = len(affine) < 2 and ("_".join(affine) or "plain"), residual and "residual", bool(mean) and f"mean{mean:g}"
    return arguments, *details, affine_dtype and f"{affine_dtype}_scale", rounds and "rounds_before_scale"


LAYER_NORM = norm_op(
    Norm(name="layer_norm", epsilon=1e-6),
    layer_norm,
    layer_norm_reference,
    differentiable=("x", "scale", "bias", "residual"),
    arg_specs=(
        _call(3, 512),
        _call(2, 2, 1024, residual=False),
        _call(3, 512, dtype="float32"),
        _call(3, 256, dtype="float16", residual=False),
        _call(3, 256, affine=("scale",)),
        _call(3, 256, affine=("bias",), residual=False),
        _call(3, 256, affine=(), residual=False),
        _call(512, residual=False),
        _call(3, 512, rounds=True),
        _call(3, 256, affine_dtype="float32", residual=False, rounds=True),
        # A mean so far from zero that a variance computed as E[x**2] - E[x]**2 would have no correct digits.
        _call(3, 1024, dtype="float32", mean=3e3, residual=False),
        _call(3, 1000, dtype="float32", residual=False, tags="test ragged"),
        *calls(_call, (2, 4097), (4, 127), tags="test ragged"),
        _call(4, 1, dtype="float32", tags="test ragged"),
        _call(2, 20004, tags="test ragged long"),
        _call(3, 256, fill="extreme", tags="test extreme"),
        _call(3, 256, fill="zeros", tags="test extreme"),
        _call(0, 512, tags="test empty"),
        _call(4, 0, residual=False, tags="test empty"),
        _call(1000, 4096, tags="gpu"),
        _call(1001, 384, tags="gpu"),  # a row for each warp
        _call(515, 136, dtype="float32", residual=False, tags="gpu"),
        _call(300, 4096, dtype="float32", mean=3e3, residual=False, tags="gpu"),
        *calls(_call, (333, 8192), (300, 16384), tags="gpu"),
        _call(300, 8192, dtype="float32", tags="gpu"),
        _call(1000, 4096, rounds=True, tags="gpu"),
        _call(500, 4096, affine=(), tags="gpu"),
        *calls(_call, (2000, 1152), (1000, 4097), tags="gpu ragged"),
        _call(8192, 1024, tags="gpu bench block"),
        _call(32768, 4096, tags="gpu bench"),
        _call(32768, 4096, residual=False, tags="gpu bench"),
        _call(8192, 8192, tags="gpu bench"),
        _call(8192, 8192, residual=False, tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
        *calls(_call, (1, 4096), (64, 4096), tags="gpu bench"),
    ),
)
