"""Which implementation computes each site of the block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from xlafuse.errors import UnknownNameError
from xlafuse.models.config import BlockConfig

SITES: dict[str, tuple[str, ...]] = {
    "attention_norm": ("xla", "mosaic"),
    "qkv_projection": ("xla",),
    "rope": ("xla",),
    "attention": ("xla", "cudnn"),
    "output_projection": ("xla",),
    "mlp_norm": ("xla", "mosaic"),
    "gated_mlp": ("xla",),
    "down_projection": ("xla",),
}
"""The sites of the block in program order, and the implementations that each has."""


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """The implementation of each site: "xla" (plain JAX), "mosaic" (`pallas_kernels`) or "cudnn".

    `mlp_norm="mosaic"` fuses the attention's residual addition into the norm. Weights and results are the same under
    every plan, up to rounding. Raises `UnknownNameError` (a `ValueError`) for what a site does not have.
    """

    attention_norm: str = "xla"
    qkv_projection: str = "xla"
    rope: str = "xla"
    attention: str = "xla"
    output_projection: str = "xla"
    mlp_norm: str = "xla"
    gated_mlp: str = "xla"
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
        """The sites at which this plan cannot serve a block of `config`, with the reason."""
        reasons: dict[str, str] = {}
        for site in ("attention_norm", "mlp_norm"):
            if getattr(self, site) == "mosaic" and config.norm != "rms_norm":
                reasons[site] = f"the kernel computes RMSNorm, and {config.name} has {config.norm}"
        if self.attention == "cudnn" and config.dtype not in ("bfloat16", "float16"):
            reasons["attention"] = f"cuDNN computes in bfloat16 or float16, and {config.name} in {config.dtype}"
        return reasons

    def applicable(self, config: BlockConfig) -> FusionPlan:
        """This plan with every inapplicable site handed back to XLA."""
        return dataclasses.replace(self, **dict.fromkeys(self.inapplicable(config), "xla"))
