"""Calls of operations whose work devices share: each computes its parts of the results from its parts of the arrays."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad

from pallas_kernels.primitives.call import Call
from pallas_kernels.primitives.cuts import Cut, told_of_parts, varying
from pallas_kernels.primitives.derivatives import with_pullback
from pallas_kernels.primitives.dimensions import Axes, Rule, names_in, rule_of, sizes_apart
from pallas_kernels.primitives.overlapped import is_overlapping
from pallas_kernels.primitives.shared_call import shared_p


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """A function of arrays whose work devices share.

    rule: the dimensions of its arrays. binder: takes its calls, if JAX's partitioner does not: what one device runs,
    the rule, the types of the results and the arrays.
    """

    call: Call
    rule: Rule
    binder: Callable[..., list[Any]] | None = None

    @functools.cached_property
    def results(self) -> tuple[tuple[Any, ...], Any]:
        """The types of the results and their structure."""
        types, structure = jax.tree.flatten(jax.eval_shape(self.call.reference, *self.call.structs))
        return tuple(types), structure

    @functools.cached_property
    def label(self) -> str:
        """Tells calls apart that compute different things, for JAX's compile cache: it sees no more of a call."""
        program = re.sub(r" at 0x\w+", "", str(jax.make_jaxpr(self.call.reference)(*self.call.structs)))
        key = f"{_version()} {self.call.options} {program}"
        return f"{self.call.operation} {hashlib.sha256(key.encode()).hexdigest()}"

    def __call__(self, *arrays: Any) -> Any:
        """Returns the function's result."""
        types, structure = self.results
        return structure.unflatten(self._bind(partial(self._result), self.rule, types, arrays))

    def differentiated(self, wanted: Sequence[bool], kept: Sequence[Any], *arrays: Any) -> tuple[Any, list[Any]]:
        """Returns the function's result as it is computed where it is differentiated, and what its gradient needs.

        kept: the types of the arrays that the gradient needs.
        """
        types, structure = self.results
        names = [self.rule.named(each.shape) for each in kept]
        shapes = [sizes_apart(own, each.shape, self.rule.sizes) for own, each in zip(names, kept, strict=True)]
        kept_types = [ShapedArray(shape, each.dtype) for shape, each in zip(shapes, kept, strict=True)]
        run = partial(self._result_and_kept, tuple(wanted), self._kept_by(names, kept))
        results = self._bind(run, self.rule.with_kept(names), (*types, *kept_types), arrays)
        values = [value.reshape(each.shape) for value, each in zip(results[len(types) :], kept, strict=True)]
        return structure.unflatten(results[: len(types)]), values

    def gradients(
        self, wanted: Sequence[bool], kept: Sequence[Any], arrays: Sequence[Any], cotangents: Any
    ) -> list[Any]:
        """Returns the gradients of the wanted arrays.

        kept: what `differentiated` returned. cotangents: a tree like the result, with `ad.Zero`s for none.
        """
        leaves, structure = jax.tree.flatten(cotangents, is_leaf=lambda leaf: isinstance(leaf, ad.Zero))
        given = tuple(not isinstance(leaf, ad.Zero) for leaf in leaves)
        names = [self.rule.named(each.shape) for each in kept]
        shapes = [sizes_apart(own, each.shape, self.rule.sizes) for own, each in zip(names, kept, strict=True)]
        operands = [*arrays, *(value.reshape(shape) for value, shape in zip(kept, shapes, strict=True))]
        operands += [leaf for leaf in leaves if not isinstance(leaf, ad.Zero)]
        run = partial(self._gradients, tuple(wanted), self._kept_by(names, kept), given, structure)
        types = [jax.typeof(array) for array, each in zip(arrays, wanted, strict=True) if each]
        return self._bind(run, self.rule.for_gradients(wanted, names, given), types, operands)

    def _bind(self, run: partial[Any], rule: Rule, types: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        if self.binder is not None:
            return self.binder(run, rule, types, arrays)
        avals = tuple((each.shape, each.dtype) for each in types)
        text = f"{run.func.__name__} {run.args}"
        return shared_p.bind(*arrays, run=run, rule=rule, types=avals, shared=self, text=text)

    def _kept_by(self, names: Sequence[Any], kept: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple((own, each.shape, each.dtype) for own, each in zip(names, kept, strict=True))

    def _of(self, cut: Cut | None) -> Callable[..., Any]:
        if cut is None:
            return self.call.reference
        return partial(self.call.parts, cut.sums) if cut.sums else self.call

    def _result(self, cut: Cut | None, *arrays: Any) -> list[Any]:
        return jax.tree.leaves(self._of(cut)(*told_of_parts(self.rule, cut, arrays)))

    def _result_and_kept(self, wanted: Sequence[bool], kept: Any, cut: Cut | None, *arrays: Any) -> list[Any]:
        arrays = tuple(told_of_parts(self.rule, cut, arrays))
        result, pullback = with_pullback(self._of(cut), wanted, *arrays)
        values, parts = computed_among(pullback, arrays), self._parts(kept, cut)
        if _types_of(values) != [(whole, dtype) for whole, _, dtype in parts]:
            # The gradient computes them again, as it finds the same there. NaN, lest it take these.
            values = [_invalid(whole, dtype) for whole, _, dtype in parts]
        values = [value.reshape(shape) for value, (_, shape, _) in zip(values, parts, strict=True)]
        return [*jax.tree.leaves(result), *values]

    def _gradients(
        self,
        wanted: Sequence[bool],
        kept: Any,
        given: Sequence[bool],
        structure: Any,
        cut: Cut | None,
        *operands: Any,
    ) -> list[Any]:
        count = len(wanted) + len(kept)
        arrays: Sequence[Any] = told_of_parts(self.rule, cut, operands[: len(wanted)])
        values, cotangents = operands[len(wanted) : count], iter(operands[count:])
        if cut is not None and cut.sums:
            arrays = [varying(array, cut.shared) for array in arrays]
        result, pullback = with_pullback(self._of(cut), wanted, *arrays)
        again, parts = computed_among(pullback, arrays), self._parts(kept, cut)
        if cut is not None and _types_of(again) == [(whole, dtype) for whole, _, dtype in parts]:
            own = {
                id(old): varying(new.reshape(old.shape), tuple(jax.typeof(old).manual_axis_type.varying))
                for old, new in zip(again, values, strict=True)
            }
            pullback = jax.tree.map(lambda leaf: own.get(id(leaf), leaf), pullback)
        leaves = jax.tree.leaves(result)
        pulled = [next(cotangents) if each else ad.Zero(jax.typeof(y)) for y, each in zip(leaves, given, strict=True)]
        if cut is not None:
            pulled = [
                each if isinstance(each, ad.Zero) else _share(each, cut.lacked(own), y)
                for each, own, y in zip(pulled, self.rule.results, leaves, strict=True)
            ]
        return list(pullback(structure.unflatten(pulled)))

    def _parts(self, kept: Any, cut: Cut | None) -> list[tuple[tuple[int, ...], tuple[int, ...], Any]]:
        """Returns shape, shape with a dimension for each name, and dtype of one device's parts of kept arrays."""
        parts = []
        for names, shape, dtype in kept:
            sizes = self.rule.sizes if cut is None else cut.sizes_of(names_in(names) & self.rule.summed)
            whole = tuple(
                prod(sizes[name] for name in own) if own else size for own, size in zip(names, shape, strict=True)
            )
            parts.append((whole, sizes_apart(names, shape, sizes), dtype))
        return parts


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # where the packages are not installed
        return importlib.metadata.version("xlafuse")
    return ""


def computed_among(tree: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the arrays of a tree that are not among the operands."""
    places = set(map(id, operands))
    return [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in places]


def _types_of(values: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
    return [(value.shape, value.dtype) for value in values]


def _invalid(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0, dtype)


def _share(cotangent: jax.Array, axes: Axes, result: jax.Array) -> jax.Array:
    """Returns one device's share of the cotangent of a result that is the same on the devices along `axes`."""
    if axes:
        cotangent = (cotangent / lax.axis_size(axes)).astype(cotangent.dtype)
    return varying(cotangent, tuple(jax.typeof(result).manual_axis_type.varying))


def shared_by(call: Call) -> Shared | None:
    """Returns a call of an operation as one whose work devices share, or None if they cannot."""
    shapes = [(name, array.shape) for name, array in zip(call.names(), call.arrays, strict=True)]
    results = jax.tree.leaves(jax.eval_shape(call.reference, *call.structs))
    rule = rule_of(call.dimensions, call.by_name(call.arrays), shapes, [each.shape for each in results])
    return None if isinstance(rule, str) else Shared(call=call, rule=replace(rule, overlaps=is_overlapping()))
