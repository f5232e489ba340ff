"""Parts of registry entries: calls of products, norms as flat arguments, sizes and work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from pallas_kernels.arguments import Norm
from pallas_kernels.specs import BENCH, ArgSpec, Arguments, ArraySpec, OpSpec, array_bytes, call_name

NORM_ARRAYS = ("norm_scale", "norm_bias", "mean_square")
"""The names under which a norm's arrays stand among an `ArgSpec`'s arguments."""

Part = tuple[Mapping[str, Any], str]
"""Some of an `ArgSpec`'s arguments, and what they add to its name, if anything."""


def product_call(sizes: str, operands: Mapping[str, Any], *parts: Part, tags: Iterable[str]) -> ArgSpec:
    """How a product is called: 2x72-128-192-bfloat16-bias for x (2, 72, 128), w (128, 192) and a bias.

    sizes: of the weights, for the name. operands: x first, whatever it is called. parts: what follows, in order.
    """
    x, arguments = next(iter(operands.values())), dict(operands)
    for more, _ in parts:
        arguments |= more
    name = call_name(x.shape[:-1], sizes, x.dtype, *(told for _, told in parts), fill=x.fill)
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


def bench_tags(rows: int) -> tuple[str, ...]:
    """Of timed calls. Those of one row have the kernels of sixteen: no need to compile them for tests, too."""
    return ("bench",) if rows == 1 else BENCH


def weight(features: int, outputs: int, dtype: str, *, deviation: float = 1.0) -> ArraySpec:
    """Weights whose products with features of deviation 1 have this one; trained ones nearly keep the size."""
    return ArraySpec(shape=(features, outputs), dtype=dtype, deviation=deviation * features**-0.5)


def behind_product(
    x: ArraySpec,
    outputs: int,
    *,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    out_dtype: str | None = None,
) -> Part:
    """What a linear layer does with its product."""
    arguments: dict[str, Any] = {}
    told = []
    if bias:
        arguments["bias"] = ArraySpec(shape=(outputs,), dtype=x.dtype)
        told.append("bias")
    if activation:
        arguments["activation"] = activation
        told.append(activation)
    if residual:
        arguments["residual"] = ArraySpec(shape=(*x.shape[:-1], outputs), dtype=out_dtype or x.dtype)
        told.append("residual")
    if out_dtype:
        arguments["out_dtype"] = out_dtype
        told.append(f"to-{out_dtype}")
    return arguments, "-".join(told)


def norm_arguments(kind: str | None, x: ArraySpec, *, scaled: bool = True, mean_square: bool = False) -> Part:
    """A norm of x."""
    if kind is None:
        return {}, ""
    features, name = x.shape[-1:], kind
    arguments: dict[str, Any] = {"norm": kind}
    if scaled:
        arguments["norm_scale"] = ArraySpec(shape=features, dtype=x.dtype, mean=1.0, deviation=0.2)
    else:
        name += "_unscaled"
    if kind == "layer":
        arguments["norm_bias"] = ArraySpec(shape=features, dtype=x.dtype, deviation=0.2)
    if mean_square:
        arguments["mean_square"] = ArraySpec(shape=x.shape[:-1], dtype="float32", mean=1.0, deviation=0.05)
        name += "-mean_square"
    return arguments, name


def with_norm(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An `ArgSpec`'s arguments with their norm as the operations take it."""
    arguments = dict(arguments)
    kind, scale, bias, mean_square = (arguments.pop(name, None) for name in ("norm", *NORM_ARRAYS))
    norm = None if kind is None else Norm(scale, bias, kind, mean_square=mean_square)
    return arguments if norm is None else {**arguments, "norm": norm}


def rows_of(arguments: Arguments) -> int:
    """How many rows x (..., features) has."""
    return math.prod(arguments["x"].shape[:-1])


def product_bytes(arguments: Arguments, *weights: str) -> tuple[list[int], list[int]]:
    """Bytes of x and each of the weights, and of each product in x's dtype."""
    x, arrays = arguments["x"], [arguments[name] for name in weights]
    written = [rows_of(arguments) * w.shape[1] * x.dtype.itemsize for w in arrays]
    return [array_bytes(array) for array in (x, *arrays)], written


def product_flops(arguments: Arguments, phase: str, *, weights: tuple[str, ...] = ("w",)) -> int:
    """Multiplications and additions of a phase's products of x with each of the weights."""
    outputs = sum(arguments[name].shape[1] for name in weights)
    return 2 * rows_of(arguments) * arguments["x"].shape[-1] * outputs * (1 if phase == "forward" else 2)


def flat(array: jax.Array | None) -> jax.Array | None:
    """(..., columns) as rows."""
    return None if array is None else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def gradients_of(
    op: OpSpec, implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The backward pass together with the forward pass that it differentiates, as far as the compiler keeps that.

    Where norm and product are operations of their own, what lies between them is saved, and there is no backward pass
    to be called without it.
    """
    names = [name for name in op.differentiable if arguments.get(name) is not None]

    def forward(differentiable):
        return op.function(**{**arguments, **differentiable}, implementation=implementation)

    pullback = jax.vjp(forward, {name: arguments[name] for name in names})[1]
    pulled: Any = cotangents[0] if len(cotangents) == 1 else cotangents
    (gradients,) = pullback(pulled)
    return tuple(gradients[name] for name in names)
