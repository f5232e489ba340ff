"""Writes the sentences and short texts that all views share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hlo_analysis.records import (
    Analysis,
    Comparison,
    Memory,
    Numerics,
    Provenance,
    SiteRecord,
    StrategyResult,
    Trial,
)
from hlo_analysis.report.advice import headline
from hlo_analysis.report.formats import Unit, enumerated, format_bytes, format_change, format_us, plural
from hlo_analysis.report.ranking import Ranking, is_lower_bound, ranking
from hlo_analysis.report.similar_layers import without_numbers

_SEVERAL = re.compile(r"([a-rt-z])_?\*$")
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


def memory_name(comparison: Comparison) -> str:
    """What to call the memory that the programs' launches read and write: 'HBM', or 'memory' where there is none."""
    return next((each.analysis.device.memory_name for each in comparison.strategies if each.analysis), "HBM")


def target_name(name: str) -> str:
    """Returns the target's name as used in a sentence."""
    return TARGET_NAMES.get(name, name)


def program_name(provenance: Provenance) -> str:
    """Returns 'loss, grad'; a dump does not say how its program was made."""
    return provenance.function if provenance.mode == "unknown" else f"{provenance.function}, {provenance.mode}"


def compiled_by(provenance: Provenance) -> str:
    """Names the versions that decide what XLA makes: 'jax 0.11.2', with packages of other versions; '' if unknown."""
    versions = dict(provenance.versions)
    main = versions.get("jax", "")
    compilers = {name: version for name, version in versions.items() if name.startswith("jax") and version != main}
    return ", ".join(f"{name} {version}" for name, version in {"jax": main, **compilers}.items() if version)


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


def last_scope(scope: str) -> str:
    """Returns the last part of a scope, with those before it as long as it has no letter: 'layers/3', 'scope 3'."""
    parts = scope.split("/")
    named = next((place for place in reversed(range(len(parts))) if any(map(str.isalpha, parts[place]))), None)
    return "/".join(parts[named:]) if named is not None else scope and f"scope {scope}"


def scope_name(scope: str) -> str:
    """Returns a scope as it is used in a sentence; numbers of layers may be '*', and '' is no scope."""
    if not any(map(str.isalnum, scope)):
        return "numbered scopes" if "*" in scope else "launches without a scope or source line"
    # 'layer_*' stands for several.
    parts = (_SEVERAL.sub(r"\1s", part).replace("*", "") for part in last_scope(scope).split("/"))
    parts = (part.strip("_").replace("_", " ") for part in parts)
    return " ".join(part for part in parts if any(map(str.isalnum, part)))


def saved_percent(comparison: Comparison, name: str) -> str:
    """Formats the share of the unfused strategy's HBM traffic that a strategy saves, in percent."""
    share = comparison.saved_share(name)
    return "–" if share is None else f"{share:.0%}"


def peak_bytes(analysis: Analysis) -> int | None:
    """Returns the peak memory, or None without a buffer assignment."""
    return None if analysis.memory == Memory() else analysis.memory.peak_bytes


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


def site_texts(sites: Sequence[SiteRecord]) -> dict[str, list[str]]:
    """Returns lines such as 'model.py:12: rms_norm by mosaic', by the sites' outcome; equal ones once, counted."""
    counts = Counter(sites)

    def text(site: SiteRecord) -> str:
        times = f" ({counts[site]} times)" if counts[site] > 1 else ""
        if site.outcome == "taken":
            reason = f"; {site.reason}" if site.reason else ""
            return f"{site.source}: {site.operation} by {site.implementation}{times}{reason}"
        if site.outcome == "left to XLA":
            return f"{site.source}: {site.operation} left to XLA{times}{site.reason and f'; {site.reason}'}"
        return f"{site.source}: no {site.operation}: {site.reason}{times}"

    outcomes = ("taken", "left to XLA", "refused")
    return {outcome: [text(site) for site in counts if site.outcome == outcome] for outcome in outcomes}


def intermediates_by_scope(analysis: Analysis) -> dict[str, int]:
    """Sums the bytes that values move between launches by producing scope, largest first; layers count as one scope.

    Launches without a scope count under their source line, or ''.
    """
    totals: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    for value in analysis.intermediates:
        producer = analysis.launches[value.producer]
        plain = without_numbers(producer.scope) or producer.group
        layers.setdefault(plain, set()).add(producer.group)
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
    """Returns what to do and what it gives, and what the baseline's program is, in two to four sentences."""
    return " ".join(verdict_sentences(comparison))


def verdict_sentences(comparison: Comparison) -> tuple[str, ...]:
    """Returns the sentences of the verdict: what to do and what it gives, then what the baseline's program is."""
    base = comparison[comparison.baseline]
    if base.analysis is None:
        return (headline(comparison),)
    others = (_baseline_sentence(comparison, base.analysis), _best_sentence(comparison))
    return (headline(comparison), *filter(None, others))


def _baseline_sentence(comparison: Comparison, analysis: Analysis) -> str:
    memory = analysis.device.memory_name
    # A single program is named by its label.
    is_plain = comparison.baseline == "xla" or len(comparison.strategies) == 1
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
        parts.append(f"{format_bytes(moved)} still goes through {memory} between launches{_largest_part(analysis)}")
    return "; ".join(parts) + "."


def _largest_part(analysis: Analysis) -> str:
    """Names the scope, or the source line, that most of the traffic between launches comes from."""
    scopes = intermediates_by_scope(analysis)
    if not any(scopes):  # neither scopes nor source lines are known
        return ""
    scope, largest = next(iter(scopes.items()))
    share = largest / sum(scopes.values())
    amount = "all of it" if share == 1 else "most of it" if share > 0.5 else f"{share:.0%} of it"
    is_line = any(launch.source == scope for launch in analysis.launches)
    return f", {amount} from {scope if is_line else scope_name(scope)}"


def time_text(time_us: float, analysis: Analysis, base: Analysis | None, unit: Unit) -> str:
    """Formats the roofline time or the estimate of a program in `unit`, with "≥" if it omits some of the work."""
    return (AT_LEAST if is_lower_bound(analysis, base) else "") + unit.show(time_us)


def _best_sentence(comparison: Comparison) -> str:
    """Names the fastest strategy, if it is not the baseline, and by which times it is."""
    base = comparison[comparison.baseline]
    if base.analysis is None or sum(each.analysis is not None for each in comparison.strategies) < 2:
        return ""
    ranked = ranking(comparison)
    partial = [
        each.name for each in comparison.strategies if each.analysis and is_lower_bound(each.analysis, base.analysis)
    ]
    has_rivals = any(each is not base and each.name != comparison.unfused for each in ranked.results)
    said = [_fastest_sentence(base, ranked, has_rivals=has_rivals)]
    if partial:
        said.append(
            f"The roofline time of {enumerated(partial)} is a lower bound: XLA cannot see the matrix products in their "
            "kernels."
        )
    return " ".join(filter(None, said))


def _fastest_sentence(base: StrategyResult, ranked: Ranking, *, has_rivals: bool) -> str:
    """Says that no strategy is faster than the baseline, or how many the headline's was the fastest of."""
    best = ranked.winner
    if best is None or best.analysis is None or base.analysis is None:
        return ""
    if best is base:
        others = [result.name for result in ranked.results if result is not base]
        if not has_rivals:
            return ""
        none = f"{others[0]} is not" if len(others) == 1 else f"None of the other {len(others)} strategies is"
        return f"{none} faster ({ranked.how})."
    launches = plural(best.analysis.launch_count, "launch")
    traffic = format_change(best.analysis.traffic.bytes, base.analysis.traffic.bytes)
    return (
        f"Fastest of {len(ranked.results)} strategies ({ranked.how}): {best.name}, in {launches}, "
        f"{traffic} {base.analysis.device.memory_name} traffic."
    )
