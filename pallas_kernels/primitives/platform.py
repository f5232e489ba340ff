"""The device that the code being traced will run on, found at trace time and never at import."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax._src import config as jax_config
from jax._src import core as jax_core

_HOPPER_KINDS = ("H100", "H200", "H800", "H20", "GH200")
_HOPPER_CORES = 132
"""Streaming multiprocessors of the H100 SXM and H200, where the device does not say."""
_INTERPRETED_CORES = 2
"""The interpreter runs every block, idle ones too: two keep it quick and still show what blocks race over."""


@dataclass(frozen=True, kw_only=True)
class TargetDevice:
    """A device as far as kernels must know it.

    `kind` is JAX's `device_kind` ("NVIDIA H200"); `core_count` counts streaming multiprocessors.
    """

    platform: str
    kind: str
    core_count: int
    is_hopper: bool
    is_interpreted: bool = False


def is_interpreted() -> bool:
    """Whether the trace is under `plgpu.force_gpu_interpret_mode`."""
    # The same switch that `plgpu.kernel` reads; JAX has no public way to ask.
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def mapped_mesh_axes() -> frozenset[str]:
    """Explicit mesh axes over which arrays are spread along what `jax.vmap` maps here: no array's own type has them."""
    # JAX has no public way to ask.
    return frozenset(map(str, jax_core.get_axis_env().explicit_mesh_axis_names))


def target_device() -> TargetDevice:
    """The device of the current trace.

    In this order: the interpreter, the abstract mesh's `abstract_device` (lowering for a GPU that is not there),
    `jax.default_device`, the first device of the default backend.
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
    """`value`, marked as varying over every mesh axis of `jax.shard_map` that one of `operands` varies over.

    Kernels are traced without these marks, so that their outputs claim to be the same on all devices. Outside
    `shard_map`, and under `check_vma=False`, nothing is marked and `value` comes back as it is.
    """
    axes = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    missing = tuple(sorted(axes - jax.typeof(value).manual_axis_type.varying))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def varying_alike[T](operands: T) -> T:
    """A tree of arrays, all marked as varying alike, so that `jax.shard_map` sums gradients over the devices that any
    of them is spread over."""
    leaves = jax.tree.leaves(operands)
    return jax.tree.map(lambda leaf: varying_like(leaf, *leaves), operands)


MOSAIC_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that the kernels of row-wise operations take."""


def dtypes_unsupported(**arrays: jax.Array | None) -> str | None:
    """Why the kernels of row-wise operations cannot take one of these arrays, or None where they can."""
    for name, array in arrays.items():
        if array is not None and array.dtype.name not in MOSAIC_DTYPES:
            return f"{name} is {array.dtype.name}, the kernels take {', '.join(MOSAIC_DTYPES)}"
    return None


def mosaic_gpu_unsupported() -> str | None:
    """Why Mosaic GPU kernels cannot run on the device of the current trace, or None where they can."""
    device = target_device()
    if device.is_hopper or device.is_interpreted:
        return None
    return (
        f"the kernels are for Hopper GPUs (compute capability 9.0) and this trace is for {device.kind!r} "
        f"({device.platform}); plgpu.force_gpu_interpret_mode interprets them on a CPU"
    )
