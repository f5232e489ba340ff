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

from pallas_kernels.dispatch import Choice
from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.graph import frozen
from xlafuse.fusion.plan import Plan, make_plan
from xlafuse.fusion.site import Site
from xlafuse.fusion.spellings import Choices


@dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    call: computes it; a trace takes its equations over without evaluating them. choices: what each site's operation
    took, on one device's parts where explicit mesh axes cut the arrays.
    """

    plan: Plan
    program: Any
    call: Any
    choices: Mapping[Site, Choice]


@dataclass(frozen=True)
class _Request:
    """A program to rewrite. Two are equal where the program and everything that its rewriting depends on are equal."""

    key: Any
    choices: Choices
    avals: tuple[Any, ...]
    closed: Any = field(compare=False)


def rewritten(closed: Any, inputs: Sequence[Any], choices: Choices, source: Any) -> Rewritten:
    """Rewrites a closed jaxpr to a program of its constants and arguments, or looks up the one made before.

    inputs: the constants and arguments. source: the code whose lines a report names. The cache tells programs apart by
    their equations, shapes, dtypes, mesh and configuration.
    """
    settings = (config.trace_context(), jax.default_backend())
    key = canonical(closed.jaxpr), source, settings
    return _rewritten(_Request(key, choices, tuple(jax.typeof(each) for each in inputs), closed))


@functools.lru_cache(maxsize=32)
def _rewritten(request: _Request) -> Rewritten:
    plan = make_plan(request.closed.jaxpr, request.choices)
    made: dict[Site, Choice] = {}
    program = jax.make_jaxpr(lambda *inputs: evaluate(plan, inputs, made.setdefault))(*request.avals)
    return Rewritten(plan, program, jax.jit(jex.jaxpr_as_fun(program), inline=True), made)


def canonical(jaxpr: Any) -> Any:
    """Returns a key that two jaxprs share where they have the same equations.

    The key compares functions and arrays by identity: whoever keeps it must keep the jaxpr, too.
    """
    known: dict[int, Any] = {}

    def key(jaxpr: Any) -> Any:
        if id(jaxpr) not in known:
            inputs = (*jaxpr.constvars, *jaxpr.invars)
            results = (variable for equation in jaxpr.eqns for variable in equation.outvars)
            numbers = {variable: number for number, variable in enumerate((*inputs, *results))}

            def atom(each: Any) -> Any:
                return (each.aval, np.asarray(each.val).tobytes()) if isinstance(each, jex.Literal) else numbers[each]

            equations = tuple(
                (each.primitive, tuple(map(atom, each.invars)), frozen(each.params, key), each.source_info.name_stack)
                for each in jaxpr.eqns
            )
            known[id(jaxpr)] = tuple(each.aval for each in inputs), equations, tuple(map(atom, jaxpr.outvars))
        return known[id(jaxpr)]

    return key(jaxpr)
