"""Fusion strategies: a plan for the block's sites, whether to `fuse`, XLA options, and requirements.

Every strategy compiles the same program with the same weights and inputs. To add one, add an entry to `STRATEGIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from pallas_kernels import BY_COPY_ENGINES  # imports no JAX
from xlafuse.errors import UnknownNameError
from xlafuse.models.plan import SITES, FusionPlan

Requirement = Literal["block", "cuda", "hopper", "triton"]
"""What a strategy needs.

block: a program with sites for a plan, so not any function. cuda: an NVIDIA target. hopper: a target of compute
    capability 9.0. triton: jax-triton, which the extra `triton` installs.
"""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to compile a program."""

    name: str
    description: str
    plan: FusionPlan = field(default_factory=FusionPlan)
    fuses: bool = False
    """Whether `xlafuse.fuse` rewrites the program before it is differentiated."""
    compiler_options: Mapping[str, str | int | bool] = field(default_factory=dict)
    """XLA options for this compilation alone."""
    requires: tuple[Requirement, ...] = ()
    overlaps: bool = False
    """Whether products of a block over a mesh compute while their rows or sums travel between devices."""

    @property
    def is_installed(self) -> bool:
        """Whether the packages that the strategy needs are installed."""
        return "triton" not in self.requires or find_spec("jax_triton") is not None

    def rewritten(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as the strategy changes it, if it fuses or overlaps; differentiate it afterwards.

        Tracing one that fuses raises `NothingFusedError` where no site is taken.
        """
        if self.overlaps:
            from pallas_kernels import overlapped_collectives

            return overlapped_collectives()(function)
        if not self.fuses:
            return function
        from xlafuse.fusion.program import FusedProgram

        return FusedProgram(function).function

    def unmet(self, *, is_block: bool, kind: str, compute_capability: tuple[int, int]) -> str | None:
        """Returns why the strategy cannot be used here, or None if it can.

        `kind` is the target's ("cuda", "cpu", "attached"). `compute_capability` is (0, 0) if it is unknown; the kernels
        themselves then raise.
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
        if not self.is_installed:
            return f"{self.name!r} needs jax-triton, which is not installed: pip install 'xlafuse[triton]'"
        return None


_FUSION_PASSES = (
    "priority-fusion",
    "multi_output_fusion",
    "triton-softmax-rewriter",
    # Merges products that share an operand into one wider product.
    "dot-merger",
)

_PALLAS = FusionPlan(**dict.fromkeys(SITES, "mosaic"))
_BEST = FusionPlan(**dict.fromkeys(SITES, "best"))
# Merging q, k and v would copy their weights before the product, and its result once for each kernel that reads a part.
# That is 0.3 GB of traffic in the forward pass of llama3-8b at 2x4096.
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
            # Triton products would fuse what surrounds them. Without cuBLAS's rewriter as well, products would be naive
            # loops, hundreds of times slower, which is no fair baseline.
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
            # The default of 32 MiB does not merge products of this size.
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
            name="triton",
            description=(
                "Triton kernels at every site that has one: norms, products with what follows them, and the softmax of "
                "attention's scores, which are written out."
            ),
            plan=FusionPlan(**dict.fromkeys(SITES, "triton")),
            compiler_options=_PRODUCTS_APART,
            requires=("block", "cuda", "triton"),
        ),
        Strategy(
            name="best",
            description="Each site by what its operation takes at this shape, as measured: our kernel or XLA.",
            plan=_BEST,
            compiler_options=_PRODUCTS_APART,
            requires=("block", "cuda", "hopper"),
        ),
        Strategy(
            name="pallas_overlap",
            description=(
                "The sites and options of best. Over a mesh, products of sequence parallel layers compute while their "
                "rows or sums travel, by copies between the GPUs of one process."
            ),
            plan=_BEST,
            compiler_options={**_PRODUCTS_APART, **BY_COPY_ENGINES},
            requires=("block", "cuda", "hopper"),
            overlaps=True,
        ),
        Strategy(
            name="fused",
            description="The plain program rewritten by xlafuse.fuse, before it is differentiated.",
            fuses=True,
            requires=("cuda", "hopper"),
        ),
    )
}
"""Strategies by name, in the order of a comparison."""


def get_strategy(name: str) -> Strategy:
    """Returns the strategy called `name`; raises `UnknownNameError` with the nearest names."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UnknownNameError("strategy", name, STRATEGIES) from None


def resolve_strategies(strategies: Iterable[str | Strategy] | None) -> tuple[Strategy, ...]:
    """Returns the named or given strategies, each once, in order.

    None takes all whose packages are installed, without those that overlap: most programs are of one device.
    """
    if strategies is None:
        strategies = [each for each in STRATEGIES.values() if each.is_installed and not each.overlaps]
    resolved = (get_strategy(each) if isinstance(each, str) else each for each in strategies)
    return tuple({strategy.name: strategy for strategy in resolved}.values())
