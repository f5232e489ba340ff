"""Writes the sentences and short texts that all views share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hlo_analysis.records import (
    Analysis,
    Comparison,
    Memory,
    MissedFusion,
    Numerics,
    Provenance,
    SiteRecord,
    StrategyResult,
    Trial,
)
from hlo_analysis.report.formats import Unit, format_bytes, format_change, format_us, plural
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
    """Returns the target's name as used in a sentence."""
    return TARGET_NAMES.get(name, name)


def seconds_to_compile(comparison: Comparison) -> str:
    """Formats the seconds that each strategy took to lower and to compile; '' if none is known.

    For example 'xla 0.1 + 2.3, best 2.0 + 1.5'.
    """
    done = [(result.name, result.analysis.provenance) for result in comparison.strategies if result.analysis]
    known = [(name, origin.lower_seconds, origin.compile_seconds) for name, origin in done if origin.compile_seconds]
    return ", ".join(f"{name} {lowering:.1f} + {compiling:.1f}" for name, lowering, compiling in known)


def gemm_choice(provenance: Provenance) -> str:
    """Describes how matrix-product kernels were chosen: 'replayed 15 of 15', 'default (no autotuning)', ..."""
    match provenance.gemm_choice:
        case "replayed":
            return f"replayed {provenance.autotune_hits} of {provenance.autotune_lookups}"
        case "attached":
            return "attached (autotuned on this GPU)"
        case "default":
            return "default (no autotuning)"
        case _ if provenance.mode == "unknown" and provenance.target != "cpu":
            return "not known"  # a dump that another tool made
        case _:
            return "none to choose"


def numerics_text(numerics: Numerics | None) -> str:
    """Formats '1.1× baseline error', after FAILED if it exceeds the bound; '' if nothing was checked."""
    if numerics is None:
        return ""
    if not numerics.baseline_error:
        ratio = "exact" if not numerics.error else f"error {numerics.error:.2g}, baseline exact"
    else:
        ratio = f"{numerics.error / numerics.baseline_error:.2f}× baseline error"
    return ratio if numerics.passed else f"FAILED: {ratio}"


def scope_name(scope: str) -> str:
    """Returns a readable scope: its last part, or a phrase if the program named none."""
    last = scope.rsplit("/", 1)[-1].replace("*", "").strip("_").replace("_", " ")
    return last if scope else "launches without a scope"


def saved_percent(comparison: Comparison, name: str) -> str:
    """Formats the share of the unfused strategy's HBM traffic that a strategy saves, in percent."""
    share = comparison.saved_share(name)
    return "–" if share is None else f"{share:.0%}"


def peak_bytes(analysis: Analysis) -> int | None:
    """Returns the peak memory, or None without a buffer assignment."""
    return None if analysis.memory == Memory() else analysis.memory.peak_bytes


def shared_argument(item: MissedFusion) -> str | None:
    """Returns 'argument x.1' for a value that several launches read and none wrote; None if a launch wrote it.

    The record of such a value has the first consumer in place of a producer.
    """
    if (
        len(item.consumers) < 2 or item.producer not in item.consumers
    ):  # a single consumer is a launch in a loop that reads its own value
        return None
    return f"{'constant' if item.value.startswith('constant') else 'argument'} {item.value}"


def location(analysis: Analysis, item: MissedFusion) -> str:
    """Returns the scope of a missed fusion, or its source line; for a value that XLA inserted, its consumer's line."""
    sources = (analysis.launches[index].source for index in (item.producer, *item.consumers))
    return item.scope or next(filter(None, sources), "no scope")


_SHOWN_US = 0.05
"""Shorter times are shown as 0.0 µs."""


def trial_text(trial: Trial) -> str:
    """Describes a trial, or why it gained nothing.

    For example 'rms_norm by xlafuse.fuse: 2 launches and 67 MB fewer, 18 µs less (estimated)'.
    """
    if trial.error:
        return f"{trial.change}: {trial.error}"
    amounts = [
        (trial.saved_launches, plural(abs(trial.saved_launches), "launch")),
        (trial.saved_bytes, format_bytes(abs(trial.saved_bytes))),
    ]
    fewer = " and ".join(text for saved, text in amounts if saved > 0)
    more = " and ".join(text for saved, text in amounts if saved < 0)
    time = f"{format_us(abs(trial.saved_us))} {'less' if trial.saved_us > 0 else 'more'} (estimated)"
    parts = [fewer and f"{fewer} fewer", more and f"{more} more", time if abs(trial.saved_us) >= _SHOWN_US else ""]
    effect = ", ".join(filter(None, parts)) or "the program stays the same"
    return f"{trial.change}: {effect if trial.helps else f'no gain ({effect})'}"


def is_advice(item: MissedFusion) -> bool:
    """Whether to show the remedy as advice: not if it was tried and does not help."""
    return item.trial is None or item.trial.helps or bool(item.trial.error)


def site_texts(sites: Sequence[SiteRecord]) -> dict[str, list[str]]:
    """Returns lines such as 'model.py:12: rms_norm by mosaic', by the sites' outcome; equal ones once, counted."""
    counts = Counter(sites)

    def text(site: SiteRecord) -> str:
        times = f" ({counts[site]} times)" if counts[site] > 1 else ""
        if site.outcome == "taken":
            return f"{site.source}: {site.operation} by {site.implementation}{times}"
        if site.outcome == "left to XLA":
            return f"{site.source}: {site.operation} left to XLA{times}"
        return f"{site.source}: no {site.operation}: {site.reason}{times}"

    outcomes = ("taken", "left to XLA", "refused")
    return {outcome: [text(site) for site in counts if site.outcome == outcome] for outcome in outcomes}


def intermediates_by_scope(analysis: Analysis) -> dict[str, int]:
    """Sums the bytes that values move between launches by producing scope, largest first; layers count as one scope."""
    totals: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    for value in analysis.intermediates:
        scope = analysis.launches[value.producer].scope
        plain = without_numbers(scope)
        layers.setdefault(plain, set()).add(scope)
        totals[plain] = totals.get(plain, 0) + value.avoidable_bytes
    # The layer's number is left out if several layers contribute to the sum.
    names = {plain: next(iter(found)) if len(found) == 1 else plain for plain, found in layers.items()}
    return {names[plain]: size for plain, size in sorted(totals.items(), key=lambda item: -item[1])}


def caveats(comparison: Comparison) -> list[tuple[tuple[str, ...], str]]:
    """Lists the limits of the captures: each sentence once, with the strategies that it concerns, or () for all."""
    about: dict[str, list[str]] = {}
    done = [(result.name, result.analysis) for result in comparison.strategies if result.analysis is not None]
    for name, analysis in done:
        for note in analysis.provenance.notes:
            about.setdefault(note, []).append(name)
    return [(() if len(names) == len(done) else tuple(names), note) for note, names in about.items()]


def verdict(comparison: Comparison) -> str:
    """Returns one or two sentences about the baseline and the strategy with the lowest roofline time."""
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> tuple[str, ...]:
    """Returns the sentences of the verdict, the baseline's first."""
    base = comparison[comparison.baseline]
    if base.analysis is None:
        return (f"{base.name} could not be analysed: {base.error}",)
    return tuple(filter(None, (_baseline_sentence(comparison, base.analysis), _best_sentence(comparison))))


def _baseline_sentence(comparison: Comparison, analysis: Analysis) -> str:
    # A single program is named by its label.
    is_plain = comparison.baseline == "xla" or len(comparison.strategies) == 1
    memory = analysis.device.memory_name
    subject = "XLA" if is_plain else comparison.baseline
    parts = [
        f"On {target_name(analysis.provenance.target)}, {subject} makes {plural(analysis.launch_count, 'launch')} "
        f"of this program"
    ]
    if comparison.unfused not in (None, comparison.baseline):
        parts.append(f"fusion saves {saved_percent(comparison, comparison.baseline)} of the unfused {memory} traffic")
    moved = analysis.traffic.intermediate_bytes
    if not moved:
        parts.append(f"no value goes through {memory} between launches")
    else:
        where = ""
        scopes = intermediates_by_scope(analysis)
        if any(scopes):  # otherwise the program names no scope
            scope, largest = next(iter(scopes.items()))
            share = largest / sum(scopes.values())
            amount = "most of it" if share > 0.5 else f"{share:.0%} of it"
            where = f", {amount} from {scope_name(scope)}"
        parts.append(f"{format_bytes(moved)} still goes through {memory} between launches{where}")
    return "; ".join(parts) + "."


_PRODUCT_KINDS = ("cublas", "cublaslt", "cudnn", "triton_gemm")


def is_lower_bound(analysis: Analysis, base: Analysis | None) -> bool:
    """Whether a roofline time omits matrix products that the baseline counts, those inside opaque kernels."""
    products = () if base is None else (launch for launch in base.launches if launch.kind in _PRODUCT_KINDS)
    counted = sum(launch.flops * launch.repeat for launch in products)
    return analysis.has_opaque_kernels and analysis.traffic.flops < counted / 2


def roofline_text(analysis: Analysis, base: Analysis | None, unit: Unit) -> str:
    """Formats the roofline time in `unit`, with "≥" if it omits some of the work."""
    return (AT_LEAST if is_lower_bound(analysis, base) else "") + unit.show(analysis.roofline_us)


def estimate_text(analysis: Analysis, base: Analysis | None, unit: Unit) -> str:
    """Formats the estimated time in `unit`, with "≥" if it omits some of the work."""
    return (AT_LEAST if is_lower_bound(analysis, base) else "") + unit.show(analysis.estimated_us)


def _best_sentence(comparison: Comparison) -> str:
    """Describes the strategy with the lowest roofline time, if it is not the baseline."""
    base = comparison[comparison.baseline]
    done: list[tuple[StrategyResult, Analysis]] = [
        (result, result.analysis) for result in comparison.strategies if result.analysis is not None
    ]
    if base.analysis is None or len(done) < 2:
        return ""
    partial = [result.name for result, analysis in done if is_lower_bound(analysis, base.analysis)]
    done = [(result, analysis) for result, analysis in done if result.name not in partial]
    return " ".join(filter(None, [_lowest_roofline(base.name, base.analysis, done), _partial_sentence(partial)]))


def _partial_sentence(names: Sequence[str]) -> str:
    if not names:
        return ""
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"The roofline time of {listed} is a lower bound: XLA cannot see the matrix products in their kernels."


def _lowest_roofline(name: str, base: Analysis, done: Sequence[tuple[StrategyResult, Analysis]]) -> str:
    if len(done) < 2:
        return ""
    best, analysis = min(done, key=lambda item: item[1].roofline_us)
    if analysis.roofline_us >= base.roofline_us * 0.995:
        if len(done) == 2:
            other = next(result.name for result, _ in done if result.name != name)
            return f"{other} has no lower roofline time (estimated)."
        return f"None of the other {len(done) - 1} strategies has a lower roofline time (estimated)."
    traffic = format_change(analysis.traffic.bytes, base.traffic.bytes)
    time = format_change(analysis.roofline_us, base.roofline_us)
    return (
        f"Lowest roofline of the {len(done)} strategies: {best.name}, {time} estimated time and {traffic} HBM traffic "
        f"in {plural(analysis.launch_count, 'launch')}."
    )
