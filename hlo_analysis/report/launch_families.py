"""Groups launch kinds into families for display, each with a colour (a CSS class), a label and a description."""

from __future__ import annotations

from hlo_analysis.records import LaunchKind

FAMILIES: dict[str, tuple[str, str]] = {
    "library": (
        "library",
        "A call of cuBLAS or cuDNN. It takes in no more than the library offers, as a bias after a product.",
    ),
    "triton-gemm": (
        "Triton GEMM",
        "A matrix product that XLA generates through Triton and fuses with elementwise work.",
    ),
    "triton": ("Triton fusion", "A fusion that XLA generates through Triton: mostly softmax and normalizations."),
    "ours": ("custom kernel", "A kernel written in Pallas (Mosaic GPU, Triton) or jax-triton, opaque to XLA."),
    "loop": ("loop fusion", "Elementwise operations; each thread computes a few output elements."),
    "reduction": ("reduction fusion", "A reduction over rows or columns, fused with elementwise operations."),
    "layout": (
        "data movement fusion",
        "Transposes, concatenations, scatters and sorts, fused with elementwise work.",
    ),
    "copy": ("copy", "A plain copy or fill of memory."),
    "other": ("other", "Collectives, Fourier transforms and custom calls."),
}
"""Family → (label, description)."""

FAMILY_OF: dict[str, str] = {
    "cublas": "library",
    "cublaslt": "library",
    "cudnn": "library",
    "triton_gemm": "triton-gemm",
    "triton": "triton",
    "mosaic": "ours",
    "jax_triton": "ours",
    "loop": "loop",
    "reduction": "reduction",
    "transpose": "layout",
    "concatenate": "layout",
    "scatter": "layout",
    "sort": "layout",
    "copy": "copy",
    "memset": "copy",
}
"""Kind → family; all other kinds belong to 'other'."""


def family_of(kind: LaunchKind | str) -> str:
    """Returns the family that a kind is shown in."""
    return FAMILY_OF.get(kind, "other")
