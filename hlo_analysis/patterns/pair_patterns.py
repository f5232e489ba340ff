"""Patterns of a producer and its consumers, matched on their opcodes and facts."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.hlo.attributes import dot_dimensions, gemm_config, integers
from hlo_analysis.patterns.launch_patterns import LINEAR, has, is_product, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Value

_COUNTER = 8
"""Bytes of a loop's counter."""


def scatters_rows(scatter: LaunchRow) -> bool:
    """Whether each update of a scatter is of several elements, as those of an embedding's gradient are."""
    found = next((found for found in scatter.facts.of("scatter") if len(found.operands) == 3), None)
    update = scatter.facts.operand(found, 2) if found else None
    if found is None or update is None:
        return False
    return any(update.shape.dimensions[axis] != 1 for axis in integers(found, "update_window_dims"))


def knows_all_steps(slice_: LaunchRow, reader: LaunchRow) -> bool:
    """Whether a product in a loop multiplies a part of a stack by what the loop does not change."""
    others = [value for value in reader.inputs if value.producer != slice_.index]
    is_known = bool(others) and all(value.producer is None for value in others)
    return is_product(reader) and is_known and not any(_is_state(value, slice_) for value in slice_.inputs)


def _is_state(value: Value, launch: LaunchRow) -> bool:
    """Whether a launch in a loop reads what a later launch left in the run before, other than the loop's counter."""
    return value.producer is not None and value.producer >= launch.index and value.bytes > _COUNTER


def is_known_before(product: LaunchRow, producers: Sequence[LaunchRow]) -> bool:
    """Whether a product in a loop multiplies slices of stacked arrays by invariant values, and could precede it."""
    in_loop = [producer for producer in producers if producer.repeat > 1]
    slices = [producer for producer in in_loop if has(producer, "dynamic-slice") and only_moves(producer)]
    return bool(slices) and slices == in_loop and all(knows_all_steps(slice_, product) for slice_ in slices)


def gathers(reader: LaunchRow, product: LaunchRow) -> bool:
    """Whether a launch takes rows of a product by indices, and not of another array that it reads beside it."""
    found = reader.facts.of("gather")
    return any(product.name in reader.facts.operand_origins(gather)[0] for gather in found) or (
        not found and has(reader, "gather")
    )


def is_next_state(producer: LaunchRow, copy: LaunchRow) -> bool:
    """Whether a loop's launch reads in its next run what is copied of its result."""
    return copy.index > producer.index and any(value.producer == copy.index for value in producer.inputs)


def adds_parts(product: LaunchRow, reader: LaunchRow) -> bool:
    """Whether a launch adds up the batches of a product: so XLA makes several short sums of a long one.

    Both then bear the name of the one product that the program has; batches that the program adds up itself do not.
    """
    dots = [found for found in product.facts.of("dot") if (axes := dot_dimensions(found)) and axes.lhs_batch]
    sums = {found.op_name for found in reader.facts.of("reduce") if integers(found, "dimensions") == (0,)}
    name = next((found.op_name for found in dots if found.op_name), "")
    return bool(name) and name in sums


def sets_values(scatter: LaunchRow) -> bool:
    """Whether a scatter of the forward pass sets values, and adds nothing up."""
    return scatter.op_name.endswith("/scatter") and scatter.phase == "forward"


def numbers_updates(scatter: LaunchRow) -> bool:
    """Whether a scatter writes the number of each update. JAX makes one for the gradient of a scatter that sets."""
    is_whole = scatter.outputs and scatter.outputs[0].shape.startswith("u32[")
    return bool(is_whole) and has(scatter, "scatter") and has(scatter, "iota") and sets_values(scatter)


def normalizes_sum(product: LaunchRow, reader: LaunchRow) -> bool:
    """Whether a launch divides rows by the roots of their mean squares, and they are of a product and a residual."""
    accumulates_in_blas = any(gemm_config(found).get("beta") for found in product.facts.instructions.values())
    adds = dict(reader.opcodes).get("add", 0) > 1 or has(product, "add") or accumulates_in_blas
    is_rms = has(reader, "rsqrt") and has(reader, "reduce") and not has(reader, "subtract")
    return adds and is_rms and product.phase == reader.phase == "forward"


def accumulates(launch: LaunchRow) -> bool:
    """Whether a loop's launch adds to all of what it wrote in the run before, which it does not scale.

    What it makes of a product before it adds that may only be a move or a sum: the sum of all is then one product.
    """
    adds = has(launch, "add") and not has(launch, "dynamic-update-slice")
    carries = any(value.producer == launch.index for value in launch.inputs)
    return adds and carries and not _scales(launch) and _adds_whole_products(launch)


def _scales(launch: LaunchRow) -> bool:
    """Whether it multiplies anything but the factors of a product of its own."""
    needed: set[str] = set()
    for found in reversed(list(launch.facts.instructions.values())):
        if found.opcode == "dot" or found.name in needed:
            needed |= set(found.operands)
        elif found.opcode == "multiply":
            return True
    return has(launch, "multiply") and not needed


def _adds_whole_products(launch: LaunchRow) -> bool:
    """Whether nothing but sums and moves stands between a product within the launch and what is returned.

    Where the product is another launch, nothing else is in this one.
    """
    products = {found.name for found in launch.facts.of("dot")}
    if not products:
        return {opcode for opcode, _ in launch.opcodes} <= LINEAR
    for found in launch.facts.instructions.values():
        if not products.isdisjoint(found.operands):
            if found.opcode not in LINEAR:
                return False
            products.add(found.name)
    return True
