"""A call of an operation in place of equations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.dispatch import Choice, choice, listening
from pallas_kernels.primitives.gradients import differentiated_as
from pallas_kernels.primitives.platform import varying_alike
from pallas_kernels.primitives.sharing import described
from xlafuse.fusion.binding import Binding, is_permuted, laid_out
from xlafuse.fusion.graph import Equation, Value, is_free

NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A call of an operation in place of equations.

    arrays, options: the arguments. prepare: changes the arrays before the call. negated: whether the value is the
    negative of the result. results: the values that the call's results replace. orders: how the axes of each result are
    transposed, () for not at all. covered: the equations that the call replaces. shared: covered equations that other
    sites may need. stream: the input of the norm that the call computes, which it also returns, as the last result.
    Equations and sites that are evaluated later read that. is_for_gradients: whether XLA computes it where it is not
    differentiated; of a norm of a sum there is one result then.
    """

    operation: str
    arrays: Mapping[str, Binding]
    options: Mapping[str, Any]
    results: tuple[Value, ...]
    orders: tuple[tuple[int, ...], ...]
    covered: frozenset[Equation]
    shared: frozenset[Equation] = frozenset()
    broadcasting: frozenset[str] = frozenset()
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    negated: bool = False
    stream: Value | None = None
    is_for_gradients: bool = False

    @functools.cached_property
    def own(self) -> frozenset[Equation]:
        """Returns the equations that only this site may cover."""
        return frozenset(equation for equation in self.covered if not is_free(equation))

    @property
    def note(self) -> str:
        """Says what is done in place of a call of an operation; "" for an operation."""
        return ""

    @property
    def root(self) -> Equation:
        """Returns the equation whose result the call computes."""
        assert self.results[0].equation is not None
        return self.results[0].equation

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Returns the values that `call` computes."""
        return self.results if self.stream is None else (*self.results, self.stream)

    def key(self, values: Sequence[Value]) -> Hashable:
        """Returns a key that sites share which compute the same of the values that their arguments are bound to.

        Raises:
            TypeError: an option is an array, or cannot be compared.
        """
        arrays = [(name, values.index(each.value), each.layout) for name, each in self.arrays.items()]
        results = [(value.shape, value.dtype) for value in self.outputs]
        own = (type(self), self.operation, self.options, self.prepare, self.negated, self.is_for_gradients)
        return described((*own, arrays, results, self.orders, self.stream is None, self.broadcasting))

    def call(self, arrays: dict[str, Any], implementation: str | None = None) -> tuple[Any, ...]:
        """Calls the operation, and returns its results with the axes, shapes and dtypes of the program."""
        arrays = arrays if self.prepare is None else self.prepare(arrays)
        options = {**self.options} if implementation is None else {**self.options, "implementation": implementation}
        if self.is_for_gradients:
            options |= {} if self.stream is None else {"returns_total": True}
            results = _by_xla_unless_differentiated(self.operation, arrays, options, len(self.outputs))
        elif self.stream is None:
            results = _results(self.operation, arrays, options)
        elif "norm" in arrays:
            results = _with_stream(self.operation, arrays, options)
        else:
            results = _results(self.operation, arrays, {**options, "returns_total": True})
        if self.negated:
            results = (-results[0], *results[1:])
        return tuple(
            (jnp.transpose(each, order) if is_permuted(order) else each).reshape(value.shape).astype(value.dtype)
            for each, value, order in zip(results, self.outputs, (*self.orders, ()), strict=False)
        )


def _results(operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    function = getattr(pallas_kernels, operation)
    call = inspect.signature(function).bind(**arrays, **options)  # as a program would write it: x by place
    results = function(*call.args, **call.kwargs)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _by_xla_unless_differentiated(
    operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any], count: int
) -> tuple[Any, ...]:
    """Returns the first results, as many as `count`."""

    def by_kernel(arrays):
        return _results(operation, arrays, options)[:count]

    def by_xla(arrays):
        with listening(lambda choice: None):
            return _results(operation, arrays, {**options, "implementation": "xla"})[:count]

    jax.eval_shape(by_kernel, dict(arrays))  # tells a listener the choice
    return differentiated_as(by_kernel, by_xla)(varying_alike(dict(arrays)))


def _with_stream(operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the results of a product with a norm, and x for the residual stream.

    Their gradient is that of the norm, which returns x, and the product after it: so the operation itself is
    differentiated, too.
    """

    def together(arrays):
        return *_results(operation, arrays, options), arrays["x"]

    def apart(arrays):
        norm, others = arrays["norm"], {name: each for name, each in arrays.items() if name != "norm"}
        bias = {} if norm.bias is None else {"bias": norm.bias}
        given = {"epsilon": norm.epsilon, "rounds_before_scale": norm.rounds_before_scale, "returns_total": True}
        function = pallas_kernels.rms_norm if norm.kind == "rms" else pallas_kernels.layer_norm
        by_kernels: dict[str, Any] = {"implementation": ("mosaic", "xla")}
        others["x"], stream = function(others["x"], norm.scale, **bias, **given, **by_kernels)
        product = "linear" if operation == "norm_linear" else operation
        return *_results(product, others, {**options, **by_kernels}), stream

    if options.get("implementation") == "xla":
        return together(arrays)
    return differentiated_as(apart, together)(varying_alike(dict(arrays)))


def implementation_of(site: Site) -> str | None:
    """Returns the implementation that the operation takes here; None where it refuses the arguments."""
    found = choice_of(site)
    return None if found is None else found.taken


def choice_of(site: Site) -> Choice | None:
    """Returns what the operation takes here, and why not the others; None where it refuses the arguments."""
    try:
        return choice(site.call, structs_of(site))
    except (TypeError, ValueError, NotImplementedError):
        return None


def structs_of(site: Site) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the types of a site's arrays, as `call` is given them; explicit mesh axes are among their shardings."""
    structs = {}
    for name, binding in site.arrays.items():
        given, keeps = binding.value, name in site.broadcasting
        shape = tuple(1 if keeps and axis in binding.missing else size for axis, size in enumerate(binding.shape))
        struct = jax.ShapeDtypeStruct(shape, given.dtype)
        if given.sharding is not None:
            cut = jax.ShapeDtypeStruct(given.shape, given.dtype, sharding=given.sharding)
            struct = jax.eval_shape(functools.partial(laid_out, binding, keeps_missing=keeps), cut)
        structs[name] = struct
    return structs


@dataclass(frozen=True, kw_only=True, eq=False)
class Refusal:
    """A value that looks like the result of an operation, and why no operation is called.

    covered: the equations that compute it, where it is the result of the operation.
    """

    operation: str
    value: Value
    reason: str
    covered: frozenset[Equation] = frozenset()
