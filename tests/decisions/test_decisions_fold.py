"""Folding the steps of priority fusion: members, summed gains, last verdicts."""

from __future__ import annotations

import re
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hlo_analysis import Capture
from hlo_analysis.decisions.dump import Fused, Priced, Refused, read_fusion_dump
from hlo_analysis.decisions.fold import fold


def priced(producer: str, gain: float) -> Priced:
    return Priced(producer=producer, us_fused=10.0, us_unfused=10.0 + gain)


def fused(producer: str, consumer: str, fusion: str) -> Fused:
    return Fused(fusion=fusion, producer=producer, consumer=consumer)


def test_refused_first_and_fused_later() -> None:
    folded = fold([Refused(producer="a", reason="no"), priced("a", 3.0), fused("a", "b", "f")])
    assert [(edge.producer, edge.fusion, edge.gain_us) for edge in folded.edges] == [("a", "f", 3.0)]


def test_priced_first_and_refused_later_keeps_the_rule() -> None:
    verdict = fold([priced("a", 3.0), Refused(producer="a", reason="the consumer is not fusible")]).verdicts["a"]
    assert (verdict.reason, verdict.gain_us) == ("the consumer is not fusible", None)


def test_increments_add_up_while_the_producer_waits_in_the_queue() -> None:
    verdict = fold([priced("a", 5.0), priced("a", -2.0), priced("a", -4.5)]).verdicts["a"]
    assert verdict.gain_us == pytest.approx(-1.5)


def test_a_producer_that_left_the_queue_is_priced_afresh() -> None:
    verdict = fold([priced("a", -5.0), priced("a", -2.0)]).verdicts["a"]
    assert verdict.gain_us == pytest.approx(-2.0)


def test_a_fusion_that_grew_is_priced_afresh() -> None:
    verdict = fold([priced("f", 5.0), fused("a", "f", "f"), priced("f", 1.0), priced("f", 0.5)]).verdicts["f"]
    assert verdict.gain_us == pytest.approx(1.5)


@pytest.mark.parametrize("mode", ["forward", "grad"])
def test_gains_agree_with_what_the_pass_did(captured: Callable[..., Capture], mode: str) -> None:
    """The pass fuses where the gain is not negative, and what it priced and left has a negative one."""
    dump = read_fusion_dump(captured(mode).require("priority_fusion_dump"))
    folded = fold(dump.steps)
    gains = [edge.gain_us for edge in folded.edges if edge.gain_us is not None]
    assert len(gains) > 20
    assert min(gains) > -0.01  # jaxlib 0.12 prints six digits of a time, or more
    gone = {edge.producer for edge in folded.edges} | {e.consumer for e in folded.edges if e.consumer != e.fusion}
    left = [verdict.gain_us for name, verdict in folded.verdicts.items() if verdict.reason is None and name not in gone]
    assert left or mode == "forward"
    assert all(gain is not None and gain < 0 for gain in left)


def _frames(capture: Capture, folder: Path) -> list[str]:
    """What XLA's fusion viewer shows, step by step: its own account, with sums where the dump has increments."""
    labels: list[str] = []
    for archive in capture.path.rglob("*_fusion.pyz"):
        with zipfile.ZipFile(archive) as zipped:
            connection = sqlite3.connect(zipped.extract("fusions.db", folder))
        labels += [label for (label,) in connection.execute("select label from frames order by id")]
        connection.close()
    return labels


@pytest.mark.slow
@pytest.mark.drawn(1 / 8)  # the pictures take half a minute, and only another XLA draws others
def test_gains_agree_with_xlas_own_account(captured: Callable[..., Capture], tmp_path: Path) -> None:
    capture = captured("grad", xla_dump_fusion_visualization=True)
    rejected = re.compile(r"Rejected \|(.+?)\|: Negative benefit \((-[\d.]+)(ns|us|ms)\)")
    scale = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
    account = {
        found[1]: float(found[2]) * scale[found[3]]
        for label in _frames(capture, tmp_path)
        if (found := rejected.match(label))
    }
    folded = fold(read_fusion_dump(capture.require("priority_fusion_dump")).steps)
    gone = {edge.producer for edge in folded.edges} | {e.consumer for e in folded.edges if e.consumer != e.fusion}
    left = {
        name: verdict.gain_us
        for name, verdict in folded.verdicts.items()
        if verdict.reason is None and name not in gone
    }
    assert len(left) >= 5
    for name, gain in left.items():
        assert account[name] == pytest.approx(gain, rel=1e-4, abs=2e-3), name
