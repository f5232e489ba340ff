from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_analysis.records import Analysis, Value
from hlo_analysis.report.graph import LaunchGraph, launch_graph
from tests.report.example_steps import XLA_STEPS, Step
from tests.report.examples import analysis_of


def _analysis(scopes: Sequence[str], edges: Sequence[tuple[int, int]]) -> Analysis:
    steps = tuple(
        Step(name=f"op{n}", kind="loop", scope=scope, shape="f32[4]", size=16, reads=("x",))
        for n, scope in enumerate(scopes)
    )
    analysis = analysis_of(steps, "graph")
    launches = tuple(
        replace(
            launch,
            inputs=tuple(
                Value(name=f"op{a}", shape="f32[4]", bytes=16, producer=a) for a, b in edges if b == launch.index
            ),
        )
        for launch in analysis.launches
    )
    return replace(analysis, launches=launches)


def _layer_of(graph: LaunchGraph) -> dict[int, int]:
    return {cluster: depth for depth, layer in enumerate(graph.layers) for cluster in layer if cluster is not None}


@st.composite
def _programs(draw: st.DrawFn) -> Analysis:
    count = draw(st.integers(1, 14))
    scopes = draw(st.lists(st.sampled_from(["", "a", "a/b", "c"]), min_size=count, max_size=count))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    return _analysis(scopes, edges)


@settings(deadline=None, max_examples=60)
@given(_programs())
def test_every_launch_is_placed_once_and_every_line_leads_down(analysis: Analysis):
    graph = launch_graph(analysis)
    placed = [index for cluster in graph.clusters for index in cluster.launches]
    assert sorted(placed) == list(range(len(analysis.launches)))
    layer = _layer_of(graph)
    assert sorted(layer) == list(range(len(graph.clusters)))
    for cluster in graph.clusters:
        launches = [analysis.launches[index] for index in cluster.launches]
        assert {launch.scope or launch.source for launch in launches} == {cluster.scope}
        assert len(cluster.places) == len(cluster.launches)
        assert len(set(cluster.places)) == len(cluster.places)
    home = {index: number for number, cluster in enumerate(graph.clusters) for index in cluster.launches}
    assert {(home[a], home[b]) for a, b, _ in graph.edges if home[a] != home[b]} == {
        (route.source, route.target) for route in graph.routes
    }
    for route in graph.routes:
        depths = [layer[route.source], *(depth for depth, _ in route.via), layer[route.target]]
        assert depths == list(range(depths[0], depths[-1] + 1))
        assert all(graph.layers[depth][slot] is None for depth, slot in route.via)


def test_a_scope_before_and_after_another_is_two_clusters():
    graph = launch_graph(_analysis(["rope", "qkv", "rope"], [(0, 1), (1, 2)]))
    assert [(cluster.scope, cluster.launches) for cluster in graph.clusters] == [
        ("rope", (0,)),
        ("qkv", (1,)),
        ("rope", (2,)),
    ]


def test_independent_launches_of_a_scope_stay_together():
    graph = launch_graph(_analysis(["rope", "qkv", "rope"], [(1, 2)]))
    assert [(cluster.scope, cluster.launches) for cluster in graph.clusters] == [("rope", (0, 2)), ("qkv", (1,))]
    assert _layer_of(graph) == {1: 0, 0: 1}


def test_a_value_carried_round_a_loop_is_drawn_too():
    graph = launch_graph(_analysis(["a", "b"], [(0, 1), (1, 0)]))
    assert {(source, target) for source, target, _ in graph.edges} == {(0, 1), (1, 0)}
    assert {(route.source, route.target) for route in graph.routes} == {(0, 1), (1, 0)}


def test_edges_add_up_what_one_launch_hands_another():
    analysis = analysis_of(XLA_STEPS, "xla")
    graph = launch_graph(analysis)
    for launch in analysis.launches:
        read = sum(value.bytes for value in launch.inputs if value.producer is not None)
        assert sum(size for _, target, size in graph.edges if target == launch.index) == read


def test_launches_without_a_scope_are_grouped_by_source_line():
    analysis = _analysis(["", "", "", "a", ""], [(0, 1), (1, 2), (2, 3)])
    lines = ("model.py:3", "model.py:3", "model.py:4", "model.py:5", None)
    launches = tuple(replace(launch, source=line) for launch, line in zip(analysis.launches, lines, strict=True))
    graph = launch_graph(replace(analysis, launches=launches))
    assert {cluster.scope: cluster.launches for cluster in graph.clusters} == {
        "model.py:3": (0, 1),
        "model.py:4": (2,),
        "a": (3,),
        "": (4,),
    }


def test_many_layers_are_one_box_and_a_name_keeps_its_number():
    scopes = [
        "GPT2LM/embed",
        *(f"GPT2LM/h/{layer}/{part}" for layer in range(20) for part in ("attn", "mlp")),
        "GPT2LM/head",
    ]
    graph = launch_graph(_analysis(scopes, [(number, number + 1) for number in range(len(scopes) - 1)]))
    assert [(cluster.scope, len(cluster.launches)) for cluster in graph.clusters] == [
        ("GPT2LM", 1),
        ("GPT2LM/h/*", 40),
        ("GPT2LM", 1),
    ]
