"""Explains the verdict on an edge: XLA's reason is quoted as it is, ours stands in brackets."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.decisions import categories
from hlo_analysis.records import Launch, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A verdict with its reason. The fields are those of `records.Decision`."""

    verdict: Verdict
    reason: str
    category: str
    pass_name: str
    gain_us: float | None = None


def our_reason(text: str, category: str, pass_name: str = "") -> Explanation:
    """Explains, in our words, which rule forbids fusing the edge."""
    return Explanation(verdict="ineligible", reason=f"[{text}]", category=category, pass_name=pass_name)


def without_reason(text: str, category: str) -> Explanation:
    """Explains an edge for which no pass recorded a reason."""
    return Explanation(verdict="unrecorded", reason=f"[{text}]", category=category, pass_name="")


def xla_reason(pass_name: str, reason: str) -> Explanation:
    """Explains an edge with the reason that a pass gave."""
    return Explanation(verdict="ineligible", reason=reason, category=categories.classify(reason), pass_name=pass_name)


_KINDS = {
    "loop": "an elementwise fusion",
    "reduction": "a reduction",
    "transpose": "a transpose",
    "concatenate": "a concatenation",
    "scatter": "a scatter",
    "sort": "a sort",
    "triton": "a Triton fusion",
    "triton_gemm": "a Triton matrix product",
    "cublas": "a cuBLAS call",
    "cublaslt": "a cuBLAS call",
    "cudnn": "a cuDNN call",
    "mosaic": "a Pallas kernel",
    "jax_triton": "a Triton kernel of the program",
    "copy": "a copy",
    "memset": "a fill of memory",
    "collective": "a collective",
    "custom_call": "a custom call",
}
_LIBRARY = ("cublas", "cublaslt", "cudnn", "custom_call", "collective", "copy", "memset", "sort")
_OWN = ("mosaic", "jax_triton", "custom_call")
_PRODUCTS = ("triton_gemm", "cublas", "cublaslt")

# What a category means for two launches: the kinds of the launch that it is about (none: the consumer), and what XLA
# does with it. Other categories need no launch's name.
_ABOUT: dict[str, tuple[tuple[str, ...], str]] = {
    categories.CONSUMER: ((), "{launch}: XLA fuses no producer into such a launch."),
    categories.PRODUCER: (("producer",), "{launch}: XLA fuses no such launch into its reader."),
    categories.LIBRARY_CALL: (
        _LIBRARY,
        "{launch}: it takes in only what the library offers, such as a bias, GELU or ReLU, or the sum with another "
        "matrix.",
    ),
    categories.CUSTOM_KERNEL: (_OWN, "{launch}: XLA cannot put work into it; the kernel itself must do that work."),
    categories.MATRIX_PRODUCT: (
        _PRODUCTS,
        "{launch}: XLA declined to put this work into it, as the product would read more bytes in its inner loop, or "
        "several inputs that XLA does not analyse.",
    ),
    categories.MATRIX_PRODUCT_OPAQUE: (
        _PRODUCTS,
        "{launch}: it is closed by the time that priority fusion runs, which puts no more work into it.",
    ),
    categories.SEVERAL_USERS: (_PRODUCTS, "{launch} with several readers: XLA gives an epilogue only to one with one."),
    categories.TWO_REDUCTIONS: ((), "{launch}, and so is what it reads: XLA does not fuse one reduction into another."),
    categories.AFTER_REDUCTION: (
        ("reduction",),
        "{launch}: XLA cannot go on with other work after the sum without losing its fast reduction.",
    ),
}


def plain_reason(category: str, producer: Launch, consumer: Launch) -> str:
    """Says in plain words why two launches are apart: 'fusion.3 is a Triton fusion: XLA fuses no producer into …'."""
    kinds, text = _ABOUT.get(category, ((), ""))
    if not text:
        return categories.CATEGORIES.get(category, categories.CATEGORIES[categories.OTHER_RULE])
    ends = (producer, consumer) if "producer" in kinds else (consumer, producer)
    launch = next((end for end in ends if end.kind in kinds), ends[0])
    return text.format(launch=f"{launch.name} is {_KINDS.get(launch.kind, 'another kind of launch')}")
