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
from jax._src import source_info_util
from jax._src.interpreters.batching import fancy_primitive_batchers
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax._src.state.discharge import discharge_state, register_discharge_rule
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.derivatives import with_pullback
from pallas_kernels.primitives.dimensions import Dimensions
from pallas_kernels.primitives.explicit import by_explicit_axes, is_explicit, on_one_device
from pallas_kernels.primitives.interpreter import reason_against
from pallas_kernels.primitives.platform import is_interpreted
from pallas_kernels.primitives.sharded import Shared, shared_by
from pallas_kernels.primitives.shared_call import mesh_of, needed, notify, place_of
from pallas_kernels.specs import Static

INSIDE_SHARD_MAP = "a kernel sees one device; call the operation inside jax.shard_map"
"""What to do about arrays that are spread over several devices."""


class KernelWarning(UserWarning):
    """A program that XLA partitions calls an operation that has a kernel."""


class KernelChosen(Exception):
    """Ends a call that takes a kernel, to be made again once it is settled where; not an error."""


_open_to: ContextVar[str | None] = ContextVar("open_to", default=None)
_settled: ContextVar[str | None] = ContextVar("settled", default=None)
_uninterpretable: ContextVar[tuple[str, str] | None] = ContextVar("uninterpretable", default=None)


def is_open(operation: str) -> bool:
    """Returns whether a call of the operation that takes a kernel is to raise `KernelChosen`."""
    return _open_to.get() == operation


def is_settled(operation: str) -> bool:
    """Returns whether the call's choice has been made, recorded and checked before."""
    return _settled.get() == operation


def interpreter_lacks(operation: str) -> str | None:
    """Returns why JAX's interpreter cannot run the kernels of this call, or None if it can or is not in use."""
    name, reason = _uninterpretable.get() or (None, None)
    return reason if name == operation else None


def is_spread(array: Any) -> bool:
    """Returns whether an array has values, and different ones on several devices."""
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    return is_concrete and len(array.sharding.device_set) > 1 and not array.is_fully_replicated


def automatic_axes() -> tuple[str, ...]:
    """Returns the current mesh's axes over which XLA may partition the program."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1)


def call_operation(
    operation: str,
    function: Callable[..., Any],
    dimensions: Dimensions | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls an operation, with its kernels only where they can run: on one device's arrays, or one device's parts.

    function: takes `implementation`, and calls `dispatch.choose` with the operation's name. dimensions: how devices may
    share its work, if they may.
    """
    key = kwargs.get("dropout_key")
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.ndim:
        kwargs = {**kwargs, "dropout_key": jax.random.key_data(key)}  # XLA's partitioner knows no keys
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays = [leaves[place] for place in places]

    def call(*arrays: Any, **given: Any) -> Any:
        merged = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        args, kwargs = jax.tree.unflatten(structure, merged)
        with assigned(_settled, operation):
            return function(*args, **{**kwargs, **given})

    if is_settled(operation):
        return function(*args, **kwargs)
    if is_interpreted():
        reason = reason_against(call, tuple(arrays), with_gradient=kwargs.get("implementation") is None)
        with assigned(_uninterpretable, None if reason is None else (operation, reason)):
            return function(*args, **kwargs)
    if not any(isinstance(leaf, Tracer) for leaf in arrays):
        return function(*args, **kwargs)
    reference = partial(call, implementation="xla")
    if dimensions is not None and is_explicit() and any(any(jax.typeof(leaf).sharding.spec) for leaf in arrays):
        with on_one_device():
            with assigned(_open_to, operation), contextlib.suppress(KernelChosen):  # checks the call
                jax.eval_shape(call, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays))
            shared = shared_by(operation, dimensions, function, call, reference, (args, kwargs), places)
        if shared is not None:
            return by_explicit_axes(shared, partial(_warn_of, operation, source_info_util.current().traceback))(*arrays)
    if not may_be_partitioned():
        return function(*args, **kwargs)
    if dimensions is None and automatic_axes() and kwargs.get("implementation") is None:
        return function(*args, **kwargs)  # by XLA
    try:
        with assigned(_open_to, operation):
            return function(*args, **kwargs)
    except KernelChosen:
        pass
    several = Reference(function=reference)
    if dimensions is not None:
        several = shared_by(operation, dimensions, function, call, reference, (args, kwargs), places) or several
    return by_devices(operation, call, several)(*arrays)


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


def _warn_of(operation: str, traceback: Any, what: str, why: str) -> None:
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
    _warn_of(operation, ctx.traceback, what, why)


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
    either = partial(_either, operation, is_shared=isinstance(several, Shared))
    run = jax.custom_vjp(
        lambda *arrays: either(lambda *own: (kernel(*own), None), lambda _, *own: (several(*own), []), arrays)[0]
    )

    def forward(*arrays: Any) -> Any:
        values = [array.value for array in arrays]
        wanted = tuple(array.perturbed and jnp.issubdtype(array.value.dtype, jnp.inexact) for array in arrays)
        result, pullback = either(
            partial(with_pullback, kernel, wanted), partial(several.differentiated, wanted), values
        )
        places = set(map(id, values))
        is_kept = tuple(id(leaf) not in places for leaf in jax.tree.leaves(pullback))
        return result, (pullback, values, Static((wanted, is_kept)))

    def backward(saved: Any, cotangents: Any) -> Any:
        pullback, values, (wanted, is_kept) = saved[0], saved[1], saved[2].value
        leaves, structure = jax.tree.flatten(cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))

        def all_of(given: Sequence[Any]) -> Any:
            own = iter(given)
            zeros = (ad.Zero(leaf.aval) if isinstance(leaf, SymbolicZero) else next(own) for leaf in leaves)
            return structure.unflatten(zeros)

        def by_kernel(pullback: Any, values: Any, given: Any) -> Any:
            if pullback is None:
                return by_several((), pullback, values, given)
            return pullback(all_of(given)), None

        def by_several(_: Any, pullback: Any, values: Any, given: Any) -> Any:
            kept = [leaf for leaf, each in zip(jax.tree.leaves(pullback), is_kept, strict=True) if each]
            return several.gradients(wanted, kept, values, all_of(given)), []

        given = [leaf for leaf in leaves if not isinstance(leaf, SymbolicZero)]
        gradients = iter(either(by_kernel, by_several, (pullback, values, given))[0])
        return tuple(next(gradients) if is_wanted else None for is_wanted in wanted)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _either(
    operation: str, kernel: Callable[..., Any], reference: Callable[..., Any], operands: Any, *, is_shared: bool
) -> Any:
    """Calls one of two functions of trees of arrays: `kernel` on one device, `reference` on several.

    Both return a result and what the gradient needs, `reference` as a list. It takes the types of those arrays first.

    is_shared: whether `reference` is a call whose work devices share.
    """
    leaves, structure = jax.tree.flatten(tuple(operands))
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return (reference((), *operands)[0], None) if any(map(is_spread, leaves)) else kernel(*operands)
    trees: list[Any] = []
    operand_of: list[int | None] = []

    def by_kernel(*leaves: Any) -> list[Any]:
        values, tree = jax.tree.flatten(kernel(*structure.unflatten(leaves)))
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        operand_of[:] = [places.get(id(value)) for value in values]
        trees[:] = [tree]
        return _computed(values, operand_of)

    def by_reference(*leaves: Any) -> list[Any]:
        count = trees[0].children()[0].num_leaves
        kept = closed.out_avals[len(_computed(operand_of[:count], operand_of)) :]
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            result, needed_by_gradient = reference(kept, *structure.unflatten(leaves))
        return [*_computed(jax.tree.leaves(result), operand_of), *needed_by_gradient]

    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision
    closed = jax.make_jaxpr(by_kernel)(*leaves)
    computed = iter(
        _either_p.bind(*leaves, operation=operation, kernel=closed, reference=by_reference, is_shared=is_shared)
    )
    return trees[0].unflatten(next(computed) if place is None else leaves[place] for place in operand_of)


def _computed(values: Sequence[Any], operand_of: Sequence[int | None]) -> list[Any]:
    """Leaves out results that are operands, so that a loop's gradient does not save weights once for each trip."""
    return [value for value, place in zip(values, operand_of, strict=False) if place is None]


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
"""One of two functions: `kernel`, a closed jaxpr, or `reference`. Only `_by_devices` has derivatives."""
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
