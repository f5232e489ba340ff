"""Makes programs of public models, whose code comes from installed packages and from checkouts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.io  # noqa: F401  it looks for tensorflow, which must not be a stand-in
import jax
import jax.numpy as jnp
import numpy as np
import optax

from xlafuse.bench.public.sizes import Graphs, Size, resolve


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model at some size. init: makes the parameters from a key. forward, loss: functions of (params, *batch)."""

    size: str
    init: Callable[[jax.Array], Any]
    batch: tuple[Any, ...]
    forward: Callable[..., Any]
    loss: Callable[..., Any]


@dataclass(frozen=True)
class PublicModel:
    """A model of a package or repository.

    source: package and version, or repository and commit. sizes: by name. make: makes the program of (folder of
    checkouts, dtype of the computation, sizes). unit: what its speed is counted in.
    """

    name: str
    source: str
    sizes: dict[Size, Any]
    make: Callable[[Path, Any, Any], Program]
    unit: str = "tokens"

    def build(self, folder: Path, dtype: Any, size: Size, layers: int | None = None) -> Program:
        """Makes the program at a size, with at most so many layers."""
        return self.make(folder, dtype, resolve(self.sizes, size, layers))

    def units(self, size: Size) -> int:
        """Returns how many tokens, images or others a batch has."""
        sizes = self.sizes[size]
        if isinstance(sizes, Graphs):
            return sizes.graphs
        return sizes.batch * (sizes.length if self.unit == "tokens" else 1)


OPTIMIZER = optax.adamw(1e-3)


def part_of(program: Program, part: str) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Returns the function that `fuse` gets, and what makes the part of it."""
    if part == "forward":
        return program.forward, lambda forward: forward
    return program.loss, step_of if part == "step" else jax.value_and_grad


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the training step of a loss."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def shapes_of(program: Program, part: str) -> tuple[Any, ...]:
    """Returns a part's arguments: shapes of the parameters and, for a step, of the optimizer's state; the batch."""
    params = jax.eval_shape(program.init, jax.random.key(0))
    state = (jax.eval_shape(OPTIMIZER.init, params),) if part == "step" else ()
    return params, *state, *program.batch


def tokens_of(batch: int, length: int, vocabulary: int, seed: int = 0) -> jax.Array:
    """Returns random tokens, none of them 0."""
    return jnp.asarray(np.random.default_rng(seed).integers(1, vocabulary, (batch, length)), jnp.int32)


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Returns random normal numbers."""
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def molecules(sizes: Graphs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns senders and receivers, two nodes of one graph, and each graph's numbers of nodes and edges."""
    generator, atoms = np.random.default_rng(0), sizes.nodes // sizes.graphs
    first = np.arange(sizes.edges) * sizes.graphs // sizes.edges * atoms
    senders = generator.integers(0, atoms, sizes.edges)
    receivers = (senders + generator.integers(1, atoms, sizes.edges)) % atoms
    counts = [jnp.full(sizes.graphs, count // sizes.graphs, jnp.int32) for count in (sizes.nodes, sizes.edges)]
    return jnp.asarray(first + senders, jnp.int32), jnp.asarray(first + receivers, jnp.int32), counts[0], counts[1]


def statistics_of(shapes: Any) -> Any:
    """Returns means of zero and variances of one, for batch norms."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.full(leaf.shape, float(path[-1].key == "var")), shapes)


KEY = np.asarray([0, 7], np.uint32)
"""A key for dropout, in the batch."""


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


class _Anything(metaclass=_AnyClass):
    """Stands for anything of a package that is not installed, such as a base class, a call or an annotation."""


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__getattr__ = lambda attribute: getattr(_Anything, attribute)  # type: ignore[method-assign]
    return module


@contextlib.contextmanager
def importing(folder: Path, *stand_ins: str) -> Iterator[None]:
    """Imports from a folder whose modules have names such as `models`, with stand-ins for packages that load data."""
    if not folder.is_dir():
        raise ModuleNotFoundError(f"no folder {folder.name} among the checkouts")
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules.update({name: _stand_in(name) for name in stand_ins if name not in sys.modules})
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        added = {name: sys.modules[name] for name in set(sys.modules) - set(before)}
        places = {
            name: [getattr(each, "__file__", None), *getattr(each, "__path__", ())] for name, each in added.items()
        }
        for name, found in places.items():
            if name in stand_ins or any(isinstance(each, str) and Path(each).is_relative_to(folder) for each in found):
                del sys.modules[name]


def linen_program(
    module: Any, inputs: tuple[Any, ...], given: dict[str, Any], loss: Callable[..., Any], **more: Any
) -> Any:
    """Returns init, forward and loss of a Linen module; `given` are its keyword arguments, `more` those of Program.

    loss: of the module's result and the rest of the batch.
    """
    rngs = {"dropout": jax.random.wrap_key_data(jnp.asarray(KEY))}
    count = len(inputs)

    def init(key: jax.Array) -> Any:
        import flax.linen

        return flax.linen.unbox(module.init({"params": key, **rngs}, *inputs, **given))["params"]

    def forward(params: Any, *batch: Any) -> Any:
        key = {"dropout": jax.random.wrap_key_data(batch[-1])}
        return module.apply({"params": params}, *batch[:count], **given, rngs=key)

    def whole(params: Any, *batch: Any) -> Any:
        return loss(forward(params, *batch), *batch[:-1])

    return Program(init=init, forward=forward, loss=whole, **more)


def _random_state(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a key or a count of a module's random numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(7), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def nnx_program(
    make: Callable[[Any], Any],
    forward: Callable[..., Any],
    loss: Callable[..., Any],
    *,
    dtype: Any = None,
    **more: Any,
) -> Program:
    """Makes the program of an NNX module, with weights in float32.

    make: of `nnx.Rngs`. forward: of module and batch. loss: of the result and batch. dtype: of the module's weights in
    the forward pass; None: as they are given.
    """
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(state)]
    structure = jax.tree.structure(state)
    constants = [_random_state(leaf) for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jnp.floating)]

    def init(key: jax.Array) -> Any:
        leaves = jax.tree.leaves(nnx.state(make(nnx.Rngs(key))))
        return [leaf.astype(jnp.float32) for leaf, is_floating in zip(leaves, floating, strict=True) if is_floating]

    def run(params: Any, *batch: Any) -> Any:
        given = iter(params if dtype is None else [leaf.astype(dtype) for leaf in params])
        others = iter(constants)
        leaves = [next(given) if is_floating else next(others) for is_floating in floating]
        return forward(nnx.merge(graph, jax.tree.unflatten(structure, leaves)), *batch)

    def whole(params: Any, *batch: Any) -> Any:
        return loss(run(params, *batch), *batch)

    return Program(init=init, forward=run, loss=whole, **more)
