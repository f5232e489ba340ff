"""Kernels that a test launches more than once are made into programs for the interpreter once, for tests only.

A call's forward pass and that of its gradient are often one kernel, traced twice. Making the interpreter's program of
it takes far longer than running it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from jax._src import core
from jax._src.pallas.core import BlockMapping, GridMapping
from jax._src.pallas.mosaic_gpu.core import WarpMesh

_programs: dict[Hashable, Callable[..., Any]] = {}


def forget() -> None:
    """Each test has its own, since tests may add to the interpreter what is theirs alone."""
    _programs.clear()


def count() -> int:
    """Different kernels since the last `forget`."""
    return len(_programs)


def program_of(make: Callable[[], Callable[..., Any]], **parameters: Any) -> Callable[..., Any]:
    """What `make` gave for a kernel with the same parameters, or gives now."""
    key = key_of(parameters)
    if key not in _programs:
        _programs[key] = make()
    return _programs[key]


def key_of(value: Any) -> Hashable:
    """Equal for equal values, also for two traces of one function.

    Of all else that cannot be compared only the same object is equal; the key keeps it, so that no other takes its
    place.
    """
    return _key(value, {})


def _key(value: Any, names: dict[Any, int]) -> Hashable:
    """`key_of`, where `names` counts the variables and axes met so far."""
    match value:
        case core.Jaxpr():
            return _key_of_jaxpr(value, names)
        case core.Literal():
            return "literal", value.aval, _key(value.val, names)
        case core.Var():
            return names.setdefault(value, len(names)), value.aval
        case tuple() | list() if type(value) in (tuple, list):
            return type(value), *(_key(each, names) for each in value)
        case GridMapping() | BlockMapping() | WarpMesh():
            return _key({each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, names)
        case core.DebugInfo():
            return "where it was traced"
        case Mapping():
            return "mapping", *((name, _key(each, names)) for name, each in sorted(value.items()))
        case bool() | int() | float() | complex() | np.generic():
            return type(value), repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        case np.ndarray():
            return value.dtype, value.shape, value.tobytes()
    if type(value) is object:  # an axis without a name
        return "object", names.setdefault(value, len(names))
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value


def _key_of_jaxpr(jaxpr: Any, names: dict[Any, int]) -> Hashable:
    # What a scoped function closes over stands in its equation, too; here are only the tracers of long ago.
    constants = [each for each in jaxpr.consts if not isinstance(each, core.Tracer)]
    variables = _key([*jaxpr.constvars, *jaxpr.invars], names)
    equations = tuple(
        (each.primitive, _key(each.params, names), *(_key(vs, names) for vs in (each.invars, each.outvars)), each.ctx)
        for each in jaxpr.eqns
    )
    return "jaxpr", variables, equations, _key(jaxpr.outvars, names), *map(Same, constants)


class Same:
    """Equal to itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
