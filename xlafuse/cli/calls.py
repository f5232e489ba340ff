"""Writes the call of a site's operation as source."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import jax
import numpy as np

import pallas_kernels
from xlafuse.fusion.site import Site


def call_text(site: Site) -> str:
    """Returns the call of a site's operation, with the operation's own names for its arrays."""
    texts: list[str] = []

    def written(given: dict[str, Any]) -> None:
        names = {id(array): name for name, array in given.items()}

        def text(name: str, value: Any) -> str:
            if isinstance(value, jax.Array):
                return names.get(id(value), name)
            if isinstance(value, tuple):
                return f"({', '.join(text(name, each) for each in value)})"
            if dataclasses.is_dataclass(value):
                own = [each for each in dataclasses.fields(value) if getattr(value, each.name) is not each.default]
                fields = [f"{each.name}={text(each.name, getattr(value, each.name))}" for each in own]
                return f"{type(value).__name__}({', '.join(fields)})"
            return _literal(value)

        arrays = site.prepare(dict(given)) if site.prepare is not None else given
        values = {**site.options, **arrays}
        for name, parameter in inspect.signature(getattr(pallas_kernels, site.operation)).parameters.items():
            if values.get(name) is not None:
                keyword = "" if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else f"{name}="
                texts.append(keyword + text(name, values[name]))

    jax.eval_shape(
        written, {name: jax.ShapeDtypeStruct(each.shape, each.value.dtype) for name, each in site.arrays.items()}
    )
    call = f"{site.operation}({', '.join(texts)})"
    return f"(-{call})" if site.negated else call


def _literal(value: Any) -> str:
    """Formats a value as in Python, a number with as few digits as distinguish it from other float32 values."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float | np.floating) and float(np.float32(value)) == value:
        return str(np.float32(value))
    return repr(value.item() if isinstance(value, np.generic) else value)
