"""What a deep model repeats is told once."""

from __future__ import annotations

from dataclasses import replace

from hlo_analysis.records import Comparison, MissedFusion
from hlo_analysis.report import render_html
from hlo_analysis.report.sentences import intermediates_by_scope, scope_name
from hlo_analysis.report.similar_layers import fold_layers, group_missed, layer_of, without_numbers


def test_layers_alike_are_folded_into_one_row() -> None:
    rows = [("embed", 1), *((f"layer_{n}/{part}", size) for n in range(9) for part, size in (("mlp", 1), ("norm", 2)))]
    rows += [("layer_9/mlp", 5), ("head", 1)]
    folded = fold_layers(rows, lambda row: (row[0], "forward"), lambda row: row[1])
    assert folded == [
        ("embed", 1),
        ("layer_0/mlp", 1),
        ("layer_0/norm", 2),
        ("layer_1", "layer_8", 8),
        ("layer_9/mlp", 5),
        ("head", 1),
    ]


def test_two_layers_and_scopes_without_numbers_stay() -> None:
    rows = [("layer_0", 1), ("layer_1", 1), ("mlp", 1), ("norm", 1), ("head", 1)]
    assert fold_layers(rows, lambda row: (row[0], "forward"), lambda row: row[1]) == rows


def test_missed_fusions_of_layers_alike_are_one_group(comparison: Comparison) -> None:
    analysis = comparison["xla"].analysis
    assert analysis is not None
    producer, reader = analysis.launches[5:7]
    launches, missed = [], []
    for layer in range(4):
        for launch in (producer, reader):
            scope = f"layer_{layer}/mlp" if layer < 3 else "head"
            launches.append(replace(launch, index=len(launches), name=f"fusion.{layer}", scope=scope))
        item: MissedFusion = analysis.missed[0]
        ends = {"producer": 2 * layer, "consumers": (2 * layer + 1,)}
        missed.append(replace(item, rank=layer + 1, **ends, reason=f"[fusion.{layer} is a library call]"))
    deep = replace(analysis, launches=tuple(launches), missed=tuple(missed))
    assert [[item.rank for item in group] for group in group_missed(deep)] == [[1, 2, 3], [4]]


def test_layers_are_one_scope_in_the_verdict(comparison: Comparison) -> None:
    analysis = comparison["xla"].analysis
    assert analysis is not None
    launches = tuple(replace(launch, scope=f"layer_{launch.index}/mlp") for launch in analysis.launches)
    scopes = intermediates_by_scope(replace(analysis, launches=launches))
    assert list(scopes) == [without_numbers("layer_1/mlp")] == ["layer_*/mlp"]
    assert scope_name("model/layer_*") == "layers"


def test_the_page_tells_layers_alike_once(comparison: Comparison) -> None:
    row = comparison.rows[0]
    deep = replace(comparison, rows=tuple(replace(row, scope=f"layer_{layer}/norm") for layer in range(30)))
    assert "29 times" in render_html(deep)
    assert "launched as the one above" not in render_html(comparison)


def test_source_lines_are_no_layers() -> None:
    rows = [(f"model.py:{line}", 1) for line in (3, 4, 5, 6)]
    assert fold_layers(rows, lambda row: (row[0], "forward"), lambda row: row[1]) == rows


def test_a_models_name_is_no_layer():
    assert layer_of("GPT2/h_0/attn", "forward") == ("GPT2/h_0", "forward")
    assert layer_of("blocks/11/mlp", "forward") == ("blocks/11", "forward")
    assert layer_of("Block_3/norm", "backward") == ("Block_3", "backward")
    assert layer_of("layer7", "forward") == ("layer7", "forward")
    assert layer_of("GPT2/model.py:12", "forward") == ("", "forward")
