"""Compares two files of results and lists medians that differ by more than noise."""

from __future__ import annotations

from xlafuse.bench.results import Measured, Results, ResultsError, short_spec

LEAST = 0.02
"""Smallest relative change that counts; a kernel's median varies by this much between two visits."""


def compare(old: Results, new: Results) -> tuple[list[str], int]:
    """Formats what moved, largest first, with XLA's change on the same shape; also counts what of ours is slower.

    XLA's change shows the effect of clocks, power and versions. Variants are left out. If a file has several
    measurements of a shape, the last one counts.

    Raises:
        ResultsError: the files are from different kinds of GPU or share no measurement.
    """
    kinds = [{run.environment.device_kind for run in each.runs} for each in (old, new)]
    if kinds[0] != kinds[1]:
        raise ResultsError(f"measured on {', '.join(kinds[0])} and on {', '.join(kinds[1])}: expected one kind of GPU")
    before, after = (
        {(*s.key, c.name): c for s in each.shapes for c in s.candidates if c.kind != "variant"} for each in (old, new)
    )
    changes = {
        key: after[key].timing.median_us / was.timing.median_us - 1 for key, was in before.items() if key in after
    }
    if not changes:
        raise ResultsError("no operation, shape and candidate was measured in both files")
    moved = [
        key for key, change in changes.items() if abs(change) > LEAST and _is_beyond_noise(before[key], after[key])
    ]
    lines, slower = [], 0
    for op, spec, phase, name in sorted(moved, key=lambda key: -abs(changes[key])):
        key = op, spec, phase, name
        is_slower = changes[key] > 0 and _is_ours(after[key])
        slower += is_slower
        xla = changes.get((op, spec, phase, "xla")) if name != "xla" else None
        lines.append(
            f"{f'{op} {phase} {short_spec(spec)} {name}':<72} {before[key].timing.median_us:10.2f} → "
            f"{after[key].timing.median_us:10.2f} µs  {changes[key]:+7.1%}"
            f"{'' if xla is None else f'  (xla {xla:+.1%})'}{'  SLOWER' if is_slower else ''}"
        )
    return [*lines, f"{len(changes)} compared, {len(moved)} moved beyond noise, {slower} of ours slower"], slower


def _is_ours(candidate: Measured) -> bool:
    """Tells whether the candidate is one of our kernels or a strategy with them, not XLA or another library."""
    if candidate.kind == "strategy":
        return not candidate.name.startswith(("xla", "unfused"))
    return candidate.kind == "default" or (
        candidate.kind == "implementation" and candidate.name in ("mosaic", "triton")
    )


def _is_beyond_noise(one: Measured, other: Measured) -> bool:
    pairs = ((one.timing, other.timing), (other.timing, one.timing))
    return all(not a.p20_us <= b.median_us <= a.p80_us for a, b in pairs)
