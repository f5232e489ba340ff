"""Writes the call of a site's operation as source."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import pallas_kernels
from xlafuse.cli.probes import Span
from xlafuse.fusion.site import Site

Text = tuple[str | Span, ...]
"""Text with places of the file whose text, edited too, is part of it."""


def _prepared(site: Site, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return site.prepare(dict(arrays)) if site.prepare is not None else dict(arrays)


def _structs(site: Site) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(each.shape, each.value.dtype) for name, each in site.arrays.items()}


def own_results(site: Site) -> list[Any]:
    """Returns shapes and dtypes of what a site's operation returns."""
    function, options = getattr(pallas_kernels, site.operation), {**site.options, "implementation": "xla"}
    structs = _structs(site)
    return jax.tree.leaves(jax.eval_shape(lambda given: function(**_prepared(site, given), **options), structs))


def call_text(site: Site, arguments: Mapping[str, Text], callee: Callable[[str], str] = str) -> Text:
    """Returns the call of a site's operation.

    arguments: expressions for its arrays. callee: returns the expression for a name of `xlafuse.kernels`.
    """
    texts: list[Text] = []

    def written(given: dict[str, Any]) -> None:
        names = {id(array): name for name, array in given.items()}

        def text(name: str, value: Any) -> Text:
            if isinstance(value, jax.Array):
                name = names.get(id(value), name)
                return arguments.get(name, (name,))
            if isinstance(value, tuple):
                return ("(", *_listed([text(name, each) for each in value]), ")")
            if dataclasses.is_dataclass(value):
                own = [each for each in dataclasses.fields(value) if getattr(value, each.name) is not each.default]
                fields = [(f"{each.name}=", *text(each.name, getattr(value, each.name))) for each in own]
                return (f"{callee(type(value).__name__)}(", *_listed(fields), ")")
            return (number_text(value),)

        values = {**site.options, **_prepared(site, given)}
        for name, parameter in inspect.signature(getattr(pallas_kernels, site.operation)).parameters.items():
            if values.get(name) is not None:
                keyword = () if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else (f"{name}=",)
                texts.append((*keyword, *text(name, values[name])))

    jax.eval_shape(written, _structs(site))
    call = (f"{callee(site.operation)}(", *_listed(texts), ")")
    return ("(-", *call, ")") if site.negated else call


def _listed(texts: Sequence[Text]) -> Text:
    return tuple(part for place, text in enumerate(texts) for part in ((", ",) if place else ()) + text)


def number_text(value: Any) -> str:
    """Formats a value as a Python literal, a number with as few digits as distinguish it from other float32 values."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float | np.floating) and float(np.float32(value)) == value:
        return str(np.float32(value))
    return repr(value.item() if isinstance(value, np.generic) else value)
