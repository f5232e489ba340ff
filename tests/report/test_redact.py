"""A redacted comparison names nothing of the program, and counts the same."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from hlo_analysis.records import Analysis, Comparison, Launch
from hlo_analysis.report import redacted, render_html
from hlo_analysis.report.payload import payload
from hlo_analysis.report.sentences import intermediates_by_scope
from hlo_analysis.report.similar_layers import group_missed
from hlo_analysis.schema import from_json, to_json
from tests.report.examples import full_comparison

MARK = "Secret"
# What may stay: figures, XLA's vocabulary, this tool's own words, versions, the target.
KEPT = {
    "shape", "opcodes", "pass_name", "cause", "limiter", "xla_estimate_model", "category", "remedy",
    "options", "change", "mode", "target", "versions", "created", "device", "compiler_options", "environment",
    "numerics", "description", "strategy", "baseline", "unfused", "operation", "outcome", "implementation",
    "occupancy_limiter",
}  # fmt: skip


def _marked(value: Any, name: str = "") -> Any:
    """The record with a mark in each text that is not of a closed set; equal texts stay equal."""
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        is_result = type(value).__name__.endswith(("StrategyResult", "WithSites"))
        changed = {}
        for each in fields(value):
            kept = each.name in KEPT or (is_result and each.name == "name")
            kept |= each.name == "kernel" and type(value).__name__ in ("MissedFusion", "Hotspot")
            kept |= get_origin(getattr(hints[each.name], "__value__", hints[each.name])) is Literal
            if not kept:
                changed[each.name] = _marked(getattr(value, each.name), each.name)
        return replace(value, **changed)
    if isinstance(value, tuple) and name == "scopes":
        return tuple((_marked(scope), phase) for scope, phase in value)
    if isinstance(value, tuple) and name == "silent":
        return tuple((_marked(text), reason) for text, reason in value)
    if isinstance(value, tuple):
        return tuple(_marked(each) for each in value)
    return "/".join(MARK + part for part in value.split("/")) if isinstance(value, str) and value else value


@pytest.fixture(scope="module")
def marked() -> Comparison:
    return _marked(full_comparison())


def _analysis(comparison: Comparison, name: str = "xla") -> Analysis:
    analysis = comparison[name].analysis
    assert analysis is not None
    return analysis


def test_no_name_is_left_in_any_view(marked: Comparison):
    assert to_json(marked).count(MARK) > 500
    shown = redacted(marked)
    for text in (to_json(shown), json.dumps(payload(shown)), render_html(shown), repr(shown)):
        assert MARK not in text


def test_a_strategy_named_by_a_path_gets_another_name(hostile: Comparison):
    kept = redacted(hostile)  # its names hold '</script>'
    assert [result.name for result in kept.strategies] == ["program1", "program2"]
    assert kept.baseline == "program1"
    assert {cell.strategy for row in kept.rows for cell in row.cells} == {"program1"}
    assert kept.strategies[1].error == "withheld"
    assert "onerror" not in repr(kept)


def test_numbers_and_opcodes_stay(comparison: Comparison):
    before, after = _analysis(comparison), _analysis(redacted(comparison))
    assert after.traffic == before.traffic
    assert (after.roofline_us, after.estimated_us, after.memory) == (
        before.roofline_us,
        before.estimated_us,
        before.memory,
    )
    assert [launch.opcodes for launch in after.launches] == [launch.opcodes for launch in before.launches]
    figures = ("index", "kind", "bytes_read", "bytes_written", "flops", "grid", "block", "limiter", "phase", "repeat")
    for old, new in zip(before.launches, after.launches, strict=True):
        assert [getattr(new, name) for name in figures] == [getattr(old, name) for name in figures]
        assert [(value.shape, value.bytes, value.producer) for value in new.inputs] == [
            (value.shape, value.bytes, value.producer) for value in old.inputs
        ]
    assert [item.remaining_us for item in after.missed] == [item.remaining_us for item in before.missed]
    assert [item.options for item in after.missed] == [item.options for item in before.missed]


def test_an_alias_is_the_same_everywhere(comparison: Comparison):
    kept = redacted(comparison)
    launches = _analysis(kept).launches
    for launch in launches:
        for value in launch.inputs:
            if value.producer is not None:
                assert value.name == launches[value.producer].name
    for decision in _analysis(kept).decisions:
        if decision.verdict != "fused":
            assert decision.producer_launch is not None
            assert decision.producer == launches[decision.producer_launch].name
    assert [row.scope for row in kept.rows if not row.cells] == []
    scopes = {launch.scope for each in kept.strategies if each.analysis for launch in each.analysis.launches}
    assert scopes <= {row.scope for row in kept.rows}
    assert len(kept.rows) == len({row.scope for row in kept.rows}) == len(comparison.rows)


def test_views_group_and_name_scopes_as_before(comparison: Comparison):
    before, after = _analysis(comparison), _analysis(redacted(comparison))
    assert list(intermediates_by_scope(after).values()) == list(intermediates_by_scope(before).values())
    assert set(intermediates_by_scope(after)) <= {launch.scope for launch in after.launches}
    assert [len(group) for group in group_missed(after)] == [len(group) for group in group_missed(before)]


def test_layers_can_still_be_told_apart(comparison: Comparison):
    first, second, *rest = _analysis(comparison).launches

    def at(launch: Launch, layer: int) -> Launch:
        return replace(launch, scope=f"secret/layer_{layer}/norm", scopes=())

    result = replace(
        comparison["xla"], analysis=replace(_analysis(comparison), launches=(at(first, 0), at(second, 11), *rest))
    )
    kept = redacted(replace(comparison, strategies=(result,), rows=(), unfused=None))
    one, two = (launch.scope for launch in _analysis(kept, "program1").launches[:2])
    assert one != two
    assert one.replace("_0", "_11") == two


def test_a_redacted_comparison_is_one(comparison: Comparison):
    kept = redacted(comparison)
    assert from_json(Comparison, to_json(kept)) == kept
    assert comparison["xla"].analysis is not None
    assert comparison["xla"].analysis.launches[0].name == "input_reduce_fusion", "the original is as it was"
