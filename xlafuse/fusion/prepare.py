"""Makes the arguments of operations that consist of several arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels import Norm, QuantizedWeight, Rope


def with_weight(arrays: dict[str, Any], group_size: int | None) -> dict[str, Any]:
    """Joins the integers (features, outputs) of a product and their scales to one weight."""
    scales = arrays.pop("scales").astype(jnp.float32)
    values = arrays.pop("values").T
    return {**arrays, "w": QuantizedWeight(values=values, scales=scales, bits=8, group_size=group_size)}


@dataclass(frozen=True, kw_only=True)
class Normed:
    """Gives a product its norm, whose options these are. prepare: changes the product's own arrays."""

    options: Mapping[str, Any]
    prepare: Any

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns the operation's arguments for arrays by name."""
        given = {name: arrays.pop(f"norm_{name}", None) for name in ("scale", "bias", "mean_square")}
        arrays = arrays if self.prepare is None else self.prepare(arrays)
        return {**arrays, "norm": Norm(**given, **self.options)}


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Gives the products of query, key and value their biases, norms and rotation.

    norms: the options of the norms of heads, by "q" and "k", None for no norm. rope: the options of the rotation, or
    None; tables: changes the arrays that it takes.
    """

    norms: Mapping[str, Any]
    rope: Mapping[str, Any] | None
    tables: Any

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns the operation's arguments for arrays by name."""
        more: dict[str, Any] = {}
        biases = [arrays.pop(f"b_{name}", None) for name in "qkv"]
        if biases[0] is not None:
            more["bias"] = tuple(biases)
        for name, options in self.norms.items():
            scale = arrays.pop(f"{name}_scale", None)
            if options is not None:
                more[f"{name}_norm"] = Norm(scale, **options)
        if self.rope is not None:
            arrays = arrays if self.tables is None else self.tables(arrays)
            more["rope"] = Rope(cos=arrays.pop("cos"), sin=arrays.pop("sin"), **self.rope)
        return {**arrays, **more}
