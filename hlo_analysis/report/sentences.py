"""The sentences and short texts that every view shares."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.records import Analysis, Comparison, Memory, MissedFusion, Numerics, Provenance, StrategyResult
from hlo_analysis.report.formats import Unit, format_bytes, format_change, plural
from hlo_analysis.report.similar_layers import without_numbers

AT_LEAST = "≥\N{NO-BREAK SPACE}"

TARGET_NAMES = {
    "h200": "an H200",
    "h100": "an H100",
    "a100": "an A100",
    "b200": "a B200",
    "a6000": "an RTX A6000",
    "rtx-pro-6000": "an RTX PRO 6000",
    "cpu": "this CPU",
    "attached": "the attached GPU",
}


def target_name(name: str) -> str:
    """The target as it stands in a sentence."""
    return TARGET_NAMES.get(name, name)


def gemm_choice(provenance: Provenance) -> str:
    """How matrix-product kernels were chosen: 'replayed 15 of 15', 'default (no autotuning)', ..."""
    match provenance.gemm_choice:
        case "replayed":
            return f"replayed {provenance.autotune_hits} of {provenance.autotune_lookups}"
        case "attached":
            return "attached (autotuned on this GPU)"
        case "default":
            return "default (no autotuning)"
        case _ if provenance.mode == "unknown" and provenance.target != "cpu":
            return "not known"  # a folder that somebody else dumped
        case _:
            return "none to choose"


def numerics_text(numerics: Numerics | None) -> str:
    """'1.1× baseline error', preceded by FAILED where it exceeds the bound; '' where nothing was checked."""
    if numerics is None:
        return ""
    if not numerics.baseline_error:
        ratio = "exact" if not numerics.error else f"error {numerics.error:.2g}, baseline exact"
    else:
        ratio = f"{numerics.error / numerics.baseline_error:.2f}× baseline error"
    return ratio if numerics.passed else f"FAILED: {ratio}"


def scope_name(scope: str) -> str:
    """A scope for people: its last part, or words where the program named none."""
    last = scope.rsplit("/", 1)[-1].replace("*", "").strip("_").replace("_", " ")
    return last if scope else "launches without a scope"


def saved_percent(comparison: Comparison, name: str) -> str:
    """The share of the unfused strategy's HBM traffic that a strategy saves, in percent."""
    share = comparison.saved_share(name)
    return "–" if share is None else f"{share:.0%}"


def peak_bytes(analysis: Analysis) -> int | None:
    """Peak memory; None where there was no buffer assignment to count it from."""
    return None if analysis.memory == Memory() else analysis.memory.peak_bytes


def shared_argument(item: MissedFusion) -> str | None:
    """'argument x.1' for a value that several launches read and none wrote; None where a launch wrote it.

    The record then names the first consumer in place of a producer.
    """
    if len(item.consumers) < 2 or item.producer not in item.consumers:  # alone, a loop's launch that reads its own
        return None
    return f"{'constant' if item.value.startswith('constant') else 'argument'} {item.value}"


def location(analysis: Analysis, item: MissedFusion) -> str:
    """The scope of a missed fusion, else its source line; a value that XLA inserted has its consumer's line."""
    sources = (analysis.launches[index].source for index in (item.producer, *item.consumers))
    return item.scope or next(filter(None, sources), "no scope")


def intermediates_by_scope(analysis: Analysis) -> dict[str, int]:
    """Sums the bytes that values move between launches by producing scope, largest first; layers count as one scope."""
    totals: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    for value in analysis.intermediates:
        scope = analysis.launches[value.producer].scope
        plain = without_numbers(scope)
        layers.setdefault(plain, set()).add(scope)
        totals[plain] = totals.get(plain, 0) + value.bytes_moved
    # The number of a layer is left out where the sum is of several layers.
    names = {plain: next(iter(found)) if len(found) == 1 else plain for plain, found in layers.items()}
    return {names[plain]: size for plain, size in sorted(totals.items(), key=lambda item: -item[1])}


def caveats(comparison: Comparison) -> list[tuple[tuple[str, ...], str]]:
    """What the captures could not know: each sentence once, with the strategies that it is about, or () for all."""
    about: dict[str, list[str]] = {}
    done = [(result.name, result.analysis) for result in comparison.strategies if result.analysis is not None]
    for name, analysis in done:
        for note in analysis.provenance.notes:
            about.setdefault(note, []).append(name)
    return [(() if len(names) == len(done) else tuple(names), note) for note, names in about.items()]


def verdict(comparison: Comparison) -> str:
    """One or two sentences about the baseline and the strategy with the lowest roofline time."""
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> tuple[str, ...]:
    """The sentences of the verdict: first the baseline's."""
    base = comparison[comparison.baseline]
    if base.analysis is None:
        return (f"{base.name} could not be analysed: {base.error}",)
    return tuple(filter(None, (_baseline_sentence(comparison, base.analysis), _best_sentence(comparison))))


def _baseline_sentence(comparison: Comparison, analysis: Analysis) -> str:
    # A single program is named by its label.
    is_plain = comparison.baseline == "xla" or len(comparison.strategies) == 1
    subject = "XLA" if is_plain else comparison.baseline
    parts = [
        f"On {target_name(analysis.provenance.target)}, {subject} makes {plural(analysis.launch_count, 'launch')} "
        f"of this program"
    ]
    if comparison.unfused not in (None, comparison.baseline):
        parts.append(f"fusion saves {saved_percent(comparison, comparison.baseline)} of the unfused HBM traffic")
    moved = analysis.traffic.intermediate_bytes
    if not moved:
        parts.append("no value goes through HBM between launches")
    else:
        where = ""
        scopes = intermediates_by_scope(analysis)
        if any(scopes):  # else the program names no scope
            scope, largest = next(iter(scopes.items()))
            share = largest / sum(scopes.values())
            amount = "most of it" if share > 0.5 else f"{share:.0%} of it"
            where = f", {amount} from {scope_name(scope)}"
        parts.append(f"{format_bytes(moved)} still goes through HBM between launches{where}")
    return "; ".join(parts) + "."


def is_lower_bound(analysis: Analysis, base: Analysis | None) -> bool:
    """Whether a roofline time omits matrix products that the baseline counts, those inside opaque kernels."""
    counted = 0 if base is None else base.traffic.flops
    return analysis.has_opaque_kernels and analysis.traffic.flops < counted / 2


def roofline_text(analysis: Analysis, base: Analysis | None, unit: Unit) -> str:
    """The roofline time in `unit`, with "≥" where it omits some of the work."""
    return (AT_LEAST if is_lower_bound(analysis, base) else "") + unit.show(analysis.roofline_us)


def _best_sentence(comparison: Comparison) -> str:
    """The strategy with the lowest roofline time, where that is another than the baseline."""
    base = comparison[comparison.baseline]
    done: list[tuple[StrategyResult, Analysis]] = [
        (result, result.analysis) for result in comparison.strategies if result.analysis is not None
    ]
    if base.analysis is None or len(done) < 2:
        return ""
    partial = [result.name for result, analysis in done if is_lower_bound(analysis, base.analysis)]
    done = [(result, analysis) for result, analysis in done if result.name not in partial]
    return " ".join(filter(None, [_lowest_roofline(base.analysis, done), _partial_sentence(partial)]))


def _partial_sentence(names: Sequence[str]) -> str:
    if not names:
        return ""
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"The roofline time of {listed} is a lower bound: XLA cannot see the matrix products in their kernels."


def _lowest_roofline(base: Analysis, done: Sequence[tuple[StrategyResult, Analysis]]) -> str:
    if len(done) < 2:
        return ""
    best, analysis = min(done, key=lambda item: item[1].roofline_us)
    if analysis.roofline_us >= base.roofline_us * 0.995:
        if len(done) == 2:
            other = next(result.name for result, other in done if other is not base)
            return f"{other} has no lower roofline time (estimated)."
        return f"None of the other {len(done) - 1} strategies has a lower roofline time (estimated)."
    traffic = format_change(analysis.traffic.bytes, base.traffic.bytes)
    time = format_change(analysis.roofline_us, base.roofline_us)
    return (
        f"Lowest roofline of the {len(done)} strategies: {best.name}, {time} estimated time and {traffic} HBM traffic "
        f"in {plural(analysis.launch_count, 'launch')}."
    )
