"""Calls the operations of a program's sites. Equal calls are one function, which JAX traces and differentiates once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer

from pallas_kernels.dispatch import Choice, listening
from xlafuse.fusion.binding import laid_out
from xlafuse.fusion.graph import Value
from xlafuse.fusion.site import Site

OnChoice = Callable[[Site, Choice], object] | None
"""Called with each site and what its operation chose, of one device's parts where explicit mesh axes cut the arrays."""


@dataclass(frozen=True)
class _Call:
    """A site's results as a function of the arrays that its arguments are bound to.

    choices: what its operation chooses, once it is traced.
    """

    function: Callable[..., tuple[Any, ...]]
    choices: list[Choice] = field(default_factory=list)


class Calls:
    """Calls the operations of one program's sites.

    A step of 32 layers of Llama has 163 sites of 9 kinds. JAX traces, differentiates and transposes one jitted function
    of each kind, and puts its operations in each call's place where it lowers the program.

    on_choice: hears of each site. implementation: the one for all sites; None: each operation's own choice.
    """

    def __init__(self, on_choice: OnChoice = None, implementation: str | None = None):
        self._on_choice = on_choice
        self._implementation = implementation
        self._known: dict[Hashable, _Call] = {}

    def __call__(self, site: Site, read: Callable[[Value], Any], line: Hashable) -> tuple[Any, ...]:
        """Computes a site's results.

        read: returns the array of a value. line: the site's in the program, which the call's operations keep.
        """
        values = tuple(dict.fromkeys(binding.value for binding in site.arrays.values()))
        arrays = [read(value) for value in values]
        is_traced = all(isinstance(array, Tracer) for array in arrays)
        call = self._shared(site, values, line) if is_traced else self._alone(site, values)
        results = call.function(*arrays)
        if self._on_choice is not None:
            for choice in call.choices:
                self._on_choice(site, choice)
        return results

    def _shared(self, site: Site, values: Sequence[Value], line: Hashable) -> _Call:
        """Returns the jitted call of the first site on this line that computes the same."""
        try:
            key = site.key(values), line
            hash(key)
        except TypeError:
            return self._alone(site, values)
        if key not in self._known:
            call = self._alone(site, values)
            self._known[key] = _Call(jax.jit(call.function, inline=jax.Inline.JAX_LATE), call.choices)
        return self._known[key]

    def _alone(self, site: Site, values: Sequence[Value]) -> _Call:
        choices: list[Choice] = []

        def function(*arrays: Any) -> tuple[Any, ...]:
            array_of = dict(zip(values, arrays, strict=True))
            with contextlib.nullcontext() if self._on_choice is None else listening(choices.append):
                given = {
                    name: laid_out(binding, array_of[binding.value], keeps_missing=name in site.broadcasting)
                    for name, binding in site.arrays.items()
                }
                return site.call(given, self._implementation)

        function.__name__ = site.operation
        return _Call(function, choices)
