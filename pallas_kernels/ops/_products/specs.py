"""Parts of the products' registry entries: calls, norms as flat arguments, sizes and work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.spec_builders import arg_spec, call_name
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, Fill

NORM_ARRAYS = ("norm_scale", "norm_bias", "mean_square")
"""The names of a norm's arrays among an `ArgSpec`'s arguments."""

Part = tuple[Mapping[str, Any], str]
"""Some of an `ArgSpec`'s arguments, and what they add to its name, if anything."""


def product_call(build: Callable[..., tuple[Any, ...]]) -> Callable[..., ArgSpec]:
    """Decorates a function that builds a product's call, given x.

    The decorated function takes x's leading dimensions, by keyword `features`, dtype, fill and tags, and the other
    keywords of `build`. Its specs have names such as 2x72-128-192-bfloat16-bias, for x (2, 72, 128), w (128, 192) and a
    bias. `build` returns the weights' sizes for the name, the operands, and further parts of the arguments, in order.
    """

    def call(
        *leading: int, features: int, dtype: str = "bfloat16", fill: Fill = "normal", tags: str = "test", **own: Any
    ) -> ArgSpec:
        x = ArraySpec(shape=(*leading, features), dtype=dtype, fill=fill)
        sizes, operands, *parts = build(x, **own)
        name = call_name(leading, f"{features}-{sizes}", dtype, *(detail for _, detail in parts), fill=fill)
        arguments = dict(operands)
        for more, _ in parts:
            arguments |= more
        return arg_spec(name, arguments, tags)

    return call


def bench_tags(rows: int, *, block: bool = False) -> str:
    """Returns the tags of timed calls. One row has the same kernels as sixteen, which tests need not compile again."""
    return ("bench" if rows == 1 else "gpu bench") + " block" * block


def weight(x: ArraySpec, outputs: int, *, deviation: float = 1.0) -> ArraySpec:
    """Makes weights whose products with features of standard deviation 1 have the given one, like trained weights."""
    features = x.shape[-1]
    return ArraySpec(shape=(features, outputs), dtype=x.dtype, deviation=deviation * features**-0.5)


def epilogue(
    x: ArraySpec,
    outputs: int,
    *,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    out_dtype: str | None = None,
) -> Part:
    """Makes the arguments of a linear layer's epilogue."""
    result = ArraySpec(shape=(*x.shape[:-1], outputs), dtype=out_dtype or x.dtype)
    parts = {
        "bias": bias and (ArraySpec(shape=(outputs,), dtype=x.dtype), "bias"),
        "activation": activation and (activation, activation),
        "residual": residual and (result, "residual"),
        "out_dtype": out_dtype and (out_dtype, f"to-{out_dtype}"),
    }
    given = {name: part for name, part in parts.items() if part}
    return {name: value for name, (value, _) in given.items()}, "-".join(detail for _, detail in given.values())


def norm_arguments(
    x: ArraySpec, kind: str | None, *, scaled: bool = True, mean_square: bool = False, rounds: bool = False
) -> Part:
    """Makes the arguments of a norm of x."""
    if kind is None:
        return {}, ""
    scale = ArraySpec(shape=x.shape[-1:], dtype=x.dtype, mean=1.0, deviation=0.2)
    bias = ArraySpec(shape=x.shape[-1:], dtype=x.dtype, deviation=0.2)
    squares = ArraySpec(shape=x.shape[:-1], dtype="float32", mean=1.0, deviation=0.05)
    arrays = (scaled and scale, kind == "layer" and bias, mean_square and squares)
    name = kind + "_unscaled" * (not scaled) + "-mean_square" * mean_square + "-rounds_before_scale" * rounds
    return {"norm": kind, "norm_rounds": rounds, **dict(zip(NORM_ARRAYS, arrays, strict=True))}, name


def with_norm(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an `ArgSpec`'s arguments with a norm to those of the operations."""
    arguments = dict(arguments)
    kind, scale, bias, mean_square = (arguments.pop(name, None) for name in ("norm", *NORM_ARRAYS))
    rounds = arguments.pop("norm_rounds", False)
    norm = None if kind is None else Norm(scale, bias, kind, mean_square=mean_square, rounds_before_scale=rounds)
    return arguments if norm is None else {**arguments, "norm": norm}


def rows_of(arguments: Arguments) -> int:
    """Returns the number of rows of x (..., features)."""
    return math.prod(arguments["x"].shape[:-1])


def result_bytes(weight: str = "w") -> Callable[[Arguments], int]:
    """Counts the bytes of x's product with the weight."""

    def count(arguments: Arguments) -> int:
        dtype = jnp.dtype(arguments.get("out_dtype") or arguments["x"].dtype)
        return rows_of(arguments) * arguments[weight].shape[1] * dtype.itemsize

    return count


def kept_bytes(arguments: Arguments) -> int | None:
    """Counts the bytes of the product that the forward pass keeps for an activation's gradient, if there is one."""
    return result_bytes()(arguments) if arguments.get("activation") else None


def product_flops(arguments: Arguments, phase: str, *, weights: tuple[str, ...] = ("w",)) -> int:
    """Counts the multiplications and additions of a phase's products of x with each of the weights."""
    outputs = sum(arguments[name].shape[1] for name in weights)
    return 2 * rows_of(arguments) * arguments["x"].shape[-1] * outputs * (1 if phase == "forward" else 2)
