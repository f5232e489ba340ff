"""Runs a planned program: equations outside its sites, and operations at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.extend import core as jex

from xlafuse.fusion.calls import Calls, OnChoice
from xlafuse.fusion.graph import Equation, Value
from xlafuse.fusion.plan import Plan
from xlafuse.fusion.schedule import schedule
from xlafuse.fusion.site import Site


def evaluate(
    plan: Plan, inputs: Sequence[Any], on_choice: OnChoice = None, implementation: str | None = None
) -> list[Any]:
    """Computes the outputs of a plan's graph.

    inputs: the constants, then the arguments. implementation: the one for all sites; None: each operation's own choice.
    """
    return _evaluate(Calls(on_choice, implementation), plan, inputs)


def _evaluate(calls: Calls, plan: Plan, inputs: Sequence[Any]) -> list[Any]:
    known: dict[Value, Any] = dict(zip(plan.graph.inputs, inputs, strict=True))
    inside = functools.partial(_evaluate, calls)

    def read(value: Value) -> Any:
        return value.literal if value.literal is not None else known[value]

    for unit in schedule(plan.graph, plan.sites):
        if isinstance(unit, Site):
            with _names_of(unit.root):
                known.update(zip(unit.outputs, calls(unit, read, _traceback_of(unit.root)), strict=True))
        else:
            operands = [read(value) for value in unit.inputs]
            known.update(zip(unit.outputs, _bind(unit, plan.inner.get(unit, {}), operands, inside), strict=True))
    return [_typed(read(value), value) for value in plan.graph.outputs]


def _typed(result: Any, value: Value) -> Any:
    return result if hasattr(result, "dtype") and result.dtype == value.dtype else jnp.asarray(result, value.dtype)


def _bind(
    equation: Equation, bodies: Mapping[str, Sequence[Plan]], inputs: Sequence[Any], inside: Callable[..., list[Any]]
) -> Sequence[Any]:
    """Computes an equation. inside: evaluates the plans of its bodies."""
    source = equation.source
    params = dict(equation.params)
    with _names_of(equation), source.ctx.manager:
        if any(inner.changes for plans in bodies.values() for inner in plans):
            if equation.primitive == "shard_map":
                return _in_shard_map(functools.partial(inside, bodies["jaxpr"][0]), params, inputs)
            for name, plans in bodies.items():
                params[name] = _rewritten(plans, params[name], inside)
        results = source.primitive.bind(*inputs, **source.primitive.get_bind_params(params))
    return results if source.primitive.multiple_results else [results]


def _rewritten(plans: Sequence[Plan], given: Any, inside: Callable[..., list[Any]]) -> Any:
    """Rewrites the bodies of a loop or call."""
    bodies = given if isinstance(given, tuple | list) else (given,)
    made = []
    for plan, body in zip(plans, bodies, strict=True):
        if not plan.changes:
            made.append(body)
            continue
        is_closed = isinstance(body, jex.ClosedJaxpr)
        consts = body.consts if is_closed else ()
        avals = [value.aval for value in plan.graph.inputs[len(consts) :]]

        def body_of(*own: Any, plan: Plan = plan, consts: Sequence[Any] = consts) -> list[Any]:
            return inside(plan, (*consts, *own))

        closed = jax.make_jaxpr(body_of)(*avals)
        made.append(closed if is_closed else closed.jaxpr)
    return tuple(made) if isinstance(given, tuple | list) else made[0]


def _in_shard_map(
    body: Callable[[Sequence[Any]], list[Any]], params: Mapping[str, Any], inputs: Sequence[Any]
) -> Sequence[Any]:
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return jax.shard_map(
        lambda *own: tuple(body(own)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(*inputs)


def _names_of(equation: Equation) -> Any:
    """Enters the scopes and the line of the user's program that an equation comes from."""
    stack = source_info_util.current_name_stack()
    for call in (*equation.calls, equation.source):
        stack = stack + call.source_info.name_stack
    return source_info_util.user_context(_traceback_of(equation), name_stack=stack)


def _traceback_of(equation: Equation) -> Any:
    """Returns the innermost traceback with a line of the user's: inside jax.nn's jitted functions there is none."""
    tracebacks = [each.source_info.traceback for each in (equation.source, *reversed(equation.calls))]
    return next((each for each in tracebacks if any(source_info_util.user_frames(each))), tracebacks[0])
