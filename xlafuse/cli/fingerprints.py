"""Tells whether two traced programs are the same: numbers each value by what computes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from xlafuse.fusion.graph import Equation, Graph, Value, is_plain_call
from xlafuse.fusion.plan import BODIES

Path = tuple[tuple[int, str, int], ...]
"""Where the body of a loop or call is: fingerprint of each equation around it, with the parameter and its place."""

_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim", "expand_dims")
_MOST_SAMPLES = 4096
"""How many numbers of a constant array are compared."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A traced program.

    outputs: the fingerprints of its results and effects. live, dead: how often each equation occurs that these need,
    and that they do not. marks: the places and fingerprints of the values that `mark` named, by name.
    """

    outputs: tuple[int, ...]
    live: Counter[Any]
    dead: Counter[Any]
    marks: Mapping[str, set[tuple[Path, int]]]

    def is_edit(self, fused: Fingerprint, original: Fingerprint) -> bool:
        """Tells whether this program, an edit of `original`, computes what `fused` does and nothing besides."""
        return (
            self.outputs == fused.outputs
            and all(count <= max(fused.live[each], original.live[each]) for each, count in self.live.items())
            and all(count <= original.dead[each] for each, count in self.dead.items())
        )


MARK = "xlafuse:"
"""Begins the names by which `marks` knows values; they are those of `jax.ad_checkpoint.checkpoint_name`."""


@dataclass(frozen=True)
class Numbering:
    """Numbers what is computed: equal computations of equal inputs have equal numbers, in all programs read by it.

    Two reshapes in a row are one, and casts, transpositions and reshapes that change nothing are none.
    """

    _numbers: dict[Any, int] = field(default_factory=dict)
    _reshaped: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _transposed: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _bodies: dict[int, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)

    def read(self, closed: Any) -> Fingerprint:
        """Reads a `ClosedJaxpr`."""
        reader = _Reader(self)
        outputs = reader.read(closed.jaxpr, self.inputs(closed), ())
        return Fingerprint(outputs=outputs, live=reader.live, dead=reader.dead, marks=reader.marks)

    def inputs(self, body: Any) -> list[int]:
        """Numbers a jaxpr's constants, by their numbers, and its arguments, by their places."""
        consts, jaxpr = getattr(body, "consts", ()), getattr(body, "jaxpr", body)
        given = [self._number(("constant", *_sample(each))) for each in consts]
        free = [*jaxpr.constvars[len(consts) :], *jaxpr.invars]
        return given + [self._number(("input", place, _kind(var.aval))) for place, var in enumerate(free)]

    def literal(self, value: Any, aval: Any) -> int:
        """Numbers a scalar constant."""
        return self._number(("literal", repr(np.asarray(value).tolist()), _kind(aval)))

    def equation(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[int]) -> int:
        """Numbers an equation."""
        frozen = tuple((name, self._parameter(value)) for name, value in sorted(params.items()))
        return self._number((str(primitive), frozen, tuple(operands)))

    def outputs(
        self, equation: int, source: Any, operands: Sequence[tuple[int, Any]], avals: Sequence[Any]
    ) -> list[int]:
        """Numbers the results of an equation. operands: their numbers and avals. avals: those of the results."""
        name, aval = source.primitive.name, avals[0] if avals else None
        if len(operands) == 1 and aval is not None:
            base, given = operands[0]
            if name in ("convert_element_type", "copy", "copy_p") and _kind(given) == _kind(aval):
                return [base]
            if name in _RESHAPES and given.size == aval.size:
                base, first = self._reshaped.get(base, (base, tuple(given.shape)))
                return [self._moved(base, first, tuple(aval.shape), self._reshaped, first)]
            if name == "transpose":
                first = tuple(range(given.ndim))
                base, order = self._transposed.get(base, (base, first))
                order = tuple(order[axis] for axis in source.params["permutation"])
                return [self._moved(base, first, order, self._transposed, order)]
        return [self._number((equation, place)) for place in range(len(avals))]

    def _moved(self, base: int, first: Any, last: Any, known: dict[int, Any], kept: Any) -> int:
        """Numbers a layout of a value, and keeps how it came about; the value's own number where nothing changes."""
        if first == last:
            return base
        made = self._number((base, last))
        known[made] = (base, kept)
        return made

    def applied(self, function: Any, operands: Sequence[tuple[int, Any]]) -> int:
        """Numbers what a function makes of values, given by their numbers and avals."""
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for _, aval in operands))
        return _Reader(self).read(closed.jaxpr, [number for number, _ in operands], ())[0]

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
            if id(value) not in self._bodies:
                read = _Reader(self).read(getattr(value, "jaxpr", value), self.inputs(value), ())
                self._bodies[id(value)] = value, read  # kept, so that its id stays its own
            return self._bodies[id(value)][1]
        if isinstance(value, tuple | list):
            return tuple(map(self._parameter, value))
        if isinstance(value, dict):
            return tuple((str(name), self._parameter(each)) for name, each in value.items())
        if isinstance(value, np.ndarray | jax.Array):
            return _sample(value)
        if callable(value) and not isinstance(value, type | np.dtype):
            return type(value).__name__  # rules of derivatives, say
        if isinstance(value, float):
            value = np.float32(value)  # source has as few digits as float32 needs
        return re.sub("0x[0-9a-f]+", "", str(value))


@dataclass
class _Reader:
    numbering: Numbering
    live: Counter[Any] = field(default_factory=Counter)
    dead: Counter[Any] = field(default_factory=Counter)
    marks: dict[str, set[tuple[Path, int]]] = field(default_factory=dict)

    def read(self, jaxpr: Any, inputs: Sequence[int], path: Path) -> tuple[int, ...]:
        """Reads a body; returns the numbers of its results and of its equations with effects."""
        flat: list[tuple[int, Any, list[int]]] = []
        made: list[int] = []
        results = self._inline(jaxpr, [(number, -1) for number in inputs], path, flat)
        needed = {place for _, place in results}
        for place in range(len(flat) - 1, -1, -1):
            number, source, operands = flat[place]
            is_live = place in needed or bool(source.effects)
            if is_live:
                needed.update(operands)
            if source.effects:
                made.append(number)
            if source.primitive.name not in _RESHAPES:
                (self.live if is_live else self.dead)[tuple(name for _, name, _ in path), number] += 1
        return *(number for number, _ in results), *made[::-1]

    def _inline(
        self, jaxpr: Any, inputs: Sequence[tuple[int, int]], path: Path, flat: list[Any]
    ) -> list[tuple[int, int]]:
        """Reads equations with plain calls of `jit` inlined; values are pairs of a number and a place in `flat`."""
        numbering, known = self.numbering, dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(atom: Any) -> tuple[int, int]:
            return (numbering.literal(atom.val, atom.aval), -1) if isinstance(atom, jex.Literal) else known[atom]

        for source in jaxpr.eqns:
            operands = [read(atom) for atom in source.invars]
            if is_plain_call(source):
                known.update(zip(source.outvars, self._inline(_body(source), operands, path, flat), strict=True))
                continue
            if source.primitive.name == "name" and source.params["name"].startswith(MARK):
                self.marks.setdefault(source.params["name"], set()).add((path, operands[0][0]))
                known[source.outvars[0]] = operands[0]
                continue
            numbers = [number for number, _ in operands]
            number = numbering.equation(source.primitive, source.params, numbers)
            self._bodies(source, number, path)
            flat.append((number, source, [place for _, place in operands]))
            given = [(each, atom.aval) for each, atom in zip(numbers, source.invars, strict=True)]
            outputs = numbering.outputs(number, source, given, [var.aval for var in source.outvars])
            known.update({var: (output, len(flat) - 1) for var, output in zip(source.outvars, outputs, strict=True)})
        return [read(atom) for atom in jaxpr.outvars]

    def _bodies(self, source: Any, number: int, path: Path) -> None:
        for name in BODIES.get(source.primitive.name, ()):
            given = source.params[name]
            for place, body in enumerate(given if isinstance(given, tuple | list) else (given,)):
                inside = (*path, (number, f"{source.primitive.name} {name}", place))
                self.read(getattr(body, "jaxpr", body), self.numbering.inputs(body), inside)


def graph_numbers(
    numbering: Numbering, graph: Graph, inputs: Sequence[int]
) -> tuple[dict[Value, int], dict[Equation, int]]:
    """Numbers the values and the equations of a plan's graph. inputs: the numbers of the graph's inputs."""
    values, equations = dict(zip(graph.inputs, inputs, strict=True)), {}

    def read(value: Value) -> int:
        return numbering.literal(value.literal, value.aval) if value.literal is not None else values[value]

    for equation in graph.equations:
        operands = [(read(each), each.aval) for each in equation.inputs]
        number = numbering.equation(equation.source.primitive, equation.params, [each for each, _ in operands])
        equations[equation] = number
        avals = [output.aval for output in equation.outputs]
        values.update(zip(equation.outputs, numbering.outputs(number, equation.source, operands, avals), strict=True))
    return values, equations


def _body(source: Any) -> Any:
    return source.params["jaxpr"].jaxpr


def _kind(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{tuple(getattr(aval, 'shape', ()))}"


def _sample(array: Any) -> tuple[Any, ...]:
    """Returns shape, dtype and some of a constant's numbers."""
    if isinstance(array, Tracer):  # a kernel's memory
        return (_kind(array.aval),)
    if not hasattr(array, "shape") or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return (str(array),)
    flat = np.asarray(array).reshape(-1)
    return array.shape, str(array.dtype), flat[:: max(1, flat.size // _MOST_SAMPLES)].tobytes()
