"""Caches plans and rewritten programs of functions that were traced before."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax.extend import core as jex

from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.plan import Plan, make_plan
from xlafuse.fusion.site import Site
from xlafuse.fusion.spelling import Spelling


@dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    call: computes it; a trace takes its equations over without evaluating them. implementations: the one that each
    site's operation took.
    """

    plan: Plan
    program: Any
    call: Any
    implementations: Mapping[Site, str]


@dataclass(frozen=True)
class _Request:
    """A program to rewrite. Two are equal where the program and everything that its rewriting depends on are equal."""

    key: Any
    closed: Any = field(compare=False)
    inputs: Any = field(compare=False)


def rewritten(
    closed: Any,
    inputs: Sequence[Any],
    spellings: tuple[Spelling, ...],
    allow: frozenset[str],
    ops: tuple[str, ...] | None,
    skip: frozenset[str],
    source: Any,
) -> Rewritten:
    """Rewrites a closed jaxpr to a program of its constants and arguments, or looks up the one made before.

    inputs: the constants and arguments. source: the code whose lines a report names. The cache tells programs apart by
    their equations, shapes, dtypes, mesh and configuration.
    """
    avals = tuple(jax.typeof(each) for each in inputs)
    settings = (config.trace_context(), jax.default_backend())
    program = canonical(closed.jaxpr)
    key = (program, avals, tuple(map(id, spellings)), allow, ops, skip, source, settings)
    return _rewritten(_Request(key, closed, (avals, spellings, allow, ops, skip)))


@functools.lru_cache(maxsize=32)
def _rewritten(request: _Request) -> Rewritten:
    avals, *choices = request.inputs
    plan = make_plan(request.closed.jaxpr, *choices)
    implementations: dict[Site, str] = {}
    program = jax.make_jaxpr(lambda *inputs: evaluate(plan, inputs, implementations.setdefault))(*avals)
    return Rewritten(plan, program, jax.jit(jex.jaxpr_as_fun(program), inline=True), implementations)


def canonical(jaxpr: Any) -> Any:
    """Returns a key that two jaxprs share where they have the same equations.

    The key compares functions and arrays by identity: whoever keeps it must keep the jaxpr, too.
    """
    return _Canonical().jaxpr(jaxpr)


class _Canonical:
    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def jaxpr(self, jaxpr: Any) -> Any:
        """Returns the key of a jaxpr, with variables by number."""
        if id(jaxpr) in self._known:
            return self._known[id(jaxpr)]
        numbers: dict[Any, int] = {}
        variables = (*jaxpr.constvars, *jaxpr.invars)
        for variable in variables:
            numbers[variable] = len(numbers)

        def atom(each: Any) -> Any:
            return (each.aval, _literal(each.val)) if isinstance(each, jex.Literal) else numbers[each]

        equations = []
        for equation in jaxpr.eqns:
            operands = tuple(map(atom, equation.invars))
            for variable in equation.outvars:
                numbers[variable] = len(numbers)
            equations.append(
                (equation.primitive, operands, self.parameter(equation.params), equation.source_info.name_stack)
            )
        inputs = tuple(each.aval for each in variables)
        made = (inputs, tuple(equations), tuple(map(atom, jaxpr.outvars)))
        self._known[id(jaxpr)] = made
        return made

    def parameter(self, given: Any) -> Any:
        """Returns a hashable form of an equation's parameter."""
        if isinstance(given, dict):
            return tuple((name, self.parameter(each)) for name, each in given.items())
        if isinstance(given, list | tuple):
            return tuple(map(self.parameter, given))
        if isinstance(given, jex.ClosedJaxpr):
            return self.jaxpr(given.jaxpr), tuple(map(id, given.consts))
        if isinstance(given, jex.Jaxpr):
            return self.jaxpr(given)
        try:
            hash(given)
        except TypeError:
            return id(given)
        return given


def _literal(value: Any) -> Any:
    array = np.asarray(value)
    return array.tobytes(), str(array.dtype)
