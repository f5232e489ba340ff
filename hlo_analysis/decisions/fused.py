"""The edges that were fused, by whichever pass fused them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hlo_analysis.decisions import categories
from hlo_analysis.decisions.align import contents
from hlo_analysis.decisions.fold import Folded
from hlo_analysis.decisions.log import GEMM_PASS, MULTI_OUTPUT_PASS, SOFTMAX_PASS, LogWords
from hlo_analysis.decisions.survivors import PRIORITY_PASS
from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Decision

# What a random-number generator is made of, on unsigned integers of 32 or 64 bits.
_BITS = frozenset(
    {"xor", "or", "and", "not", "add", "multiply", "shift-left", "shift-right-logical", "compare", "select"}
)
_MOVES = frozenset({"broadcast", "iota", "slice", "concatenate", "reshape", "transpose", "copy", "dynamic-slice"})
_RANDOM_OPCODES = _BITS | _MOVES | {"convert", "bitcast-convert"}
_RANDOM_TYPES = frozenset(("u32", "u64"))
_UNSEEN = frozenset(("parameter", "constant", "bitcast"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What is known of a name at the time of a fusion step."""

    shape: str = ""
    byte_size: int = 0
    scope: str = ""
    is_random: bool = False
    is_silent: bool = False


def fused_edges(
    before: Module | None, folded: Folded | None, log: LogWords, launches: Mapping[str, tuple[int, ...]]
) -> tuple[Decision, ...]:
    """The fused edges: those of passes before priority fusion, then its own in order, then multi-output fusion's.

    Args:
        before: the module that priority fusion began with, where the capture has it.
        folded: what priority fusion did, where it left a dump.
        log: words of the other passes.
        launches: instruction right after priority fusion → indices of the launches that hold it, in launch order.

    Edges out of constants and bitcasts are left out, and so are those whose result was later found unused; the steps
    of a random-number generator become one line a launch.
    """
    known = _known(before) if before else {}
    holders = _holders(folded, launches)
    decisions = [*_inner_edges(before, holders)] if before else []
    random: dict[int | None, list[Decision]] = defaultdict(list)
    for edge in folded.edges if folded else ():
        producer, consumer = known.get(edge.producer, _Known()), known.get(edge.consumer, _Known())
        held = holders.get(edge.fusion, ())
        launch = held[0] if held else None
        known[edge.fusion] = consumer
        if producer.is_silent or (launches and launch is None):
            continue
        decision = Decision(
            producer=edge.producer,
            consumer=edge.consumer,
            verdict="fused",
            reason=f"[fused into {edge.fusion}]",
            category=categories.FUSED,
            pass_name=PRIORITY_PASS,
            gain_us=edge.gain_us,
            producer_launch=launch,
            consumer_launch=launch,
            bytes=producer.byte_size,
            shape=producer.shape,
            scope=consumer.scope,
        )
        if producer.is_random and consumer.is_random:
            random[launch].append(decision)
        else:
            decisions.append(decision)
    decisions += [_collapse(steps) for steps in random.values()]
    for fusion in log.multi_output:
        held = launches.get(fusion.second, launches.get(fusion.first, ()))
        if fusion.siblings or not held:
            continue
        producer = known.get(fusion.first, _Known())
        decisions.append(
            Decision(
                producer=fusion.first,
                consumer=fusion.second,
                verdict="fused",
                reason="[fused, and the producer's value is still written for its other users]",
                category=categories.FUSED,
                pass_name=MULTI_OUTPUT_PASS,
                producer_launch=held[0],
                consumer_launch=held[0],
                bytes=producer.byte_size,
                shape=producer.shape,
                scope=producer.scope,
            )
        )
    return tuple(decisions)


def _known(module: Module) -> dict[str, _Known]:
    return {
        name: _Known(
            shape=str(instruction.shape),
            byte_size=instruction.shape.byte_size,
            scope=scope_of(instruction.op_name)[0],
            is_random=instruction.opcode in _RANDOM_OPCODES and instruction.shape.element_type in _RANDOM_TYPES,
            is_silent=instruction.opcode in _UNSEEN,
        )
        for computation in module.computations.values()
        for name, instruction in computation.instructions.items()
    }


def _holders(folded: Folded | None, launches: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Launches that hold each name that priority fusion ever used, followed back from what was left at its end."""
    holders = dict(launches)
    for edge in reversed(folded.edges if folded else ()):
        held = holders.get(edge.fusion, ())
        for name in (edge.consumer, edge.producer):
            if name != edge.fusion:
                holders[name] = tuple(sorted({*holders.get(name, ()), *held}))
    return holders


def _inner_edges(before: Module, holders: Mapping[str, tuple[int, ...]]) -> Iterator[Decision]:
    """What earlier passes had already fused: the insides of the fusions that priority fusion found."""
    for computation in before.computations.values():
        for fusion in computation.instructions.values():
            if fusion.opcode != "fusion":
                continue
            fused = before.computations[fusion.called[0]]
            inside = contents(before, fusion)
            pass_name = _pass_of(fusion, inside)
            held = holders.get(fusion.name, ())
            if holders and not held:
                continue
            for consumer in inside:
                for operand in _through_bitcasts(fused.instructions, consumer):
                    yield Decision(
                        producer=operand.name,
                        consumer=consumer.name,
                        verdict="fused",
                        reason=f"[fused into {fusion.name}]",
                        category=categories.FUSED,
                        pass_name=pass_name,
                        producer_launch=held[0] if held else None,
                        consumer_launch=held[0] if held else None,
                        bytes=operand.shape.byte_size,
                        shape=str(operand.shape),
                        scope=scope_of(consumer.op_name)[0],
                    )


def _pass_of(fusion: Instruction, inside: tuple[Instruction, ...]) -> str:
    if any(inner.opcode in ("dot", "scaled-dot") for inner in inside):
        return GEMM_PASS
    config = fusion.backend_config
    settings = config.get("fusion_backend_config") or {} if isinstance(config, dict) else {}
    return SOFTMAX_PASS if str(settings.get("kind", "")).startswith("__triton") else "before priority-fusion"


def _through_bitcasts(instructions: Mapping[str, Instruction], consumer: Instruction) -> list[Instruction]:
    """The operands that compute something, bitcasts looked through."""
    found: dict[str, Instruction] = {}
    for name in consumer.operands:
        operand = instructions[name]
        while operand.opcode in ("bitcast", "get-tuple-element"):
            operand = instructions[operand.operands[0]]
        if operand.opcode not in _UNSEEN:
            found[operand.name] = operand
    return list(found.values())


def _collapse(steps: list[Decision]) -> Decision:
    """One decision for the steps of a random-number generator that ended in one launch."""
    first, last = steps[0], steps[-1]
    gains = [step.gain_us for step in steps if step.gain_us is not None]
    return Decision(
        producer=first.producer,
        consumer=last.consumer,
        verdict="fused",
        reason=f"[{len(steps)} edges of integer arithmetic for random numbers, all fused]",
        category=categories.RANDOM_BITS,
        pass_name=first.pass_name,
        gain_us=round(sum(gains), 6) if gains else None,
        producer_launch=first.producer_launch,
        consumer_launch=last.consumer_launch,
        bytes=max(step.bytes for step in steps),
        shape=max(steps, key=lambda step: step.bytes).shape,
        scope=last.scope,
    )
