"""The meshes under which a function is traced: they name the target that kernels are lowered for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from hlo_analysis.capture.patches import Patch
from hlo_analysis.errors import CaptureError
from hlo_analysis.targets import Target

NEEDS_DEVICES = "primitives that require devices"
"""JAX's message about a mesh without devices."""

NEEDS_MESH = "requires a non-empty mesh"
"""JAX's message about a PartitionSpec where no mesh is set."""

OTHER_DEVICES = "incompatible devices"
"""JAX's message about two meshes of different devices."""

AXIS = "_device"
"""The one axis of the mesh of a program that brings none."""

# JAX keeps what it traced, and knows it again by the mesh that the program brings, which does not name the target.
_traced_for = jax.make_user_context()


def mesh_of_one(target: Target) -> AbstractMesh:
    """The mesh of one device under which a function is traced that brings none."""
    return AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=_device(target))


def under_mesh_of_one[T](alone: AbstractMesh | None, call: Callable[[], T]) -> T:
    """Calls under the mesh `alone`, or without it where that is None or the program brings a mesh of its own."""
    if alone is not None:
        try:
            with jax.sharding.use_abstract_mesh(alone):
                return call()
        except ValueError as error:
            if f"'{AXIS}'" not in str(error):
                raise
    return call()


def is_cut(leaf: Any) -> bool:
    """Whether an array is placed on a mesh of several devices."""
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def undivided(shape: Sequence[int], sharding: NamedSharding) -> str | None:
    """Says which dimension the mesh's axes do not divide, or returns None."""
    for place, axes in enumerate(sharding.spec):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        if place >= len(shape):
            return f"the sharding {sharding.spec} is of more dimensions than the shape {tuple(shape)} has"
        if shape[place] % prod(sharding.mesh.shape[name] for name in names):
            cut = ", ".join(f"{name}={sharding.mesh.shape[name]}" for name in names)
            return f"the mesh axis {cut} does not divide dimension {place} of the shape {tuple(shape)}"
    return None


def check_cuts(named: Iterable[tuple[str, Any]]) -> None:
    """Checks the shardings of arguments, given with their names.

    Raises:
      CaptureError: an axis does not divide what it cuts, or two arguments are on different meshes.
    """
    first: tuple[str, Any] | None = None
    for name, leaf in named:
        if not is_cut(leaf):
            continue
        if (reason := undivided(leaf.shape, leaf.sharding)) is not None:
            raise CaptureError(f"{name}: {reason}")
        mesh = leaf.sharding.mesh
        first = first or (name, mesh)
        if dict(mesh.shape) != dict(first[1].shape):
            raise CaptureError(
                f"{name} is on a mesh of {dict(mesh.shape)}, and {first[0]} on one of {dict(first[1].shape)}: expected "
                "one mesh for all arguments"
            )


def devices_of(target: Target, count: int) -> tuple[Any, ...]:
    """Described devices of the target, which JAX takes for a mesh: so does what calls Python to cut its arrays."""
    with _MAKING_DEVICES:
        return _devices_of(target, count)


_MAKING_DEVICES = threading.Lock()
"""JAX keeps what it traced for one thread's mesh, which must be the devices of all threads."""


@functools.cache
def _devices_of(target: Target, count: int) -> tuple[Any, ...]:
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=target.config_text)
    return tuple(topology.devices)


@contextlib.contextmanager
def traced_for_one(target: Target) -> Iterator[None]:
    """Within the block functions are traced for one device of the target, whatever mesh is set around it."""
    # JAX lets a mesh of another size replace none but the empty one.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh_of_one(target)):
        yield


@contextlib.contextmanager
def name_target_in_meshes(target: Target) -> Iterator[None]:
    """Within the block, and in this thread only, meshes of `jax.shard_map` that name no GPU name the target's."""
    with _MANUAL_MESHES.applied(_device(target)), _traced_for(target.device_kind):
        yield


def _device(target: Target) -> AbstractDevice:
    return AbstractDevice(device_kind=target.device_kind, num_cores=target.core_count, platform="gpu")


def _named(original: Callable[..., AbstractMesh], device: AbstractDevice, *arguments: Any) -> AbstractMesh:
    mesh = original(*arguments)
    named = mesh.abstract_device
    # One of a CPU is that of devices that stand for GPUs on this machine. Who leaves the platform out means a GPU.
    is_gpu = named is not None and getattr(named, "platform", None) in (None, "gpu", "cuda")
    return mesh if is_gpu else mesh.update(abstract_device=device)


_MANUAL_MESHES = Patch("jax._src.shard_map", {"_as_manual_mesh": _named})


@contextlib.contextmanager
def without_devices() -> Iterator[None]:
    """Within the block what cuDNN and Python compute lowers for a mesh that has no devices, within `shard_map`.

    JAX refuses such a mesh beforehand, wherever they are. Outside `shard_map` it is right to: there XLA would call
    Python to cut them, while it compiles.

    Raises:
      CaptureError: they are outside `shard_map`.
    """
    with _DEVICES.applied(True):
        try:
            yield
        except (AssertionError, AttributeError) as error:
            raise CaptureError(
                "cuDNN's attention and products over a mesh are cut by calls of Python, which a capture cannot make: "
                "expected them within jax.shard_map. Or read what xla_dump_to wrote where the program runs "
                "(Capture.load), or capture what one device computes"
            ) from error


_DEVICES = Patch("jax._src.dispatch", {"jaxpr_has_prim_requiring_devices": lambda *_: False})
