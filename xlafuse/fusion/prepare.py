"""Makes the arguments of operations that consist of several arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import Norm, QuantizedWeight, Rope


def with_weight(arrays: dict[str, Any], group_size: int | None) -> dict[str, Any]:
    """Joins the integers (features, outputs) of a product and their scales to one weight."""
    scales = arrays.pop("scales").astype(jnp.float32)
    values = arrays.pop("values").T
    return {**arrays, "w": QuantizedWeight(values=values, scales=scales, bits=8, group_size=group_size)}


def with_positions(arrays: dict[str, Any]) -> dict[str, Any]:
    """Gives a rotation its positions in the shape that it takes."""
    if "positions" not in arrays:
        return arrays
    return {**arrays, "positions": row_positions(arrays["positions"], arrays["query"].shape[1])}


def row_positions(positions: Any, tokens: int) -> Any:
    """Broadcasts positions to (batch, tokens), or to (tokens,) where the whole batch shares them."""
    positions = jnp.broadcast_to(positions, (positions.shape[0], tokens))
    return positions[0] if positions.shape[0] == 1 else positions


def of_hidden(arrays: dict[str, Any], prepare: Any) -> dict[str, Any]:
    """Gives a loss of hidden states the labels that one of logits has."""
    logits = jax.ShapeDtypeStruct((*arrays["labels"].shape, arrays["w"].shape[1]), arrays["w"].dtype)
    return {**arrays, "labels": prepare({"logits": logits, "labels": arrays["labels"]})["labels"]}


class Normed:
    """Gives a product its norm."""

    def __init__(self, kind: Any, options: Mapping[str, Any], prepare: Any):
        self.options = {"kind": kind, **options}
        self._prepare = prepare

    def __repr__(self) -> str:
        return f"{self.options} {self._prepare!r}"

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns the operation's arguments for arrays by name."""
        given = {name: arrays.pop(f"norm_{name}", None) for name in ("scale", "bias", "mean_square")}
        arrays = arrays if self._prepare is None else self._prepare(arrays)
        return {**arrays, "norm": Norm(**given, **self.options)}


class Projection:
    """Gives the products of query, key and value their biases, norms and rotation.

    norms: the options of the norms of heads, by "q" and "k", None for no norm.
    """

    def __init__(self, norms: Mapping[str, Any], rope: Any = None):
        self._norms = norms
        self._rope = rope

    def __repr__(self) -> str:
        return f"{self._norms} {self._rope}"

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Returns the operation's arguments for arrays by name."""
        more: dict[str, Any] = {}
        biases = [arrays.pop(f"b_{name}", None) for name in "qkv"]
        if biases[0] is not None:
            more["bias"] = tuple(biases)
        for name, options in self._norms.items():
            scale = arrays.pop(f"{name}_scale", None)
            if options is not None:
                more[f"{name}_norm"] = Norm(scale, **options)
        if self._rope is not None:
            positions = arrays.pop("positions", None)
            options = dict(self._rope)
            known = options.pop("positions", None)
            positions = known if positions is None else row_positions(positions, arrays["x"].shape[1])
            more["rope"] = Rope(positions=jnp.asarray(positions), **options)
        return {**arrays, **more}
