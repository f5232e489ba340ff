"""`xlafuse diff` on saved reports, and on a function compiled twice."""

from __future__ import annotations

import json

import pytest


def test_two_strategies_of_a_report(invoke, report: str):
    result = invoke("diff", f"{report}:xla", f"{report}:pallas")
    assert result.exit_code == 0
    assert "A: xla: " in result.stdout
    assert "B: pallas: " in result.stdout
    assert "block/attention" in result.stdout


def test_json_is_all_there_is(invoke, report: str):
    result = invoke("diff", report, f"{report}:unfused", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["before"]["launches"] == 13
    assert data["after"]["launches"] > 13


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report.json"], "expected two saved programs A and B"),
        (["report.json", "report.json", "--b", "xla"], "--b is for --fn or --block"),
        (["report.json", "report.json", "--fn", "a:b", "--b", "xla"], "got both"),
        (["--fn", "a:b"], "expected --b STRATEGY[@TARGET]"),
        (["--block", "tiny", "--b", "@h100", "--a", "@"], "as xla or xla@h100, got '@'"),
    ],
)
def test_bad_input(invoke, report: str, words: list[str], message: str):
    result = invoke("diff", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_function_with_and_without_fusion(invoke, program: tuple[str, ...]):
    """XLA's softmax is one launch, and several without its fusion passes; the sort is the same in both."""
    result = invoke("diff", *program, "--b", "unfused", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    by_scope = {scope["scope"]: scope for scope in data["scopes"]}
    assert by_scope["softmax"]["launches_before"] == 1
    assert by_scope["softmax"]["launches_after"] >= 3
    (split,) = [change for change in data["changes"] if change["kind"] == "split"]
    assert split["bytes_after"] > split["bytes_before"] == 2 * 512 * 1024 * 4
    assert not any(change["kind"] in ("gained", "lost", "regrouped") for change in data["changes"])
    assert any("xla_disable_hlo_passes" in note for note in data["notes"])
