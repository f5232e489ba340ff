"""Study of the same programs compiled for four GPUs, and where XLA's decisions differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from hlo_analysis.targets import load_target
from xlafuse.studies.attention import plain
from xlafuse.studies.products import bf16, dot, rms
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import UNFUSED, Case, Variant, count_variants

_TARGETS = ("a100", "h100", "h200", "b200")
_APART = "unfused"


def _cases() -> list[Case]:
    def mlp(x, w, bias):
        return jax.nn.gelu(dot(x, w) + bias, approximate=True)

    def residual(x, stream, scale):
        return rms(x + stream, scale), x + stream

    programs = {
        "attention, 4096 tokens": (plain, (jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16),) * 3),
        "residual and RMSNorm": (residual, (bf16(8192, 4096), bf16(8192, 4096), bf16(4096))),
        "product, bias, GELU": (mlp, (bf16(512, 4096), bf16(4096, 16384), bf16(16384))),
    }
    return [
        Case(
            name=name,
            arguments=arguments,
            variants={"XLA": Variant(function=function), _APART: Variant(function=function, options=UNFUSED)},
        )
        for name, (function, arguments) in programs.items()
    ]


def _count(target: str) -> Iterator[Row | str]:
    """Counts for all four GPUs, whatever the target."""
    for each in _TARGETS:
        for row in count_variants(_cases(), each):
            if isinstance(row, Row):
                yield replace(row, variant=each if row.variant == "XLA" else f"{each}, {_APART}")
            else:
                yield f"{each}: {row}"


def _conclude(result: StudyResult) -> Conclusion:
    differing = [
        case
        for case in result.cases
        if len({(result.value(case, t, "launches"), result.value(case, t, "bytes")) for t in _TARGETS}) > 1
    ]
    gains = {
        target: [result.ratio(case, target, f"{target}, {_APART}", "roofline_us") for case in result.cases]
        for target in _TARGETS
    }
    intensity = {}
    for target in _TARGETS:
        device = load_target(target).device
        intensity[target] = dict(device.matrix_flops)["bf16"] / device.memory_bandwidth
    ordered = sorted(_TARGETS, key=lambda target: intensity[target])
    mean = {target: sum(values) / len(values) for target, values in gains.items()}
    shown = ", ".join(f"{target} {mean[target]:.2f} × at {intensity[target]:.0f} FLOP/byte" for target in ordered)
    launches = "; ".join(
        f"{case}: " + ", ".join(f"{t} {result.value(case, t, 'launches'):.0f}" for t in _TARGETS) for case in differing
    )
    rises = [mean[target] for target in ordered] == sorted(mean.values())
    return Conclusion(
        sentences=(
            f"Of {len(result.cases)} programs {len(differing)} become different launches or bytes on different GPUs"
            + (f" (launches: {launches})." if differing else "."),
            f"By the roofline, fusion gains in the mean: {shown}.",
            "The decisions are XLA's cost model's, which is given each GPU's bandwidth, clock and multiprocessors; "
            "product kernels are replayed for the H200 and XLA's default elsewhere, which differs by itself.",
        ),
        findings=(
            Finding(
                ours=shown,
                verdict="holds" if rises else "does not hold",
                reason="By the roofline: where memory bounds both forms, both shrink alike with its bandwidth.",
            ),
        ),
    )


STUDY = Study(
    name="targets",
    title="Four GPUs",
    claims=(
        Claim(
            "Fusion matters more the wider the gap between arithmetic and memory (A100: 312 TFLOP/s, 2 TB/s)",
            "no figure",
            "GPU MODE lecture on fusing kernels; Fused Kernels in LLMs",
        ),
    ),
    count=_count,
    conclude=_conclude,
    quantity=("roofline_us", "µs by the roofline"),
)
