"""Counts the FLOPs of one instruction from shapes, matrix products apart from the rest.

A fusion counts what its results need: instructions before a slice are computed only for the slice.

A product counts 2·M·N·K per batch, four times that if complex. An elementwise operation counts one for each element of
its result, transcendental ones included. A reduction counts one for each element that it reads, a Fourier transform
5·N·log2(N), half of it between real and complex. A triangular solve counts one for each row of the triangle and element
of its result. Copies, conversions, slices and reshapes count none. cuDNN attention counts its two products forward and
five backward, only for the scores that a causal mask leaves.

The body of a Pallas kernel is not visible. It counts the FLOPs that the program states, as does
`set_xla_metadata(matrix_flops="bf16 FLOPS / ELEMENTS")` of `jax.experimental.xla_metadata`. ELEMENTS is the number of
elements in its results, which `jax.vmap` increases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import Any

from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import (
    convolution_labels,
    custom_call_target,
    dot_dimensions,
    integers,
    product_precision,
    stated_flops,
    window_size,
)
from hlo_analysis.program.dataflow import leaves
from hlo_analysis.program.demand import needed_elements

_ELEMENTWISE = frozenset([
    "add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum", "abs", "negate", "sign",
    "compare", "select", "clamp", "and", "or", "xor", "not", "shift-left", "shift-right-logical",
    "shift-right-arithmetic", "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh",
    "tan", "sine", "cosine", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh", "atan2", "erf", "sqrt",
    "rsqrt", "cbrt", "floor", "ceil", "round-nearest-afz", "round-nearest-even", "is-finite", "popcnt",
    "count-leading-zeros", "reduce-precision", "stochastic-convert", "complex", "real", "imag", "map", "rng",
    "rng-bit-generator", "batch-norm-inference", "batch-norm-training", "batch-norm-grad",
])  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of one launch: `matrix` by the element type of the product's operands, `vector` for everything else."""

    matrix: tuple[tuple[str, int], ...] = ()
    vector: int = 0

    @property
    def total(self) -> int:
        """Returns all FLOPs."""
        return self.vector + sum(count for _, count in self.matrix)

    def without_matrix_units(self) -> Flops:
        """Returns the same work for a code generator that does not use the matrix units."""
        return Flops(vector=self.total)

    def part(self, numerator: int, denominator: int) -> Flops:
        """Returns the fraction numerator / denominator of the work."""
        matrix = tuple((kind, count * numerator // denominator) for kind, count in self.matrix)
        return Flops(matrix=matrix, vector=self.vector * numerator // denominator)

    def __add__(self, other: Flops) -> Flops:
        matrix = dict(self.matrix)
        for kind, count in other.matrix:
            matrix[kind] = matrix.get(kind, 0) + count
        return Flops(matrix=tuple(sorted(matrix.items())), vector=self.vector + other.vector)


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> Flops:
    """Counts an instruction's FLOPs; a fusion's are those of its computation."""
    operands = [computation.instructions[name].shape for name in instruction.operands]
    match instruction.opcode:
        case "fusion":
            return _fused(module, module.computations[instruction.called[0]])
        case "dot" | "scaled-dot":
            contracting = integers(instruction, "lhs_contracting_dims")
            return _product(instruction, operands[0], instruction.shape, contracting)
        case "convolution":
            return _convolution(instruction, operands[0], operands[1], instruction.shape)
        case "custom-call":
            return _library_call(instruction, operands)
        case "triangular-solve":
            return _triangular_solve(instruction, operands)
        case "fft":
            return _fourier(instruction, operands[0])
        case "reduce" | "all-reduce" | "all-reduce-start" | "reduce-scatter":
            count = max(len(operands) // 2, 1) if instruction.opcode == "reduce" else len(operands)
            return Flops(vector=sum(shape.element_count for shape in operands[:count]))
        case "reduce-window" | "select-and-scatter":
            return Flops(vector=prod(window_size(instruction)) * _results(instruction))
        case "scatter":
            count = (len(operands) - 1) // 2
            return Flops(vector=sum(shape.element_count for shape in operands[count + 1 :]))
        case opcode if opcode in _ELEMENTWISE:
            return Flops(vector=_results(instruction))
    return Flops()


def _fused(module: Module, body: Computation) -> Flops:
    """Counts the FLOPs of a fused computation; instructions before a slice count as much as the slice needs."""
    needed, total = needed_elements(module, body), Flops()
    for inner in body.instructions.values():
        made, whole = needed[inner.name], inner.shape.element_count
        own = flops_of(module, body, inner)
        total += own.part(made, whole) if 0 < made < whole else own
    return total


def _results(instruction: Instruction) -> int:
    return sum(shape.element_count for _, shape in leaves(instruction.shape))


def _product(instruction: Instruction, lhs: Shape, result: Shape, contracting: Sequence[int]) -> Flops:
    depth = prod(lhs.dimensions[number] for number in contracting)
    return _matrix(instruction, lhs.element_type, 2 * result.element_count * depth)


def _matrix(instruction: Instruction, element_type: str, count: int) -> Flops:
    """Counts a product on the matrix units, or on the vector units where float32 must stay float32."""
    is_exact, algorithm = product_precision(instruction)
    if element_type in ("c64", "c128"):
        count *= 4
    if element_type == "f32" and is_exact:
        return Flops(vector=count)
    match algorithm.split("_"):  # dot_bf16_bf16_f32_x3 and the like: float32 computed by several narrower products
        case ["dot", ("bf16" | "tf32") as operand, _, "f32", *passes]:
            repeats = int(passes[0].removeprefix("x")) if passes else 1
            return Flops(matrix=(("bf16" if operand == "bf16" else "f32", count * repeats),))
    return Flops(matrix=((element_type, count),))


def _convolution(instruction: Instruction, data: Shape, kernel: Shape, result: Shape) -> Flops:
    """Counts a convolution: each output element sums over the kernel's window and the input features."""
    labels = convolution_labels(instruction)
    features = kernel.dimensions[labels[1].index("o")] if labels else 1
    return _matrix(instruction, data.element_type, 2 * result.element_count * kernel.element_count // max(features, 1))


def _triangular_solve(instruction: Instruction, operands: Sequence[Shape]) -> Flops:
    """Counts a multiplication and an addition for each element of the triangle and each right-hand side."""
    triangle, sides = operands[:2]
    return _matrix(instruction, triangle.element_type, sides.element_count * triangle.dimensions[-1])


def _fourier(instruction: Instruction, data: Shape) -> Flops:
    """Counts a Fourier transform by the textbook formula that FFT libraries use, with the size of the longer side."""
    length = prod(integers(instruction, "fft_length"))
    transforms = max(data.element_count, instruction.shape.element_count) // max(length, 1)
    each = 5 * length * log2(max(length, 1))
    return Flops(vector=int(transforms * each / (2 if "RFFT" in instruction.attributes.get("fft_type", "") else 1)))


def _library_call(instruction: Instruction, operands: list[Shape]) -> Flops:
    target, settings = custom_call_target(instruction), instruction.backend_config
    results = [shape for _, shape in leaves(instruction.shape)]
    if dimensions := dot_dimensions(instruction):
        return _product(instruction, operands[0], results[0], dimensions.lhs_contracting)
    if attention := settings.get("cudnn_fmha_backend_config"):
        return _attention(attention, target, operands)
    if target == "__cudnn$blockScaledDot":
        return _product(instruction, operands[0], results[0], [len(operands[0].dimensions) - 1])
    if target == "__cublas$triangularSolve":
        return _triangular_solve(instruction, operands)
    if target == "__cudnn$convBackwardInput":
        return _convolution(instruction, operands[0], operands[1], operands[0])
    if target == "__cudnn$convBackwardFilter":
        return _convolution(instruction, operands[0], results[0], operands[1])
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes:
        return _convolution(instruction, operands[0], operands[1], results[0])
    if stated := stated_flops(instruction):
        element_type, count, elements = stated
        made = sum(shape.element_count for shape in results)
        return Flops(matrix=((element_type, count * made // elements if elements else count),))
    if cost := settings.get("cost_estimate"):
        return Flops(vector=int(cost.get("flops", 0)))
    return Flops()


def _attention(config: dict[str, Any], target: str, operands: list[Shape]) -> Flops:
    """Counts query times keys and scores times values. Backward recomputes scores and adds four gradient products."""
    scores = [int(size) for size in config.get("intermediate_tensor_shape", {}).get("dimensions", ())]
    if not scores or not operands:
        return Flops()
    query = operands[0]
    head = query.dimensions[-1]
    products = 5 if "Backward" in target else 2
    pairs = prod(scores)
    if "CAUSAL" in config.get("mask_type", ""):
        queries, keys = scores[-2:]
        square = min(queries, keys)
        pairs = prod(scores[:-2]) * (square * (square + 1) // 2 + (queries - square) * keys)
    return Flops(matrix=((query.element_type, products * 2 * pairs * head),))
