"""What to do about a missed fusion: an option of XLA's, another way to write the model, or a kernel of one's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis import remedy_texts as texts
from hlo_analysis.decisions import categories
from hlo_analysis.ends import (
    adds_parts,
    continues_reduction,
    expands_groups,
    is_next_state,
    is_one_hot,
    knows_all_steps,
    scatters_all,
    takes_part,
)
from hlo_analysis.merging import can_merge
from hlo_analysis.records import Launch
from hlo_analysis.remedy_texts import Remedy
from hlo_analysis.traits import (
    LIBRARIES,
    PRODUCTS,
    convolves,
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
    ends = (producer, *readers)
    return (
        _by_category(producer, readers, category, donated)
        or (texts.ATTENTION if is_score else None)
        or _of_devices(table, ends)
        or _of_places(table, producer, readers, feeds_attention=feeds_attention)
        or _of_products(table, producer, readers)
        or _of_rows(table, producer, readers, category)
    )


def _by_category(producer: Launch, readers: Sequence[Launch], category: str, donated: Collection[str]) -> Remedy | None:
    """The remedy that follows from why XLA left them apart, whatever they do."""
    ends = (producer, *readers)
    if category == categories.SWITCHED_OFF:
        return texts.LEAVE_ON
    if category == categories.INSERTED:
        if any(has(end, "all-reduce") for end in ends) and any(map(only_moves, ends)):
            return texts.SEPARATE_SUMS
        if copies := [end for end in ends if has(end, "copy")]:
            return texts.STATE if is_next_state(producer, copies[0]) else _copied(copies[0], donated)
    if category == categories.BOUNDARY:
        return texts.CARRIED if any(reader.index <= producer.index for reader in readers) else texts.BOUNDARY
    return None


def _of_devices(table: Table, ends: Sequence[Launch]) -> Remedy | None:
    """The remedy where one end is a sum over devices, or was made for one."""
    if any(end.kind == "collective" for end in ends):
        return texts.OVERLAP
    return texts.SEPARATE_SUMS if any(_joins_sums(table, end) for end in ends) else None


def _of_places(table: Table, producer: Launch, readers: Sequence[Launch], *, feeds_attention: bool) -> Remedy | None:
    """The remedy where one end changes no value: it casts, fills, sorts, cuts, joins or transposes."""
    ends = (producer, *readers)
    if any(map(only_casts, ends)) and any(end.kind in LIBRARIES for end in ends):
        return texts.KEEP_TRITON
    if fills(producer) and any(has(reader, "scatter") for reader in table.readers.get(producer.index, ())):
        return texts.ADD_TO
    if producer.kind == "sort" and all(takes_part(reader, producer) for reader in readers):
        return texts.TOP_K
    # A copy whose index is counted down, as in a backward pass, has arithmetic inside.
    if producer.repeat > 1 and has(producer, "dynamic-slice") and (producer.kind == "copy" or only_moves(producer)):
        return _of_stack(producer, readers)
    if takes_every_other(producer) and any(map(takes_every_other, readers)):
        return texts.SCAN
    if feeds_attention and has(producer, "transpose"):
        return texts.AS_PROJECTED
    moves = [end for end in ends if only_moves(end)]
    if has(producer, "pad") and producer in moves and all(map(convolves, readers)):
        return texts.PADDED
    if any(map(relays, moves)):
        return texts.FILTER_LAYOUT if any(map(convolves, ends)) else texts.LAYOUT
    return (texts.JOINED if has(moves[0], "concatenate") else texts.PARTS) if moves else None


def _of_stack(part: Launch, readers: Sequence[Launch]) -> Remedy:
    """The remedy for a part that a loop copies out of a stack."""
    if all(knows_all_steps(part, reader) for reader in readers):
        return texts.HOISTED
    # cuBLAS takes no part whose index is counted down.
    counts_up = part.kind == "copy" and not has(part, "subtract")
    of_triton = all(reader.kind == "triton_gemm" for reader in readers)
    return texts.BY_CUBLAS if counts_up and of_triton else texts.UNSTACKED


def _of_products(table: Table, producer: Launch, readers: Sequence[Launch]) -> Remedy | None:
    """The remedy where one end is a matrix product."""
    if is_product(producer):
        return _after_product(table, producer, readers)
    if not any(map(is_product, readers)):
        return None
    if expands_groups(producer, readers):
        return texts.GROUPED
    if is_one_hot(producer, readers):
        return texts.INDEXED
    # A product can scale rows that it reads whole; a group of channels is no row, nor is a feature of a batch.
    of_rows = rows_remedy(table, table.with_sums([producer], [producer])) not in (texts.GROUP_NORM, texts.BATCH_NORM)
    scales = normalizes(producer) and producer.phase == "forward" and of_rows
    return texts.NORM_LINEAR if scales else texts.LINEAR_PROLOGUE


def _of_rows(table: Table, producer: Launch, readers: Sequence[Launch], category: str) -> Remedy:
    """The remedy where both ends are element-wise work and reductions."""
    # A small value is told by the sums that it was made of, a large one by those that its readers read beside it.
    is_small = producer.bytes_written * _SUMS <= max(reader.bytes_read for reader in readers)
    rows = rows_remedy(table, table.with_sums((producer, *readers), [producer] if is_small else readers))
    return _elementwise(producer, readers, category) if rows is texts.ONE_KERNEL else rows


def _elementwise(producer: Launch, readers: Sequence[Launch], category: str) -> Remedy:
    """The remedy where neither a product nor a normalization or softmax is near."""
    if is_closed(producer) or any(map(is_closed, readers)):
        return texts.OWN_KERNEL
    if category == categories.IN_PLACE and has(producer, "scatter") and scatters_all(producer):
        return texts.GATHERED
    if len(readers) == 1 and continues_reduction(producer, readers[0]):
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
    again = [
        reader
        for index in columns
        for reader in table.readers.get(index, ())
        # Those that read more than sums are of a normalization of rows behind it, as in a backward pass.
        if has(reader, "reduce") and _SUMS * reader.bytes_read <= table.launches[index].bytes_read
    ]
    return any(not sums_columns(sum_) and {value.producer for value in sum_.inputs} <= columns for sum_ in again)


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
    if any(adds_parts(product, reader) for reader in readers):
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
