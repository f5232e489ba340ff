"""The registry entry of grouped linear layers."""

from __future__ import annotations

from pallas_kernels.ops._products.specs import product_call
from pallas_kernels.ops.grouped_linear.api import grouped_linear
from pallas_kernels.ops.grouped_linear.mosaic_gpu import grouped_linear_backward
from pallas_kernels.ops.grouped_linear.reference import grouped_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import backward_passes, gradients_of, traffic
from pallas_kernels.specs import Arguments, ArraySpec, OpSpec


def group_arrays(
    x: ArraySpec, groups: int, outputs: int, *, deviation: float = 1.0, transpose: bool = False, empty: int = 0
) -> tuple[ArraySpec, ArraySpec]:
    """Makes weights whose products have this standard deviation, and sizes that sum to about the rows of x.

    empty: so many groups for each one with rows have a negative size, or none.
    """
    rows, features = x.shape
    sizes = (outputs, features) if transpose else (features, outputs)
    w = ArraySpec(shape=(groups, *sizes), dtype=x.dtype, deviation=deviation * features**-0.5)
    most = 2 * rows // groups + 1
    return w, ArraySpec(shape=(groups,), dtype="int32", fill="integers", minimum=-empty * most, maximum=most)


@product_call
def _call(x, *, groups, outputs, bias=False, activation=None, transpose=False, empty=0):
    w, sizes = group_arrays(x, groups, outputs, transpose=transpose, empty=empty)
    operands = {
        "x": x,
        "w": w,
        "group_sizes": sizes,
        "bias": bias and ArraySpec(shape=(groups, outputs), dtype=x.dtype),
    }
    options = ({"activation": activation}, activation or ""), ({"transpose": transpose}, "transposed" * transpose)
    return f"{groups}x{outputs}", operands, ({}, "bias" * bias), *options, ({}, "empty" * bool(empty))


def _outputs(arguments: Arguments, weight: str) -> int:
    return arguments[weight].shape[1 if arguments.get("transpose") else 2]


def grouped_result_bytes(arguments: Arguments, weight: str = "w") -> int:
    """Counts the bytes of x's products with a weight."""
    x = arguments["x"]
    return x.shape[0] * _outputs(arguments, weight) * x.dtype.itemsize


def grouped_flops(arguments: Arguments, phase: str, *, weights: tuple[str, ...] = ("w",)) -> int:
    """Counts the multiplications and additions of a phase, as if every row had a group."""
    rows, features = arguments["x"].shape
    outputs = sum(_outputs(arguments, name) for name in weights)
    return 2 * rows * features * outputs * (1 if phase == "forward" else 2)


def _backward(*, x, w, group_sizes, bias=None, activation=None, transpose=False, cotangents):
    (dy,) = cotangents  # stands for the product that the forward pass keeps
    function = None if activation is None else get_activation("grouped_linear", activation)
    saved = (x, w, bias, group_sizes, *([] if function is None else [dy]))
    gradients = grouped_linear_backward(function, transpose, saved, dy)
    return tuple(gradient for gradient in gradients if gradient is not None)


_DIFFERENTIABLE = ("x", "w", "bias")

GROUPED_LINEAR = OpSpec(
    name="grouped_linear",
    function=grouped_linear,
    reference=grouped_linear_reference,
    differentiable=_DIFFERENTIABLE,
    batched=("x", "w", "bias", "group_sizes"),
    arg_specs=(
        _call(150, features=128, groups=4, outputs=192),
        _call(203, features=192, groups=3, outputs=128, dtype="float16", transpose=True),
        _call(70, features=128, groups=9, outputs=128, empty=1, bias=True, activation="silu"),
        _call(40, features=128, groups=16, outputs=128, bias=True),
        _call(30, features=72, groups=3, outputs=40, tags="test ragged"),
        _call(0, features=128, groups=2, outputs=128, tags="test empty"),
        _call(24, features=128, groups=2, outputs=128, fill="zeros", tags="test extreme"),
        _call(3000, features=1024, groups=17, outputs=1088, bias=True, activation="gelu_tanh", tags="gpu"),
        _call(2222, features=576, groups=64, outputs=768, dtype="float16", transpose=True, empty=3, tags="gpu"),
        _call(16384, features=4096, groups=8, outputs=14336, tags="gpu bench"),
        _call(16384, features=2048, groups=64, outputs=1536, tags="gpu bench"),
        _call(65536, features=2048, groups=128, outputs=768, tags="gpu bench"),
        _call(64, features=2048, groups=128, outputs=768, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=("x", "w", "bias"), written=("y",), y=grouped_result_bytes),
    backward_traffic=traffic(read=("x", "w", "y"), written=("x", "w", "bias"), y=grouped_result_bytes),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(grouped_linear_reference, *_DIFFERENTIABLE)),
    flops=grouped_flops,
)
