"""What to do about a missed fusion: an option of XLA's, another way to write the model, or a kernel of one's own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis import remedy_texts as texts
from hlo_analysis.decisions import categories
from hlo_analysis.merging import can_merge
from hlo_analysis.records import Launch
from hlo_analysis.remedy_texts import Remedy
from hlo_analysis.traits import (
    LIBRARIES,
    PRODUCTS,
    fills,
    has,
    is_closed,
    is_product,
    is_softmax,
    normalizes,
    only_casts,
    only_moves,
    relays,
    shifts,
    sums_columns,
    takes_every_other,
)

# What launches hand on as sums over rows is at most this part of what they read.
_SUMS = 8
# Of what is sorted at most this part is taken where selecting would do.
_SMALL_PART = 8
# Launches from a sum to what is made with it, at most: finished in two steps, divided, and its root taken.
_FAR = 5


@dataclass(frozen=True)
class Table:
    """The launch table, and who reads what: found once for all of its missed fusions."""

    launches: Sequence[Launch]

    @cached_property
    def readers(self) -> Mapping[int, Sequence[Launch]]:
        """By index of a launch those that read what it writes."""
        found: dict[int, list[Launch]] = defaultdict(list)
        for launch in self.launches:
            for producer in {value.producer for value in launch.inputs if value.producer is not None}:
                found[producer].append(launch)
        return found

    def makers(self, launch: Launch, largest: float = float("inf")) -> list[Launch]:
        """The launches that make its inputs of at most so many bytes."""
        indices = {value.producer for value in launch.inputs if value.producer is not None and value.bytes <= largest}
        return [self.launches[index] for index in sorted(indices)]

    def with_sums(self, ends: Sequence[Launch], near: Sequence[Launch]) -> list[Launch]:
        """The ends, and those that finish what `near` of them read as sums over rows."""
        largest = max(launch.bytes_read for launch in ends) / _SUMS
        found, new = {launch.index: launch for launch in ends}, list(near)
        for _ in range(_FAR):
            new = [maker for launch in new for maker in self.makers(launch, largest)]
            new = [maker for maker in new if maker.index not in found and maker.kind != "copy"]  # a copy counts indices
            found |= {launch.index: launch for launch in new}
        return list(found.values())


def vertical_remedy(
    table: Table,
    producer: Launch,
    readers: Sequence[Launch],
    category: str,
    *,
    is_score: bool,
    feeds_attention: bool = False,
    donated: Collection[str] = (),
) -> Remedy:
    """The remedy for a value that `producer` writes and `readers` read, by what stands on both ends.

    Args:
        table: the launch table.
        producer: the launch that writes the value.
        readers: those that read it and could be one kernel with the producer.
        category: why XLA left them apart.
        is_score: whether the value is one of attention scores, or made from them.
        feeds_attention: whether all readers are products that make or read such scores.
        donated: names of arguments whose buffers the program may overwrite.
    """
    if category == categories.SWITCHED_OFF:
        return texts.LEAVE_ON
    ends = (producer, *readers)
    if category == categories.INSERTED:
        if any(has(end, "all-reduce") for end in ends) and any(map(only_moves, ends)):
            return texts.SEPARATE_SUMS
        if copies := [end for end in ends if has(end, "copy")]:
            return texts.STATE if _is_next_state(producer, copies[0]) else _copied(copies[0], donated)
    if category == categories.BOUNDARY:
        return texts.CARRIED if any(reader.index <= producer.index for reader in readers) else texts.BOUNDARY
    if is_score:
        return texts.ATTENTION
    if any(end.kind == "collective" for end in ends):
        return texts.OVERLAP
    if any(_joins_sums(table, end) for end in ends):
        return texts.SEPARATE_SUMS
    if any(map(only_casts, ends)) and any(end.kind in LIBRARIES for end in ends):
        return texts.KEEP_TRITON
    if fills(producer) and any(has(reader, "scatter") for reader in table.readers.get(producer.index, ())):
        return texts.ADD_TO
    if producer.kind == "sort" and all(_takes_part(reader, producer) for reader in readers):
        return texts.TOP_K
    # A copy whose index is counted down, as in a backward pass, has arithmetic inside.
    if producer.repeat > 1 and has(producer, "dynamic-slice") and (producer.kind == "copy" or only_moves(producer)):
        if all(_knows_all_steps(producer, reader) for reader in readers):
            return texts.HOISTED
        # cuBLAS takes no part whose index is counted down, as in a backward pass.
        counts_up = producer.kind == "copy" and not has(producer, "subtract")
        of_triton = all(reader.kind == "triton_gemm" for reader in readers)
        return texts.BY_CUBLAS if counts_up and of_triton else texts.UNSTACKED
    if takes_every_other(producer) and any(map(takes_every_other, readers)):
        return texts.SCAN
    if feeds_attention and has(producer, "transpose"):
        return texts.AS_PROJECTED
    if moves := [end for end in ends if only_moves(end)]:
        return (
            texts.LAYOUT if any(map(relays, moves)) else texts.JOINED if has(moves[0], "concatenate") else texts.PARTS
        )
    if is_product(producer):
        return _after_product(table, producer, readers)
    if any(map(is_product, readers)):
        if _expands_groups(producer, readers):
            return texts.GROUPED
        if _is_one_hot(producer, readers):
            return texts.INDEXED
        return texts.NORM_LINEAR if normalizes(producer) and producer.phase == "forward" else texts.LINEAR_PROLOGUE
    # A small value is told by the sums that it was made of, a large one by those that its readers read beside it.
    is_small = producer.bytes_written * _SUMS <= max(reader.bytes_read for reader in readers)
    rows = rows_remedy(table, table.with_sums(ends, [producer] if is_small else readers))
    return _elementwise(producer, readers, category) if rows is texts.ONE_KERNEL else rows


def _elementwise(producer: Launch, readers: Sequence[Launch], category: str) -> Remedy:
    """The remedy where neither a product nor a normalization or softmax is near."""
    if is_closed(producer) or any(map(is_closed, readers)):
        return texts.OWN_KERNEL
    if category == categories.IN_PLACE and has(producer, "scatter") and _scatters_all(producer):
        return texts.GATHERED
    if len(readers) == 1 and _sums_on(producer, readers[0]):
        return texts.TWO_STEPS
    return texts.RECOMPUTE if category == categories.SLOWER and len(readers) > 1 else texts.ONE_KERNEL


def rows_remedy(table: Table, ends: Sequence[Launch]) -> Remedy:
    """The remedy for launches of which some may reduce rows: by what they make of the sums."""
    if sums := [end for end in ends if has(end, "reduce")]:
        if any(map(normalizes, ends)):
            centred = any(has(end, "subtract") for end in ends)
            if _sums_groups(table, sums):
                return texts.GROUP_NORM
            if all(map(sums_columns, sums)):
                return texts.BATCH_NORM if centred else texts.ONE_KERNEL
            return texts.LAYER_NORM if centred else texts.RMS_NORM
        around = [*ends, *(maker for end in sums for maker in table.makers(end))]
        runs_on = any(has(end, "reduce-window") for end in ends)  # what sums up as it goes is made of a softmax
        if any(map(shifts, around)) and not runs_on and not any(map(is_softmax, ends)):
            return texts.LOG_SOFTMAX if _takes_logarithms(table, ends) else texts.SOFTMAX
    return texts.ONE_KERNEL


def _sums_groups(table: Table, sums: Sequence[Launch]) -> bool:
    """Whether sums over columns are summed again over some of the columns, as those of a group normalization are."""
    columns = {launch.index for launch in sums if sums_columns(launch)}
    again = [reader for index in columns for reader in table.readers.get(index, ()) if has(reader, "reduce")]
    return any(not sums_columns(sum_) and {value.producer for value in sum_.inputs} <= columns for sum_ in again)


def _takes_part(reader: Launch, whole: Launch) -> bool:
    """Whether a launch reads a small part of what another writes, or moves a part of it."""
    given = [value.bytes for value in reader.inputs if value.producer == whole.index]
    moves = has(reader, "slice") and only_moves(reader)
    return moves or (bool(given) and _SMALL_PART * reader.bytes_read <= max(given))


def _scatters_all(scatter: Launch) -> bool:
    """Whether a scatter sets as many elements as there are, and adds up none."""
    whole = max(value.bytes for value in scatter.outputs)
    return scatter.bytes_written >= whole and not re.search(r"scatter-(add|mul|min|max)", scatter.op_name)


def _sums_on(first: Launch, second: Launch) -> bool:
    """Whether two launches are steps of one reduction of the program: both then bear its name."""
    named = [set(re.findall(r' reduce\(.*op_name="([^"]+)"', launch.hlo)) for launch in (first, second)]
    return has(first, "reduce") and bool(named[0] & named[1])


def _knows_all_steps(slice_: Launch, reader: Launch) -> bool:
    """Whether a product in a loop multiplies a part of a stack by what the loop does not change."""
    others = [value for value in reader.inputs if value.producer != slice_.index]
    return is_product(reader) and bool(others) and all(value.producer is None for value in others)


def _is_next_state(producer: Launch, copy: Launch) -> bool:
    """Whether a loop's launch reads in its next run what is copied of its result."""
    return copy.index > producer.index and any(value.producer == copy.index for value in producer.inputs)


def _joins_sums(table: Table, move: Launch) -> bool:
    """Whether a launch joins arrays for one sum over devices, or takes them apart after it, by XLA's own doing."""
    if not only_moves(move):
        return False
    near = [table.launches[value.producer] for value in move.inputs if value.producer is not None]
    near += table.readers.get(move.index, ())
    return any(has(sums, "all-reduce") and move.op_name in ("", sums.op_name) for sums in near)


def _copied(copy: Launch, donated: Collection[str]) -> Remedy:
    """The remedy for a copy that XLA put in to keep a buffer whole: by whose buffer it is."""
    source = copy.inputs[0] if copy.inputs else None
    if source is None or source.producer is not None or source.name.startswith("constant"):
        return texts.KEPT
    return texts.DONATED if source.name in donated else texts.DONATE


def _after_product(table: Table, product: Launch, readers: Sequence[Launch]) -> Remedy:
    if any(_adds_parts(product, reader) for reader in readers):
        return texts.WHOLE_SUM
    if all(map(only_casts, readers)):
        return texts.TYPED
    if any(_gates(reader, table.launches) for reader in readers):
        return texts.GATED_LINEAR
    if all(map(is_product, readers)):
        return texts.CHAINED
    is_softmax = all(any(has(reader, opcode) for reader in readers) for opcode in ("exponential", "reduce"))
    if is_softmax and product.phase == "forward" and _takes_logarithms(table, readers):
        return texts.LINEAR_CROSS_ENTROPY
    return texts.LINEAR_EPILOGUE


def _adds_parts(product: Launch, reader: Launch) -> bool:
    """Whether a launch adds up the batches of a product: so XLA makes several short sums of a long one.

    Both then bear the name of the one product that the program has; batches that the program adds up itself do not.
    """
    batched = re.search(r' dot\(.*lhs_batch_dims=\{\d.*op_name="([^"]+)"', product.hlo)
    return bool(batched) and batched[1] in re.findall(r' reduce\(.*dimensions=\{0\}.*op_name="([^"]+)"', reader.hlo)


def _takes_logarithms(table: Table, readers: Sequence[Launch]) -> bool:
    """Whether there is a logarithm a few launches further on, as in the loss of a softmax."""
    near = {reader.index for reader in readers}
    for _ in range(3):
        near |= {launch.index for index in near for launch in table.readers.get(index, ())}
    return any(has(table.launches[index], "log") for index in near)


def shared_input_remedy(readers: Sequence[Launch], shared: str) -> Remedy | None:
    """The remedy for launches that each read the value `shared`; None where one launch could not do all their work."""
    if not all(map(is_product, readers)):
        return texts.MERGE_LOOPS
    return texts.MERGE_PRODUCTS if can_merge(readers, shared) else None


def _is_one_hot(producer: Launch, readers: Sequence[Launch]) -> bool:
    """Whether a launch makes a matrix of a count and of little else, which is compared with indices."""
    compares = any(has(end, "compare") for end in (producer, *readers))
    return has(producer, "iota") and compares and 8 * producer.bytes_read <= producer.bytes_written


def _expands_groups(producer: Launch, readers: Sequence[Launch]) -> bool:
    """Whether XLA makes one dense product of a product whose rows fall into groups."""
    return any("ragged_dot" in end.hlo for end in (producer, *readers))


def _gates(launch: Launch, launches: Sequence[Launch]) -> bool:
    """Whether an element-wise launch multiplies two products of one input, one of them activated, or two halves of one.

    The gates of a recurrent cell are sums of products of different inputs, cut into four.
    """
    made = {value.producer for value in launch.inputs if value.producer is not None}
    products = [launches[index] for index in made if launches[index].kind in PRODUCTS]
    shared = set[str].intersection(*({value.name for value in found.inputs} for found in products)) if products else ()
    is_pair = shared if len(products) > 1 else products and dict(launch.opcodes).get("slice", 0) in (1, 2)
    activates = any(has(launch, opcode) for opcode in ("logistic", "exponential", "tanh", "erf"))
    is_elementwise = launch.phase == "forward" and not has(launch, "reduce")
    return bool(is_pair) and activates and is_elementwise and has(launch, "multiply")
