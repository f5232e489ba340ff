"""Names the categories of reasons why two launches stay apart, and sorts XLA's messages into them.

XLA explains its decisions in free text that changes between versions. A report groups decisions by category and quotes
the text. Unknown text goes to `OTHER_RULE` and is quoted unchanged, so it never lands in a wrong group.
"""

from __future__ import annotations

FUSED = "fused"
SLOWER = "cost model: fusing is slower"
BITCAST_USERS = "only bitcast users"
LIBRARY_CALL = "library call"
CUSTOM_KERNEL = "custom kernel"
MATRIX_PRODUCT = "matrix product: not worth fusing"
MATRIX_PRODUCT_OPAQUE = "matrix product kernel"
SEVERAL_USERS = "product with several users"
TWO_REDUCTIONS = "reduction into reduction"
AFTER_REDUCTION = "work after a reduction"
OTHER_CONSUMER = "another consumer cannot take it"
CONSUMER = "consumer cannot take it"
PRODUCER = "producer cannot be fused"
DUPLICATION = "would duplicate work"
TOO_LARGE = "fusion too large"
TILING = "tiling cannot follow"
DIFFERENT_SHAPES = "different loop shapes"
IN_PLACE = "in-place update"
CYCLE = "would make a cycle"
MULTIPLE_OUTPUTS = "multiple outputs"
OUTPUT = "program output"
BOUNDARY = "loop or branch boundary"
SWITCHED_OFF = "switched off"
SHARED_INPUT = "shared input read again"
INSERTED = "inserted after fusion"
KEPT = "kept for the backward pass"
ODD_SIZE = "odd size"
UNRECORDED = "unrecorded"
OTHER_RULE = "other rule"

CATEGORIES: dict[str, str] = {
    FUSED: "One launch holds both ends: the value never leaves the chip.",
    SLOWER: "XLA's cost model expects the fused kernel to take longer than the two it would replace, "
    "often because the producer would be computed again for each user.",
    BITCAST_USERS: "The value is only re-labelled with another shape before a kernel that takes no fusion reads it; "
    "priority fusion weighs a producer only against users that compute.",
    LIBRARY_CALL: "One end is a call of cuBLAS, cuDNN, cuSOLVER or the like. XLA fuses into it only what the library "
    "offers, such as cuBLASLt's epilogues: a bias, GELU or ReLU, the sum with another matrix.",
    CUSTOM_KERNEL: "One end is a kernel from outside XLA (Pallas, Triton, a foreign call), or a finished one of "
    "XLA's own (TopK): opaque to its passes.",
    MATRIX_PRODUCT: "The Triton matrix-product rewriter weighed this work as a prologue or epilogue and declined: it "
    "would read more bytes inside the product's loop, or the rewriter does not analyse several inputs.",
    MATRIX_PRODUCT_OPAQUE: "One end is a Triton matrix product, which is closed by the time priority fusion runs.",
    SEVERAL_USERS: "The Triton matrix-product rewriter puts an epilogue only on a product with a single reader.",
    TWO_REDUCTIONS: "Both ends reduce: XLA has no cost model for a reduction that feeds a reduction.",
    AFTER_REDUCTION: "The reduction's emitter cannot go on with this work after the sum; fused, the kernel would lose "
    "its fast reduction.",
    OTHER_CONSUMER: "A producer is fused into all of its users or none, and another user of this value cannot take it.",
    CONSUMER: "The consumer is not an operation that takes a fused producer.",
    PRODUCER: "The producer is not an operation that XLA can fuse into its user.",
    DUPLICATION: "The fused code would repeat the producer's work, or its code, too often.",
    TOO_LARGE: "The fused kernel would have too many operands, outputs or reductions, or too much shared memory.",
    TILING: "The tiled code generator cannot follow this transpose, reshape, slice or data type inside one tile.",
    DIFFERENT_SHAPES: "The two kernels loop over different shapes, so that one loop cannot write both outputs.",
    IN_PLACE: "One end updates a buffer in place, and fusing would let it read what it overwrites.",
    CYCLE: "The consumer also depends on the producer through a third kernel.",
    MULTIPLE_OUTPUTS: "The rule concerns kernels with several outputs, which XLA fuses only in part.",
    OUTPUT: "The value is an output of the program and must be written.",
    BOUNDARY: "The value crosses into or out of a loop or branch, over which nothing is fused.",
    SWITCHED_OFF: "An option keeps this kind of fusion off.",
    SHARED_INPUT: "Several launches, none of which needs another, read one value that a single launch could read once.",
    INSERTED: "One end did not exist when XLA fused: a later pass put it in, such as a copy that keeps a buffer whole.",
    KEPT: "The forward pass writes what the backward pass could compute again from other values that it reads.",
    ODD_SIZE: "A matrix product has rows that do not all begin at multiples of 16 bytes: no cuBLAS kernel takes it, "
    "and XLA's Triton kernel loads such rows a few bytes at a time.",
    UNRECORDED: "Two launches, and no pass recorded a reason for the edge.",
    OTHER_RULE: "XLA gave a reason that this tool has no group for; its words are kept.",
}
"""Explains each category in one sentence for the reader of a report."""

# Fragments of XLA's messages, in lower case. The first match decides, so more specific fragments come first. Sources:
# priority_fusion.cc, gpu_priority_fusion.cc, gpu_fusible.cc, instruction_fusion.cc, multi_output_fusion.cc,
# gemm_fusion.cc, triton_tiling_propagation.cc, triton/support.cc, softmax_rewriter_triton.cc (XLA of jaxlib 0.11.2).
_FRAGMENTS: tuple[tuple[str, str], ...] = (
    ("only bitcast users", BITCAST_USERS),
    ("single bitcast as consumer", BITCAST_USERS),
    ("output of the root instruction", OUTPUT),
    ("is the root instruction", OUTPUT),
    ("both the producer and the consumer contain a reduce", TWO_REDUCTIONS),
    ("into a significant reduction", TILING),
    ("output of a reduce fusion would create a loop fusion", AFTER_REDUCTION),
    ("reduction output fusion", AFTER_REDUCTION),
    ("continuous dims epilogue", AFTER_REDUCTION),
    ("is not enabled", SWITCHED_OFF),
    ("at low fusion levels", SWITCHED_OFF),
    ("fusion is disabled", SWITCHED_OFF),
    ("ignored elementwise operation", SWITCHED_OFF),
    ("slower if fused", SLOWER),
    ("negative benefit", SLOWER),
    ("not obviously profitable to fuse", MATRIX_PRODUCT),
    ("not properly analyzed yet", MATRIX_PRODUCT),
    ("not fusing a broadcast", MATRIX_PRODUCT),
    ("skipping unsupported broadcast", MATRIX_PRODUCT),
    ("concatenate fusion is inefficient", MATRIX_PRODUCT),
    ("overly large code duplication", DUPLICATION),
    ("expensive op duplication", DUPLICATION),
    ("power op with multiple users", DUPLICATION),
    ("heavy computation", DUPLICATION),
    ("too large ir", TOO_LARGE),
    ("number of operands and output buffers", TOO_LARGE),
    ("shared memory", TOO_LARGE),
    ("unnested reductions in fusion", TOO_LARGE),
    ("too many reductions", TOO_LARGE),
    ("parameter limit", TOO_LARGE),
    ("maximum number of elements of a triton tensor", TOO_LARGE),
    ("different loop shapes", DIFFERENT_SHAPES),
    ("non-overlapping", DIFFERENT_SHAPES),
    ("tiled transpose would become untiled", DIFFERENT_SHAPES),
    ("transpose and a reduction", DIFFERENT_SHAPES),
    ("element-wise root", DIFFERENT_SHAPES),
    ("nested transpose", DIFFERENT_SHAPES),
    ("in-place", IN_PLACE),
    ("inplace", IN_PLACE),
    ("scatter", IN_PLACE),
    ("dus", IN_PLACE),
    ("dynamic-update-slice", IN_PLACE),
    ("would introduce a cycle", CYCLE),
    ("creates a cycle", CYCLE),
    ("are connected", CYCLE),
    ("multi-output fusion", MULTIPLE_OUTPUTS),
    ("not an array", MULTIPLE_OUTPUTS),
    ("tile", TILING),
    ("tiling", TILING),
    ("transpos", TILING),
    ("split", TILING),
    ("coalescing", TILING),
    ("concatenat", TILING),
    ("fragment", TILING),
    ("slicing", TILING),
    ("are not fused", TILING),
    ("supported", TILING),
    ("data type", TILING),
    ("dimension", TILING),
    ("reshape", TILING),
    ("shape tracker", TILING),
    ("triton", TILING),
    ("producer is not fusible", PRODUCER),
    ("producer is not loop-fusible", PRODUCER),
    ("consumer is not", CONSUMER),
    ("user is not fusible", CONSUMER),
    ("consumer not eligible", MULTIPLE_OUTPUTS),
    ("no users to fuse", OUTPUT),
)


def classify(reason: str) -> str:
    """Returns the category of a reason in XLA's words, or `OTHER_RULE` if the text is unknown."""
    lowered = reason.lower()
    return next((category for fragment, category in _FRAGMENTS if fragment in lowered), OTHER_RULE)
