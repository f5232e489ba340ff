"""Softmax's registry entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pallas_kernels.ops.softmax.api import softmax
from pallas_kernels.ops.softmax.mosaic_gpu import softmax_backward, xla_gradient
from pallas_kernels.ops.softmax.reference import softmax_reference
from pallas_kernels.spec_builders import array_call, backward_passes, calls, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


@array_call
def _call(x, *, deviation=2.0, mask=None, mask_dtype="bool", **static):
    fill = "integers" if mask_dtype == "bool" else "normal"
    mask_array = mask is not None and ArraySpec(shape=mask, dtype=mask_dtype, fill=fill, maximum=2)
    which_mask = mask and f"{mask_dtype}_mask_" + "x".join(map(str, mask))
    which_deviation = deviation > 100 and f"deviation_{deviation:g}"
    options = (f"{key}_{value}" for key, value in static.items())
    arguments = {"x": replace(x, deviation=deviation), **static, "mask": mask_array}
    return arguments, x.fill != "normal" and x.fill, which_deviation, which_mask, *options


def _rows(*arrays: Any) -> Any:
    return (array.reshape(-1, array.shape[-1]) for array in arrays)


def _backward(*, x, cotangents, axis=-1, **arguments):
    """Runs the backward pass with x in place of the saved weights; the work is the same."""
    return (softmax_backward(*_rows(x, *cotangents), scale=arguments.get("scale")).reshape(x.shape),)


def _triton_backward(*, x, cotangents, axis=-1, **arguments):
    from pallas_kernels.ops.softmax.triton import backward  # imports Triton

    return (backward(*_rows(x, *cotangents), scale=arguments.get("scale", 1.0)).reshape(x.shape),)


def _xla_backward(*, x, cotangents, axis=-1, **arguments):
    return (xla_gradient(x, *cotangents, scale=arguments.get("scale")),)


SOFTMAX = OpSpec(
    name="softmax",
    function=softmax,
    reference=softmax_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x",),
    batched=("x",),
    arg_specs=(
        _call(3, 1024),
        _call(2, 1, 2, 256, scale=0.125),
        _call(2, 512, dtype="float32"),
        _call(256),
        _call(2, 2, 2, 256, mask=(2, 1, 2, 256)),
        _call(2, 2, 2, 256, mask=(2, 1, 256), mask_dtype="float32", scale=0.5),
        _call(4, 256, mask=(4, 1)),
        _call(2, 3, 256, is_causal=True),
        *calls(_call, (2, 1152), (2, 1000), (2, 4097), (4, 127), tags="test ragged"),
        _call(4, 1, dtype="float32", tags="test ragged"),
        _call(2, 20004, tags="test ragged long"),
        _call(130, 4, axis=0, tags="test ragged"),
        _call(2, 512, fill="extreme", dtype="float32", tags="test extreme"),
        _call(2, 512, deviation=1e3, dtype="float32", tags="test extreme"),
        *calls(_call, (0, 512), (4, 0), tags="test empty"),
        *calls(_call, (1000, 4096), (333, 8192), (300, 16384), tags="gpu"),
        *calls(_call, (517, 4096), (300, 8192), (100, 16384), dtype="float32", tags="gpu"),
        _call(1000, 4096, dtype="float16", scale=0.3, tags="gpu"),
        _call(4, 8, 32, 128, mask=(4, 1, 32, 128), tags="gpu"),  # a row for each warp
        _call(4, 8, 31, 128, mask=(4, 1, 31, 128), tags="gpu"),
        _call(3, 201, 136, is_causal=True, mask=(136,), tags="gpu"),
        _call(2, 4, 1024, 1024, is_causal=True, tags="gpu"),
        _call(2, 4, 512, 1024, mask=(2, 1, 512, 1024), scale=0.125, tags="gpu"),
        _call(2, 4, 512, 1027, mask=(2, 1, 512, 1027), tags="gpu"),
        _call(2, 4, 512, 1024, mask=(4, 512, 1024), mask_dtype="bfloat16", tags="gpu"),
        _call(2, 300, 4096, mask=(2, 1, 4096), mask_dtype="float32", is_causal=True, tags="gpu"),
        *calls(_call, (2000, 1152), (1000, 4097), tags="gpu ragged"),
        _call(64, 65536, tags="gpu long"),
        _call(32768, 4096, tags="gpu bench block"),
        *calls(_call, (8192, 8192), (16384, 16384), (64, 4096), (1, 4096), tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "mask"), written=("x",)),
    backward_traffic=traffic(read=("x", "x"), written=("x",)),
    backward=backward_passes(mosaic=_backward, triton=_triton_backward, xla=_xla_backward),
)
