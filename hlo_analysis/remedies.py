"""What to do about a missed fusion: an option of XLA's, another way to write the model, or a kernel of one's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_analysis.decisions import categories
from hlo_analysis.merging import can_merge
from hlo_analysis.records import Launch

PRODUCTS = frozenset(("triton_gemm", "cublas", "cublaslt"))
"""Kinds of launch that are matrix products."""

_LAYOUT_MOVES = frozenset(("transpose", "copy", "reshape"))
_MOVES = _LAYOUT_MOVES | {"concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "pad"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """`kind` and `text` are `remedy_kind` and `remedy` of `records.MissedFusion`."""

    kind: Literal["option", "rewrite", "kernel"]
    text: str


_ATTENTION = Remedy(
    kind="kernel",
    text="attention: one kernel that keeps the scores on the chip, e.g. cuDNN's through "
    "jax.nn.dot_product_attention(implementation='cudnn') for bf16 and f16",
)
_GATED_LINEAR = Remedy(
    kind="kernel",
    text="gated_linear: both products and the gated activation in one kernel, which writes only the result",
)
_LINEAR_EPILOGUE = Remedy(
    kind="kernel", text="linear: the work after the product done in its epilogue, before the result is written"
)
_LINEAR_PROLOGUE = Remedy(kind="kernel", text="linear: the work before the product done as its operand is loaded")
_NORM_LINEAR = Remedy(
    kind="kernel", text="norm_linear: the product normalises its rows as it loads them, or scales its result afterwards"
)
_RMS_NORM = Remedy(
    kind="kernel", text="rms_norm: the reduction and all that follows it in one kernel, the row read once"
)
_LAYER_NORM = Remedy(
    kind="kernel", text="layer_norm: mean, variance and all that follows in one kernel, the row read once"
)
_SOFTMAX = Remedy(kind="kernel", text="softmax: maximum, sum and quotient in one kernel, the row read once")
_LAYOUT = Remedy(
    kind="rewrite",
    text="give the operation the layout that its neighbour wants (order of einsum axes, of reshape and transpose), so "
    "that nothing is moved",
)
_PARTS = Remedy(
    kind="rewrite",
    text="have the operation work on the part where it lies (by indices, a mask, or sizes that need no padding), so "
    "that it is not moved first",
)
_UNSTACKED = Remedy(
    kind="rewrite",
    text="keep the parts apart (a Python loop over a list in place of lax.scan over one stacked array), so that none "
    "is copied out of the stack",
)
_JOINED = Remedy(
    kind="rewrite",
    text="keep the parts in one array from the start (as one weight of several products), so that nothing is joined in "
    "each run",
)
_INDEXED = Remedy(
    kind="rewrite",
    text="take the rows by their indices (table[indices]): a product with a one-hot matrix writes that matrix, reads "
    "it, and multiplies by its zeros",
)
_LINEAR_CROSS_ENTROPY = Remedy(
    kind="kernel", text="linear_cross_entropy: product and loss in one kernel, which never writes an array of logits"
)
_WHOLE_SUM = Remedy(
    kind="option",
    text="xla_gpu_experimental_force_split_k=1 keeps the product whole: XLA split its sum into parts (split-K), which "
    "this launch adds up; measure both",
)
_LEAVE_ON = Remedy(kind="option", text="leave XLA's fusion passes on (xla_disable_hlo_passes switches them off)")
_DONATE = Remedy(
    kind="rewrite",
    text="donate the argument (jax.jit(..., donate_argnums=...)), so that XLA need not keep its buffer whole",
)
_DONATED = Remedy(
    kind="rewrite",
    text="the argument is donated, and overwritten while it is still to be read, so that XLA copies it first: update "
    "it after its last reader, or do not donate it",
)
_KEPT = Remedy(
    kind="rewrite",
    text="let nothing read the value once it is updated in place (as a loop's state, or .at[...].set): XLA copies what "
    "is needed twice",
)
_CARRIED = Remedy(
    kind="rewrite",
    text="unroll the loop (unroll= of lax.scan and lax.fori_loop), so that XLA sees several iterations at once; one "
    "kernel for the whole loop keeps on the chip what one iteration hands the next",
)
_OVERLAP = Remedy(
    kind="rewrite",
    text="cut the work into parts, so that the collective of one part runs beside the work on the next",
)
_SEPARATE_SUMS = Remedy(
    kind="option",
    text="xla_gpu_all_reduce_combine_threshold_bytes=0 leaves sums over devices apart: XLA joined several arrays for "
    "one and takes the result apart again; measure both",
)
_BOUNDARY = Remedy(kind="rewrite", text="move the work to one side of the loop or branch")
_RECOMPUTE = Remedy(
    kind="rewrite", text="compute the value where it is used: written once, it is read again by every user"
)
_ONE_KERNEL = Remedy(kind="kernel", text="one kernel for both ends")
_KEEP_TRITON = Remedy(
    kind="option",
    text="xla_gpu_cublas_fallback=False keeps the product in Triton, with what was fused into it; measure both",
)
_MERGE_PRODUCTS = Remedy(
    kind="option",
    text="xla_gpu_dot_merger_threshold_mb=1024 makes one product of those that share an input",
)
_MERGE_LOOPS = Remedy(kind="kernel", text="one kernel with several outputs, which reads the shared values once")


def vertical_remedy(
    launches: Sequence[Launch],
    producer: Launch,
    readers: Sequence[Launch],
    category: str,
    *,
    is_score: bool,
    donated: Collection[str] = (),
) -> Remedy:
    """The remedy for a value that `producer` writes and `readers` read, by what stands on both ends.

    Args:
        launches: the launch table.
        producer: the launch that writes the value.
        readers: those that read it and could be one kernel with the producer.
        category: why XLA left them apart.
        is_score: whether the value is one of attention scores, or made from them.
        donated: names of arguments whose buffers the program may overwrite.
    """
    if category == categories.SWITCHED_OFF:
        return _LEAVE_ON
    ends = (producer, *readers)
    if category == categories.INSERTED:
        if any(_has(end, "all-reduce") for end in ends) and any(map(_only_moves, ends)):
            return _SEPARATE_SUMS
        if copies := [end for end in ends if end.kind == "copy"]:
            return _copied(copies[0], donated)
    if category == categories.BOUNDARY:
        return _CARRIED if any(reader.index <= producer.index for reader in readers) else _BOUNDARY
    if is_score:
        return _ATTENTION
    if any(end.kind == "collective" for end in ends):
        return _OVERLAP
    if any(map(_only_casts, ends)):
        return _KEEP_TRITON
    # A copy whose index is counted down, as in a backward pass, has arithmetic inside.
    if producer.repeat > 1 and _has(producer, "dynamic-slice") and (producer.kind == "copy" or _only_moves(producer)):
        return _UNSTACKED
    if moves := [end for end in ends if _only_moves(end)]:
        return _LAYOUT if any(map(_relays, moves)) else _JOINED if _has(moves[0], "concatenate") else _PARTS
    if is_product(producer):
        return _after_product(launches, producer, readers)
    if any(map(is_product, readers)):
        if _is_one_hot(producer, readers):
            return _INDEXED
        return _NORM_LINEAR if _normalizes(producer) and producer.phase == "forward" else _LINEAR_PROLOGUE
    rows = rows_remedy(ends)
    return _RECOMPUTE if rows is _ONE_KERNEL and category == categories.SLOWER and len(readers) > 1 else rows


def rows_remedy(ends: Sequence[Launch]) -> Remedy:
    """The remedy for launches of which some may reduce rows: by what they make of the sums."""
    if any(_has(end, "reduce") for end in ends):
        if any(map(_normalizes, ends)):
            return _LAYER_NORM if any(_has(end, "subtract") for end in ends) else _RMS_NORM
        if any(_has(end, "exponential") for end in ends) and not any(map(_is_softmax, ends)):
            return _SOFTMAX
    return _ONE_KERNEL


def is_product(launch: Launch) -> bool:
    """Whether a launch is a matrix product; cuBLAS solves triangular systems, too."""
    return launch.kind in PRODUCTS and "triangularSolve" not in launch.hlo


def _copied(copy: Launch, donated: Collection[str]) -> Remedy:
    """The remedy for a copy that XLA put in to keep a buffer whole: by whose buffer it is."""
    source = copy.inputs[0] if copy.inputs else None
    if source is None or source.producer is not None or source.name.startswith("constant"):
        return _KEPT
    return _DONATED if source.name in donated else _DONATE


def _after_product(launches: Sequence[Launch], product: Launch, readers: Sequence[Launch]) -> Remedy:
    if any(_adds_parts(product, reader) for reader in readers):
        return _WHOLE_SUM
    if any(_gates(reader, launches) for reader in readers):
        return _GATED_LINEAR
    is_softmax = all(any(_has(reader, opcode) for reader in readers) for opcode in ("exponential", "reduce"))
    if is_softmax and product.phase == "forward" and _takes_logarithms(launches, readers):
        return _LINEAR_CROSS_ENTROPY
    return _LINEAR_EPILOGUE


def _adds_parts(product: Launch, reader: Launch) -> bool:
    """Whether a launch adds up the batches of a product: so XLA makes several short sums of a long one."""
    is_batched = re.search(r" dot\(.*lhs_batch_dims=\{\d", product.hlo)
    return bool(is_batched and re.search(r" reduce\(.*dimensions=\{0\}", reader.hlo))


def _takes_logarithms(launches: Sequence[Launch], readers: Sequence[Launch]) -> bool:
    """Whether there is a logarithm a few launches further on, as in the loss of a softmax."""
    near = {reader.index for reader in readers}
    for _ in range(3):
        near |= {launch.index for launch in launches if any(value.producer in near for value in launch.inputs)}
    return any(_has(launches[index], "log") for index in near)


def shared_input_remedy(readers: Sequence[Launch], shared: str) -> Remedy | None:
    """The remedy for launches that each read the value `shared`; None where one launch could not do all their work."""
    if not all(map(is_product, readers)):
        return _MERGE_LOOPS
    return _MERGE_PRODUCTS if can_merge(readers, shared) else None


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
