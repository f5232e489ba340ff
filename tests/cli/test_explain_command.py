"""`xlafuse explain` on saved reports."""

from __future__ import annotations

import json

import pytest

from hlo_analysis.saved import save
from tests.report.examples import llama_comparison, with_ptx


def test_without_names_the_costliest_edges(invoke, report: str):
    result = invoke("explain", "--capture", report, "-n", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].strip() == "1. #4 gemm_fusion_dot.2 → #5 softmax_fusion"
    assert "897 µs at stake (estimated)" in result.stdout
    assert " 3. " not in result.stdout


def test_one_edge(invoke, report: str):
    result = invoke("explain", "block/rope", "#4", "--capture", f"{report}:xla")
    assert result.exit_code == 0
    assert result.stdout.startswith("#3 loop_concatenate_fusion → #4 gemm_fusion_dot.2\n")
    assert "Fusing costs more than it saves" in result.stdout


def test_another_strategy_and_an_analysis_alone(invoke, report: str):
    pallas = llama_comparison()["pallas"].analysis
    assert pallas is not None
    save(pallas, "pallas.json.gz")
    results = [invoke("explain", "--capture", path) for path in (f"{report}:pallas", "pallas.json.gz")]
    assert results[0].exit_code == results[1].exit_code == 0
    assert results[0].stdout == results[1].stdout != invoke("explain", "--capture", report).stdout


def test_ptx_of_a_launch(invoke, report: str):
    save(with_ptx(llama_comparison()), report)
    result = invoke("explain", "5", "--ptx", "--capture", report)
    assert result.exit_code == 0
    assert result.stdout.startswith("// #5 softmax_fusion\n.visible .entry softmax_fusion()")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["soft", "xyz", "--capture", "report.json"], "has 'xyz' in its name"),
        (["--capture", "report.json:xlaa"], "no strategy 'xlaa'; did you mean 'xla'"),
        (["5", "--ptx", "--capture", "report.json"], "no PTX of #5 softmax_fusion"),
        (["5", "6", "--ptx", "--capture", "report.json"], "--ptx prints the source of one launch"),
        (["--capture", "absent.json"], "cannot read absent.json"),
        (["--capture", "absent"], "absent does not exist"),
        (["--capture", "report.json", "--fn", "a:b"], "expected one of --fn, --block and --capture, got 2"),
        (["--capture", "report.json", "--target", "h100"], "compiled already: --target cannot change it"),
        ([], "expected one of --fn, --block and --capture, got 0"),
        (["--block", "tiny", "--strategy", "fused"], "fused and --args are for --fn"),
    ],
)
def test_bad_input(invoke, report: str, words: list[str], message: str):
    result = invoke("explain", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_json_has_both_launches_the_reason_and_the_cost(invoke, report: str):
    edges = json.loads(invoke("explain", "--capture", report, "--json", "-n", "2").stdout)
    assert len(edges) == 2
    assert {"producer", "consumer", "because", "words", "decisions", "missed"} <= set(edges[0])
    (one,) = json.loads(
        invoke(
            "explain", edges[0]["producer"]["index"], edges[0]["consumer"]["index"], "--capture", report, "--json"
        ).stdout
    )
    assert one == edges[0]


@pytest.mark.parametrize("words", [("targets",), ("strategies",), ("kernels",), ("study", "--list")])
def test_lists_have_json(invoke, words: tuple[str, ...]):
    found = json.loads(invoke(*words, "--json").stdout)
    assert len(found) > 4
    assert all(each["name"] for each in found)


def test_the_json_of_an_operation_says_what_calls_take(invoke):
    found = json.loads(invoke("kernels", "softmax", "--json", "--arg", "x=bf16[8192,4096]").stdout)
    assert found["takes"] in found["runs"]
    assert json.loads(invoke("kernels", "softmax", "--json").stdout)["calls"]
