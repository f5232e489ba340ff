"""Explains the verdict on an edge: XLA's reason is quoted as it is, ours stands in brackets."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.decisions import categories
from hlo_analysis.records import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A verdict with its reason. The fields are those of `records.Decision`."""

    verdict: Verdict
    reason: str
    category: str
    pass_name: str
    gain_us: float | None = None


def our_reason(text: str, category: str, pass_name: str = "") -> Explanation:
    """Explains, in our words, which rule forbids fusing the edge."""
    return Explanation(verdict="ineligible", reason=f"[{text}]", category=category, pass_name=pass_name)


def without_reason(text: str, category: str) -> Explanation:
    """Explains an edge for which no pass recorded a reason."""
    return Explanation(verdict="unrecorded", reason=f"[{text}]", category=category, pass_name="")


def xla_reason(pass_name: str, reason: str) -> Explanation:
    """Explains an edge with the reason that a pass gave."""
    return Explanation(verdict="ineligible", reason=reason, category=categories.classify(reason), pass_name=pass_name)
