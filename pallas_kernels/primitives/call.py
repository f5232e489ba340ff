"""One call of an operation, as a function of its arrays, and what `dispatch.choose` asks about the call under way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.cuts import Sums
from pallas_kernels.primitives.dimensions import Dimensions
from pallas_kernels.primitives.gemm.row_blocks import RowBlock
from pallas_kernels.primitives.settings import usual_promotion


class KernelChosen(Exception):
    """Ends a call that takes a kernel, to be made again once it is settled where; not an error."""


open_to: ContextVar[str | None] = ContextVar("open_to", default=None)
settled: ContextVar[str | None] = ContextVar("settled", default=None)
uninterpretable: ContextVar[tuple[str, str] | None] = ContextVar("uninterpretable", default=None)


def is_open(operation: str) -> bool:
    """Returns whether a call of the operation that takes a kernel is to raise `KernelChosen`."""
    return open_to.get() == operation


def is_settled(operation: str) -> bool:
    """Returns whether the call's choice has been made, recorded and checked before."""
    return settled.get() == operation


def interpreter_lacks(operation: str) -> str | None:
    """Returns why JAX's interpreter cannot run the kernels of this call, or None if it can or is not in use."""
    name, reason = uninterpretable.get() or (None, None)
    return reason if name == operation else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of an operation, as a function of its arrays.

    function: the public function without its decorator. dimensions: how devices may share its work.
    leaves: of the positional arguments and those by name, a tree of `structure`. places: of the arrays among them.
    """

    function: Callable[..., Any]
    dimensions: Dimensions
    leaves: Sequence[Any]
    structure: Any
    places: Sequence[int]

    @classmethod
    def of(cls, function: Callable[..., Any], dimensions: Dimensions, args: Any, kwargs: Any) -> Call:
        """Returns the call with these arguments."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        return cls(function=function, dimensions=dimensions, leaves=leaves, structure=structure, places=places)

    def __call__(self, *arrays: Any, **given: Any) -> Any:
        """Calls the operation, whose choice is settled, with other arrays and keyword arguments."""
        args, kwargs = self.with_arrays(arrays)
        with assigned(settled, self.operation), usual_promotion():
            return self.function(*args, **{**kwargs, **given})

    @property
    def operation(self) -> str:
        """The public function's name."""
        return self.function.__name__

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the arguments."""
        return [self.leaves[place] for place in self.places]

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes."""
        return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.arrays]

    @cached_property
    def reference(self) -> Callable[..., Any]:
        """The same function by XLA."""
        return partial(self, implementation="xla")

    @property
    def options(self) -> str:
        """The arguments that are no arrays."""
        others = {place: leaf for place, leaf in enumerate(self.leaves) if place not in self.places}
        return re.sub(r" at 0x\w+", "", f"{others} {self.structure}")

    def with_arrays(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional arguments and those by name, with other arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)

    def by_name(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Returns all arguments by name, also those that were left out, with other arrays."""
        args, kwargs = self.with_arrays(arrays)
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def names(self) -> list[str]:
        """Returns the name of each array, such as "x" or "norm.scale"."""
        marks = [object() for _ in self.places]
        paths = jax.tree_util.tree_leaves_with_path(self.by_name(marks))
        name_of = {id(leaf): jax.tree_util.keystr(path, simple=True, separator=".") for path, leaf in paths}
        return [name_of[id(mark)] for mark in marks]

    def parts(self, sums: Mapping[str, Sums], *arrays: Any) -> Any:
        """Computes the results from parts of arrays of which dimensions are cut that are summed over."""
        assert self.dimensions.parts is not None
        return self.dimensions.parts(self.by_name(arrays), sums)

    def in_place(self, arrays: Sequence[Any], written: RowBlock) -> tuple[jax.Array, ...]:
        """Computes the results for one block of rows."""
        assert self.dimensions.in_place is not None
        return tuple(jax.tree.leaves(self.dimensions.in_place(self.by_name(arrays), written)))
