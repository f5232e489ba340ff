"""Shards a block or a model over a mesh: data, fully sharded, tensor, sequence and expert parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlo_analysis.capture.meshes import undivided
from xlafuse.errors import UnknownNameError, XlafuseError

AXES = ("replica", "data", "tensor")
"""Axes of a mesh: the first two cut the batch."""
PARALLEL = {"dp": "data", "fsdp": "data", "tp": "tensor", "sp": "tensor", "ep": "tensor"}
"""How a model may be parallel, and the axis that each needs.

dp: whole weights on every device. fsdp: each weight cut over "data", and over "tensor" where the mesh has it. tp: heads
and hidden features cut over "tensor". sp: as tp, with the tokens of what is between attention and MLP cut over it, too.
ep: as tp, but each device has whole experts in place of a part of each.
"""
_NARROWING = ("output", "down", "embedding")
"""Weights whose rows, not columns, "tensor" cuts."""


class ShardingError(XlafuseError, ValueError):
    """A mesh does not fit a program; the message names the argument and the axis."""


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a mesh: "data=2,tensor=4" gives {"data": 2, "tensor": 4}. Raises `ShardingError`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if not size.isdecimal() or int(size) < 1 or name in sizes:
            raise ShardingError(f"expected a mesh as data=2,tensor=4, each axis once, got {text!r}")
        if name not in AXES:
            raise UnknownNameError("mesh axis", name, AXES)
        sizes[name] = int(size)
    return sizes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the arrays of a block or a model are on a mesh.

    mesh: with axes of `AXES`; one without devices serves captures. parallel: a name of `PARALLEL`.
    """

    mesh: Mesh | AbstractMesh
    parallel: str

    def __str__(self) -> str:
        return f"{self.parallel}, {','.join(f'{name}={size}' for name, size in self.mesh.shape.items())}"

    @property
    def tokens(self) -> NamedSharding:
        """The sharding of arrays (batch, tokens)."""
        return NamedSharding(self.mesh, P(self._batch))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of the residual stream, (batch, tokens, hidden)."""
        return NamedSharding(self.mesh, P(self._batch, "tensor" if self.parallel == "sp" else None))

    def placed(self, x: jax.Array) -> jax.Array:
        """Constrains the residual stream, (batch, tokens, hidden)."""
        return jax.lax.with_sharding_constraint(x, self.rows)

    def placed_wide(self, x: jax.Array) -> jax.Array:
        """Constrains heads (batch, tokens, heads, size) or hidden features (batch, tokens, features).

        With sequence parallelism alone, XLA might keep the tokens cut and gather weights.
        """
        axis = self._tensor
        fits = axis is not None and x.shape[2] % self.mesh.shape[axis] == 0
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(self._batch, None, axis))) if fits else x

    @property
    def _tensor(self) -> str | None:
        return "tensor" if self.parallel != "dp" and "tensor" in self.mesh.axis_names else None

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every device has."""
        return NamedSharding(self.mesh, P())

    @property
    def _batch(self) -> tuple[str, ...]:
        return tuple(name for name in ("replica", "data") if name in self.mesh.axis_names)

    def of_weights(self, params: Any) -> Any:
        """Returns the shardings of the weights of a block or a `Decoder`, in a tree like theirs."""
        return jax.tree_util.tree_map_with_path(self._of_weight, params)

    def _of_weight(self, path: Any, weight: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        tensor = self._tensor
        data = "data" if self.parallel == "fsdp" else None
        is_narrowing = any(name in _NARROWING for name in names)
        if self.parallel == "ep" and "experts" in names:
            spec = (tensor, None, None) if len(weight.shape) > 2 else ()
        elif names[-1] == "bias":
            spec = (None,) if is_narrowing or len(names) < 2 or names[-2].endswith("norm") else (tensor,)
        elif names[-1] in ("scale", "positions"):
            spec = ()
        else:
            # A device's part is contiguous where one axis cuts: XLA would copy a gathered array otherwise.
            spec = (tensor, data) if is_narrowing and tensor else (data, tensor)
        return NamedSharding(self.mesh, P(*(None,) * (len(weight.shape) - len(spec)), *spec))


def layout_of(sizes: Mapping[str, int], parallel: str, devices: Any = None) -> Layout:
    """Returns the layout on a mesh of these sizes; without `devices` for captures alone.

    Raises:
        UnknownNameError: no such `parallel`.
        ShardingError: the mesh lacks the axis that `parallel` needs, has one whose devices would repeat work, or has
            another number of devices than there are.
    """
    if parallel not in PARALLEL:
        raise UnknownNameError("kind of parallel", parallel, PARALLEL)
    if sizes.get(needed := PARALLEL[parallel], 1) < 2:
        raise ShardingError(f"{parallel} cuts over the mesh axis {needed!r}: expected {needed}=2 or more, got {sizes}")
    if parallel == "dp" and sizes.get("tensor", 1) > 1:
        raise ShardingError("dp cuts nothing over the mesh axis 'tensor', whose devices would repeat the work")
    shape, names = tuple(sizes.values()), tuple(sizes)
    kinds = (AxisType.Auto,) * len(names)
    if devices is None:
        return Layout(mesh=AbstractMesh(shape, names, axis_types=kinds), parallel=parallel)
    if len(devices) != prod(shape):
        raise ShardingError(f"the mesh {sizes} is of {prod(shape)} devices, and there are {len(devices)}")
    return Layout(mesh=jax.make_mesh(shape, names, axis_types=kinds, devices=devices), parallel=parallel)


def sharded(tree: Any, shardings: Any, name: str) -> Any:
    """Returns the types of arrays with their shardings; `name` is the argument's, for errors.

    Raises:
        ShardingError: an axis cuts a dimension that it does not divide.
    """

    def one(path: Any, leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        if (reason := undivided(leaf.shape, sharding)) is not None:
            raise ShardingError(f"{name}{jax.tree_util.keystr(path)}: {reason}")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, tree, shardings)
