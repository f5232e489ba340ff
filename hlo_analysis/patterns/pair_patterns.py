"""What launches on both ends of a value do together: signs, beside those of each, by which a remedy is chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hlo_analysis.patterns.launch_patterns import LINEAR, has, is_product, only_moves
from hlo_analysis.records import Launch

# What is taken of a sorted array, or handed on of a reduced one, is at most this part of it.
_SMALL_PART = 8


def takes_part(reader: Launch, whole: Launch) -> bool:
    """Whether a launch reads a small part of what another writes, or moves a part of it."""
    given = [value.bytes for value in reader.inputs if value.producer == whole.index]
    moves = has(reader, "slice") and only_moves(reader)
    return moves or (bool(given) and _SMALL_PART * reader.bytes_read <= max(given))


def scatters_all(scatter: Launch) -> bool:
    """Whether a scatter sets as many elements as there are, and adds up none."""
    whole = max(value.bytes for value in scatter.outputs)
    return scatter.bytes_written >= whole and not re.search(r"scatter-(add|mul|min|max)", scatter.op_name)


def scatters_rows(scatter: Launch) -> bool:
    """Whether each update of a scatter is of several elements, as those of an embedding's gradient are."""
    found = re.search(r" scatter\([^,]*, [^,]*, %([\w.\-]+)\), update_window_dims=\{([\d,]*)\}", scatter.hlo)
    update = found and re.search(rf"%{re.escape(found[1])} = \w+\[([\d,]+)\]", scatter.hlo)
    if not found or not update:
        return False
    sizes = update[1].split(",")
    return any(sizes[int(axis)] != "1" for axis in found[2].split(",") if axis)


def continues_reduction(first: Launch, second: Launch) -> bool:
    """Whether two launches are steps of one reduction of the program: both bear its name, and sums alone are handed."""
    named = [set(re.findall(r' reduce\(.*op_name="([^"]+)"', launch.hlo)) for launch in (first, second)]
    hands_sums = _SMALL_PART * second.bytes_read <= first.bytes_read
    return has(first, "reduce") and hands_sums and bool(named[0] & named[1])


def knows_all_steps(slice_: Launch, reader: Launch) -> bool:
    """Whether a product in a loop multiplies a part of a stack by what the loop does not change."""
    others = [value for value in reader.inputs if value.producer != slice_.index]
    return is_product(reader) and bool(others) and all(value.producer is None for value in others)


def is_next_state(producer: Launch, copy: Launch) -> bool:
    """Whether a loop's launch reads in its next run what is copied of its result."""
    return copy.index > producer.index and any(value.producer == copy.index for value in producer.inputs)


def adds_parts(product: Launch, reader: Launch) -> bool:
    """Whether a launch adds up the batches of a product: so XLA makes several short sums of a long one.

    Both then bear the name of the one product that the program has; batches that the program adds up itself do not.
    """
    batched = re.search(r' dot\(.*lhs_batch_dims=\{\d.*op_name="([^"]+)"', product.hlo)
    return bool(batched) and batched[1] in re.findall(r' reduce\(.*dimensions=\{0\}.*op_name="([^"]+)"', reader.hlo)


def is_one_hot(producer: Launch, readers: Sequence[Launch]) -> bool:
    """Whether a launch makes a matrix of a count and of little else, which is compared with indices."""
    compares = any(has(end, "compare") for end in (producer, *readers))
    return has(producer, "iota") and compares and 8 * producer.bytes_read <= producer.bytes_written


def expands_groups(producer: Launch, readers: Sequence[Launch]) -> bool:
    """Whether XLA makes one dense product of a product whose rows fall into groups."""
    return any("ragged_dot" in end.hlo for end in (producer, *readers))


def sets_values(scatter: Launch) -> bool:
    """Whether a scatter puts values in place and adds up none."""
    return scatter.op_name.endswith("/scatter") and scatter.phase == "forward"


def numbers_updates(scatter: Launch) -> bool:
    """Whether a scatter puts numbers, counted up, in their places: JAX does before it differentiates one that sets."""
    is_whole = scatter.outputs and scatter.outputs[0].shape.startswith("u32[")
    return bool(is_whole) and has(scatter, "scatter") and has(scatter, "iota") and sets_values(scatter)


def normalizes_sum(product: Launch, reader: Launch) -> bool:
    """Whether a launch divides rows by the roots of their mean squares, and they are of a product and a residual."""
    adds = (
        dict(reader.opcodes).get("add", 0) > 1 or has(product, "add") or bool(re.search(r'"beta":[1-9]', product.hlo))
    )
    is_rms = has(reader, "rsqrt") and has(reader, "reduce") and not has(reader, "subtract")
    return adds and is_rms and product.phase == reader.phase == "forward"


def searches_in_a_loop(launch: Launch) -> bool:
    """Whether it is a step of `jnp.searchsorted`, which makes a loop of its steps by default."""
    return "jit(searchsorted)/" in launch.op_name and "/while/" in launch.op_name


def accumulates(launch: Launch) -> bool:
    """Whether a loop's launch adds to all of what it wrote in the run before, which it does not scale.

    What it makes of a product before it adds that may only be a move or a sum: the sum of all is then one product.
    """
    adds = has(launch, "add") and not has(launch, "dynamic-update-slice")
    carries = any(value.producer == launch.index for value in launch.inputs)
    return adds and carries and not _scales(launch) and _adds_whole_products(launch)


def adds_gradients(launch: Launch) -> bool:
    """Whether a gradient's product and what it is added to are one launch, and the model's own loop adds them."""
    sums = re.findall(r' add\(.*op_name="([^"]+)"', launch.hlo)
    return launch.phase == "backward" and has(launch, "dot") and bool(sums) and "transpose(" not in sums[-1]


def _instructions(launch: Launch) -> list[tuple[str, str, set[str]]]:
    """Name, opcode and operands of what is inside, in order."""
    lines = re.findall(r"%([\w.\-]+) = \S+ ([\w\-]+)\((.*?)\)(?:,|\n|$)", launch.hlo)
    return [
        (name, opcode, set(re.findall(r"%([\w.\-]+)", operands)))
        for name, opcode, operands in lines
        if opcode != "fusion"
    ]


def _scales(launch: Launch) -> bool:
    """Whether it multiplies anything but the factors of a product of its own."""
    needed: set[str] = set()
    for name, opcode, operands in reversed(_instructions(launch)):
        if opcode == "dot" or name in needed:
            needed |= operands
        elif opcode == "multiply":
            return True
    return has(launch, "multiply") and not needed


def _adds_whole_products(launch: Launch) -> bool:
    """Whether nothing but sums and moves stands between a product within the launch and what is returned.

    Where the product is another launch, nothing else is in this one.
    """
    lines = _instructions(launch)
    made = {name for name, opcode, _ in lines if opcode == "dot"}
    if not made:
        return {opcode for opcode, _ in launch.opcodes} <= LINEAR
    for name, opcode, operands in lines:
        if made & operands:
            if opcode not in LINEAR:
                return False
            made.add(name)
    return True
