"""Finds the data edges between launches, looking through bitcasts and tuples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hlo_analysis.hlo import Computation, Module, Shape
from hlo_analysis.program.dataflow import CONTROL_FLOW, Dataflow, Path, Source, leaf_shape, leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """All values that one launch writes and another launch reads."""

    producer: str
    consumer: str
    values: tuple[tuple[Path, Shape], ...]
    """The outputs of the producer that the consumer reads, with their shapes; the path () means the only output."""
    positions: frozenset[int]
    """The operand numbers of the consumer that read these values."""
    crosses: bool
    """Whether the values cross the boundary of a loop or branch."""

    @property
    def byte_size(self) -> int:
        """Returns the total size of the values."""
        return sum(shape.byte_size for _, shape in self.values)

    @property
    def shape_text(self) -> str:
        """Returns the shapes of the values, without layouts."""
        return ", ".join(str(shape) for _, shape in self.values)


def launch_edges(module: Module, launches: Collection[str]) -> tuple[Edge, ...]:
    """Returns the edges between the named instructions, in text order of the consumer.

    Args:
        module: any module, before or after scheduling.
        launches: instructions of its entry, loop bodies and branches. All other instructions are looked through.
    """
    dataflow = Dataflow(module)
    places = _places(module)
    edges: list[Edge] = []
    for computation in executed_computations(module):
        for consumer in computation.instructions.values():
            if consumer.name not in launches:
                continue
            found: dict[tuple[str, str], dict[Path, set[int]]] = {}
            straight: set[tuple[str, str]] = set()
            for number, operand in enumerate(consumer.operands):
                for path, _ in leaves(computation.instructions[operand].shape):
                    sources = list(_written(dataflow, launches, computation, operand, path))
                    # A value that a loop carries has two sources: one is in the loop, or comes after its reader in
                    # the text.
                    if not any(_crosses_boundary(places[s.instruction], places[consumer.name]) for s in sources):
                        straight.update((s.computation, s.instruction) for s in sources)
                    for source in sources:
                        if source.instruction != consumer.name:
                            outputs = found.setdefault((source.computation, source.instruction), {})
                            outputs.setdefault(source.path, set()).add(number)
            for (home, producer), outputs in found.items():
                shape = module.computations[home].instructions[producer].shape
                edges.append(
                    Edge(
                        producer=producer,
                        consumer=consumer.name,
                        values=tuple((path, leaf_shape(shape, path)) for path in sorted(outputs)),
                        positions=frozenset().union(*outputs.values()),
                        crosses=(home, producer) not in straight,
                    )
                )
    return tuple(edges)


_Place = tuple[str, tuple[int, ...]]


def _crosses_boundary(written: _Place, read: _Place) -> bool:
    """Whether a value is read in another computation than it is written in, or before it: in a loop's next run."""
    return written[0] != read[0] or written[1] >= read[1]


def _places(module: Module) -> dict[str, _Place]:
    """Maps each executed instruction to the entry, loop body or branch that it runs in, and its position there."""
    homes: dict[str, _Place] = {}
    places: dict[str, _Place] = {}
    for computation in reversed(executed_computations(module)):  # callers come after the computations that they call
        home, position = homes.get(computation.name, (computation.name, ()))
        for number, instruction in enumerate(computation.instructions.values()):
            places[instruction.name] = home, (*position, number)
            if instruction.opcode not in ("while", "conditional"):
                homes.update((name, (home, (*position, number))) for name in instruction.called)
    return places


def executed_computations(module: Module) -> tuple[Computation, ...]:
    """Returns the entry and the bodies of loops, branches and calls, in text order.

    Fused computations and the computations of reductions are left out.
    """
    wanted = {module.entry_name}
    queue = [module.entry]
    while queue:
        for instruction in queue.pop().instructions.values():
            if instruction.opcode in CONTROL_FLOW:
                new = [name for name in instruction.called if name not in wanted]
                wanted.update(new)
                queue += [module.computations[name] for name in new]
    return tuple(computation for name, computation in module.computations.items() if name in wanted)


def _written(
    dataflow: Dataflow, launches: Collection[str], computation: Computation, name: str, path: Path
) -> Iterator[Source]:
    """Yields the launches that write a value, looking through instructions such as the end of a copy."""
    queue, seen = list(dataflow.sources(computation.name, name, path)), set()
    while queue:
        source = queue.pop(0)
        if source in seen:
            continue
        seen.add(source)
        if source.instruction in launches:
            yield source
            continue
        home = dataflow.module.computations[source.computation]
        for operand in home.instructions[source.instruction].operands:
            for inner, _ in leaves(home.instructions[operand].shape):
                queue += dataflow.sources(home.name, operand, inner)
