"""Builders shared by the registry entries: argument specs, memory traffic, kernel variants, backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, Fill, Traffic, array_bytes

Arrays = tuple[jax.Array, ...]
Phase = tuple[Callable[..., Any], Callable[[Arguments], Mapping[str, Any]]]
"""A phase's kernel, and a function from a call's arguments to the configurations worth timing, by name."""


def call_name(shape: Sequence[int], *details: object, fill: Fill = "normal") -> str:
    """Returns the name of an `ArgSpec`, a shape and distinguishing details, such as 2x512-float32-residual.

    Details that are False or empty are left out. So is the fill if it is normal or already among the details.
    """
    return joined("x".join(map(str, shape)), *details, fill != "normal" and fill not in details and fill)


def joined(*details: object) -> str:
    """Joins the details that are non-empty strings with hyphens."""
    return "-".join(detail for detail in details if isinstance(detail, str) and detail)


def arg_spec(name: str, arguments: Mapping[str, Any], tags: str) -> ArgSpec:
    """Makes an `ArgSpec` of the arguments that are not False. tags: separated by spaces."""
    given = {key: value for key, value in arguments.items() if value is not False}
    return ArgSpec(name=name, arguments=given, tags=frozenset(tags.split()))


def array_call(build: Callable[..., tuple[Any, ...]]) -> Callable[..., ArgSpec]:
    """Decorates a function that builds a call's arguments from its first array.

    `build` takes an `ArraySpec` and keywords, and returns the arguments (those that are False are left out) and details
    for the name. The decorated function takes the first array's shape, its dtype and fill by keyword, tags, and the
    keywords of `build`; it returns an `ArgSpec`.
    """

    def call(*shape: int, dtype: str = "bfloat16", fill: Fill = "normal", tags: str = "test", **own: Any) -> ArgSpec:
        arguments, *details = build(ArraySpec(shape=shape, dtype=dtype, fill=fill), **own)
        return arg_spec(call_name(shape, dtype, *details, fill=fill), arguments, tags)

    return call


def calls(call: Callable[..., ArgSpec], *sizes: Sequence[int], **others: Any) -> tuple[ArgSpec, ...]:
    """Makes one call for each size, all with the same keywords."""
    return tuple(call(*each, **others) for each in sizes)


def given_names(arguments: Arguments, *names: str) -> tuple[str, ...]:
    """Returns the names whose argument is given."""
    return tuple(name for name in names if arguments.get(name) is not None)


def traffic(
    read: Iterable[str] = (), written: Iterable[str] = (), **sizes: Callable[[Arguments], int | None]
) -> Callable[[Arguments], Traffic]:
    """Returns a function that counts the bytes of the arrays named in `read` and `written`.

    A name is an argument, or one of `sizes`: a function from the arguments to a number of bytes, or None. Missing
    arguments and sizes of None do not count.
    """

    def count(arguments: Arguments) -> Traffic:
        known = {name: size(arguments) for name, size in sizes.items()}
        known |= {name: array_bytes(arguments[name]) for name in given_names(arguments, *read, *written)}

        def bytes_of(names: Iterable[str]) -> tuple[int, ...]:
            return tuple(size for name in names if (size := known.get(name)) is not None)

        return Traffic(read=bytes_of(read), written=bytes_of(written))

    return count


def variants(
    forward: Phase | None = None, backward: Phase | None = None
) -> Callable[[str, Arguments], Mapping[str, Callable[..., Any]]]:
    """Makes `OpSpec.variants` from each phase's kernel and its configurations, passed as `config`."""

    def configured(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
        found = forward if phase == "forward" else backward
        if found is None:
            return {}
        kernel, configs = found
        return {name: partial(kernel, config=config) for name, config in configs(arguments).items()}

    return configured


def backward_passes(**passes: Callable[..., Arrays]) -> Callable[[str, Arguments, Arrays], Arrays]:
    """Makes `OpSpec.backward` from one function per implementation.

    Each takes the arguments and `cotangents` as keywords.
    """

    def run(implementation: str, arguments: Arguments, cotangents: Arrays) -> Arrays:
        return passes[implementation](**arguments, cotangents=cotangents)

    return run


def both_passes(function: Callable[..., Any], *names: str) -> Callable[[str, Arguments, Arrays], Arrays]:
    """Makes `OpSpec.backward` from `jax.vjp` of the public function, which also runs its forward pass.

    The compiler removes the parts of the forward pass that the gradients do not need. For an operation without a
    backward function of its own, such as a norm and a product that each have their own gradient.
    """

    def run(implementation: str, arguments: Arguments, cotangents: Arrays) -> Arrays:
        called = partial(function, implementation=implementation)
        return gradients_of(called, *names)(**arguments, cotangents=cotangents)

    return run


def gradients_of(function: Callable[..., Any], *names: str) -> Callable[..., Arrays]:
    """Returns a backward pass by `jax.vjp`: the gradients of the given arguments among `names`, in that order."""

    def run(*, cotangents: Arrays, **arguments: Any) -> Arrays:
        def forward(given: dict[str, jax.Array]) -> Any:
            return function(**{**arguments, **given})

        present = given_names(arguments, *names)
        pull_back = jax.vjp(forward, {name: arguments[name] for name in present})[1]
        (found,) = pull_back(cotangents[0] if len(cotangents) == 1 else cotangents)
        return tuple(found[name] for name in present)

    return run


def as_taken(function: Callable[..., Any], convert: Callable[..., Mapping[str, Any]]) -> Callable[..., Any]:
    """Wraps `function` so that it takes an `ArgSpec`'s arguments, which `convert` turns into its own."""

    def called(**arguments: Any) -> Any:
        return function(**convert(arguments))

    return called
