"""Small programs as launch tables, and profiles of them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.profiler import ProfileData

from hlo_analysis import Capture
from hlo_analysis.measured import KernelEvent, Profile
from hlo_analysis.records import Analysis, Device, Launch, LaunchKind, Memory, Provenance, Traffic


def launch(index: int, name: str, kind: LaunchKind = "loop", *, repeat: int = 1, body: str = "main") -> Launch:
    """A launch whose kernel has the instruction's name, where XLA or Mosaic made it."""
    named = kind in ("loop", "reduction", "triton", "mosaic")
    return Launch(
        index=index,
        thunk_id=index,
        name=name,
        kind=kind,
        kernel=name.replace(".", "_") if named else None,
        computation=body,
        repeat=repeat,
        roofline_us=2.0,
    )


def program(*launches: Launch) -> Analysis:
    device = Device(
        name="h200", description="", memory_bandwidth=4e12, matrix_flops=(), vector_flops=1e13, launch_overhead_us=2.0,
        source="",
    )  # fmt: skip
    return Analysis(
        label="f",
        provenance=Provenance(function="f", mode="forward", arguments=(), target="h200", gemm_choice="none"),
        device=device,
        launches=launches,
        decisions=(),
        intermediates=(),
        missed=(),
        traffic=Traffic(bytes_read=0, bytes_written=0, flops=0, unfused_bytes=0, intermediate_bytes=0),
        memory=Memory(),
    )


def profile(names: Iterable[str], times: Sequence[float] = (), gap: float = 1.0) -> Profile:
    """Kernels one after another. 'name@operation' has the HLO instruction that launched it."""
    events: list[KernelEvent] = []
    now = 0.0
    for i, text in enumerate(names):
        name, _, operation = text.partition("@")
        time = times[i % len(times)] if times else 5.0
        events.append(
            KernelEvent(
                name=name, start_us=now, duration_us=time, operation=operation, module="jit_f" if operation else ""
            )
        )
        now += time + gap
    return Profile(device="NVIDIA H200", events=tuple(events))


def xspace(*gpus: Sequence[KernelEvent]) -> str:
    """The text of an XSpace with the events of each GPU, as `jax.profiler` would write it."""
    return "planes { name: '/host:CPU' }\n" + "".join(_plane(number, events) for number, events in enumerate(gpus))


def _plane(number: int, events: Sequence[KernelEvent]) -> str:
    names = {event.name: i for i, event in enumerate(events, start=1)}
    lines = "".join(
        f"events {{ metadata_id: {names[e.name]} offset_ps: {round(e.start_us * 1e6)} "
        f"duration_ps: {round(e.duration_us * 1e6)} stats {{ metadata_id: 1 str_value: '{e.operation}' }} "
        f"stats {{ metadata_id: 2 str_value: '{e.module}' }} }}\n"
        for e in events
    )
    metadata = "".join(
        f"event_metadata {{ key: {i} value {{ id: {i} name: '{name}' }} }}\n" for name, i in names.items()
    )
    stats = "".join(
        f"stat_metadata {{ key: {i} value {{ id: {i} name: '{name}' }} }}\n"
        for i, name in enumerate(("hlo_op", "hlo_module", "gpu_device_name"), start=1)
    )
    return (
        f"planes {{ name: '/device:GPU:{number}'\n"
        f"lines {{ name: 'Stream #7(Kernel)' timestamp_ns: 1790000000000000000\n{lines}}}\n"
        f"lines {{ name: 'XLA Ops' events {{ metadata_id: 1 offset_ps: 0 duration_ps: 9 }} }}\n"
        f"{metadata}{stats}stats {{ metadata_id: 3 str_value: 'NVIDIA H200' }} }}\n"
    )


def as_run(compiled: Capture, run: dict[str, Any], kernels: list[str] | None = None) -> Capture:
    """A capture as if its program had run on a GPU: `run` is what the runner returns, `kernels` the profile."""
    files = compiled.manifest.files | {"run": "run.json"}
    (compiled.path / "run.json").write_text(json.dumps(run))
    if kernels is not None:
        data = ProfileData.text_proto_to_serialized_xspace(xspace(profile(kernels, gap=0.5).events))
        (compiled.path / "profile.xplane.pb").write_bytes(data)
        files["profile"] = "profile.xplane.pb"
    return Capture(compiled.path, replace(compiled.manifest, files=files))


RUN = {
    "device": "NVIDIA H200",
    "devices": 1,
    "walls_us": [33.0] * 9,
    "peak_bytes": 1 << 20,
    "compile_seconds": 2.0,
    "gpu": {},
}
