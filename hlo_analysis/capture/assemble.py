"""Makes a manifest of the worker's folder: its files, what they contain, and what is unknown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlo_analysis.capture import artefacts, attached, autotune, resources
from hlo_analysis.capture.manifest import Manifest
from hlo_analysis.capture.process import LOG_NAME
from hlo_analysis.capture.runner import PROFILE
from hlo_analysis.errors import CaptureError
from hlo_analysis.records import Memory, Provenance
from hlo_analysis.targets import Target

if TYPE_CHECKING:
    from hlo_analysis.capture.lowering import Lowered, Mode

DUMP, MODULE, MOSAIC = "dump", "module.mlirbc", "mosaic"


def assemble(
    folder: Path,
    program: Lowered,
    target: Target,
    result: Mapping[str, Any],
    *,
    mode: Mode,
    label: str | None,
    notes: list[str],
    options: Mapping[str, Any],
    recording: Path | None,
) -> Manifest:
    """The manifest of what the worker left in `folder`, to which artefacts of our own are added.

    Raises:
      CaptureError: the folder holds no module at all.
    """
    if not (folder / DUMP).is_dir():
        raise CaptureError("XLA wrote no dump: is another xla_dump_to among the compiler options?")
    module, names = artefacts.main_module(folder / DUMP)
    files = {key: f"{DUMP}/{name}" for key, name in artefacts.index(module, names).items()}
    files |= {"stablehlo": MODULE, "worker_log": LOG_NAME}
    if (folder / autotune.RESULTS_NAME).is_file():
        files["autotune_results"] = autotune.RESULTS_NAME
    if run := result.get("run"):
        files["run"] = "run.json"
        (folder / files["run"]).write_text(json.dumps(run), encoding="utf-8")
        if (folder / PROFILE).is_file():
            files["profile"] = PROFILE
    log = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace")
    replay = autotune.describe(log, target, recording)
    notes = [*notes, *replay.notes, *_add_resources(folder, names, target, files)]
    if target.kind == "attached":
        config = folder / files["target_config"] if "target_config" in files else None
        target = attached.with_config(target, config.read_text(encoding="utf-8") if config else None)
    memory = _memory(result.get("memory"))
    notes += _too_large(memory, target)
    return Manifest(
        label=label or program.function,
        target=target.name,
        kind=target.kind,
        device=target.device,
        compute_capability=target.compute_capability,
        module=module,
        complete=bool(result["ok"]),
        memory=memory,
        provenance=Provenance(
            function=program.function,
            mode=mode,
            arguments=program.arguments,
            target=target.name,
            gemm_choice=replay.choice,
            autotune_hits=replay.hits,
            autotune_lookups=replay.lookups,
            compiler_options=tuple((name, str(value)) for name, value in options.items()),
            versions=tuple(result["versions"].items()),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            lower_seconds=round(program.seconds, 3),
            compile_seconds=round(float(result["seconds"]), 3),
            notes=tuple(notes),
        ),
        files=files,
        dump=DUMP,
    )


def _add_resources(folder: Path, names: list[str], target: Target, files: dict[str, str]) -> list[str]:
    """Writes the resource artefacts that there is something to make from; the notes to add."""
    mosaic = folder / MOSAIC
    if mosaic.is_dir():
        text = resources.mosaic_resources(mosaic)
        # The log of Mosaic's passes takes megabytes a kernel, and all that matters of it is in the summary.
        shutil.rmtree(mosaic)
        if text is not None:
            files["mosaic_resources"] = "mosaic_resources.json"
            (folder / files["mosaic_resources"]).write_text(text, encoding="utf-8")
    ptx = [folder / DUMP / name for name in names if name.endswith(".ptx")]
    if not ptx:
        return []
    text, note = resources.ptx_resources(ptx, target.compute_capability)
    if text is not None:
        files["ptx_resources"] = "ptx_resources.json"
        (folder / files["ptx_resources"]).write_text(text, encoding="utf-8")
    return [note] if note else []


def _memory(stats: Mapping[str, int] | None) -> Memory:
    if not stats:
        return Memory()
    counted = stats["argument_bytes"] + stats["output_bytes"] + stats["temp_bytes"] - stats["alias_bytes"]
    return Memory(
        argument_bytes=stats["argument_bytes"],
        output_bytes=stats["output_bytes"],
        temp_bytes=stats["temp_bytes"],
        peak_bytes=stats["peak_bytes"] or counted,
    )


def _too_large(memory: Memory, target: Target) -> list[str]:
    if not target.memory_bytes or memory.peak_bytes <= target.memory_bytes:
        return []
    return [
        f"The program takes {memory.peak_bytes / 1e9:.0f} GB of memory and the {target.device_kind} has "
        f"{target.memory_bytes / 1e9:.0f} GB: it compiles, and would not run."
    ]
