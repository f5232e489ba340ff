"""Calls of operations in programs that XLA partitions: a kernel there would have whole arrays gathered on every device.

Tracing cannot see the shardings of `jax.jit`'s arguments, and the same trace serves all of them. Lowering knows for how
many devices a program is compiled. So a call is lowered as its kernels for one device, and for several as one whose
work they share (`sharded.py`), or as its reference where they cannot. These are traced only then. With explicit
mesh axes tracing does see them (`explicit.py`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import partial_eval as pe
from jax._src.interpreters.batching import fancy_primitive_batchers
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax._src.state.discharge import discharge_state, register_discharge_rule
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.derivatives import with_pullback, with_zeros
from pallas_kernels.primitives.sharded import Shared
from pallas_kernels.primitives.shared_call import mesh_of, needed, notify, place_of
from pallas_kernels.specs import Static

INSIDE_SHARD_MAP = "a kernel sees one device; call the operation inside jax.shard_map"
"""What to do about arrays that are spread over several devices."""


class KernelWarning(UserWarning):
    """A program that XLA partitions calls an operation that has a kernel."""


def is_spread(array: Any) -> bool:
    """Returns whether an array has values, and different ones on several devices."""
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_concrete and len(array.sharding.device_set) > 1 and not array.is_fully_replicated


def automatic_axes() -> tuple[str, ...]:
    """Returns the current mesh's axes over which XLA may partition the program."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1)


def may_be_partitioned() -> bool:
    """Returns whether XLA may partition the program that is traced: not where all axes are manual or explicit."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(automatic_axes()) or (not mesh.manual_axes and (mesh.empty or mesh.size == 1))


_heard: ContextVar[dict[str, str] | None] = ContextVar("heard", default=None)


@contextlib.contextmanager
def kernel_warnings() -> Iterator[dict[str, str]]:
    """Collects the texts of `KernelWarning`s, which are not shown then, each with its operation."""
    heard: dict[str, str] = {}
    with assigned(_heard, heard):
        yield heard


def warn_of(operation: str, traceback: Any, what: str, why: str) -> None:
    """Warns of an operation at the line of the call."""
    message = f"{operation} {what}: {why}"
    if (heard := _heard.get()) is not None:
        heard[message] = operation
        return
    name, _, line = place_of(traceback).rpartition(":")
    warnings.warn_explicit(message, KernelWarning, name or "unknown", int(line) if name else 0, registry=_warned)


_warned: dict[Any, Any] = {}
"""Python's record of the warnings given, by which each is shown once for a line of the caller's."""


def _warn(ctx: Any, operation: str, what: str, why: str | None = None) -> None:
    """Warns of an operation in a program for several devices."""
    context = ctx.module_context.axis_context
    devices = context.num_devices if isinstance(context, ShardingContext) else context.mesh.size
    why = why or f"the program is compiled for {devices} devices, and {INSIDE_SHARD_MAP}"
    warn_of(operation, ctx.traceback, what, why)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What XLA computes of a call on several devices.

    The gradient computes it again from the arrays; XLA merges the two in one program.
    """

    function: Callable[..., Any]

    def __call__(self, *arrays: Any) -> Any:
        """Returns the function's result."""
        return self.function(*arrays)

    def differentiated(self, wanted: Sequence[bool], kept: Sequence[Any], *arrays: Any) -> tuple[Any, list[Any]]:
        """Returns the function's result, and zeros as residuals, which `gradients` does not read."""
        del wanted
        return self.function(*arrays), [jnp.zeros(each.shape, each.dtype) for each in kept]

    def gradients(self, wanted: Sequence[bool], kept: Sequence[Any], arrays: Sequence[Any], cotangents: Any) -> Any:
        """Returns the gradients of the wanted arrays."""
        del kept
        return with_pullback(self.function, wanted, *arrays)[1](cotangents)


def by_devices(operation: str, kernel: Callable[..., Any], several: Reference | Shared) -> Callable[..., Any]:
    """Returns a differentiable function of arrays: `kernel` on one device, `several` on more. Both compute the same."""
    either = partial(_either, operation=operation, is_shared=isinstance(several, Shared))
    return differentiated_by(either, kernel, several)


def differentiated_by(
    either: Callable[..., Any], kernel: Callable[..., Any], several: Reference | Shared
) -> Callable[..., Any]:
    """Returns a differentiable function of arrays. either: calls `kernel` or `several`, as `_either` does."""
    run = jax.custom_vjp(partial(either, kernel, several))

    def forward(*arrays: Any) -> Any:
        values = [array.value for array in arrays]
        wanted = tuple(array.perturbed and jnp.issubdtype(array.value.dtype, jnp.inexact) for array in arrays)
        functions = partial(with_pullback, kernel, wanted), partial(several.differentiated, wanted)
        result, pullback = either(*functions, *values, keeps=True)
        places = set(map(id, values))
        is_kept = tuple(id(leaf) not in places for leaf in jax.tree.leaves(pullback))
        return result, (pullback, values, Static((wanted, is_kept)))

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback, values, (wanted, is_kept) = saved[0], saved[1], saved[2].value

        def by_kernel(pullback: Any, values: Any, cotangents: Any) -> Any:
            return by_several(None, values, cotangents) if pullback is None else pullback(cotangents)

        def by_several(pullback: Any, values: Any, cotangents: Any) -> Any:
            kept = [leaf for leaf, each in zip(jax.tree.leaves(pullback), is_kept, strict=True) if each]
            return several.gradients(wanted, kept, values, cotangents)

        gradients = iter(either(by_kernel, by_several, pullback, values, with_zeros(cotangents)))
        return tuple(next(gradients) if is_wanted else None for is_wanted in wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _either(
    kernel: Callable[..., Any],
    several: Callable[..., Any],
    *operands: Any,
    operation: str,
    is_shared: bool,
    keeps: bool = False,
) -> Any:
    """Calls one of two functions of trees of arrays: `kernel` on one device, `several` on more.

    is_shared: whether `several` is a call whose work devices share. keeps: whether `kernel` returns a result and what
    its gradient needs. Then `several` takes the types of the arrays that these have beside the operands first, and
    returns the result and a list of such arrays.
    """
    leaves, structure = jax.tree.flatten(operands)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        if not any(map(is_spread, leaves)):
            return kernel(*operands)
        return (several([], *operands)[0], None) if keeps else several(*operands)
    traced, types = jax.make_jaxpr(kernel, return_shape=True)(*operands)
    # Results that are operands are no outputs of the primitive: a loop's gradient would save weights once a trip.
    place_of_operand = {id(variable): place for place, variable in enumerate(traced.jaxpr.invars)}
    places = [place_of_operand.get(id(variable)) for variable in traced.jaxpr.outvars]
    jaxpr, _ = pe.dce_jaxpr(traced.jaxpr, [place is None for place in places], instantiate=True)
    results = jax.tree.structure(types[0] if keeps else types).num_leaves
    closed = ClosedJaxpr(jaxpr, traced.consts)
    kept_types = closed.out_avals[places[:results].count(None) :]
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision

    def by_several(*leaves: Any) -> list[Any]:
        own = structure.unflatten(leaves)
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            result, kept = several(kept_types, *own) if keeps else (several(*own), [])
        computed = (value for value, place in zip(jax.tree.leaves(result), places, strict=False) if place is None)
        return [*computed, *kept]

    params = {"operation": operation, "kernel": closed, "reference": by_several, "is_shared": is_shared}
    computed = iter(_either_p.bind(*leaves, **params))
    return jax.tree.structure(types).unflatten(next(computed) if place is None else leaves[place] for place in places)


def _is_partitioned(ctx: Any) -> bool:
    """Returns whether XLA partitions the program that is lowered."""
    context = ctx.module_context.axis_context
    if isinstance(context, SPMDAxisContext):
        return context.mesh.size > 1 and context.manual_axes != frozenset(context.mesh.axis_names)
    return isinstance(context, ShardingContext) and context.num_devices > 1


def _lower_either(
    ctx: Any, *operands: Any, operation: str, kernel: Any, reference: Callable[..., Any], is_shared: bool
) -> Any:
    if not _is_partitioned(ctx):
        return mlir.lower_fun(jaxpr_as_fun(kernel))(ctx, *operands)
    if not is_shared or mesh_of(ctx) is None:
        _warn(ctx, operation, "is left to XLA")
    with assigned(notify, (partial(_warn, ctx, operation), place_of(ctx.traceback))):
        return mlir.lower_fun(partial(needed, reference))(ctx, *operands)


def _batch_either(axis: Any, operands: Any, places: Any, *, kernel: Any, reference: Any, **params: Any) -> Any:
    axes = [place if isinstance(place, int) else None for place in places]
    mapped, other = (jax.vmap(each, axes, axis_size=axis.size) for each in (jaxpr_as_fun(kernel), reference))
    results = _either_p.bind(*operands, kernel=jax.make_jaxpr(mapped)(*operands), reference=other, **params)
    return results, [0] * len(results)


def _discharge_either(ctx: Any, *operands: Any, kernel: Any, **params: Any) -> Any:
    """Replaces the references that a kernel makes for itself, to update arrays in place, by arrays."""
    del ctx
    results = _either_p.bind(*operands, kernel=discharge_state(kernel), **params)
    return [None] * len(operands), results


_either_p = Primitive("either")
"""One of two functions: `kernel`, a closed jaxpr, or `reference`. Only `by_devices` has derivatives."""
_either_p.multiple_results = True
_either_p.def_impl(
    lambda *operands, operation, kernel, reference, is_shared: (
        reference(*operands) if any(map(is_spread, operands)) else jaxpr_as_fun(kernel)(*operands)
    )
)
_either_p.def_effectful_abstract_eval(lambda *_, kernel, **params: (kernel.out_avals, kernel.effects))
fancy_primitive_batchers[_either_p] = _batch_either
register_discharge_rule(_either_p)(_discharge_either)
mlir.register_lowering(_either_p, _lower_either, cacheable=False)
