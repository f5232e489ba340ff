"""Reads the kernels from a profile that `jax.profiler` wrote (`*.xplane.pb`)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlo_analysis.errors import DumpError

UNNAMED_GPU = "NVIDIA GPU"
"""The device of an older profile, which does not state its name."""
_GPU_PLANE = "/device:GPU:"
_STREAM = "Stream #"
_NO_WORK = frozenset(("MemoryAlloc", "MemoryFree", "MemoryResidency", "Overhead", "CudaGraph"))
"""Events of a stream that keep no part of the GPU busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEvent:
    """A kernel, copy or memset that ran on the GPU.

    `operation` is the HLO instruction and `module` the program that launched it. Both are '' where the profile does not
    say, as inside command buffers.
    """

    name: str
    start_us: float
    duration_us: float
    operation: str = ""
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All kernels of one GPU in the order in which they started."""

    device: str
    events: tuple[KernelEvent, ...]


def read_profile(path: str | Path) -> tuple[Profile, ...]:
    """Reads the newest profile in a folder, or one `.xplane.pb` file: of each GPU that ran kernels, most kernels first.

    Raises:
      DumpError: there is no profile, the profile was cut off, or it has no GPU.
    """
    file = _profile_file(Path(path))
    with warnings.catch_warnings():
        # The reader's own types cause this warning: "builtin type plane_stats has no __module__ attribute".
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.profiler import ProfileData

        try:
            data: Any = ProfileData.from_file(str(file))
        except (RuntimeError, ValueError, OSError) as error:
            raise DumpError(f"{file} is no profile of jax.profiler, or it was cut off: {error}") from error
        planes = [plane for plane in data.planes if plane.name.startswith(_GPU_PLANE)]
        found = [Profile(device=_device(plane), events=_events(plane)) for plane in planes]
    found = sorted((each for each in found if each.events), key=lambda each: len(each.events), reverse=True)
    if not found:
        raise DumpError(
            f"{file} shows no kernel of a GPU; expected a profile of a run on one, as jax.profiler.trace writes it"
        )
    return tuple(found)


def _profile_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = [file for file in path.rglob("*.xplane.pb") if file.is_file()] if path.is_dir() else []
    if not files:
        raise DumpError(
            f"{path} holds no *.xplane.pb; expected a file or folder that jax.profiler.trace or start_trace wrote"
        )
    return max(files, key=lambda file: (file.stat().st_mtime, str(file)))


def _device(plane: Any) -> str:
    return str(dict(plane.stats).get("gpu_device_name", UNNAMED_GPU))


def _events(plane: Any) -> tuple[KernelEvent, ...]:
    """Returns the events of all streams, without the lines that a viewer derives from them."""
    lines = [line for line in plane.lines if line.name.startswith(_STREAM)]
    raw = [event for line in lines for event in line.events if event.name not in _NO_WORK]
    begin = min((event.start_ns for event in raw), default=0.0)
    found = [
        KernelEvent(
            name=event.name,
            start_us=(event.start_ns - begin) / 1e3,
            duration_us=event.duration_ns / 1e3,
            operation=str(stats.get("hlo_op", "")),
            module=str(stats.get("hlo_module", "")),
        )
        for event in raw
        for stats in (dict(event.stats),)
    ]
    return tuple(sorted(found, key=lambda event: event.start_us))
