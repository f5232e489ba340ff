"""Patterns of a single launch, matched on its opcodes and facts."""

from __future__ import annotations

from functools import lru_cache

from hlo_analysis.hlo import Instruction, Shape, parse_shape
from hlo_analysis.hlo.attributes import (
    PYTHON_TARGETS,
    DotDimensions,
    dot_dimensions,
    gemm_config,
    integers,
    interior_padding,
    slice_strides,
)
from hlo_analysis.program.facts import LaunchFacts, LaunchRow

PRODUCTS = frozenset(("triton_gemm", "cublas", "cublaslt"))
"""Kinds of launch that are matrix products."""

LIBRARIES = frozenset(("cublas", "cublaslt"))
"""Products that take no work of others."""

_LAYOUT_MOVES = frozenset(("transpose", "copy", "reshape"))
_MOVES = _LAYOUT_MOVES | {"concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad"}
LINEAR = frozenset(_MOVES | {"add", "convert", "bitcast", "broadcast", "reduce", "dot", "custom-call", "tuple"})
"""What may be done to parts of a sum as well as to the sum."""

_SCALES = {"convert", "multiply", "subtract", "broadcast", "reshape", "transpose"}
_OF_OTHER_ELEMENTS = frozenset(("reduce", "reduce-window", "dot", "gather", "scatter", "dynamic-slice",
                                "dynamic-update-slice", "concatenate", "slice", "pad", "xor", "rng-bit-generator",
                                "custom-call", "sort", "transpose"))  # fmt: skip
"""Opcodes whose elements are made of operands' elements at other places, or of random bits."""

SMALL_SIZE = 16
"""Coordinates, colours and quadrature points are at most so many."""

ROUNDS = 20
"""Threefry has 20 rounds, each with an exclusive or."""
SIXTEEN_BITS = ("bf16", "f16")
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


def computes_groups(launch: LaunchRow) -> bool:
    """Whether it is a product of rows that fall into groups (`lax.ragged_dot`), or a step of one."""
    return any("ragged_dot" in name for name in (launch.op_name, *launch.facts.all_op_names))


def convolves(launch: LaunchRow) -> bool:
    """Whether it is one of cuDNN's convolutions."""
    return launch.kind == "cudnn" and any(target.startswith("__cudnn$conv") for target in launch.facts.targets)


def calls_python(launch: LaunchRow) -> bool:
    """Whether it calls back to Python on the host, as `jax.debug.print` and `pure_callback` do."""
    return launch.kind == "custom_call" and any(target.startswith(PYTHON_TARGETS) for target in launch.facts.targets)


def is_library_kernel(launch: LaunchRow) -> bool:
    """Whether it is a library's kernel (cuDNN, cuSOLVER, cuBLAS, cuFFT), which takes no work of others."""
    return launch.kind in ("cudnn", "custom_call", *LIBRARIES) or has(launch, "fft")


def only_moves(launch: LaunchRow) -> bool:
    """Whether it only moves data. A plain copy does not count: XLA adds it to keep a buffer unchanged."""
    opcodes = {opcode for opcode, _ in launch.opcodes} - {"convert", "broadcast"}
    return bool(opcodes) and opcodes <= _MOVES and not fills(launch) and (launch.kind, opcodes) != ("copy", {"copy"})


def broadcasts(launch: LaunchRow) -> bool:
    """Whether it writes each of its values to several places."""
    return has(launch, "broadcast") and launch.bytes_written >= 2 * launch.bytes_read


def only_repeats(launch: LaunchRow) -> bool:
    """Whether it writes each of its values to several places, and does nothing else, as `jnp.repeat`."""
    return {opcode for opcode, _ in launch.opcodes} <= {"broadcast", "transpose"} and broadcasts(launch)


def dequantizes(launch: LaunchRow) -> bool:
    """Whether it converts integer weights to a wider type, and at most scales and shifts the result."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    shapes = [(shape_of(value.shape), value.bytes) for value in launch.inputs]
    weights = [size for shape, size in shapes if shape.element_type in _INTEGERS and len(shape.dimensions) > 1]
    widens = bool(weights) and 2 * max(weights) <= launch.bytes_written
    return widens and {"convert", "multiply"} <= opcodes <= _SCALES and launch.phase == "forward"


def is_batched(product: LaunchRow) -> bool:
    """Whether a product is of several pairs of matrices."""
    return any(found.lhs_batch for found in map(dot_dimensions, product.facts.instructions.values()) if found)


def adds_bias(launch: LaunchRow, size: int) -> bool:
    """Whether it adds a vector to each row of an array of so many elements, or has cuBLAS do so."""
    sides = [launch.facts.operand(found, number) for found in launch.facts.of("add") for number in (0, 1)]
    epilogues = [gemm_config(found).get("epilogue", "") for found in launch.facts.of("custom-call")]
    is_added = any(side is not None and _repeats_row(launch.facts, side, size) for side in sides)
    return is_added or any("BIAS" in epilogue for epilogue in epilogues)


def _repeats_row(facts: LaunchFacts, side: Instruction, size: int) -> bool:
    while side.opcode in ("convert", "bitcast") and (operand := facts.operand(side, 0)):
        side = operand
    is_row = side.opcode == "broadcast" and integers(side, "dimensions") == (len(side.shape.dimensions) - 1,)
    return is_row and side.shape.element_count == size


def factors(product: LaunchRow) -> tuple[Shape, Shape, DotDimensions] | None:
    """The shapes that a product multiplies, and its dimension numbers; None where they are not known."""
    for found in product.facts.instructions.values():
        if dimensions := dot_dimensions(found):
            inside = [product.facts.operand(found, number) for number in (0, 1)]
            outside = [shape_of(value.shape) for value in product.inputs[:2]]
            shapes = [made.shape for made in inside if made] or outside
            return (shapes[0], shapes[1], dimensions) if len(shapes) == 2 else None
    return None


def takes_sixteen_bits(product: LaunchRow) -> bool:
    """Whether both factors of a product are bfloat16 or float16."""
    known = factors(product)
    shapes = known[:2] if known else [shape_of(value.shape) for value in product.inputs[:2]]
    return all(shape.element_type in SIXTEEN_BITS for shape in shapes)


def changes_layout(launch: LaunchRow) -> bool:
    """Whether a launch that only moves changes the order of elements, or nothing at all."""
    return any(opcode in _LAYOUT_MOVES for opcode, _ in launch.opcodes)


def only_casts(launch: LaunchRow) -> bool:
    """Whether it converts to another type and does nothing else."""
    return {opcode for opcode, _ in launch.opcodes} == {"convert"}


def fills(launch: LaunchRow) -> bool:
    """Whether it writes one value everywhere."""
    opcodes = {opcode for opcode, _ in launch.opcodes}
    return "broadcast" in opcodes and opcodes <= {"broadcast", "copy"} and launch.bytes_read < 64


def elementwise_inputs(launch: LaunchRow, name: str) -> frozenset[str]:
    """Returns the inputs that a result is an element-wise function of.

    Empty if the result depends on other elements, as a sum does, or on random bits. name: of the result in `outputs`.
    """
    facts, found, seen = launch.facts, set[str](), set[str]()
    element = name.partition("#")[2]
    queue = list(facts.root.operands) if facts.root and facts.root.opcode == "tuple" and element else []
    queue = [queue[int(element)]] if queue else [facts.root.name] if facts.root else []
    while queue:
        step = facts.instructions.get(inside := queue.pop())
        if step is None or inside in facts.parameters:
            found.add(facts.parameters.get(inside, inside))
        elif step.opcode in _OF_OTHER_ELEMENTS:
            return frozenset()
        elif inside not in seen:
            queue += step.operands
        seen.add(inside)
    return frozenset(found)


def sums_columns(launch: LaunchRow) -> bool:
    """Whether a launch sums, and never over the axis that is last in memory. So do batch normalizations."""
    reductions = launch.facts.of("reduce")
    return bool(reductions) and all(_keeps_last_axis(launch.facts, reduction) for reduction in reductions)


def _keeps_last_axis(facts: LaunchFacts, reduction: Instruction) -> bool:
    operand = facts.operand(reduction, 0)
    if operand is None or not operand.shape.dimensions:
        return False
    return operand.shape.minor_to_major[0] not in integers(reduction, "dimensions")


def normalizes(launch: LaunchRow) -> bool:
    """Whether the launch is a normalisation of rows, or a part of one: by its operations, else by the model's name."""
    return has(launch, "rsqrt") or "norm" in launch.scope.rsplit("/", 1)[-1]


def subtracts_row_maximum(launch: LaunchRow) -> bool:
    """Whether it computes exp(x - m) with one m for each row, as a softmax does with the row's maximum.

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
    """Whether XLA made one kernel of a softmax already, and not of its maximum and exponentials alone."""
    sums = dict(launch.opcodes).get("reduce", 0) > 1 or has(launch, "divide")
    return launch.kind == "triton" and has(launch, "exponential") and has(launch, "reduce") and sums


def rotates(launch: LaunchRow) -> bool:
    """Whether it makes the two parts of a rotation, a * c - b * s and b * c + a * s, and nothing of further sums."""
    sums = launch.facts.of("add", "subtract")
    factors_of = [[launch.facts.operand(each, number) for number in (0, 1)] for each in sums]
    is_turned = all(side is not None and side.opcode == "multiply" for sides in factors_of for side in sides)
    return is_turned and len(sums) == 2 and (has(launch, "subtract") or has(launch, "negate"))


def is_residual_sum(launch: LaunchRow) -> bool:
    """Whether a launch of the forward pass only adds two arrays, as the kernels of norms do by themselves."""
    alike = [value for value in launch.inputs if value.bytes == launch.bytes_written]
    only_adds = has(launch, "add") and not has(launch, "xor") and not has(launch, "multiply")
    return launch.phase == "forward" and only_adds and len(alike) == len(launch.inputs) == 2


def is_norm(launch: LaunchRow) -> bool:
    """Whether XLA made one kernel of a normalization: it reads the rows, reduces them and writes what it makes of them.

    A kernel of the catalogue reads no less.
    """
    largest = max((value.bytes for value in launch.inputs), default=0)
    writes_rows = any(2 * value.bytes >= largest for value in launch.outputs)
    return launch.kind == "triton" and has(launch, "reduce") and has(launch, "rsqrt") and writes_rows


def draws_in_a_loop(launch: LaunchRow) -> bool:
    """Whether a launch in a loop mostly makes random bits, and takes no longer than the least time of a launch."""
    found = dict(launch.opcodes)
    return launch.repeat > 1 and launch.limiter == "overhead" and found.get("xor", 0) >= ROUNDS


def is_invariant(launch: LaunchRow) -> bool:
    """Whether a loop's launch computes the same in each of the loop's runs, of nothing but arguments."""
    given = bool(launch.inputs) and all(value.producer is None for value in launch.inputs)
    return launch.repeat > 1 and given and launch.flops > 0


def strides_by_two(launch: LaunchRow) -> bool:
    """Whether it splits or merges elements of even and odd index, as a level of `lax.associative_scan` does."""
    takes = any(2 in slice_strides(found) for found in launch.facts.of("slice"))
    return takes or any(1 in interior_padding(found) for found in launch.facts.of("pad"))
