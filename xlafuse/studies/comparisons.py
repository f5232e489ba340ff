"""Sentences and findings of studies that compare a fused form with the same work in several launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xlafuse.bench.results import geometric_mean
from xlafuse.studies.records import Claim, Conclusion, Finding, Study, StudyResult, Verdict
from xlafuse.studies.variants import Case, count_variants, time_variants

UNFUSED, XLA, FUSED = "unfused", "XLA", "fused"


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A claim in numbers: the speed-up of the fused form over `over` is at least `least` and at most `most`.

    quantity: "us" for a speed-up, or "bytes" for a ratio of bytes.
    best_verdict: "holds in part" if the published figure itself cannot be right.
    reason: why our figure differs, or what it rests on.
    """

    over: str = UNFUSED
    least: float = 1.0
    most: float = float("inf")
    quantity: str = "us"
    reason: str = ""
    best_verdict: Verdict = "holds"


def claim(text: str, published: str, source: str, gain: Gain) -> tuple[Claim, Gain]:
    """Returns a claim, and its numbers."""
    return Claim(text, published, source), gain


def comparison(
    name: str,
    title: str,
    claims: Sequence[tuple[Claim, Gain]],
    cases: Callable[[], Sequence[Case]],
    *,
    reason: str = "",
) -> Study:
    """Makes a study that counts and times the `cases`; its findings are gains. reason: a third sentence."""

    def conclude(result: StudyResult) -> Conclusion:
        return Conclusion(
            sentences=(counted(result), timed(result), reason or memory_bound(result)),
            findings=tuple(finding(result, gain) for _, gain in claims),
        )

    return Study(
        name=name,
        title=title,
        claims=tuple(claim for claim, _ in claims),
        count=lambda target: count_variants(cases(), target),
        time=lambda: time_variants(cases()),
        conclude=conclude,
        cases=cases,
    )


def ratios(result: StudyResult, variant: str, over: str, quantity: str = "us") -> dict[str, float]:
    """Returns the ratio of each case that has both variants."""
    found = {case: result.ratio(case, variant, over, quantity) for case in result.cases}
    return {case: ratio for case, ratio in found.items() if ratio == ratio}


def span(values: Sequence[float]) -> str:
    """Formats the range of the values: '1.05 to 1.31 ×'."""
    low, high = (f"{value:.2f}" if value < 20 else f"{value:.0f}" for value in (min(values), max(values)))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def finding(result: StudyResult, gain: Gain) -> Finding:
    """Judges whether the claimed gain is there: in the geometric mean, in some case, or in none."""
    found = list(ratios(result, FUSED, gain.over, gain.quantity).values())
    if not found:
        return Finding(ours="not measured", verdict="not measured")
    inside = [gain.least <= ratio <= gain.most for ratio in found]
    mean = geometric_mean(found)
    verdict: Verdict = "does not hold"
    if gain.least <= mean <= gain.most:
        verdict = gain.best_verdict
    elif any(inside) or (gain.most == float("inf") and mean > 1):
        verdict = "holds in part"
    what = "fewer bytes than" if gain.quantity == "bytes" else "over"
    cases = f", {len(found)} cases, mean {mean:.2f} ×" if found[1:] else ""
    ours = f"{span(found)} ({FUSED} {what} {gain.over}{cases})"
    return Finding(ours=ours, verdict=verdict, reason=gain.reason)


def counted(result: StudyResult) -> str:
    """Writes a sentence on launches and bytes, at the largest counted case."""
    cases = [case for case in result.cases if result.value(case, XLA, "bytes") == result.value(case, XLA, "bytes")]
    if not cases:
        return "Nothing was counted."
    case = max(cases, key=lambda case: result.value(case, XLA, "bytes"))
    parts = [
        f"{name} {_launches(result.value(case, name, 'launches'))} and "
        f"{result.value(case, name, 'bytes') / 1e6:,.0f} MB"
        for name in result.variants(case)
        if result.value(case, name, "bytes") == result.value(case, name, "bytes")
    ]
    return f"Counted at {case}, launches and HBM traffic: {'; '.join(parts)}."


def _launches(count: float) -> str:
    return f"{count:,.0f} {'launch' if count == 1 else 'launches'}"


def timed(result: StudyResult) -> str:
    """Writes a sentence on the speed-ups of the fused form over the others."""
    parts = []
    for other in dict.fromkeys(name for case in result.cases for name in result.variants(case)):
        found = ratios(result, FUSED, other)
        if other != FUSED and found:
            parts.append(f"{span(list(found.values()))} over {other}")
    if not parts:
        return "It has not been timed yet."
    return f"Measured, the fused form is faster by these factors (below 1: slower): {', '.join(parts)}."


def memory_bound(result: StudyResult) -> str:
    """Writes a sentence on whether time is proportional to bytes."""
    times, traffic = ratios(result, FUSED, UNFUSED), ratios(result, FUSED, UNFUSED, "bytes")
    both = [case for case in times if case in traffic]
    if not both:
        return "Whether time follows bytes needs both counts and times."
    case = max(both, key=lambda case: result.value(case, UNFUSED, "bytes"))
    share = (times[case] - 1) / (traffic[case] - 1) if traffic[case] > 1.001 else 0.0
    why = (
        "memory sets the time of both forms"
        if share > 0.7
        else "the rest of the time is arithmetic or launching, which fusion does not take away"
    )
    return f"At {case} it moves {traffic[case]:.2f} times fewer bytes and is {times[case]:.2f} times as fast: {why}."
