"""The records of a registry entry: array and argument specs, error bounds, memory traffic, operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Fill = Literal["normal", "zeros", "ones", "extreme", "bits", "integers", "sorted"]
"""How an array is filled.

normal: random normal values. zeros, ones: constants. extreme: 1e4 and -1e4 at random. bits: unsigned integers with all
bits random. integers: uniform integers from a range (0 to 2 for booleans). sorted: the same, sorted along the last
axis.
"""

Arguments = Mapping[str, Any]
"""Keyword arguments of an operation: arrays or ShapeDtypeStructs, and static values.

Each static value is wrapped in a `Static` until `plain` unwraps it.
"""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """The spec of an array argument.

    mean, deviation: of a normal fill. minimum, maximum: of an integer fill; `maximum` itself is excluded.
    """

    shape: tuple[int, ...]
    dtype: str
    fill: Fill = "normal"
    mean: float = 0.0
    deviation: float = 1.0
    minimum: int = 0
    maximum: int = 2

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype as a ShapeDtypeStruct."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def make(self, seed: int) -> jax.Array:
        """Makes the array; random values are drawn from `seed`.

        NumPy draws arrays of up to 2**20 elements. For those, JAX would spend longer compiling a program per shape.
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
    """Draws random values with NumPy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def integers(self, shape: tuple[int, ...], minimum: int, maximum: int) -> np.ndarray:
        return self.rng.integers(minimum, maximum, shape)

    def bits(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.rng.integers(2 ** (8 * dtype.itemsize), size=shape, dtype=dtype)


class _LargeDraw:
    """Draws random values with JAX, on its device."""

    def __init__(self, seed: int) -> None:
        self.key = jax.random.key(seed)

    def normal(self, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(self.key, shape, jnp.float32)

    def integers(self, shape: tuple[int, ...], minimum: int, maximum: int) -> jax.Array:
        return jax.random.randint(self.key, shape, minimum, maximum)

    def bits(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jax.random.bits(self.key, shape, dtype)


def seeds_of(seed: int, count: int) -> list[int]:
    """Derives `count` independent seeds from `seed`, each below 2**31."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count) >> 1]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A static argument as a pytree without leaves, so that it passes through `jax.jit` and `jax.vmap` unchanged."""

    value: Any


def plain(arguments: Arguments) -> dict[str, Any]:
    """Returns the arguments as an operation takes them, with static values unwrapped."""
    return {name: value.value if isinstance(value, Static) else value for name, value in arguments.items()}


@dataclass(frozen=True, kw_only=True)
class ArgSpec:
    """One call of an operation, shared by the tests, the benchmark and the tuner.

    tags: "test" (small enough for the interpreter), "gpu" (compiled for the H200 by tests, and run by tests/gpu),
        "bench" (timed), "block" (occurs in the transformer block), "ragged", "extreme", "empty".
    """

    name: str
    arguments: Mapping[str, ArraySpec | Any]
    tags: frozenset[str] = field(default_factory=frozenset)

    def make(self, seed: int) -> dict[str, Any]:
        """Makes the arguments, with values drawn from `seed`."""
        return {
            name: value.make(own) if isinstance(value, ArraySpec) else _wrapped(value)
            for own, (name, value) in zip(seeds_of(seed, len(self.arguments)), self.arguments.items(), strict=True)
        }

    def structs(self) -> dict[str, Any]:
        """Returns the arguments with ShapeDtypeStructs in place of arrays."""
        return {
            name: value.struct if isinstance(value, ArraySpec) else _wrapped(value)
            for name, value in self.arguments.items()
        }


def _wrapped(value: Any) -> Any:
    return value if value is None or hasattr(value, "shape") else Static(value)


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """The error allowed against a float64 reference.

    An element may be off by `baseline_factor` times the largest error of `"xla"` in the same dtype, plus `ulps` units
    in the last place of the exact value.

    least_error: what XLA's error counts as at least. A difference of float32 sums can be exactly zero in XLA's order
        and not in another one.
    """

    baseline_factor: float = 2.0
    ulps: float = 1.0
    least_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of each array that a perfect kernel reads or writes once. Small arrays (a scale) may be left out."""

    read: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The total, read and written."""
        return sum(self.read) + sum(self.written)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """Registry entry of an operation, compared and hashed by identity.

    function: the public function, called with the keyword arguments of an `ArgSpec` and `implementation`.
    reference: the same function in plain `jax.numpy`; in float64 it is the oracle.
    differentiable: the arguments that have gradients.
    batched: the arguments with leading dimensions (for vmap and shard_map); the others are shared.
    forward_traffic, backward_traffic: count the bytes of a call with given arguments.
    backward: the backward pass alone, as in training, where the forward pass has saved its residuals. It takes the
        implementation's name, the arguments and the cotangents, and returns gradients. For the benchmark.
    flops: counts the additions and multiplications in a phase's matrix products; None without matrix products.
    variants: for a phase ("forward" or "backward") and arguments, the kernel configurations that the tuned table may
        name, or forms for a study. Each one takes the arguments (and, backward, `cotangents`) and runs that kernel
        alone.
    tuned_key: returns the key under which the tuned table (`pallas_kernels.tuning`) has a call; None if not tuned.
    tuned_phases: the phases whose configuration is looked up in the tuned table.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    differentiable: tuple[str, ...]
    batched: tuple[str, ...]
    arg_specs: tuple[ArgSpec, ...]
    forward_traffic: Callable[[Arguments], Traffic]
    backward_traffic: Callable[[Arguments], Traffic]
    backward: Callable[[str, Arguments, tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    variants: Callable[[str, Arguments], Mapping[str, Callable[..., Any]]] = lambda phase, arguments: {}
    implementations: tuple[str, ...] = ("mosaic", "xla")
    error_bound: ErrorBound = ErrorBound()
    flops: Callable[[Arguments, str], int] | None = None
    tuned_key: Callable[[Arguments], Mapping[str, int | str]] | None = None
    tuned_phases: tuple[str, ...] = ("forward",)

    def tagged(self, *tags: str) -> tuple[ArgSpec, ...]:
        """Returns the argument specs that have all of `tags`."""
        return tuple(spec for spec in self.arg_specs if spec.tags.issuperset(tags))


def array_bytes(array: Any) -> int:
    """Returns the bytes of an array or ShapeDtypeStruct."""
    return int(np.prod(array.shape)) * jnp.dtype(array.dtype).itemsize
