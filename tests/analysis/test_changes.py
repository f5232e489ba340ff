"""Launches of two analyses matched by their work: merged, split, gained, lost, changed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hlo_analysis import Analysis, Launch
from hlo_analysis.changes import Change, difference
from hlo_analysis.matching import matched
from hlo_analysis.records import LaunchKind, Value
from hlo_analysis.report.changes import difference_json, difference_lines
from tests.report.examples import llama_comparison


def launch(index: int, *operations: str, reads: tuple[int, ...] = (), kind: LaunchKind = "loop", **given) -> Launch:
    """A launch that computes `operations`, as 'exp' or 'exp:8' with the number of elements."""
    lines = [f"%fused_{index} (p: f32[4]) -> f32[4] {{", "  %p = f32[4]{0} parameter(0)"]
    for place, operation in enumerate(operations):
        name, _, size = operation.partition(":")
        lines.append(
            f'  %v{index}.{place} = f32[{size or 4}]{{0}} add(%p, %p), metadata={{op_name="jit(f)/{name}" stack=1}}'
        )
    return Launch(
        index=index,
        thunk_id=index,
        name=f"fusion.{index}",
        kind=kind,
        computation="main",
        inputs=tuple(Value(name=f"v{read}", shape="f32[4]", bytes=16, producer=read) for read in reads),
        bytes_read=16,
        bytes_written=16,
        hlo="\n".join([*lines, "}"]),
        **given,
    )


def test_names_and_numbers_do_not_matter():
    before = [launch(0, "sin"), launch(1, "cos", reads=(0,))]
    after = [launch(0, "cos"), launch(1, "sin")]
    assert matched(before, after) == [((1,), (0,)), ((0,), (1,))]


def test_several_that_became_one():
    before = [launch(0, "sin"), launch(1, "cos", reads=(0,)), launch(2, "exp", reads=(1,))]
    after = [launch(0, "sin", "cos"), launch(1, "exp", reads=(0,))]
    assert matched(before, after) == [((0, 1), (0,)), ((2,), (1,))]


def test_equal_layers_are_told_apart_by_their_order():
    before = [launch(0, "mul"), launch(1, "exp", reads=(0,)), launch(2, "mul", reads=(1,)), launch(3, "exp")]
    after = [launch(0, "mul", "exp"), launch(1, "mul", "exp")]
    assert matched(before, after) == [((0, 1), (0,)), ((2, 3), (1,))]


def test_operations_of_another_size_are_others():
    assert matched([launch(0, "mul:8")], [launch(0, "mul:4")]) == [((0,), ()), ((), (0,))]


def test_a_kernel_that_hides_its_work_is_what_stood_in_its_place():
    before = [launch(0, "a"), launch(1, "b", reads=(0,)), launch(2, "c", reads=(1,)), launch(3, "d", reads=(2,))]
    after = [launch(0, "a"), launch(1, "kernel", reads=(0,), kind="mosaic"), launch(2, "d", reads=(1,))]
    assert matched(before, after) == [((0,), (0,)), ((1, 2), (1,)), ((3,), (2,))]


def test_an_ordinary_launch_in_the_same_place_is_other_work():
    before = [launch(0, "a"), launch(1, "b", reads=(0,)), launch(2, "d", reads=(1,))]
    after = [launch(0, "a"), launch(1, "x", reads=(0,)), launch(2, "d", reads=(1,))]
    assert matched(before, after) == [((0,), (0,)), ((1,), ()), ((), (1,)), ((2,), (2,))]


def test_an_epilogue_is_in_the_librarys_product():
    before = [launch(0, "dot"), launch(1, "gelu", reads=(0,)), launch(2, "sum", reads=(1,))]
    after = [launch(0, "dot", kind="cublaslt"), launch(1, "sum", reads=(0,))]
    assert matched(before, after) == [((0, 1), (0,)), ((2,), (1,))]


def test_what_xla_made_itself_is_in_what_holds_its_neighbours():
    before = [launch(0, "a", "b")]
    after = [launch(0, "a"), launch(1, reads=(0,)), launch(2, "b", reads=(1,))]
    assert matched(before, after) == [((0,), (0, 1, 2))]


@pytest.fixture(scope="module")
def block() -> Analysis:
    analysis = llama_comparison()["xla"].analysis
    assert analysis is not None
    return analysis


def _of(block: Analysis, *launches: Launch) -> Analysis:
    moved = sum((each.bytes_read + each.bytes_written) * each.repeat for each in launches)
    traffic = replace(block.traffic, bytes_read=moved, bytes_written=0)
    return replace(block, launches=launches, traffic=traffic, decisions=(), intermediates=(), missed=())


def test_each_kind_of_change(block: Analysis):
    before = _of(
        block,
        launch(0, "a", scope="one"),
        launch(1, "b", reads=(0,), scope="one"),
        launch(2, "c", "d", reads=(1,), scope="two"),
        launch(3, "e", reads=(2,), scope="two"),
        launch(4, "f", reads=(3,), scope="two"),
        launch(5, "same", reads=(4,), scope="three"),
    )
    after = _of(
        block,
        launch(0, "a", "b", scope="one"),
        launch(1, "c", reads=(0,), scope="two"),
        launch(2, "d", reads=(1,), scope="two"),
        launch(3, "f", reads=(2,), scope="two", kind="triton"),
        launch(4, "same", reads=(3,), scope="three"),
        launch(5, "g", reads=(4,), scope="three", repeat=3),
    )
    found = difference(before, after)
    assert found.changes == (
        Change(kind="merged", before=(0, 1), after=(0,), bytes_before=64, bytes_after=32),
        Change(kind="split", before=(2,), after=(1, 2), bytes_before=32, bytes_after=64),
        Change(kind="lost", before=(3,), after=(), bytes_before=32, bytes_after=0),
        Change(kind="changed", before=(4,), after=(3,), bytes_before=32, bytes_after=32),
        Change(kind="gained", before=(), after=(5,), bytes_before=0, bytes_after=96),
    )
    counts = {each.scope: (each.launches_before, each.launches_after, each.bytes_after) for each in found.scopes}
    assert counts == {"one": (2, 1, 32), "two": (3, 3, 96), "three": (1, 4, 128)}
    text = "\n".join(difference_lines(found))
    assert "#0 fusion.0 (loop) + #1 fusion.1 (loop) → #0 fusion.0 (loop)" in text
    assert "launches (counted)" in text
    assert "+2" in text
    data = json.loads(difference_json(found))
    assert (data["before"]["launches"], data["after"]["launches"]) == (6, 8)
    assert data["changes"][0]["before_names"] == ["fusion.0", "fusion.1"]


def test_an_analysis_is_no_different_from_itself(block: Analysis):
    found = difference(block, block)
    assert found.changes == ()
    assert found.notes == ()
    assert all(scope.is_equal for scope in found.scopes)
    assert difference_lines(found)[-1] == "Every launch does the same work on both sides."


def test_other_versions_targets_and_options_are_noted(block: Analysis):
    made = replace(
        block.provenance,
        target="h100",
        versions=(("jax", "0.10.0"), *block.provenance.versions[1:]),
        compiler_options=(("xla_x", "True"),),
    )
    assert difference(replace(block, provenance=made), block).notes == (
        "target: h100 before, h200 now",
        "option xla_x: True before, not set now",
        f"version of jax: 0.10.0 before, {dict(block.provenance.versions)['jax']} now",
    )
