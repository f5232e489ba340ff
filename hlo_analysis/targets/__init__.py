"""Loads the GPU to compile for, present or not: XLA's description and the roofline's peaks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hlo_analysis.errors import DumpError, UnknownTargetError, nearest_names
from hlo_analysis.records import Device
from hlo_analysis.targets.efficiency import EFFICIENCY
from hlo_analysis.targets.peaks import LAUNCH_OVERHEAD_SOURCE, LAUNCH_OVERHEAD_US, peaks_of
from hlo_analysis.targets.textproto import Message, parse_textproto

__all__ = ["Target", "load_target", "target_from_config", "target_names"]

_FOLDER = Path(__file__).parent
_SPECIAL = ("attached", "cpu")

CPU_DEVICE = Device(
    name="cpu",
    description="the CPU that XLA:CPU compiles for",
    memory_bandwidth=100e9,
    matrix_flops=(),
    vector_flops=1e12,
    launch_overhead_us=0.0,
    source="round figures (100 GB/s, 1 TFLOP/s), not of any CPU in particular",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU (or CPU) to compile for.

    `config_text` is XLA's GpuTargetConfigProto in text form. It is '' for "cpu", and for "attached" until the GPU is
    queried. `autotune` is the recorded autotuning shipped for this target, if there is one.
    """

    name: str
    kind: Literal["cuda", "cpu", "attached"]
    config_text: str
    device: Device
    device_kind: str = ""
    """The GPU's own name for itself."""
    core_count: int = 0
    memory_bytes: int = 0
    """Memory of the device; 0 if not known."""
    compute_capability: tuple[int, int] = (0, 0)
    cudnn_version: tuple[int, int, int] = (9, 10, 0)
    autotune: Path | None = None


def target_names() -> tuple[str, ...]:
    """Returns the names that `load_target` accepts: the shipped GPUs, then "attached" and "cpu"."""
    return (*sorted(path.stem for path in _FOLDER.glob("*.txtpb")), *_SPECIAL)


def load_target(name: str | Path | Target) -> Target:
    """Returns the target of that name, or the one that a recorded target config describes.

    Args:
      name: a name of `target_names()`, or a path to a GpuTargetConfigProto in text form, such as the
        `*.gpu_target_config.pbtxt` that XLA writes into an `xla_dump_to` folder. A `Target` is returned unchanged.

    Raises:
      UnknownTargetError: no such name or file, not a target config, or a GPU that this XLA cannot compile for
        (AMD and Intel, and NVIDIA before Ampere).
    """
    if isinstance(name, Target):
        return name
    text = str(name)
    if text == "cpu":
        return Target(name="cpu", kind="cpu", config_text="", device=CPU_DEVICE)
    if text == "attached":
        unknown = Device(
            name="attached",
            description="the attached GPU",
            memory_bandwidth=0.0,
            matrix_flops=(),
            vector_flops=0.0,
            launch_overhead_us=LAUNCH_OVERHEAD_US,
            source="filled in from the GPU when it compiles",
        )
        return Target(name="attached", kind="attached", config_text="", device=unknown)
    shipped = _FOLDER / f"{text}.txtpb"
    if text in target_names():
        recorded = _FOLDER / "autotune" / f"{text}.txtpb"
        return target_from_config(
            text, shipped.read_text(encoding="utf-8"), autotune=recorded if recorded.exists() else None
        )
    path = Path(name)
    if not path.is_file():
        raise UnknownTargetError(
            f"unknown target {text!r}: expected one of {', '.join(target_names())}, or the path of a recorded "
            f"target config{nearest_names(text, target_names())}"
        )
    try:
        return target_from_config(path.stem.removesuffix(".gpu_target_config"), path.read_text(encoding="utf-8"))
    except (DumpError, UnicodeDecodeError) as error:
        raise UnknownTargetError(f"{path} is not a GpuTargetConfigProto in text form: {error}") from error


def target_from_config(name: str | None, config_text: str, *, autotune: Path | None = None) -> Target:
    """Builds the target that a GpuTargetConfigProto in text form describes. `name` defaults to the config's own.

    Raises:
      DumpError: the text is not a text proto.
      UnknownTargetError: the text proto describes something else, or a GPU that this XLA cannot compile for.
    """
    config = parse_textproto(config_text)
    info = config.message("gpu_device_info")
    device_name = config.scalar("device_description_str") or info.scalar("name")
    name = name or device_name or "recorded"
    if not info.fields:
        raise UnknownTargetError(f"target {name!r}: no gpu_device_info in it, so not an XLA target config")
    capability = _compute_capability(name, device_name, config, info)
    cores, bandwidth = int(info.scalar("core_count", "0")), float(info.scalar("memory_bandwidth", "0"))
    if cores <= 0 or bandwidth <= 0:
        raise UnknownTargetError(f"target {name!r}: core_count and memory_bandwidth must be given and positive")
    return Target(
        name=name,
        kind="cuda",
        config_text=config_text,
        device=_device(name, device_name, info),
        device_kind=device_name or "NVIDIA GPU",
        core_count=cores,
        memory_bytes=int(info.scalar("device_memory_size", "0")),
        compute_capability=capability,
        cudnn_version=_cudnn_version(config, info),
        autotune=autotune,
    )


def _compute_capability(name: str, device_name: str, config: Message, info: Message) -> tuple[int, int]:
    platform, vendor = config.scalar("platform_name"), info.scalar("device_vendor")
    # An AMD config makes the CUDA plugin segfault, so it must never reach XLA.
    is_amd = "AMD" in vendor.upper() or "ADVANCED MICRO" in vendor.upper()
    if platform.upper() != "CUDA" or is_amd or info.message("rocm_compute_capability").fields:
        raise UnknownTargetError(
            f"target {name!r} ({device_name or 'unnamed'}) is for {platform or 'an unnamed platform'}"
            f'{f" by {vendor}" if vendor else ""}: only NVIDIA GPUs (platform_name "CUDA") can be compiled for; AMD '
            "(ROCm) and Intel GPUs are not supported"
        )
    capability = info.message("cuda_compute_capability")
    if not capability.fields:
        raise UnknownTargetError(
            f"target {name!r} ({device_name or 'unnamed'}) has no cuda_compute_capability: only NVIDIA GPUs can be "
            "compiled for"
        )
    major, minor = int(capability.scalar("major", "0")), int(capability.scalar("minor", "0"))
    if major < 8:
        # Volta and older: XLA fails on every bf16 product.
        raise UnknownTargetError(
            f"target {name!r} ({device_name or 'unnamed'}) has compute capability {major}.{minor}: 8.0 (Ampere) or "
            "later is needed, because XLA does not compile bf16 matrix products for older GPUs"
        )
    return major, minor


def _cudnn_version(config: Message, info: Message) -> tuple[int, int, int]:
    version = config.message("dnn_version_info")
    if version.fields:
        numbers = [int(version.scalar(part, "0")) for part in ("major", "minor", "patch")]
    else:
        numbers = [int(part) for part in info.scalar("dnn_version").split(".") if part.isdigit()]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return (major, minor, patch) if major else (9, 10, 0)


def _device(name: str, device_name: str, info: Message) -> Device:
    bandwidth = float(info.scalar("memory_bandwidth"))
    peaks = peaks_of(device_name)
    if peaks is not None:
        matrix, vector, source = peaks.matrix_flops, peaks.vector_flops, peaks.source
    else:
        clock = float(info.scalar("clock_rate_ghz", "0")) * 1e9
        units = int(info.scalar("core_count")) * int(info.scalar("fpus_per_core", "128"))
        matrix, vector = _matrix_flops(info), 2.0 * units * clock
        source = "peaks computed from XLA's target config (multiprocessors × units × clock)"
    return Device(
        name=name,
        description=device_name,
        memory_bandwidth=bandwidth,
        matrix_flops=matrix,
        vector_flops=vector,
        launch_overhead_us=LAUNCH_OVERHEAD_US,
        core_count=int(info.scalar("core_count")),
        link_bandwidth=peaks.link_bandwidth if peaks is not None else 0.0,
        clock_hz=float(info.scalar("clock_rate_ghz", "0")) * 1e9,
        efficiency=EFFICIENCY,
        source=f"{source}; memory bandwidth from XLA's target config; {LAUNCH_OVERHEAD_SOURCE}",
    )


# xla.PrimitiveType numbers in matrix_unit_description.
_PRIMITIVE_TYPES = {2: "s8", 10: "f16", 11: "f32", 12: "f64", 16: "bf16", 20: "f8"}


def _matrix_flops(info: Message) -> tuple[tuple[str, float], ...]:
    cores = int(info.scalar("core_count"))
    rates: list[tuple[str, float]] = []
    for entry in info.message("matrix_unit_description").messages("rate_infos"):
        element_type = _PRIMITIVE_TYPES.get(int(entry.scalar("key", "0")))
        rate = entry.message("value")
        if element_type is not None:
            units, clock = float(rate.scalar("units_per_core", "0")), float(rate.scalar("clock_rate_ghz", "0")) * 1e9
            # The description counts one fused multiply-add as one operation.
            rates.append((element_type, 2.0 * cores * units * float(rate.scalar("ops_per_clock", "0")) * clock))
    return tuple(rates)
