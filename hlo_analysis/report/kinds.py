"""Launch kinds as the views show them: in families, each with a colour (a CSS class) and one sentence."""

from __future__ import annotations

from hlo_analysis.records import LaunchKind

FAMILIES: dict[str, tuple[str, str]] = {
    "library": ("library", "NVIDIA's cuBLAS or cuDNN: fast at what it offers, closed to fusion by XLA."),
    "triton-gemm": ("Triton GEMM", "A matrix product that XLA generates through Triton; elementwise neighbours fuse."),
    "triton": ("Triton fusion", "A fusion that XLA generates through Triton, softmax and normalizations mostly."),
    "ours": ("custom kernel", "A kernel of one's own in Pallas (Mosaic GPU, Triton) or jax-triton, opaque to XLA."),
    "loop": ("loop fusion", "Elementwise work, one thread for each few output elements."),
    "reduction": ("reduction fusion", "Elementwise work around a reduction over rows or columns."),
    "layout": ("data movement fusion", "Transposes, concatenations, scatters and sorts, with work fused around them."),
    "copy": ("copy", "A plain copy or fill of memory."),
    "other": ("other", "Collectives, Fourier transforms and custom calls."),
}
"""Family → (label, what it is)."""

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
"""Kind → family; kinds that are not here are 'other'."""


def family_of(kind: LaunchKind | str) -> str:
    """The family that a kind is shown with."""
    return FAMILY_OF.get(kind, "other")
