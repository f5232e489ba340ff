"""Assertions on what XLA fuses, for tests of JAX programs.

from xlafuse.testing import assert_fused

def test_mlp_is_three_launches():
    assert_fused(mlp, x, weights, max_launches=3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hlo_analysis.records import Analysis

__all__ = ["assert_fused"]


def assert_fused(
    fn: Callable[..., Any],
    *shapes: Any,
    max_launches: int | None = None,
    max_hbm_bytes: int | None = None,
    max_peak_bytes: int | None = None,
    max_value_bytes: int | None = None,
    max_collective_bytes: int | None = None,
    no_all_gather: bool = False,
    target: str = "h200",
    mode: Literal["forward", "grad"] = "forward",
    compiler_options: Mapping[str, Any] | None = None,
) -> Analysis:
    """Asserts that XLA compiles a function to no more launches, traffic and memory than given.

    It compiles in a process of its own, for a GPU that need not be present, and never runs the function.

    Args:
        fn: any function that JAX can trace.
        *shapes: its arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
        max_launches: most launches in one run; a loop's launches count each time they run. None: no limit.
        max_hbm_bytes: most bytes read and written in one run. None: no limit.
        max_peak_bytes: most memory in use at once, arguments and results included. None: no limit.
        max_value_bytes: largest array that one launch writes for others to read. None: no limit.
        max_collective_bytes: most bytes that one GPU sends to others in one run. None: no limit. How a program is cut
            over several GPUs, its arguments say: `jax.ShapeDtypeStruct`s with a `sharding`.
        no_all_gather: whether no array may be gathered from several GPUs.
        target: the GPU to compile for; see `xlafuse targets`.
        mode: "forward", or "grad" for the gradients with respect to all floating-point arguments too.
        compiler_options: XLA's options by name.

    Returns the analysis, for further assertions.

    Raises:
        AssertionError: a limit is exceeded; the message lists the launches, their source lines, and why they are
            separate.
        ValueError: no limit is given.
        CaptureError: the function does not trace or compile.
    """
    from hlo_analysis.budget import Limits, excesses, responsible

    limits = Limits(
        max_launches=max_launches,
        max_hbm_bytes=max_hbm_bytes,
        max_peak_bytes=max_peak_bytes,
        max_value_bytes=max_value_bytes,
        max_collective_bytes=max_collective_bytes,
        no_all_gather=no_all_gather,
    )
    if limits.is_none:
        raise ValueError(
            "assert_fused: expected max_launches, max_hbm_bytes, max_peak_bytes, max_value_bytes, max_collective_bytes "
            "or no_all_gather, got none"
        )
    from hlo_analysis.report.budget import excess_text, responsible_lines
    from xlafuse.compilation import compiled

    analysis = compiled(fn, *shapes, target=target, mode=mode, compiler_options=compiler_options)
    lines: list[str] = []
    for excess in excesses(analysis, limits):
        lines.append(f"{analysis.label} on {target}: {excess_text(excess)}:")
        lines += responsible_lines(responsible(analysis, excess))
    if lines:
        raise AssertionError("\n".join(lines))
    return analysis


def __dir__() -> list[str]:
    return sorted(__all__)
