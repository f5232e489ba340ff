"""The normalised linear layer's registry entry."""

from __future__ import annotations

from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    epilogue,
    kept_bytes,
    norm_arguments,
    product_call,
    product_flops,
    result_bytes,
    weight,
    with_norm,
)
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.norm_linear.api import norm_linear
from pallas_kernels.spec_builders import as_taken, both_passes, traffic
from pallas_kernels.specs import OpSpec


@product_call
def _call(x, *, outputs, norm="rms", scaled=True, mean_square=False, rounds=False, **after):
    norm_part = norm_arguments(x, norm, scaled=scaled, mean_square=mean_square, rounds=rounds)
    return outputs, {"x": x, "w": weight(x, outputs)}, norm_part, epilogue(x, outputs, **after)


_DIFFERENTIABLE = ("x", "w", "bias", *NORM_ARRAYS)
_FUNCTION = as_taken(norm_linear, with_norm)

NORM_LINEAR = OpSpec(
    name="norm_linear",
    function=_FUNCTION,
    reference=as_taken(linear_reference, with_norm),
    differentiable=_DIFFERENTIABLE,
    batched=("x", "mean_square"),
    arg_specs=(
        _call(2, 3, features=128, outputs=192, bias=True, activation="gelu_tanh"),
        _call(4, features=128, outputs=128, dtype="float16", norm="layer"),
        _call(40, features=128, outputs=128, scaled=False, mean_square=True, bias=True, activation="silu"),
        _call(40, features=192, outputs=128, mean_square=True),
        _call(40, features=192, outputs=128, mean_square=True, rounds=True),
        _call(4, features=128, outputs=128, norm="layer", rounds=True),
        _call(2, features=100, outputs=96, dtype="float32", bias=True, activation="gelu_tanh", tags="test ragged"),
        _call(0, features=128, outputs=128, tags="test empty"),
        _call(1000, features=4096, outputs=1024, tags="gpu"),
        _call(777, features=1024, outputs=4032, norm="layer", bias=True, activation="gelu_tanh", tags="gpu"),
        _call(600, features=1024, outputs=2048, scaled=False, mean_square=True, activation="silu", tags="gpu"),
        _call(17, features=1024, outputs=4096, bias=True, tags="gpu"),
        _call(13, features=2048, outputs=4096, bias=True, activation="silu", tags="gpu"),
        _call(9, features=2048, outputs=14336, tags="gpu"),
        *(_call(rows, features=4096, outputs=4096, tags="gpu bench") for rows in (8192, 512, 16, 1)),
        *(
            _call(rows, features=4096, outputs=16384, norm="layer", bias=True, activation="gelu_tanh", tags="gpu bench")
            for rows in (8192, 512)
        ),
    ),
    forward_traffic=traffic(read=("x", "w"), written=("y",), y=result_bytes()),
    backward_traffic=traffic(read=("x", "w", "y", "kept"), written=("x", "w"), y=result_bytes(), kept=kept_bytes),
    backward=both_passes(_FUNCTION, *_DIFFERENTIABLE),
    flops=product_flops,
)
