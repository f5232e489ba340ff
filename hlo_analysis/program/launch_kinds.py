"""Classifies what made a launch: an XLA emitter, a code generator, a library, or one of our kernels."""

from __future__ import annotations

from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.attributes import custom_call_target, fusion_config
from hlo_analysis.program.dataflow import behind_aliases, roots
from hlo_analysis.records import LaunchKind

EMITTERS: frozenset[LaunchKind] = frozenset({"loop", "reduction", "transpose", "concatenate", "scatter"})
"""Kinds that XLA's own emitters make. They never use the matrix units."""

_COLLECTIVE_THUNKS = (
    "kAllGather",
    "kAllReduce",
    "kAllToAll",
    "kCollectiveBroadcast",
    "kCollectiveKernel",
    "kCollectivePermute",
    "kGroup",
    "kRaggedAllToAll",
    "kRecv",
    "kReduceScatter",
    "kSend",
)
COLLECTIVE_OPCODES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_BY_THUNK: dict[str, LaunchKind] = {
    "kCopy": "copy",
    "kMemset32BitValue": "memset",
    "kMemzero": "memset",
    "kPartitionId": "memset",
    "kReplicaId": "memset",
    "kCublasLtMatmul": "cublaslt",
    "kGemm": "cublas",
    "kTriangularSolve": "cublas",
    "kCuDnn": "cudnn",
    "kConvolution": "cudnn",
    "kConvolutionReorder": "cudnn",
    "kNorm": "cudnn",
    "kCubSort": "sort",
    "kFft": "other",
    "kSelectK": "sort",
}
_BY_TARGET: tuple[tuple[str, LaunchKind], ...] = (
    ("__cublas$lt$", "cublaslt"),
    ("__cublas$", "cublas"),
    ("__cudnn$", "cudnn"),
    ("mosaic_gpu", "mosaic"),
    ("triton_kernel_call", "jax_triton"),
    ("__gpu$xla.gpu.triton", "jax_triton"),
    ("__gpu$TopK", "sort"),
)
_BY_OPCODE: dict[str, LaunchKind] = {
    "copy": "copy",
    "copy-start": "copy",
    "sort": "sort",
    "partition-id": "memset",
    "replica-id": "memset",
}
# The hero of a kInput fusion decides its emitter: the root, or else the first of these opcodes in the fusion.
_HEROES: tuple[tuple[str, LaunchKind], ...] = (
    ("scatter", "scatter"),
    ("reduce", "reduction"),
    ("transpose", "transpose"),
    ("concatenate", "concatenate"),
)


def opcode_counts(module: Module, instruction: Instruction) -> tuple[tuple[str, int], ...]:
    """Counts the opcodes in a launch, most frequent first, without those that only name or reshape a value."""
    counts: dict[str, int] = {}

    def count(inner: Instruction) -> None:
        if inner.opcode == "fusion":
            for nested in module.computations[inner.called[0]].instructions.values():
                count(nested)
        elif inner.opcode not in ("parameter", "constant", "bitcast", "tuple", "get-tuple-element"):
            counts[inner.opcode] = counts.get(inner.opcode, 0) + 1

    count(instruction)
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def kind_of(module: Module, instruction: Instruction | None, thunk_kind: str) -> LaunchKind:
    """Returns the kind of a launch, from its thunk ('' where there is none) and its instruction."""
    if thunk_kind in _BY_THUNK:
        return _BY_THUNK[thunk_kind]
    if thunk_kind in _COLLECTIVE_THUNKS:
        return "collective"
    if instruction is None:
        return "other"
    if instruction.opcode == "fusion":
        return _fusion_kind(module, instruction)
    if instruction.opcode == "custom-call":
        target = custom_call_target(instruction)
        named: list[LaunchKind] = [kind for prefix, kind in _BY_TARGET if target.startswith(prefix)]
        return named[0] if named else "custom_call"
    if instruction.opcode.removesuffix("-start") in COLLECTIVE_OPCODES:
        return "collective"
    return _BY_OPCODE.get(instruction.opcode, "other")


def _fusion_kind(module: Module, instruction: Instruction) -> LaunchKind:
    inside = {opcode for opcode, _ in opcode_counts(module, instruction)}
    generator = fusion_config(instruction).get("kind", "")
    if generator.startswith("__triton"):
        products = {"dot", "scaled-dot", "convolution"}
        return "triton_gemm" if "gemm" in generator or products & inside else "triton"
    if generator.startswith("__cudnn"):
        return "cudnn"
    if "sort" in inside:
        return "sort"
    match instruction.attributes.get("kind"):
        case "kInput":
            body = module.computations[instruction.called[0]]
            returned = {behind_aliases(body, root).opcode for _, root in roots(body)}
            for candidates in (returned, inside):
                for opcode, kind in _HEROES:
                    if opcode in candidates:
                        return kind
            return "loop"
        case "kLoop":
            return "loop"
        case "kCustom" if _is_native_product(instruction):
            return "loop"  # one thread computes one element of the result
        case "kCustom":
            # A library or kernel call that reads or writes a slice in place: the launch is the call.
            body = module.computations[instruction.called[0]].instructions.values()
            calls = [inner for inner in body if inner.opcode == "custom-call"]
            return kind_of(module, calls[0], "") if len(calls) == 1 else "other"
    return "other"


def is_untuned_product(instruction: Instruction, kind: LaunchKind) -> bool:
    """Whether XLA generated the code of a product itself, as it does where it has no GPU to time libraries on."""
    return kind == "triton_gemm" or _is_native_product(instruction)


def _is_native_product(instruction: Instruction) -> bool:
    """Whether a launch is a matrix product that XLA's config assigner took away from Triton."""
    return "native_emitter_backend_config" in instruction.backend_config


def is_attention(instruction: Instruction, kernel: str | None) -> bool:
    """Whether a launch is one fused attention kernel: cuDNN's, or a custom kernel with such a name."""
    return custom_call_target(instruction).startswith("__cudnn$fmha") or "attention" in (kernel or "")
