"""The meshes under which a function is traced: they name the target, so that kernels know what they are lowered for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from hlo_analysis.capture.patches import Patch
from hlo_analysis.targets import Target

AXIS = "_device"
"""The one axis of the mesh of a program that brings none."""

# JAX keeps what it traced, and knows it again by the mesh that the program brings, which does not name the target.
_traced_for = jax.make_user_context()


def mesh_of_one(target: Target) -> AbstractMesh:
    """The mesh of one device under which a function is traced that brings none."""
    return AbstractMesh((1,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=_device(target))


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
