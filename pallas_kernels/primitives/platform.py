"""Finds the device that the traced code will run on, at trace time and never at import."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax
from jax._src import config as jax_config
from jax._src import core as jax_core

_HOPPER_KINDS = ("H100", "H200", "H800", "H20", "GH200")
_HOPPER_CORES = 132
"""Streaming multiprocessors of the H100 SXM and H200, used if the device does not report a number."""
_INTERPRETED_CORES = 2
"""The interpreter also runs idle blocks. Two blocks keep it fast and still show races between blocks."""
_INTERPRETER_THREADS = 32
"""Threads of XLA's CPU client, for the interpreter. It holds one for each warpgroup that waits at a barrier, and if all
are held, the warpgroups wait for ever. Without this variable the client starts one thread a core."""
if (os.cpu_count() or 1) < _INTERPRETER_THREADS:
    os.environ.setdefault("PJRT_NPROC", str(_INTERPRETER_THREADS))


@dataclass(frozen=True, kw_only=True)
class TargetDevice:
    """The properties of a device that kernels depend on.

    `kind` is JAX's `device_kind` ("NVIDIA H200"); `core_count` counts streaming multiprocessors.
    """

    platform: str
    kind: str
    core_count: int
    is_hopper: bool
    is_interpreted: bool = False


def is_interpreted() -> bool:
    """Whether the trace is under `plgpu.force_gpu_interpret_mode`."""
    # `plgpu.kernel` reads the same setting. JAX has no public function for it.
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def mapped_mesh_axes() -> frozenset[str]:
    """Returns the explicit mesh axes that shard dimensions mapped by `jax.vmap`; array types do not show them."""
    # JAX has no public function for it.
    return frozenset(map(str, jax_core.get_axis_env().explicit_mesh_axis_names))


def target_device() -> TargetDevice:
    """Returns the device of the current trace.

    It is the first of these: the interpreter, the abstract mesh's `abstract_device` (lowering for a GPU that is not
    present), `jax.default_device`, the first device of the default backend.
    """
    if is_interpreted():
        return TargetDevice(
            platform="cpu", kind="interpreter", core_count=_INTERPRETED_CORES, is_hopper=False, is_interpreted=True
        )
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        kind = abstract.device_kind
        is_gpu = getattr(abstract, "platform", None) in (None, "gpu", "cuda")
        return TargetDevice(
            platform="cuda" if is_gpu else str(abstract.platform),
            kind=kind,
            core_count=abstract.num_cores or _HOPPER_CORES,
            is_hopper=is_gpu and _is_hopper_kind(kind),
        )
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):  # None, or the name of a platform
        device = jax.devices(device)[0]
    capability = str(getattr(device, "compute_capability", ""))
    is_cuda = device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()
    return TargetDevice(
        platform="cuda" if is_cuda else device.platform,
        kind=device.device_kind,
        core_count=getattr(device, "core_count", None) or _HOPPER_CORES,
        is_hopper=is_cuda and capability == "9.0",
    )


def _is_hopper_kind(kind: str) -> bool:
    return any(word in _HOPPER_KINDS for word in kind.replace("-", " ").split())


def varying_like(value: jax.Array, *operands: jax.Array) -> jax.Array:
    """Marks `value` as varying over every mesh axis of `jax.shard_map` over which one of `operands` varies.

    Kernels are traced without these marks, so their outputs would claim to be the same on all devices. Outside
    `jax.shard_map`, and under `check_vma=False`, `value` is returned unchanged.
    """
    axes = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    missing = tuple(sorted(axes - jax.typeof(value).manual_axis_type.varying))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def varying_alike[T](operands: T) -> T:
    """Marks all arrays of a tree as varying over the same mesh axes.

    `jax.shard_map` then sums gradients over all devices over which one of the arrays varies.
    """
    leaves = jax.tree.leaves(operands)
    return jax.tree.map(lambda leaf: varying_like(leaf, *leaves), operands)


MOSAIC_DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes that row-wise kernels take."""


def dtypes_unsupported(**arrays: jax.Array | None) -> str | None:
    """Returns why the row-wise kernels cannot take one of these arrays, or None if they can."""
    for name, array in arrays.items():
        if array is not None and array.dtype.name not in MOSAIC_DTYPES:
            return f"{name} is {array.dtype.name}, the kernels take {', '.join(MOSAIC_DTYPES)}"
    return None


def mosaic_gpu_unsupported() -> str | None:
    """Returns why Mosaic GPU kernels cannot run on the device of the current trace, or None if they can."""
    device = target_device()
    if device.is_hopper or device.is_interpreted:
        return None
    return (
        f"the kernels are for Hopper GPUs (compute capability 9.0) and this trace is for {device.kind!r} "
        f"({device.platform}); plgpu.force_gpu_interpret_mode interprets them on a CPU"
    )
