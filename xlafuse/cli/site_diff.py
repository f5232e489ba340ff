"""Describes a site of `xlafuse.fuse` in the program's own code: its lines, and the call that replaces them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

import pallas_kernels
from xlafuse.cli.inputs import DTYPES
from xlafuse.fusion.binding import Binding
from xlafuse.fusion.graph import Equation, Value
from xlafuse.fusion.plan import Site
from xlafuse.fusion.prepare import Normed
from xlafuse.fusion.sources import Place, same_call, source_lines, stack_of

_LONGEST_NAME = 40
"""Longest expression, in characters, that stands for an argument."""
_LONGEST_GAP = 6
"""Most lines shown between two removed lines."""


class SiteDiff:
    """Describes one site.

    inputs: names of the arrays in the traced function, `function`.
    outside: the file that called it.
    """

    def __init__(self, site: Site, *, function: str, inputs: Mapping[Value, str], outside: str):
        self._site = site
        self._function = function
        self._inputs = inputs
        self._outside = outside
        self._stack = stack_of(site.root, outside=outside)

    @cached_property
    def where(self) -> str:
        """File and lines, from the first to the last."""
        if not self._stack:
            return "an unknown line"
        first, last = self._lines[0], self._lines[-1]
        return f"{self._stack[0].shown_file}:{first}" + (f"-{last}" if last > first else "")

    @cached_property
    def arrays(self) -> dict[str, str]:
        """The call's arrays, in the form of --shape."""
        return {name: _array(binding.value.dtype, binding.shape) for name, binding in self._site.arrays.items()}

    @cached_property
    def call(self) -> str:
        """The call, with the program's expressions for the arguments, or the operation's names if those are unknown."""
        parameters = inspect.signature(getattr(pallas_kernels, self._site.operation)).parameters
        words = []
        for name, parameter in parameters.items():
            if name in self._site.arrays:
                value = self._argument(name, self._site.arrays[name])
            elif self._site.options.get(name) is not None:
                value = _number(self._site.options[name])
            elif name == "norm" and isinstance(self._site.prepare, Normed):
                value = self._norm(self._site.prepare)
            else:
                continue
            words.append(value if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else f"{name}={value}")
        call = f"{self._site.operation}({', '.join(words)})"
        return f"(-{call})" if self._site.negated else call

    def diff(self) -> Iterator[tuple[str, str]]:
        """Yields sign (" ", "-" or "+") and text of each line."""
        if not self._stack:
            yield "+", self.call
            return
        file, last = self._stack[0].file, None
        for line in self._lines:
            if last is not None and line - last > 1:
                between = source_lines(file, last + 1, line - 1) or []
                yield from ((" ", text) for text in (between if len(between) <= _LONGEST_GAP else ["..."]))
            yield from (("-", text) for text in source_lines(file, line, line) or [])
            last = line
        yield from (("+", text) for text in self._added())

    @cached_property
    def _lines(self) -> list[int]:
        """The lines of the statements that the site's equations come from, in the call that has the site's result."""
        places = {found for equation in self._site.covered if (found := self._place(equation)) is not None}
        statements = {place.statement for place in {*places, self._stack[0]}}
        return sorted({line for first, last in statements for line in range(first, last + 1)})

    def _added(self) -> list[str]:
        place, results = self._stack[0], self._site.results
        lines = place.replaced("")
        indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
        if not self._is_whole(results[0], place):
            return [f"{indent}{self.call}  # for a part of the line"]
        if len(results) == 1:
            return place.replaced(self.call) or [self.call]
        total = self._expression(results[1])
        if total is None or not total.isidentifier():
            return place.replaced(f"{self.call}[0]") or [self.call]
        target = place.target()
        name = target or "y"
        both = f"{indent}{name}, {total} = {self.call}"
        return [both] if target else [both, *(place.replaced(name) or [])]

    def _norm(self, norm: Normed) -> str:
        """Returns the norm of a product's input, as the call gives it."""
        arrays = {name.removeprefix("norm_"): name for name in self._site.arrays if name.startswith("norm_")}
        words = [f"{short}={self._argument(short, self._site.arrays[name])}" for short, name in arrays.items()]
        words += [f"{name}={_number(value)}" for name, value in norm.options.items()]
        return f"Norm({', '.join(words)})"

    def _argument(self, name: str, binding: Binding) -> str:
        value = binding.value
        if value.literal is not None:
            return _number(value.literal)
        found = self._expression(value)
        if found is None:
            return name
        return found if binding.shape == value.shape else f"<{found} as {_array(value.dtype, binding.shape)}>"

    def _expression(self, value: Value) -> str | None:
        """Returns the name of a value in the function around the site, if it is known."""
        if not self._stack:
            return None
        if value.equation is None:
            is_own = self._stack[0].function.rpartition(".")[2] == self._function
            return self._inputs.get(value) if is_own else None
        own = self._place(value.equation)
        if own is None or not (own.is_before(self._stack[0]) and self._is_whole(value, own)):
            return None
        text = own.target() or own.text
        return text if text is not None and len(text) <= _LONGEST_NAME and "\n" not in text else None

    def _is_whole(self, value: Value, place: Place) -> bool:
        """Tells whether the expression stands for this value and not for one computed from it."""
        return all(self._place(user) != place for user in value.users)

    def _place(self, equation: Equation) -> Place | None:
        """Returns where an equation comes from in the call that contains the site."""
        return same_call(equation, self._stack, outside=self._outside)


def _array(dtype: Any, shape: Sequence[int]) -> str:
    name = next((short for short, long in DTYPES.items() if long == dtype.name), dtype.name)
    return f"{name}[{','.join(map(str, shape))}]"


def _number(value: Any) -> str:
    """Formats a number as a Python literal with as few digits as distinguish it from other float32 values."""
    if isinstance(value, float | np.floating) and float(np.float32(value)) == value:
        return str(np.float32(value))
    return repr(value.item() if isinstance(value, np.generic) else value)
