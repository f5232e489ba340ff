"""`xlafuse diff` on saved reports, and on a function compiled twice."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from xlafuse import environments


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
        (["--fn", "a:b", "--jax", "0.11.2", "--b", "xla"], "leave out --b"),
        (["--fn", "a:b", "--jax", "newest"], "expected --jax VERSION as 0.11.2, got 'newest'"),
        (["--fn", "a:b", "--python", "no/such"], "the folder of a virtual environment, got 'no/such'"),
        (["--fn", "a:b", *("--jax", "0.1.1") * 3], "two environments at most"),
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


def test_markdown_has_the_table_and_each_change(invoke, report: str):
    result = invoke("diff", f"{report}:xla", f"{report}:unfused", "--format", "markdown", "--exit-code")
    assert result.exit_code == 1, "unfused makes more launches"
    assert "| launches (counted) | 13 | 32 | +19 |" in result.stdout
    assert "- `#0 " in result.stdout
    assert "(estimated), block/" in result.stdout
    assert invoke("diff", f"{report}:unfused", f"{report}:xla", "--exit-code").exit_code == 0


@pytest.mark.slow
def test_two_environments_of_one_version_agree(invoke, program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environments, "cache_folder", lambda: Path("cache/jax").absolute())
    words = ("--jax", version("jax"), "--python", sys.executable, "--exit-code")
    result = invoke("diff", *program, *words)
    assert result.exit_code == 0, result.stderr
    assert f"A: jax {version('jax')}: both" in result.stdout
    assert f"B: {sys.executable}: both" in result.stdout
    assert "note:" not in result.stdout
    assert "Every launch does the same work on both sides." in result.stdout


def test_a_program_that_fails_in_an_environment_says_where_and_why(invoke, program: tuple[str, ...]):
    result = invoke("diff", "--fn", "softmax_and_sine.py:none", "--python", sys.executable)
    assert result.exit_code == 2
    assert f"jax {version('jax')}: the program does not compile there." in result.stderr
    assert "softmax_and_sine" in result.stderr


def test_a_version_of_jax_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []

    def run(command: list[str], **_: object):
        asked.append(command)
        Path(command[command.index("--target") + 1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(environments.subprocess, "run", run)
    first, again = environments.with_jax("0.99.1"), environments.with_jax("0.99.1")
    assert first == again
    assert first.folders[0].is_dir()
    assert len(asked) == 1
    assert {"jax==0.99.1", "jaxlib==0.99.1", "jax-cuda13-plugin==0.99.1"} <= set(asked[0])


def test_a_version_that_pip_does_not_have_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **_: object):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")

    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(environments.subprocess, "run", run)
    with pytest.raises(environments.InputError, match="No matching distribution"):
        environments.with_jax("0.99.1")
    assert list(tmp_path.iterdir()) == []


def test_options_that_differ_are_named_but_for_those_of_the_capture():
    class _Captured:
        def __init__(self, text: str):
            self._text = text

        def text(self, _: str) -> str:
            return self._text

    before = _Captured('debug_options {\n  xla_a: 1\n  xla_list: A\n  xla_list: B\n  xla_dump_to: "x"\n}')
    after = _Captured('debug_options {\n  xla_a: 1\n  xla_list: A\n  xla_new: true\n  xla_dump_to: "y"\n}')
    assert environments.changed_options(before, after) == [  # pyright: ignore[reportArgumentType]
        "XLA's option xla_list: B removed",
        "XLA's option xla_new: true, which only B knows",
    ]
