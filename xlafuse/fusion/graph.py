"""A jaxpr as a graph of values: calls of `jit` inlined, equal equations one, literals values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

_EMPTY_CALL = {"donated_invars", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "compiler_options_kvs"}


@dataclass(eq=False)
class Value:
    """The array that one variable of the jaxpr holds.

    literal: the number, if it is a scalar constant. users: the equations that read it. derived: cached facts, by name.
    is_imagined: whether it only stands for a part of a formula, and no equation of the program computes it.
    primitive: the name of the primitive that computes it; "" for an input or a literal.
    """

    aval: Any
    equation: Equation | None = None
    position: int = 0
    literal: Any = None
    users: list[Equation] = field(default_factory=list)
    derived: dict[str, Any] = field(default_factory=dict)
    is_imagined: bool = False
    shape: tuple[int, ...] = field(init=False)
    dtype: Any = field(init=False)
    primitive: str = field(init=False)

    def __post_init__(self):
        self.shape = tuple(int(size) for size in self.aval.shape)
        self.dtype = self.aval.dtype
        self.primitive = self.equation.primitive if self.equation else ""

    @property
    def sharding(self) -> Any:
        """Returns how explicit mesh axes cut it, or None; a trace does not see automatic axes."""
        sharding = getattr(self.aval, "sharding", None)
        return sharding if sharding is not None and any(sharding.spec) else None


@dataclass(eq=False)
class Equation:
    """One equation.

    calls: the `jit` equations around it, the outermost first. is_constant: whether its results depend on no input of
    the graph.
    """

    primitive: str
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    source: Any
    index: int
    calls: tuple[Any, ...] = ()
    outputs: tuple[Value, ...] = ()
    is_constant: bool = field(init=False)

    def __post_init__(self):
        made = (value.equation for value in self.inputs if value.literal is None)
        self.is_constant = not self.has_effects and all(inner is not None and inner.is_constant for inner in made)

    @property
    def has_effects(self) -> bool:
        """Returns whether it does more than compute its results."""
        return bool(self.source.effects)


@dataclass(frozen=True, eq=False)
class Graph:
    """A jaxpr's inputs (its constants first), equations in order, and outputs."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value, ...]


def build(jaxpr: Any) -> Graph:
    """Builds the graph of a `Jaxpr`, whose constants become inputs."""
    builder = _Builder()
    inputs = [Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
    outputs = builder.inline(jaxpr, inputs)
    equations = _live(builder.equations, outputs)
    for equation in equations:
        for value in dict.fromkeys(equation.inputs):
            value.users.append(equation)
    return Graph(tuple(inputs), tuple(equations), tuple(outputs))


def _live(equations: Sequence[Equation], outputs: Sequence[Value]) -> list[Equation]:
    """Returns the equations that the outputs need, and those with effects."""
    needed, kept = set(outputs), []
    for equation in reversed(equations):
        if equation.has_effects or not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
            kept.append(equation)
    return kept[::-1]


class _Builder:
    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self._numbered: dict[Any, Equation] = {}
        self._literals: dict[Any, Value] = {}

    def inline(self, jaxpr: Any, inputs: Sequence[Value], calls: tuple[Any, ...] = ()) -> list[Value]:
        values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(atom: Any) -> Value:
            return self._literal(atom) if isinstance(atom, jex.Literal) else values[atom]

        for source in jaxpr.eqns:
            operands = tuple(map(read, source.invars))
            if is_plain_call(source):
                results = self.inline(source.params["jaxpr"].jaxpr, operands, (*calls, source))
            else:
                results = self._equation(source, operands, calls).outputs
            values.update(zip(source.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _literal(self, atom: Any) -> Value:
        key = (str(atom.aval), repr(atom.val))
        if key not in self._literals:
            self._literals[key] = Value(atom.aval, literal=np.asarray(atom.val)[()])
        return self._literals[key]

    def _equation(self, source: Any, operands: tuple[Value, ...], calls: tuple[Any, ...]) -> Equation:
        key = None if source.effects else (source.primitive.name, frozen(source.params), tuple(map(id, operands)))
        if key is not None and key in self._numbered:
            return self._numbered[key]
        made = Equation(source.primitive.name, source.params, operands, source, len(self.equations), calls)
        made.outputs = tuple(Value(var.aval, made, place) for place, var in enumerate(source.outvars))
        self.equations.append(made)
        if key is not None:
            self._numbered[key] = made
        return made


LAYOUTS = frozenset((
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "split", "convert_element_type", "copy", "copy_p",
    "pvary",
))  # fmt: skip
"""Primitives that change the layout of one operand, or cast it."""


def is_free(equation: Equation) -> bool:
    """Returns whether an equation may be computed twice: it changes a layout, casts, or depends on no data."""
    return equation.primitive in LAYOUTS or equation.is_constant


def before(value: Value, primitives: Collection[str], most: int) -> Iterator[Value]:
    """Yields a value and those that it is computed from by some primitives, the nearest first; about `most` of them."""
    found, known = [value], {value}
    for each in found:
        yield each
        if each.equation is not None and each.primitive in primitives and len(found) < most:
            found += [inner for inner in dict.fromkeys(each.equation.inputs) if inner not in known]
            known.update(each.equation.inputs)


def behind(value: Value, primitives: Collection[str] = LAYOUTS, ends: Collection[Value] = ()) -> Value:
    """Returns the value that another one is a layout or a cast of, or the first of `ends` on the way to it."""
    while value.equation is not None and value.primitive in primitives and value not in ends:
        value = value.equation.inputs[0]
    return value


def readers(
    value: Value, returned: Collection[Value] = (), layouts: Collection[str] = LAYOUTS
) -> Iterator[Equation | None]:
    """Yields the equations that read a value in any layout; None where it is returned."""
    if value in returned:
        yield None
    for user in value.users:
        if user.primitive in layouts:
            for output in user.outputs:
                yield from readers(output, returned, layouts)
        else:
            yield user


def depends_on(value: Value, others: Collection[Value]) -> bool:
    """Returns whether a value is one of others, or is computed from one."""
    first = min((each.equation.index for each in others if each.equation is not None), default=0)
    pending, seen = [value], set[Value]()
    while pending:
        each = pending.pop()
        if each in others:
            return True
        if each not in seen and each.equation is not None and each.equation.index >= first:
            seen.add(each)
            pending += each.equation.inputs
    return False


_MOST_CONSTANTS = 2**22
"""The largest size of an array that `constant` computes."""


def constant(value: Value) -> np.ndarray | None:
    """Computes the array that a value always is; None where it depends on the graph's inputs, or is large."""
    if value.literal is not None:
        return np.asarray(value.literal)
    equation = value.equation
    if equation is None or not equation.is_constant or math.prod(value.shape) > _MOST_CONSTANTS:
        return None
    if "constant" not in value.derived:
        inputs = [constant(each) for each in equation.inputs]
        if any(each is None for each in inputs):
            return None
        primitive = equation.source.primitive
        with jax.ensure_compile_time_eval():
            given = [jax.numpy.asarray(each, of.dtype) for each, of in zip(inputs, equation.inputs, strict=True)]
            results = primitive.bind(*given, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
            for output, result in zip(equation.outputs, results, strict=True):
                output.derived["constant"] = np.asarray(result)
    return value.derived["constant"]


def is_plain_call(source: Any) -> bool:
    """Returns whether an equation is a call of `jax.jit` without shardings, donations, layouts or compiler options."""
    if source.primitive.name not in ("jit", "pjit") or source.params["jaxpr"].consts:
        return False
    plain = (jax.sharding.NamedSharding,)
    for name in _EMPTY_CALL & source.params.keys():
        for each in source.params[name]:
            if isinstance(each, plain) or (name == "donated_invars" and each):
                return False
            if name == "compiler_options_kvs" or (name.endswith("layouts") and each is not None):
                return False
    return True


def frozen(params: Any, key: Callable[[Any], Any] = id) -> Any:
    """Returns a hashable form of parameters: by value where they are hashable, else by identity.

    key: the one of a jaxpr among them.
    """
    if isinstance(params, dict):
        return tuple((name, frozen(value, key)) for name, value in sorted(params.items()))
    if isinstance(params, list | tuple):
        return (type(params).__name__, *(frozen(each, key) for each in params))
    if isinstance(params, jex.ClosedJaxpr):
        return key(params.jaxpr), tuple(map(id, params.consts))
    if isinstance(params, jex.Jaxpr):
        return key(params)
    try:
        hash(params)
    except TypeError:
        return id(params)
    return params
