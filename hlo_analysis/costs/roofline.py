"""Computes the roofline time of a launch on a device, and reads the estimate of XLA's own cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hlo_analysis.costs.flops import Flops
from hlo_analysis.hlo import Instruction
from hlo_analysis.records import Device, LaunchKind

Limiter = Literal["memory", "compute", "link", "overhead"]

_GEMM_TILING_OPTION = "xla_gpu_experimental_cost_model_gemm_tiling_default"
# Beyond this, XLA's model has given up rather than estimated: it says 9e8 µs for a softmax that takes 15.
_UNUSABLE_US = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Time in µs by each resource; `time_us` includes the launch overhead."""

    memory_us: float
    compute_us: float
    overhead_us: float
    link_us: float = 0.0

    @property
    def time_us(self) -> float:
        """Returns the roofline time: memory, compute and links overlap perfectly, the overhead with none of them."""
        return max(self.memory_us, self.compute_us, self.link_us) + self.overhead_us

    @property
    def limiter(self) -> Limiter:
        """Returns the largest of the four."""
        if self.overhead_us > max(self.memory_us, self.compute_us, self.link_us):
            return "overhead"
        if self.link_us > max(self.memory_us, self.compute_us):
            return "link"
        return "memory" if self.memory_us >= self.compute_us else "compute"


def bound(bytes_moved: int, flops: Flops, device: Device, link_bytes: int = 0) -> Bound:
    """Computes the roofline of one launch: the longest of memory, compute and link time.

    HBM traffic runs at the full bandwidth, FLOPs at the dense peaks, bytes sent to other GPUs at the rate of the links.
    Matrix products run at the peak of their element type. A type that the device's matrix units do not support, and
    every other operation, runs at the vector peak. A peak that the device does not state bounds nothing.
    """
    peaks = dict(device.matrix_flops)
    compute = _seconds(flops.vector, device.vector_flops)
    for kind, count in flops.matrix:
        compute = max(compute, _seconds(count, peaks.get(_peak_name(kind), device.vector_flops)))
    return Bound(
        memory_us=_seconds(bytes_moved, device.memory_bandwidth) * 1e6,
        compute_us=compute * 1e6,
        overhead_us=device.launch_overhead_us,
        link_us=_seconds(link_bytes, device.link_bandwidth) * 1e6,
    )


def _seconds(amount: int, rate: float) -> float:
    return amount / rate if rate else 0.0


def _peak_name(element_type: str) -> str:
    """Returns the name of an element type's peak: all float8 types run alike, and signed as unsigned."""
    if element_type.startswith("f8"):
        return "f8"
    if element_type.startswith("f4"):
        return "f4"
    return {"u8": "s8", "s4": "s8", "u4": "s8", "c64": "f32", "c128": "f64"}.get(element_type, element_type)


OURS_IS_CLOSER: Mapping[str, float] = {
    "concatenate": 0.7, "cublaslt": 1.0, "loop": 0.99, "reduction": 0.81, "scatter": 1.0, "transpose": 0.95,
    "triton": 1.0,
}  # fmt: skip
"""How often the measured time is nearer to our estimate than to XLA's where the two differ by more than 2x, as a share
of the measured time: `scripts/check_estimates.py --models`."""


def supported_estimate(kind: LaunchKind, ours_us: float, xla_us: float | None) -> str:
    """Says which estimate recordings support, if the two differ by more than 2x and recordings tell; else ''."""
    share = OURS_IS_CLOSER.get(kind)
    if not xla_us or share is None or 0.5 <= ours_us / xla_us <= 2:
        return ""
    which, part = ("the report's", share) if share >= 0.5 else ("XLA's", 1 - share)
    return f"where the two differ by 2×, recordings of {kind} launches support {which} in {part:.0%} of the time"


def xla_estimate(
    instruction: Instruction, kind: LaunchKind, compiler_options: Mapping[str, str]
) -> tuple[float, str] | None:
    """Returns XLA's own estimate of a launch in µs and the model it comes from, or None if no model covers the kind.

    `backend_config.reification_cost` (with `xla_gpu_collect_cost_model_stats`) holds the answers of several models,
    most of them not meant for the kind of launch. Emitters use the unnamed model. Triton fusions use the indexing
    model, Triton products the product model if it may choose the tiling. Libraries use only the speed-of-light model.
    """
    costs = instruction.backend_config.get("reification_cost") or ()
    match kind:
        case "loop" | "reduction" | "transpose" | "concatenate" | "scatter":
            model = ""
        case "triton":
            model = "indexing-cost-model"
        case "triton_gemm":
            if str(compiler_options.get(_GEMM_TILING_OPTION, "")).lower() != "true":
                return None
            model = "experimental-gemm-cost-model"
        case "cublas" | "cublaslt":
            model = "sol"
        case _:
            return None
    for cost in costs:
        if cost.get("name", "") == model:
            time = float(cost.get("exec_time_us", 0.0))
            usable = math.isfinite(time) and 0 < time < _UNUSABLE_US
            return (time, model or "gpu-performance-model") if usable else None
    return None
