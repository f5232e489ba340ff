"""What an operation's registry entry is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Fill = Literal["normal", "zeros", "ones", "extreme", "bits", "integers", "sorted"]
"""Values of an array: random normal, constants, plus and minus 1e4, (unsigned integers) all bits random, or uniform
integers in a range (for booleans the range 0 to 2), also sorted along the last axis."""

Arguments = Mapping[str, Any]
"""Keyword arguments of an operation: arrays or ShapeDtypeStructs, and static values, each in a `Static` until `plain`
takes it out."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """An array argument. `normal` has the given mean and deviation; `integers` go from `minimum` to below `maximum`."""

    shape: tuple[int, ...]
    dtype: str
    fill: Fill = "normal"
    mean: float = 0.0
    deviation: float = 1.0
    minimum: int = 0
    maximum: int = 2

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype without values."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def make(self, seed: int) -> jax.Array:
        """The array; random ones are drawn from `seed`.

        NumPy draws arrays of at most 2**20 values: JAX would compile programs for each shape, which takes longer.
        """
        dtype = jnp.dtype(self.dtype)
        draw = _SmallDraw(seed) if math.prod(self.shape) <= 2**20 else _LargeDraw(seed)
        match self.fill:
            case "normal":
                values = self.mean + self.deviation * draw.normal(self.shape)
            case "extreme":
                values = 2e4 * draw.integers(self.shape, 0, 2) - 1e4
            case "zeros" | "ones":
                values = jnp.full(self.shape, self.fill == "ones")
            case "bits":
                values = draw.bits(self.shape, dtype)
            case "integers" | "sorted":
                values = draw.integers(self.shape, self.minimum, self.maximum)
        values = jnp.asarray(values.astype(dtype))
        return jnp.sort(values, axis=-1) if self.fill == "sorted" else values


class _SmallDraw:
    """Random values by NumPy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def integers(self, shape: tuple[int, ...], minimum: int, maximum: int) -> np.ndarray:
        return self.rng.integers(minimum, maximum, shape)

    def bits(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.rng.integers(2 ** (8 * dtype.itemsize), size=shape, dtype=dtype)


class _LargeDraw:
    """Random values by JAX, on its device."""

    def __init__(self, seed: int) -> None:
        self.key = jax.random.key(seed)

    def normal(self, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(self.key, shape, jnp.float32)

    def integers(self, shape: tuple[int, ...], minimum: int, maximum: int) -> jax.Array:
        return jax.random.randint(self.key, shape, minimum, maximum)

    def bits(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jax.random.bits(self.key, shape, dtype)


def seeds_of(seed: int, count: int) -> list[int]:
    """As many seeds of their own for parts of what is drawn from `seed`, each below 2**31."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count) >> 1]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A static value among arguments: a tree without leaves, so that arguments go through jit and vmap as they are."""

    value: Any


def plain(arguments: Arguments) -> dict[str, Any]:
    """The arguments as an operation takes them: static values out of their wrapping."""
    return {name: value.value if isinstance(value, Static) else value for name, value in arguments.items()}


GPU = ("gpu",)
BENCH = ("gpu", "bench")
"""The commonest tags of an `ArgSpec` besides "test"."""


def call_name(shape: Sequence[int], *details: str | bool | None, fill: Fill = "normal") -> str:
    """The name of an `ArgSpec`, as 2x512-float32-residual: a shape and what else tells it from others, if anything.

    details: what is false or empty is left out, and so is the usual fill.
    """
    told = (*details, fill != "normal" and fill)
    return "-".join(("x".join(map(str, shape)), *(detail for detail in told if isinstance(detail, str) and detail)))


@dataclass(frozen=True, kw_only=True)
class ArgSpec:
    """One way of calling an operation, used by tests, benchmark and tuner alike.

    Tags: "test" (small enough for the interpreter), "gpu" (tested on a GPU only), "bench" (timed), "block" (occurs in
    the transformer block), "ragged", "extreme", "empty".
    """

    name: str
    arguments: Mapping[str, ArraySpec | Any]
    tags: frozenset[str] = field(default_factory=frozenset)

    def make(self, seed: int) -> dict[str, Any]:
        """Arguments with fresh values drawn from `seed`."""
        return {
            name: value.make(own) if isinstance(value, ArraySpec) else _wrapped(value)
            for own, (name, value) in zip(seeds_of(seed, len(self.arguments)), self.arguments.items(), strict=True)
        }

    def structs(self) -> dict[str, Any]:
        """The same arguments as ShapeDtypeStructs."""
        return {
            name: value.struct if isinstance(value, ArraySpec) else _wrapped(value)
            for name, value in self.arguments.items()
        }


def _wrapped(value: Any) -> Any:
    return value if value is None or hasattr(value, "shape") else Static(value)


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """How far from a float64 reference a result may be.

    `baseline_factor` times the largest error of `"xla"` in the same dtype, and on top `ulps` units in the last place of
    the value itself.
    """

    baseline_factor: float = 2.0
    ulps: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Arrays that a perfect kernel reads and writes once, in bytes; small ones (a scale) may be left out."""

    read: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.read) + sum(self.written)


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """One operation.

    function: the public function, called with the keyword arguments of an `ArgSpec` and `implementation`.
    reference: the same in plain jnp; in float64 it is the oracle.
    differentiable: the arguments that have gradients.
    batched: the arguments with leading dimensions (for vmap and shard_map); the others are shared.
    forward_traffic, backward_traffic: the bytes of a call with such arguments.
    backward: the backward pass alone, as it runs in training where the forward pass has saved what it needs: from the
        implementation's name, arguments and cotangents to gradients. For the benchmark.
    flops: additions and multiplications of a phase's matrix products, where an operation has any.
    variants: for a phase ("forward", "backward") and arguments, the kernel configurations worth timing by name; each
        takes the arguments (backward: and `cotangents`) and runs that kernel alone.
    problem: what the tuned table knows a call with such arguments by (`pallas_kernels.tuning`), where it is looked up.
    tuned_phases: those whose configuration is looked up there.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    implementations: tuple[str, ...]
    differentiable: tuple[str, ...]
    batched: tuple[str, ...]
    arg_specs: tuple[ArgSpec, ...]
    forward_traffic: Callable[[Arguments], Traffic]
    backward_traffic: Callable[[Arguments], Traffic]
    backward: Callable[[str, Arguments, tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    variants: Callable[[str, Arguments], Mapping[str, Callable[..., Any]]]
    error_bound: ErrorBound = ErrorBound()
    flops: Callable[[Arguments, str], int] | None = None
    problem: Callable[[Arguments], Mapping[str, int | str]] | None = None
    tuned_phases: tuple[str, ...] = ("forward",)

    def tagged(self, *tags: str) -> tuple[ArgSpec, ...]:
        """The argument specs that carry all of `tags`."""
        return tuple(spec for spec in self.arg_specs if spec.tags.issuperset(tags))


def array_bytes(array: Any) -> int:
    """Bytes of an array or ShapeDtypeStruct."""
    return int(np.prod(array.shape)) * jnp.dtype(array.dtype).itemsize
