"""The operations of `pallas_kernels`, as the catalogue that remedies name them from."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax

from hlo_analysis.catalogue import Kernel
from hlo_analysis.hlo import Shape
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.patterns.attention_scores import elements, last_size
from hlo_analysis.patterns.launch_patterns import (
    adds_bias,
    factors,
    is_batched,
    is_product,
    shape_of,
    takes_sixteen_bits,
)
from hlo_analysis.program.facts import LaunchRow
from pallas_kernels.ops.linear_cross_entropy.config import is_preferred
from pallas_kernels.primitives.gemm.operands import operands_unsupported
from pallas_kernels.primitives.platform import dtypes_unsupported
from pallas_kernels.primitives.rows import LANES

_HOPPER = (9,)
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def _product_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Why the kernels for products cannot multiply as the first product among the launches does."""
    product = next((launch for launch in launches if is_product(launch)), None)
    if product is not None and is_batched(product):
        return "the kernels multiply by a single matrix"
    operands = _operands(product) if product else None
    return operands_unsupported(*operands) if operands else None


def _loss_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Why linear_cross_entropy cannot take the product, or would leave it to XLA, which was measured to be faster."""
    if reason := _product_unsupported(launches):
        return reason
    product = next((launch for launch in launches if is_product(launch)), None)
    if product and any(adds_bias(launch, elements(product.outputs[0])) for launch in launches):
        return "it takes no bias; XLA adds that of the logits, x @ w + bias, in the product's epilogue"
    operands = _operands(product) if product else None
    if operands is None:
        return None
    (features, rows), (_, vocabulary) = operands[0].shape, operands[1].shape
    return None if is_preferred(rows, vocabulary, features, keeps_gradients=True) else "XLA was measured to be faster"


def _operands(product: LaunchRow) -> tuple[jax.Array, jax.Array] | None:
    """x (features, rows) and w (features, outputs) of a product, None where they are not known."""
    if (known := factors(product)) is None:
        return None
    left, right, dimensions = known
    first, second = _matrix(left, dimensions.lhs_contracting), _matrix(right, dimensions.rhs_contracting)
    return (first, second) if _of_arguments(product, 1) or not _of_arguments(product, 0) else (second, first)


def _matrix(shape: Shape, contracting: Sequence[int]) -> jax.Array:
    """(features, outputs) of a factor, as far as a kernel's check looks at it: the shape and the dtype."""
    features = prod(shape.dimensions[axis] for axis in contracting)
    sizes = (features, shape.element_count // features)
    return jax.ShapeDtypeStruct(sizes, _DTYPES.get(shape.element_type, "int8"))  # pyright: ignore[reportReturnType]


def _of_arguments(product: LaunchRow, number: int) -> bool:
    """Whether a factor is made of arguments of the program, as weights are."""
    dots = product.facts.of("dot", "custom-call")
    origins = product.facts.operand_origins(dots[0])[number] if dots else frozenset()
    made = {value.name.partition("#")[0] for value in product.inputs if value.producer is not None}
    return not origins & made


def _rows_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Why the kernels for rows cannot reduce what the launches do."""
    values = [value for launch in launches for value in launch.inputs]
    shape = shape_of(max(values, key=lambda value: value.bytes).shape)
    x = jax.ShapeDtypeStruct(shape.dimensions, _DTYPES.get(shape.element_type, "int8"))
    lengths = [length for launch in launches for length in _reduced(launch)]
    if lengths and max(lengths) < LANES:
        return f"rows have {max(lengths)} values, the kernels take {LANES} at least"
    return dtypes_unsupported(x=x)  # pyright: ignore[reportArgumentType]


def _features_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Why batch_norm cannot normalize each feature, the last axis, as the launches do."""
    values = [value for launch in launches for value in launch.inputs]
    features = last_size(max(values, key=lambda value: value.bytes))
    return f"there are {features} features, the kernels take {LANES} at least" if features < LANES else None


def _reduced(launch: LaunchRow) -> list[int]:
    """How many values each reduction of a launch puts together."""
    found = [(launch.facts.operand(found, 0), integers(found, "dimensions")) for found in launch.facts.of("reduce")]
    return [prod(whole.shape.dimensions[axis] for axis in axes) for whole, axes in found if whole is not None]


def _attention_unsupported(products: Sequence[LaunchRow]) -> str | None:
    """Why the kernels cannot make and read the scores that the products do."""
    known = [product for product in products if factors(product)]
    is_wide = known and not any(map(takes_sixteen_bits, known))
    return "the kernels take bfloat16 and float16" if is_wide else None


def _rotation_unsupported(launches: Sequence[LaunchRow]) -> str | None:
    """Why rope cannot rotate what the last launch joins."""
    rotated = launches[-1].outputs[0]
    size = last_size(rotated)
    if size < 16 or size & (size - 1):
        return f"vectors have {size} values, the kernel takes powers of two from 16 on"
    x = jax.ShapeDtypeStruct((), _DTYPES.get(shape_of(rotated.shape).element_type, "int8"))
    return dtypes_unsupported(x=x)  # pyright: ignore[reportArgumentType]


_CHECKS = {
    "attention": _attention_unsupported,
    "batch_norm": _features_unsupported,
    "linear_cross_entropy": _loss_unsupported,
    "rope": _rotation_unsupported,
    **dict.fromkeys(
        ("cross_entropy", "dropout_residual_norm", "layer_norm", "rms_norm", "softmax"), _rows_unsupported
    ),
    **dict.fromkeys(
        ("gated_linear", "linear", "linear_residual_norm", "lora_linear", "norm_linear",
         "quantized_linear"),
        _product_unsupported,
    ),
}  # fmt: skip

_CALLS = {
    "attention": "y = attention(query, key, value, is_causal=is_causal)",
    "batch_norm": "y, mean, variance = batch_norm(x, scale, bias)",
    "cross_entropy": "losses = cross_entropy(logits, labels)",
    "dropout_residual_norm": "y, summed = dropout_residual_norm(x, scale, residual=residual, rate=rate, key=key)",
    "gated_linear": 'y = gated_linear(x, w_gate, w_up, activation="silu")',
    "layer_norm": "y = layer_norm(x, scale, bias)\n"
    "# or of a sum, which it returns too:\n"
    "y, summed = layer_norm(x, scale, bias, residual=residual)",
    "linear": "y = linear(x, w, bias=bias, activation=activation, residual=residual)",
    "linear_cross_entropy": "losses = linear_cross_entropy(hidden, w, labels)",
    "linear_residual_norm": "y, mean_square = linear_residual_norm(x, w, residual=residual)",
    "lora_linear": "y = lora_linear(x, w, a, b, alpha=alpha)",
    "norm_linear": "y = norm_linear(x, w, norm=norm)",
    "quantized_linear": "y = quantized_linear(x, w)",
    "rms_norm": "y = rms_norm(x, scale)\n"
    "# or of a sum, which it returns too:\n"
    "y, summed = rms_norm(x, scale, residual=residual)",
    "rope": "query, key = rope(query, key, positions, theta=theta)",
    "softmax": "y = softmax(x)",
}


def _code(name: str) -> str:
    return f"from xlafuse.kernels import {name}\n\n{_CALLS[name]}"


KERNELS = tuple(
    Kernel(
        name=name,
        pattern=name,
        package="pallas_kernels",
        compute_capabilities=_HOPPER,
        unsupported=unsupported,
        code=_code(name),
    )
    for name, unsupported in _CHECKS.items()
)
"""One entry an operation that covers a pattern of the analyzer; `analyze(..., catalogue=KERNELS)`."""
