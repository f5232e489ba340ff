"""Fusion plan: the implementation of each site of the block."""

from __future__ import annotations

from dataclasses import dataclass

from xlafuse.errors import UnknownNameError

_IMPLEMENTATIONS = ("xla", "mosaic", "triton", "best")
SITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention_norm", "qkv_projection"), _IMPLEMENTATIONS),
    "attention": (*_IMPLEMENTATIONS, "cudnn"),
    **dict.fromkeys(("output_projection", "mlp_norm", "up_projection", "down_projection"), _IMPLEMENTATIONS),
}
"""Sites of the block in program order, with the implementations of each."""


def named(implementation: str) -> str | None:
    """Returns the operations' argument for a plan's name of an implementation."""
    return None if implementation == "best" else implementation


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """The implementation of each site.

    "xla" is plain JAX, "mosaic" a kernel of `pallas_kernels`, "triton" one of its Triton kernels, and "cudnn" cuDNN's
    flash attention. "best" is what the operation itself takes for the device and shape of the trace
    (`implementation=None`): its kernel, or XLA.

    Kernels fuse work around their site. A norm's kernel adds the residual stream's gradient in the backward pass. An
    RMSNorm becomes part of the product after it if both are kernels, the rows are few and nothing is differentiated.
    The product of query, key and value applies RoPE. The output and down projections add bias and residual, the up
    projection applies the activation, and in a SwiGLU block multiplies by the gate's weights. Experts' products are the
    grouped ones, by XLA under "triton", and their residual is a launch of its own. Weights and results are the same
    under every plan, up to rounding.

    Raises `UnknownNameError` (a `ValueError`) for an implementation that a site does not have.
    """

    attention_norm: str = "xla"
    qkv_projection: str = "xla"
    attention: str = "xla"
    output_projection: str = "xla"
    mlp_norm: str = "xla"
    up_projection: str = "xla"
    down_projection: str = "xla"

    def __post_init__(self):
        for site, choices in SITES.items():
            if getattr(self, site) not in choices:
                raise UnknownNameError(f"implementation for the site {site!r}", getattr(self, site), choices)

    @property
    def fused_sites(self) -> dict[str, str]:
        """The sites that are not left to XLA, with their implementations."""
        chosen = {site: getattr(self, site) for site in SITES}
        return {site: implementation for site, implementation in chosen.items() if implementation != "xla"}
