"""Patterns of a single launch, matched on its opcodes and facts."""

from __future__ import annotations

from functools import lru_cache

from hlo_analysis.hlo import Instruction, Shape, parse_shape
from hlo_analysis.hlo.attributes import dot_dimensions, integers, interior_padding, slice_strides
from hlo_analysis.program.facts import LaunchFacts, LaunchRow

PRODUCTS = frozenset(("triton_gemm", "cublas", "cublaslt"))
"""Kinds of launch that are matrix products."""

LIBRARIES = frozenset(("cublas", "cublaslt"))
"""Products that take no work of others."""

_LAYOUT_MOVES = frozenset(("transpose", "copy", "reshape"))
_MOVES = _LAYOUT_MOVES | {"concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad"}
LINEAR = frozenset(_MOVES | {"add", "convert", "bitcast", "broadcast", "reduce", "dot", "custom-call", "tuple"})
"""What may be done to parts of a sum as well as to the sum."""

# Beside moves: what is done to indices that are taken or kept within bounds.
_OF_INDICES = {"gather", "broadcast", "iota", "convert", "compare", "select", "add", "subtract", "and", "or", "clamp",
               "negate", "minimum", "maximum"}  # fmt: skip
_SCALES = {"convert", "multiply", "subtract", "broadcast", "reshape", "transpose"}
_CALLBACKS = ("xla_ffi_python_", "xla_ffi_partitioned_python_")
_SIXTEEN_BITS = ("bf16", "f16")
_INTEGERS = ("s8", "u8", "s4", "u4")


@lru_cache(maxsize=4096)
def shape_of(text: str) -> Shape:
    """Parses the shape of a record, as 'bf16[8192,4096]'."""
    return parse_shape(text)


def has(launch: LaunchRow, opcode: str) -> bool:
    """Whether there is such an instruction inside."""
    return any(found == opcode for found, _ in launch.opcodes)


def is_product(launch: LaunchRow) -> bool:
    """Whether a launch is a matrix product, whoever makes it; cuBLAS also solves triangular systems."""
    solves = "__cublas$triangularSolve" in launch.facts.targets
    return (launch.kind in PRODUCTS or has(launch, "dot")) and not solves


def convolves(launch: LaunchRow) -> bool:
    """Whether it is one of cuDNN's convolutions."""
    return launch.kind == "cudnn" and any(target.startswith("__cudnn$conv") for target in launch.facts.targets)


def calls_python(launch: LaunchRow) -> bool:
    """Whether it calls back to Python on the host, as `jax.debug.print` and `pure_callback` do."""
    return launch.kind == "custom_call" and any(target.startswith(_CALLBACKS) for target in launch.facts.targets)


def is_closed(launch: LaunchRow) -> bool:
    """Whether it is a library's kernel (cuDNN, cuSOLVER, cuBLAS, cuFFT), which takes no work of others."""
    return launch.kind in ("cudnn", "custom_call", *LIBRARIES) or has(launch, "fft")


def only_moves(launch: LaunchRow) -> bool:
    """Whether it changes no value. An exact copy is none: it is there to keep a buffer whole."""
    opcodes = {opcode for opcode, _ in launch.opcodes} - {"convert", "broadcast"}
    return bool(opcodes) and opcodes <= _MOVES and not fills(launch) and (launch.kind, opcodes) != ("copy", {"copy"})


def spreads(launch: LaunchRow) -> bool:
    """Whether it writes each of its values to several places."""
    return has(launch, "broadcast") and launch.bytes_written >= 2 * launch.bytes_read


def repeats_rows(launch: LaunchRow) -> bool:
    """Whether it takes rows by indices, each several times, and does nothing to most of them but to join them."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    plain = opcodes <= _MOVES | _OF_INDICES or _joins_rows(launch.facts)
    return "gather" in opcodes and plain and launch.bytes_written >= 2 * launch.bytes_read


def _joins_rows(facts: LaunchFacts) -> bool:
    """Whether the result is a concatenation of which gathered rows are at least half."""
    if facts.root is None or facts.root.opcode != "concatenate":
        return False
    gathered = whole = 0
    for number in range(len(facts.root.operands)):
        part = facts.operand(facts.root, number)
        size = part.shape.element_count if part else 0
        while part and part.opcode in ("bitcast", "reshape", "convert"):
            part = facts.operand(part, 0)
        whole += size
        gathered += size if part and part.opcode == "gather" else 0
    return 0 < whole <= 2 * gathered


def dequantizes(launch: LaunchRow) -> bool:
    """Whether it makes wide weights of integers, and does nothing to them but to scale and shift."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    shapes = [(shape_of(value.shape), value.bytes) for value in launch.inputs]
    weights = [size for shape, size in shapes if shape.element_type in _INTEGERS and len(shape.dimensions) > 1]
    widens = bool(weights) and 2 * max(weights) <= launch.bytes_written
    return widens and {"convert", "multiply"} <= opcodes <= _SCALES and launch.phase == "forward"


def is_batched(product: LaunchRow) -> bool:
    """Whether a product is of several pairs of matrices."""
    return any(found.lhs_batch for found in map(dot_dimensions, product.facts.instructions.values()) if found)


def takes_sixteen_bits(product: LaunchRow) -> bool:
    """Whether both factors of a product are bfloat16 or float16."""
    if dots := product.facts.of("dot"):
        factors = [product.facts.operand(dots[0], number) for number in (0, 1)]
        return all(factor is not None and factor.shape.element_type in _SIXTEEN_BITS for factor in factors)
    return all(shape_of(value.shape).element_type in _SIXTEEN_BITS for value in product.inputs[:2])


def relays(launch: LaunchRow) -> bool:
    """Whether a launch that only moves changes the order of elements, or nothing at all."""
    return any(opcode in _LAYOUT_MOVES for opcode, _ in launch.opcodes)


def only_casts(launch: LaunchRow) -> bool:
    """Whether it converts to another type and does nothing else."""
    return {opcode for opcode, _ in launch.opcodes} == {"convert"}


def fills(launch: LaunchRow) -> bool:
    """Whether it writes one value everywhere."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    return "broadcast" in opcodes and opcodes <= {"broadcast", "copy"} and launch.bytes_read < 64


def sums_columns(launch: LaunchRow) -> bool:
    """Whether no sum of a launch is over the axis that is the last in memory: so are those of a batch normalization."""
    reductions = launch.facts.of("reduce")
    return bool(reductions) and all(_keeps_last_axis(launch.facts, reduction) for reduction in reductions)


def _keeps_last_axis(facts: LaunchFacts, reduction: Instruction) -> bool:
    operand = facts.operand(reduction, 0)
    if operand is None or operand.shape.layout is None or not operand.shape.layout.minor_to_major:
        return False
    return operand.shape.layout.minor_to_major[0] not in integers(reduction, "dimensions")


def normalizes(launch: LaunchRow) -> bool:
    """Whether the launch is a normalisation of rows, or a part of one: by its operations, else by the model's name."""
    return has(launch, "rsqrt") or "norm" in launch.scope.rsplit("/", 1)[-1]


def shifts(launch: LaunchRow) -> bool:
    """Whether it takes the exponential of what is left of a row's largest value, as a softmax does.

    Other exponentials are those of sigmoids, or of a difference of two arrays (the gradient of a softplus).
    """
    if not has(launch, "exponential"):
        return False
    found = launch.facts.of("exponential")
    return not found or any(_subtracts_rows(launch.facts, exponential) for exponential in found)


def _subtracts_rows(facts: LaunchFacts, exponential: Instruction) -> bool:
    difference = facts.operand(exponential, 0)
    if difference and difference.opcode == "convert":
        difference = facts.operand(difference, 0)
    if difference is None or difference.opcode != "subtract":
        return False
    subtracted = facts.operand(difference, 1)
    return subtracted is not None and subtracted.opcode == "broadcast"


def is_softmax(launch: LaunchRow) -> bool:
    """Whether XLA made one kernel of a softmax already."""
    return launch.kind == "triton" and has(launch, "exponential") and has(launch, "reduce")


def takes_every_other(launch: LaunchRow) -> bool:
    """Whether it takes apart, or puts together, elements of even and odd index: a level of `lax.associative_scan`."""
    takes = any(2 in slice_strides(found) for found in launch.facts.of("slice"))
    return takes or any(1 in interior_padding(found) for found in launch.facts.of("pad"))
