"""Builds the decision table of a capture: each edge between launches, fused or not, with the reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from hlo_analysis.decisions import categories
from hlo_analysis.decisions.align import origins
from hlo_analysis.decisions.dump import read_fusion_dump
from hlo_analysis.decisions.edges import Edge, launch_edges
from hlo_analysis.decisions.explanations import without_reason
from hlo_analysis.decisions.fold import fold
from hlo_analysis.decisions.fused import edges_inside, fused_edges
from hlo_analysis.decisions.log import read_log
from hlo_analysis.decisions.unfused_edges import UnfusedEdges
from hlo_analysis.hlo import Module, parse_module
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Decision
from hlo_analysis.rules import attempt, gather


class Texts(Protocol):
    """The part of a Capture that `decide` reads: the text of an artefact by its key."""

    def text(self, key: str) -> str | None:
        """Returns the artefact's text, or None if the capture does not have it."""
        ...


def decide(capture: Texts, final: Module, launch_of: Mapping[str, int]) -> tuple[Decision, ...]:
    """Returns a decision for every data edge between two launches, then one for every fused edge.

    Args:
        capture: reads `final_hlo` (only whether it exists), `priority_fusion_dump`, `before_priority_fusion`,
            `after_priority_fusion`, `before_rename`, `after_rename`, `worker_log` and `debug_options`. Where an
            artefact is missing, the reasons are ours, in brackets.
        final: the final module, parsed.
        launch_of: instruction of the final module → index of its launch.

    Raises:
        DumpError: the fusion dump exists and is incomplete.
        HloParseError: one of the modules exists and is incomplete.
    """
    dump_text = capture.text("priority_fusion_dump")
    dump = attempt(read_fusion_dump, None, dump_text) if dump_text else None
    folded = attempt(fold, None, dump.steps) if dump else None
    refusals = attempt(read_log, (), capture.text("worker_log") or "")
    before, early = _stage(capture, "before_priority_fusion"), _stage(capture, "after_priority_fusion")
    if before is None and dump is not None:
        before = attempt(parse_module, None, dump.module_text)
    came_from = attempt(origins, {}, [early, *_between(capture), final]) if early else {}

    edges = launch_edges(final, launch_of.keys())
    is_cpu = capture.text("before_cpu_fusion") is not None
    no_record = (
        "XLA:CPU keeps no record of what it leaves apart" if is_cpu else "the capture has no record of priority fusion"
    )
    unfused = UnfusedEdges(final, early, came_from, folded, refusals, before, edges, _disabled(capture), no_record)
    decisions = _unfused_decisions(unfused, edges, final, launch_of)
    if early is None or folded is None:
        return (*decisions, *gather(edges_inside, final, launch_of))
    held: dict[str, list[int]] = defaultdict(list)
    for name, index in launch_of.items():
        for origin in came_from.get(name, ()):
            held[origin].append(index)
    launches = {name: tuple(sorted(indices)) for name, indices in held.items()}
    return (*decisions, *gather(fused_edges, before, folded, launches))


def _disabled(capture: Texts) -> frozenset[str]:
    """Returns the passes that `xla_disable_hlo_passes` switched off, read from the text proto of XLA's options."""
    lines = (line.partition(":") for line in (capture.text("debug_options") or "").splitlines())
    return frozenset(value.strip().strip('"') for name, _, value in lines if name.strip() == "xla_disable_hlo_passes")


def _stage(capture: Texts, key: str) -> Module | None:
    text = capture.text(key)
    return attempt(parse_module, None, text) if text else None


def _between(capture: Texts) -> list[Module]:
    """Returns the modules between priority fusion and the final module, which is included if XLA stopped early."""
    whole, renamed = capture.text("final_hlo") is not None, capture.text("after_rename") is not None
    keys = ("before_rename", "after_rename") if whole else ("before_rename",) if renamed else ()
    return [stage for key in keys if (stage := _stage(capture, key)) is not None]


def _unfused_decisions(
    unfused: UnfusedEdges, edges: Sequence[Edge], final: Module, launch_of: Mapping[str, int]
) -> list[Decision]:
    instructions = final.instructions
    unknown = without_reason("no pass recorded a reason for this edge", categories.UNRECORDED)
    decisions: list[Decision] = []
    for edge in edges:
        why = attempt(unfused.explain, unknown, edge)
        decisions.append(
            Decision(
                producer=edge.producer,
                consumer=edge.consumer,
                **asdict(why),
                producer_launch=launch_of[edge.producer],
                consumer_launch=launch_of[edge.consumer],
                bytes=edge.byte_size,
                shape=edge.shape_text,
                scope=scope_of(instructions[edge.producer].op_name)[0],
            )
        )
    return decisions
