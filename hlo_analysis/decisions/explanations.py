"""The verdict on an edge and its reason: in XLA's words, or in ours between brackets."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.decisions import categories
from hlo_analysis.records import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A verdict with its reason; the fields are those of `records.Decision`."""

    verdict: Verdict
    reason: str
    category: str
    pass_name: str
    gain_us: float | None = None


def ours(text: str, category: str, pass_name: str = "") -> Explanation:
    """A reason of ours for which a rule forbids the edge."""
    return Explanation(verdict="ineligible", reason=f"[{text}]", category=category, pass_name=pass_name)


def unspoken(text: str, category: str) -> Explanation:
    """What we can say of an edge of which no pass left a word."""
    return Explanation(verdict="unrecorded", reason=f"[{text}]", category=category, pass_name="")


def said(pass_name: str, reason: str) -> Explanation:
    """What a pass itself said."""
    return Explanation(verdict="ineligible", reason=reason, category=categories.classify(reason), pass_name=pass_name)
