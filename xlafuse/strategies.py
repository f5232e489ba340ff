"""Fusion strategies: a plan for the block's sites, XLA compile options, and what both require.

Every strategy compiles the same block with the same weights and inputs. A new one is one entry in `STRATEGIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from xlafuse.errors import UnknownNameError
from xlafuse.models.plan import SITES, FusionPlan

Requirement = Literal["block", "cuda", "hopper"]
"""block: a program whose sites a plan can choose, so not any function. cuda: an NVIDIA target. hopper: one of compute
capability 9.0."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to have a program compiled."""

    name: str
    description: str
    plan: FusionPlan = field(default_factory=FusionPlan)
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict)
    """XLA options of this compilation alone."""
    requires: tuple[Requirement, ...] = ()

    def unmet(self, *, is_block: bool, kind: str, compute_capability: tuple[int, int]) -> str | None:
        """Returns why the strategy cannot be used here, or None when it can.

        `kind` is the target's ("cuda", "cpu", "attached"); `compute_capability` is (0, 0) where it is not known, in
        which case the kernels themselves object.
        """
        if "block" in self.requires and not is_block:
            sites = ", ".join(f"{site}={how}" for site, how in self.plan.fused_sites.items())
            return (
                f"{self.name!r} chooses kernels for the sites of a transformer block ({sites}); a plain function has "
                "no such sites. Call the kernel in the function itself, or compare a block preset."
            )
        if "cuda" in self.requires and kind == "cpu":
            return f"{self.name!r} acts on XLA's NVIDIA compiler, and the target is a CPU. Choose a GPU target."
        if "hopper" in self.requires and compute_capability not in ((9, 0), (0, 0)):
            return (
                f"{self.name!r} uses Mosaic GPU kernels for Hopper (compute capability 9.0), and the target has "
                f"{'.'.join(map(str, compute_capability))}. Choose the target h100 or h200."
            )
        return None


_FUSION_PASSES = (
    "priority-fusion",
    "multi_output_fusion",
    "triton-softmax-rewriter",
    # Joins products that share an operand into one wider product.
    "dot-merger",
)

_PALLAS = FusionPlan(
    attention_norm="mosaic",
    qkv_projection="mosaic",
    rope="mosaic",
    attention="mosaic",
    output_projection="mosaic",
    mlp_norm="mosaic",
    up_projection="mosaic",
    activation="mosaic",
    down_projection="mosaic",
)
_BEST = FusionPlan(**{site: "best" for site, choices in SITES.items() if "best" in choices})
# Joined, q, k and v cost a copy of their weights before the product, and one of its result for each kernel that reads a
# part: 0.3 GB of traffic in the forward pass of llama3-8b at 2x4096.
_PRODUCTS_APART = {"xla_gpu_dot_merger_threshold_mb": 0}

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="unfused",
            description=(
                "XLA with its fusion passes off: every operation a launch of its own, matrix products by cuBLAS with "
                "what cuBLAS itself takes in (a bias, a sum)."
            ),
            # Triton products would take in what surrounds them. Without cuBLAS's rewriter too, products would be naive
            # loops, hundreds of times slower: no fair baseline.
            compiler_options={
                "xla_disable_hlo_passes": ",".join(_FUSION_PASSES),
                "xla_gpu_enable_triton_gemm": False,
            },
            requires=("cuda",),
        ),
        Strategy(name="xla", description="XLA as it comes."),
        Strategy(
            name="xla_cublas",
            description="XLA without Triton matrix products: all products by cuBLAS.",
            compiler_options={"xla_gpu_enable_triton_gemm": False},
            requires=("cuda",),
        ),
        Strategy(
            name="xla_dot_merger",
            description="XLA that joins products of one operand at any size: q, k and v in one, gate and up in one.",
            # The default of 32 MiB leaves products of this size apart.
            compiler_options={"xla_gpu_dot_merger_threshold_mb": 1024},
            requires=("cuda",),
        ),
        Strategy(
            name="xla_gemm_v2",
            description="XLA with its second generation of matrix-product fusion (experimental).",
            compiler_options={"xla_gpu_experimental_gemm_fusion_v2": True},
            requires=("cuda",),
        ),
        Strategy(
            name="xla_cudnn",
            description="XLA with attention by cuDNN's flash attention.",
            plan=FusionPlan(attention="cudnn"),
            requires=("block", "cuda"),
        ),
        Strategy(
            name="pallas",
            description="Our Pallas kernels at every site that has one, fast or not.",
            plan=_PALLAS,
            compiler_options=_PRODUCTS_APART,
            requires=("block", "cuda", "hopper"),
        ),
        Strategy(
            name="pallas_cudnn",
            description="The kernels and options of pallas, and attention by cuDNN's flash attention.",
            plan=dataclasses.replace(_PALLAS, attention="cudnn"),
            compiler_options=_PRODUCTS_APART,
            requires=("block", "cuda", "hopper"),
        ),
        Strategy(
            name="best",
            description=(
                "Each site by what was measured to be the fastest at this shape: our kernel, cuDNN's attention, or XLA."
            ),
            plan=_BEST,
            compiler_options=_PRODUCTS_APART,
            requires=("block", "cuda", "hopper"),
        ),
    )
}
"""The strategies by name, in the order in which a comparison lists them."""


def get_strategy(name: str) -> Strategy:
    """Returns the strategy called `name`; raises `UnknownNameError` with the nearest names."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UnknownNameError("strategy", name, STRATEGIES) from None


def resolve_strategies(strategies: Iterable[str | Strategy] | None) -> tuple[Strategy, ...]:
    """Returns the strategies named or given, each once and in that order; None: all of them."""
    chosen = STRATEGIES.values() if strategies is None else strategies
    resolved = (get_strategy(each) if isinstance(each, str) else each for each in chosen)
    return tuple({strategy.name: strategy for strategy in resolved}.values())
