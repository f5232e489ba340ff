"""Puts together what one remedy mends, and says in a sentence what to do and what it gives."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby

from hlo_analysis.hotspots.times import launches_of
from hlo_analysis.records import Analysis, Comparison, Hotspot, Trial
from hlo_analysis.report.formats import enumerated, format_bytes, format_change, format_us, plural
from hlo_analysis.report.ranking import ranking

_LEAST_SHARE = 0.01
"""Of the program's time: smaller hotspots are in the JSON alone."""
_LEAST_US = 0.5
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One remedy, with the hotspots that it mends."""

    hotspots: tuple[Hotspot, ...]
    """Those furthest above their need first."""
    launches: tuple[int, ...]
    layers: str
    """'layers 0 and 1' where the launches are of several, else ''."""

    @property
    def first(self) -> Hotspot:
        """Returns the largest hotspot, whose remedy the card shows."""
        return self.hotspots[0]

    @property
    def trial(self) -> Trial | None:
        """Returns the remedy's effect on the whole program, if it was tried."""
        return self.first.trial

    @property
    def is_verified(self) -> bool:
        """Whether the program was compiled with the remedy, and takes less time by the estimate."""
        return self.trial is not None and self.trial.helps

    @property
    def is_open(self) -> bool:
        """Whether there is something to do: a remedy that was not tried in vain."""
        return bool(self.first.remedy) and (self.trial is None or self.trial.helps or bool(self.trial.error))

    @property
    def excess_us(self) -> float:
        """Returns the time above the need of all its launches."""
        return sum(each.excess_us for each in self.hotspots)

    @property
    def saved_us(self) -> float:
        """Returns the time that it saves: estimated for the whole program if tried, else at most what is above need."""
        return self.trial.saved_us if self.trial is not None and self.trial.helps else self.excess_us

    @property
    def name(self) -> str:
        """Returns what to use or do, in a few words: 'attention', 'an option of XLA', 'other code'."""
        if self.first.kernel:
            return self.first.kernel
        names = {"option": "an option of XLA", "rewrite": "other code", "kernel": "a kernel"}
        return names.get(self.first.remedy_kind, "no known remedy")

    @property
    def place(self) -> str:
        """Returns where: source line and layers."""
        return ", ".join(filter(None, (self.first.source or self.first.scope, self.layers)))


def advice(analysis: Analysis) -> tuple[Advice, ...]:
    """Groups the program's hotspots by remedy.

    Waits for the host come first, then remedies whose saving is verified, then those not tried, then what was tried in
    vain and what nothing is known to help; in each group the largest saving first.
    """
    groups: dict[Hashable, list[Hotspot]] = {}
    for place, item in enumerate(listed(analysis)):
        key = item.kernel or item.options or item.remedy or place
        groups.setdefault((key, item.trial and item.trial.change, item.waits_for_host), []).append(item)
    made = [_advice(analysis, tuple(items)) for items in groups.values()]
    return tuple(
        sorted(
            made,
            key=lambda each: (not each.first.waits_for_host, not each.is_verified, not each.is_open, -each.saved_us),
        )
    )


def _advice(analysis: Analysis, items: tuple[Hotspot, ...]) -> Advice:
    launches = sorted({index for item in items for index in launches_of(item, analysis.missed)})
    layers = layers_text(analysis.launches[index].scope for index in launches)
    return Advice(hotspots=items, launches=tuple(launches), layers=layers)


_LAYER = re.compile(r"(?:^|[/_])(\d+)(?=/|$)")


def layers_text(scopes: Iterable[str]) -> str:
    """Names the layers that scopes are of: 'layers 0 and 1', 'layers 0 to 11'; '' unless there are several."""
    numbers = sorted({int(found[1]) for scope in scopes if (found := _LAYER.search(scope))})
    if len(numbers) < 2:
        return ""
    # Numbers in a row have one difference to their place.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"layers {enumerated(parts)}"


def listed(analysis: Analysis) -> tuple[Hotspot, ...]:
    """Returns the hotspots with at least 1 % of the program's time above what is needed, and calls to the host."""
    least = max(_LEAST_SHARE * program_us(analysis), _LEAST_US)
    found = [each for each in analysis.hotspots if each.excess_us >= least or each.waits_for_host]
    return tuple(sorted(found, key=lambda each: not each.waits_for_host))


def program_us(analysis: Analysis) -> float:
    """Sums the launches of one run in µs, measured where known."""
    return sum(launch.run_us for launch in analysis.launches)


def share_text(analysis: Analysis, microseconds: float) -> str:
    """Formats a time as a share of the program's: '18 %'."""
    share = 100 * microseconds / (program_us(analysis) or 1)
    return f"{share:.0f} %" if share >= 10 else f"{share:.1f} %"


def effect_text(analysis: Analysis, item: Advice) -> str:
    """Formats what a remedy gives: '−780 µs (18 %), −2.9 GB, −26 launches' if verified, else the time above need."""
    trial = item.trial
    if item.first.waits_for_host:
        return "a wait for the host that nothing here estimates"
    if trial is None or not trial.helps:
        return f"{format_us(item.excess_us)} ({share_text(analysis, item.excess_us)}) above need"
    amounts = (
        (trial.saved_us, f"{format_us(abs(trial.saved_us))} ({share_text(analysis, abs(trial.saved_us))})"),
        (trial.saved_bytes, format_bytes(abs(trial.saved_bytes))),
        (trial.saved_launches, plural(abs(trial.saved_launches), "launch")),
    )
    return ", ".join(f"{'−' if saved > 0 else '+'}{text}" for saved, text in amounts if saved)


def most_text(item: Advice) -> str:
    """Formats the time where the data is the worst: '1.50 ms at worst'; '' where data does not matter."""
    most = sum(each.most_us or 0.0 for each in item.hotspots)
    return f"{format_us(most)} at worst" if most else ""


def launches_text(analysis: Analysis, indices: Iterable[int]) -> str:
    """Names the launches that take longest: '12 launches: #3 fusion.7 (triton), #9 fusion.8 (triton), …'."""
    found = [analysis.launches[index] for index in indices]
    longest = sorted(found, key=lambda launch: -launch.run_us)[:_MOST_NAMED]
    named = ", ".join(f"#{each.index} {each.name} ({each.kind})" for each in longest)
    more = f", {len(found) - len(longest)} more" if len(found) > len(longest) else ""
    return f"{plural(sum(each.repeat for each in found), 'launch')}: {named}{more}"


def headline(comparison: Comparison) -> str:
    """Says what to do and what it gives, with code in backquotes; what the program is, where there is nothing to do."""
    base = comparison[comparison.baseline]
    analysis = base.analysis
    if analysis is None:
        return f"{base.name} could not be analysed: {base.error}"
    ranked = ranking(comparison)
    best, time_of = ranked.winner, ranked.time_of
    found = advice(analysis)
    helping = [each for each in found if each.is_verified]
    whole = base.measured_us or analysis.estimated_us
    how = "estimated" if base.measured_us is None else "measured"
    if best is not None and best is not base and best.analysis is not None:
        before, after = time_of(base), time_of(best)
        sites = {site.operation for site in best.sites if site.outcome == "taken"}
        made = [each.name for each in helping if each.name in sites]
        named = list(dict.fromkeys([*made, *sorted(sites)]))
        means = f"`{best.call}`" if best.call and "\n" not in best.call else best.name
        return f"{_from_to(before, after, ranked.how.partition(',')[0])} with {means}{_makers(named)}."
    if helping:
        after = analysis.estimated_us - helping[0].saved_us
        return f"{_from_to(analysis.estimated_us, after, 'estimated')} with {_remedy(helping[0])}."
    open_ones = [each for each in found if each.is_open and not each.first.waits_for_host]
    if open_ones:
        first = open_ones[0]
        more = "; more remedies are below" if len(open_ones) > 1 else ""
        return (
            f"Up to {format_us(first.excess_us)} of {format_us(whole)} ({share_text(analysis, first.excess_us)}, "
            f"{first.first.how}) can go with {_remedy(first)}, not tried{more}."
        )
    return f"{format_us(whole)} ({how}), and no remedy is known that makes it less."


def winning_code(comparison: Comparison) -> str:
    """Returns code that runs the fastest strategy, with imports; '' where the headline says it already."""
    best = ranking(comparison).winner
    if best is None or best.name == comparison.baseline or "\n" not in best.call:
        return ""
    return f"import jax\nimport xlafuse\n\n{best.call}"


def _remedy(item: Advice) -> str:
    if item.first.options and not item.first.kernel:
        return " and ".join(f"`{name}={value}`" for name, value in item.first.options)
    return f"{item.name} at {item.place}" if item.place else item.name


def _makers(names: list[str]) -> str:
    if not names:
        return ""
    if len(names) == 1:
        return f"; {names[0]} makes it"
    shown = names[:_MOST_NAMED]
    most = "make most of it" if len(names) > len(shown) else "make it"
    return f"; {enumerated(shown)} {most}"


def _from_to(before: float, after: float, how: str) -> str:
    first, last = format_us(before), format_us(after)
    if first.split()[1] == last.split()[1]:
        first = first.split()[0]
    return f"{first} → {last} ({how}, {format_change(after, before)})"
