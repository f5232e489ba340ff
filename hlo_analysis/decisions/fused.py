"""Lists the edges that were fused, by any pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hlo_analysis.decisions import categories
from hlo_analysis.decisions.align import contents
from hlo_analysis.decisions.fold import Folded
from hlo_analysis.decisions.log import GEMM_PASS, SOFTMAX_PASS
from hlo_analysis.decisions.roles import generator_of
from hlo_analysis.decisions.unfused_edges import PRIORITY_PASS
from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Decision

# Opcodes of a random-number generator, on unsigned integers of 32 or 64 bits.
_BITS = frozenset(
    {"xor", "or", "and", "not", "add", "multiply", "shift-left", "shift-right-logical", "compare", "select"}
)
_MOVES = frozenset({"broadcast", "iota", "slice", "concatenate", "reshape", "transpose", "copy", "dynamic-slice"})
_RANDOM_OPCODES = _BITS | _MOVES | {"convert", "bitcast-convert"}
_RANDOM_TYPES = frozenset(("u32", "u64"))
_HIDDEN = frozenset(("parameter", "constant", "bitcast"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What is known about a name at the time of a fusion step."""

    shape: str = ""
    byte_size: int = 0
    scope: str = ""
    is_random: bool = False
    is_hidden: bool = False


def fused_edges(before: Module | None, folded: Folded, launches: Mapping[str, tuple[int, ...]]) -> tuple[Decision, ...]:
    """Returns the edges fused before priority fusion, then by it in order.

    Left out are edges from constants and bitcasts, those whose result was later found unused, and the steps of a
    random-number generator.

    Args:
        before: the module that priority fusion started with.
        folded: the end state of priority fusion.
        launches: instruction right after priority fusion → indices of the launches that contain it, in launch order.
    """
    known = _known(before) if before else {}
    holders = _holders(folded, launches)
    found = list(_inner_edges(before, holders)) if before else []
    for edge in folded.edges:
        producer, consumer = known.get(edge.producer, _Known()), known.get(edge.consumer, _Known())
        known[edge.fusion] = consumer
        held = holders.get(edge.fusion, ())
        if producer.is_hidden or not held or (producer.is_random and consumer.is_random):
            continue
        decision = _fused(
            edge.producer, edge.consumer, f"fused into {edge.fusion}", PRIORITY_PASS, held[0], producer, consumer.scope
        )
        found.append(replace(decision, gain_us=edge.gain_us))
    return tuple(found)


def edges_inside(final: Module, launch_of: Mapping[str, int]) -> tuple[Decision, ...]:
    """Returns the edges inside the launches of a program whose fusion passes left no record."""
    return tuple(_inner_edges(final, {name: (index,) for name, index in launch_of.items()}))


def _fused(producer: str, consumer: str, text: str, pass_name: str, launch: int, value: _Known, scope: str) -> Decision:
    return Decision(
        producer=producer,
        consumer=consumer,
        verdict="fused",
        reason=f"[{text}]",
        category=categories.FUSED,
        pass_name=pass_name,
        producer_launch=launch,
        consumer_launch=launch,
        bytes=value.byte_size,
        shape=value.shape,
        scope=scope,
    )


def _known(module: Module) -> dict[str, _Known]:
    return {
        name: _Known(
            shape=str(instruction.shape),
            byte_size=instruction.shape.byte_size,
            scope=scope_of(instruction.op_name)[0],
            is_random=instruction.opcode in _RANDOM_OPCODES and instruction.shape.element_type in _RANDOM_TYPES,
            is_hidden=instruction.opcode in _HIDDEN,
        )
        for name, instruction in module.instructions.items()
    }


def _holders(folded: Folded, launches: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Maps each name that priority fusion used to the launches that contain it at the end of the pass."""
    holders = dict(launches)
    for edge in reversed(folded.edges):
        held = holders.get(edge.fusion, ())
        for name in (edge.consumer, edge.producer):
            if name != edge.fusion:
                holders[name] = tuple(sorted({*holders.get(name, ()), *held}))
    return holders


def _inner_edges(module: Module, holders: Mapping[str, tuple[int, ...]]) -> Iterator[Decision]:
    """Yields the edges inside the fusions of a module."""
    known = _known(module)
    for computation in module.computations.values():
        for fusion in computation.instructions.values():
            held = holders.get(fusion.name, ())
            if fusion.opcode != "fusion" or not held:
                continue
            fused = module.computations[fusion.called[0]]
            inside = contents(module, fusion)
            pass_name = _pass_of(fusion, inside)
            for consumer in inside:
                for producer in _through_bitcasts(fused.instructions, consumer):
                    one, other = known[producer.name], known[consumer.name]
                    text = f"fused into {fusion.name}"
                    if not (one.is_random and other.is_random):
                        yield _fused(producer.name, consumer.name, text, pass_name, held[0], one, other.scope)


def _pass_of(fusion: Instruction, inside: tuple[Instruction, ...]) -> str:
    """Returns the name of the pass that makes fusions of this kind."""
    kind = generator_of(fusion)
    if kind.startswith("__triton"):
        return GEMM_PASS if any(inner.opcode in ("dot", "scaled-dot") for inner in inside) else SOFTMAX_PASS
    return "fusion"


def _through_bitcasts(instructions: Mapping[str, Instruction], consumer: Instruction) -> list[Instruction]:
    """Returns the operands that compute something, looking through bitcasts."""
    found: dict[str, Instruction] = {}
    for name in consumer.operands:
        operand = instructions[name]
        while operand.opcode in ("bitcast", "get-tuple-element"):
            operand = instructions[operand.operands[0]]
        if operand.opcode not in _HIDDEN:
            found[operand.name] = operand
    return list(found.values())
