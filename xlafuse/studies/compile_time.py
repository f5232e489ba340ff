"""Study of compile time: what a strategy costs to compile, and after how many steps it pays off."""

from __future__ import annotations

import math
from collections.abc import Iterator

from xlafuse.studies.recorded import NOTE, blocks
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult

_BASE, _OURS = "xla", "best"


def _count(target: str) -> Iterator[Row | str]:
    """Returns the rows recorded on an H200, whatever the target."""
    for block in blocks():
        base = block.strategies.get(_BASE)
        for name, measured in block.strategies.items():
            values = {"us": measured.kernel_us, "wall_us": measured.wall_us, "peak_bytes": measured.peak_bytes}
            values["compile_s"] = measured.compile_seconds
            known = {quantity: value for quantity, value in values.items() if value is not None}
            if base and base.kernel_us and base.compile_seconds and name != _BASE and "compile_s" in known:
                more, less = known["compile_s"] - base.compile_seconds, base.kernel_us - known["us"]
                if less > 0:
                    known["break_even_steps"] = max(0.0, more * 1e6 / less)
            yield Row(case=block.title, variant=name, values=known, note=NOTE)


def _conclude(result: StudyResult) -> Conclusion:
    steps = {case: result.value(case, _OURS, "break_even_steps") for case in result.cases}
    paid = {case: value for case, value in steps.items() if not math.isnan(value)}
    never = [case for case in result.cases if case not in paid]
    soonest, latest = (min(paid, key=paid.__getitem__), max(paid, key=paid.__getitem__)) if paid else ("", "")
    seconds = [
        (result.value(case, _BASE, "compile_s"), result.value(case, _OURS, "compile_s")) for case in result.cases
    ]
    base, ours = max(a for a, _ in seconds), max(b for _, b in seconds)
    case = max(result.cases, key=lambda case: result.value(case, _BASE, "peak_bytes"))
    memory = tuple(result.value(case, name, "peak_bytes") / 1e9 for name in (_BASE, _OURS))
    return Conclusion(
        sentences=(
            f"One layer compiles in up to {base:.1f} s as XLA has it and in up to {ours:.1f} s with our kernels.",
            f"That has paid for itself after {paid[soonest]:,.0f} steps of one layer at {soonest}, and after "
            f"{paid[latest]:,.0f} at {latest}"
            + (f"; at {', '.join(never)} it is no faster." if never else "; it pays at every recorded shape.")
            if paid
            else "It pays at no recorded shape.",
            f"Memory at {case}: {memory[0]:.2f} GB as XLA has it, {memory[1]:.2f} GB with our kernels.",
        ),
        findings=(
            Finding(
                ours=f"break-even after {paid[soonest]:,.0f} to {paid[latest]:,.0f} steps of a layer" if paid else "–",
                verdict="holds" if paid else "does not hold",
                reason="A model compiles equal layers once where they are in a scan, and a cache keeps them.",
            ),
        ),
    )


STUDY = Study(
    name="compile_time",
    title="What fusion costs to compile",
    claims=(Claim("Custom fusion pays at run time what it costs at compile time", "no figure", "Kernel Fusion"),),
    count=_count,
    conclude=_conclude,
    quantity=("compile_s", "s to compile"),
)
