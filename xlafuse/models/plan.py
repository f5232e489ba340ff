"""Which implementation computes each site of the block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from xlafuse.errors import UnknownNameError
from xlafuse.models.config import BlockConfig

SITES: dict[str, tuple[str, ...]] = {
    "attention_norm": ("xla", "mosaic", "best"),
    "qkv_projection": ("xla", "mosaic", "best"),
    "rope": ("xla", "mosaic", "best"),
    "attention": ("xla", "mosaic", "cudnn", "best"),
    "output_projection": ("xla", "mosaic", "best"),
    "mlp_norm": ("xla", "mosaic", "best"),
    "up_projection": ("xla", "mosaic", "best"),
    "activation": ("xla", "mosaic", "best"),
    "down_projection": ("xla", "mosaic", "best"),
}
"""The sites of the block in program order, and the implementations that each has."""


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """The implementation of each site.

    "xla" is plain JAX, "mosaic" a kernel of `pallas_kernels`, "cudnn" cuDNN's flash attention, and "best" whichever of
    them was measured to be the fastest for the device and shape of the trace (`xlafuse.models.best`).

    Kernels take in what is around their site. A norm's adds the residual stream's gradient in its backward pass. Where
    few rows are not differentiated, an RMSNorm is part of the product behind it, if both are kernels. The product of
    query, key and value rotates the first two: what `rope` says then counts for nothing. An output or down projection's
    adds bias and residual, unless dropout comes between. An up projection's multiplies by the gate's weights too, in a
    SwiGLU block, and does the activation: what `activation` says then counts for nothing. Of an activation alone, a
    GELU's takes in the bias. Weights and results are the same under every plan, up to rounding.

    Raises `UnknownNameError` (a `ValueError`) for what a site does not have.
    """

    attention_norm: str = "xla"
    qkv_projection: str = "xla"
    rope: str = "xla"
    attention: str = "xla"
    output_projection: str = "xla"
    mlp_norm: str = "xla"
    up_projection: str = "xla"
    activation: str = "xla"
    down_projection: str = "xla"

    def __post_init__(self):
        for site, choices in SITES.items():
            if getattr(self, site) not in choices:
                raise UnknownNameError(f"implementation for the site {site!r}", getattr(self, site), choices)

    @property
    def fused_sites(self) -> dict[str, str]:
        """The sites that are not left to XLA, with their implementation."""
        chosen = {site: getattr(self, site) for site in SITES}
        return {site: implementation for site, implementation in chosen.items() if implementation != "xla"}

    def inapplicable(self, config: BlockConfig) -> dict[str, str]:
        """The sites at which this plan cannot serve a block of `config`, with the reason.

        It depends on the block alone: a kernel that can serve one does so at every batch and length.
        """
        # Strategies are listed without kernels, whose import takes most of a second.
        from xlafuse.models import support

        asked = (site for site, implementation in self.fused_sites.items() if implementation == "mosaic")
        refusals = {site: support.unsupported(site, config) for site in asked}
        reasons = {site: reason for site, reason in refusals.items() if reason is not None}
        if self.attention == "cudnn" and config.dtype not in ("bfloat16", "float16"):
            reasons["attention"] = f"cuDNN computes in bfloat16 or float16, and {config.name} in {config.dtype}"
        return reasons

    def applicable(self, config: BlockConfig) -> FusionPlan:
        """This plan with every inapplicable site given back to XLA."""
        return dataclasses.replace(self, **dict.fromkeys(self.inapplicable(config), "xla"))
