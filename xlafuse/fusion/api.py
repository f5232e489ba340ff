"""`fuse` replaces parts of a function by calls of fused operations."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import ad
from jax.core import Tracer, eval_jaxpr  # pyright: ignore[reportAttributeAccessIssue]
from jax.export import is_symbolic_dim

from pallas_kernels.primitives.partitioned import may_be_partitioned
from xlafuse.fusion.cache import rewritten
from xlafuse.fusion.modules import Modules, bound_module
from xlafuse.fusion.report import Report, make_report
from xlafuse.fusion.spellings import Choices

UNSEEN_SHARDINGS = (
    "A trace cannot see how jax.jit spreads arrays: where the program is compiled for several devices, they share a "
    "site's work, or XLA computes it, and a KernelWarning says so. pallas_kernels.recorded_choices around compiling "
    "lists each device's parts and their mesh axes."
)


# flax is found without importing it: a program without its modules does not load it.
_PACKAGES = (Path(__file__).parent, jax.__file__, getattr(find_spec("flax"), "origin", None))
_NOT_USERS = (*(f"{Path(each).parent}{os.sep}" for each in _PACKAGES if each), contextlib.__file__, functools.__file__)
"""Files and folders whose frames a warning does not name."""


class FuseWarning(UserWarning):
    """`fuse` left a function as it is."""


def fuse[**P, T](
    fn: Callable[P, T],
    *,
    ops: Sequence[str] | None = None,
    skip: Collection[str] = (),
    allow: Collection[str] = (),
    report: Callable[[Report], object] | None = None,
) -> Callable[P, T]:
    """Returns a function that computes what `fn` does, with calls of the operations of `xlafuse.kernels`.

        loss = xlafuse.fuse(loss)
        step = jax.jit(jax.value_and_grad(loss))

    `fuse` traces the function and replaces each part that means the same as an operation. It compares the part with the
    operation's own definition, traced at the same shapes and dtypes: each primitive, axis, dtype and constant must
    agree, up to layouts and the order of sums and products. The operation chooses its implementation.

    Fuse a function before you differentiate it: `jax.grad(fuse(f))`. `fuse(jax.grad(f))` warns with a `FuseWarning` and
    changes nothing. The result works under `jit`, `grad`, `vmap`, `remat`, and inside `shard_map`. Where `jit` compiles
    it for several devices, they share the work of the operations; see docs/several-gpus.md. `fuse` searches
    loops, conditionals and `remat` inside `fn`, but no functions with derivatives of their own.

    Args:
        fn: any JAX function of arrays in trees; also a `flax.nnx` module or a method of one, or a function of modules,
            whose changed variables are kept. Arguments that are not arrays are static.
        ops: the operations to look for, by name, also at sites that XLA fuses with what is around them; None: all, at
            the other sites.
        skip: operations to leave out, by name. Smaller operations may take their parts.
        allow: differences to accept. "rounding": the program rounds an intermediate value that the operation does not.
        report: called with a `Report` each time the function is traced.

    Returns:
        A function with the arguments and results of `fn`. Each call traces `fn`: put it under `jax.jit`. `fuse`
        searches a program once for the same shapes, dtypes, mesh and configuration.

    Raises:
        TypeError: `fn` is no function.
        ValueError: unknown names in `ops`, `skip` or `allow`.
    """
    if not callable(fn):
        raise TypeError(f"fuse: expected a function, got {type(fn).__name__}; call fuse(f) and not fuse(f(x)).")
    if isinstance(skip, str):
        raise TypeError(f"fuse: skip must be a collection of names, got {skip!r}; write skip={{{skip!r}}}.")
    choices = Choices(None if ops is None else tuple(ops), frozenset(skip), frozenset(allow))
    name = getattr(fn, "__qualname__", type(fn).__name__)

    def run(closed: Any, arrays: Sequence[Any]) -> Sequence[Any]:
        inputs = [*closed.consts, *arrays]
        if (reason := _refusal(closed.jaxpr, inputs)) is not None:
            warnings.warn(f"fuse left {name} as it is: {reason}.", FuseWarning, skip_file_prefixes=_NOT_USERS)
            if report is not None:
                report(Report(function=name, notes=(reason,)))
            return eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
        found = rewritten(closed, inputs, choices, getattr(fn, "__code__", type(fn)))
        if report is not None:
            in_gradient = any(map(_has_tangent, inputs))
            told = make_report(name, found.plan, found.choices, outside=__file__, in_gradient=in_gradient)
            unseen = told.taken and may_be_partitioned() and jax.device_count() > 1
            report(replace(told, notes=(UNSEEN_SHARDINGS,)) if unseen else told)
        if any(isinstance(each, Tracer) for each in inputs):
            return found.call(*inputs)
        return eval_jaxpr(found.program.jaxpr, found.program.consts, *inputs)

    @functools.wraps(fn)
    def fused(*args: P.args, **kwargs: P.kwargs) -> T:
        modules, structure, leaves = Modules.of((bound_module(fn), args, kwargs))
        arrays, joined = _split(leaves)
        outcome: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            live, (own, args, kwargs) = modules.merged(structure, joined(iter(arrays)))
            function: Callable[..., Any] = fn if own is None else _rebound(fn, own)
            results, outcome["structure"] = jax.tree.flatten(function(*args, **kwargs))
            own_arrays, outcome["joined"] = _split(results)
            outcome["changes"], changed = modules.changes(live)
            return own_arrays + changed

        closed = jax.make_jaxpr(flat)(*arrays)
        values = iter(run(closed, arrays))
        results = outcome["joined"](values)
        modules.update(outcome["changes"], list(values))
        return jax.tree.unflatten(outcome["structure"], results)

    return fused


def _split(leaves: Sequence[Any]) -> tuple[list[Any], Callable[[Iterator[Any]], list[Any]]]:
    """Returns the arrays among leaves, and a function that puts others in their places."""
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves]
    arrays = [leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic]

    def joined(others: Iterator[Any]) -> list[Any]:
        return [next(others) if dynamic else leaf for leaf, dynamic in zip(leaves, is_array, strict=True)]

    return arrays, joined


def _rebound(fn: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Returns the module, or its method, with traced variables."""
    return getattr(module, fn.__name__) if inspect.ismethod(fn) else module


def _refusal(jaxpr: Any, inputs: Sequence[Any]) -> str | None:
    """Returns why `fuse` leaves a program as it is; None where it does not."""
    if is_differentiated(jaxpr):
        return "it is differentiated already; fuse what is given to jax.grad, as in jax.grad(fuse(loss))"
    for each in inputs:
        if not isinstance(each, Tracer) and isinstance(each, jax.Array) and len(each.devices()) > 1:
            return "an array is spread over several devices and a kernel sees one; use it inside jax.shard_map"
    if any(map(is_symbolic_dim, (size for each in inputs for size in np.shape(each)))):
        return "sizes are left open, and what a kernel is worth depends on them"
    return None


def _has_tangent(value: Any) -> bool:
    """Returns whether a derivative with respect to a value is being taken."""
    while isinstance(value, Tracer):
        if isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
            return True
        value = getattr(value, "val", None)  # of a mapped value
    return False


def is_differentiated(jaxpr: Any) -> bool:
    """Returns whether a program contains the transposition of another one, as gradients do."""
    return any("transpose(" in str(equation.source_info.name_stack) for equation in jaxpr.eqns)
