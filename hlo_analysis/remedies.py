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

PRODUCTS = frozenset(("triton_gemm", "cublas", "cublaslt"))
"""Kinds of launch that are matrix products."""

_LIBRARIES = frozenset(("cublas", "cublaslt"))
_LAYOUT_MOVES = frozenset(("transpose", "copy", "reshape"))
_MOVES = _LAYOUT_MOVES | {"concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad"}


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


def vertical_remedy(
    table: Table,
    producer: Launch,
    readers: Sequence[Launch],
    category: str,
    *,
    is_score: bool,
    donated: Collection[str] = (),
) -> Remedy:
    """The remedy for a value that `producer` writes and `readers` read, by what stands on both ends.

    Args:
        table: the launch table.
        producer: the launch that writes the value.
        readers: those that read it and could be one kernel with the producer.
        category: why XLA left them apart.
        is_score: whether the value is one of attention scores, or made from them.
        donated: names of arguments whose buffers the program may overwrite.
    """
    if category == categories.SWITCHED_OFF:
        return texts.LEAVE_ON
    ends = (producer, *readers)
    if category == categories.INSERTED:
        if any(_has(end, "all-reduce") for end in ends) and any(map(_only_moves, ends)):
            return texts.SEPARATE_SUMS
        if copies := [end for end in ends if _has(end, "copy")]:
            return texts.STATE if _is_next_state(producer, copies[0]) else _copied(copies[0], donated)
    if category == categories.BOUNDARY:
        return texts.CARRIED if any(reader.index <= producer.index for reader in readers) else texts.BOUNDARY
    if is_score:
        return texts.ATTENTION
    if any(end.kind == "collective" for end in ends):
        return texts.OVERLAP
    if any(_joins_sums(table, end) for end in ends):
        return texts.SEPARATE_SUMS
    if any(map(_only_casts, ends)) and any(end.kind in _LIBRARIES for end in ends):
        return texts.KEEP_TRITON
    # A copy whose index is counted down, as in a backward pass, has arithmetic inside.
    if producer.repeat > 1 and _has(producer, "dynamic-slice") and (producer.kind == "copy" or _only_moves(producer)):
        return texts.UNSTACKED
    if moves := [end for end in ends if _only_moves(end)]:
        return (
            texts.LAYOUT if any(map(_relays, moves)) else texts.JOINED if _has(moves[0], "concatenate") else texts.PARTS
        )
    if is_product(producer):
        return _after_product(table, producer, readers)
    if any(map(is_product, readers)):
        if _is_one_hot(producer, readers):
            return texts.INDEXED
        return texts.NORM_LINEAR if _normalizes(producer) and producer.phase == "forward" else texts.LINEAR_PROLOGUE
    rows = rows_remedy(table, ends)
    return texts.RECOMPUTE if rows is texts.ONE_KERNEL and category == categories.SLOWER and len(readers) > 1 else rows


def rows_remedy(table: Table, ends: Sequence[Launch]) -> Remedy:
    """The remedy for launches of which some may reduce rows: by what they make of the sums."""
    if sums := [end for end in ends if _has(end, "reduce")]:
        if any(map(_normalizes, ends)):
            centred = any(_has(end, "subtract") for end in ends)
            if all(map(_sums_columns, sums)):
                return texts.BATCH_NORM if centred else texts.ONE_KERNEL
            return texts.LAYER_NORM if centred else texts.RMS_NORM
        if any(_has(end, "exponential") for end in ends) and not any(map(_is_softmax, ends)):
            return texts.LOG_SOFTMAX if _takes_logarithms(table, ends) else texts.SOFTMAX
    return texts.ONE_KERNEL


def is_product(launch: Launch) -> bool:
    """Whether a launch is a matrix product; cuBLAS solves triangular systems, too."""
    return launch.kind in PRODUCTS and "triangularSolve" not in launch.hlo


def _is_next_state(producer: Launch, copy: Launch) -> bool:
    """Whether a loop's launch reads in its next run what is copied of its result."""
    return copy.index > producer.index and any(value.producer == copy.index for value in producer.inputs)


def _joins_sums(table: Table, move: Launch) -> bool:
    """Whether a launch joins arrays for one sum over devices, or takes them apart after it, by XLA's own doing."""
    if not _only_moves(move):
        return False
    near = [table.launches[value.producer] for value in move.inputs if value.producer is not None]
    near += table.readers.get(move.index, ())
    return any(_has(sums, "all-reduce") and move.op_name in ("", sums.op_name) for sums in near)


def _copied(copy: Launch, donated: Collection[str]) -> Remedy:
    """The remedy for a copy that XLA put in to keep a buffer whole: by whose buffer it is."""
    source = copy.inputs[0] if copy.inputs else None
    if source is None or source.producer is not None or source.name.startswith("constant"):
        return texts.KEPT
    return texts.DONATED if source.name in donated else texts.DONATE


def _after_product(table: Table, product: Launch, readers: Sequence[Launch]) -> Remedy:
    if any(_adds_parts(product, reader) for reader in readers):
        return texts.WHOLE_SUM
    if any(_gates(reader, table.launches) for reader in readers):
        return texts.GATED_LINEAR
    is_softmax = all(any(_has(reader, opcode) for reader in readers) for opcode in ("exponential", "reduce"))
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
    return any(_has(table.launches[index], "log") for index in near)


def shared_input_remedy(readers: Sequence[Launch], shared: str) -> Remedy | None:
    """The remedy for launches that each read the value `shared`; None where one launch could not do all their work."""
    if not all(map(is_product, readers)):
        return texts.MERGE_LOOPS
    return texts.MERGE_PRODUCTS if can_merge(readers, shared) else None


def _sums_columns(launch: Launch) -> bool:
    """Whether no sum of a launch is over the axis that is the last in memory: so are those of a batch normalization."""
    found = re.findall(r" reduce\(%([\w.\-]+)[^)]*\), dimensions=\{([\d,]*)\}", launch.hlo)
    last = [re.search(rf"%{re.escape(name)} = \w+\[[\d,]*\]\{{(\d+)", launch.hlo) for name, _ in found]
    return bool(found) and all(at and at[1] not in axes.split(",") for at, (_, axes) in zip(last, found, strict=True))


def _has(launch: Launch, opcode: str) -> bool:
    return any(found == opcode for found, _ in launch.opcodes)


def _normalizes(launch: Launch) -> bool:
    """Whether the launch is a normalisation of rows, or a part of one: by its operations, else by the model's name."""
    return _has(launch, "rsqrt") or "norm" in launch.scope.rsplit("/", 1)[-1]


def _is_one_hot(producer: Launch, readers: Sequence[Launch]) -> bool:
    """Whether a launch makes a matrix of a count and of little else, which is compared with indices."""
    compares = any(_has(end, "compare") for end in (producer, *readers))
    return _has(producer, "iota") and compares and 8 * producer.bytes_read <= producer.bytes_written


def _is_softmax(launch: Launch) -> bool:
    """Whether XLA made one kernel of a softmax already."""
    return launch.kind == "triton" and _has(launch, "exponential") and _has(launch, "reduce")


def _gates(launch: Launch, launches: Sequence[Launch]) -> bool:
    """Whether an element-wise launch multiplies two products, one of them activated, or two halves of one product."""
    products = sum(value.producer is not None and launches[value.producer].kind in PRODUCTS for value in launch.inputs)
    is_pair = products >= 2 or (products == 1 and _has(launch, "slice"))
    activates = any(_has(launch, opcode) for opcode in ("logistic", "exponential", "tanh", "erf"))
    is_elementwise = launch.phase == "forward" and not _has(launch, "reduce")
    return is_pair and activates and is_elementwise and _has(launch, "multiply")


def _only_moves(launch: Launch) -> bool:
    opcodes = {opcode for opcode, _ in launch.opcodes} - {"convert", "broadcast"}
    return bool(opcodes) and opcodes <= _MOVES


def _relays(launch: Launch) -> bool:
    """Whether a launch that only moves changes the order of elements, or nothing at all."""
    return any(opcode in _LAYOUT_MOVES for opcode, _ in launch.opcodes)


def _only_casts(launch: Launch) -> bool:
    return {opcode for opcode, _ in launch.opcodes} == {"convert"}
