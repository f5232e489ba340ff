"""The manifest of a folder that somebody else's `xla_dump_to` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hlo_analysis.capture import artefacts
from hlo_analysis.capture.manifest import Manifest
from hlo_analysis.capture.process import LOG_NAME
from hlo_analysis.errors import DumpError, UnknownTargetError
from hlo_analysis.records import Memory, Provenance
from hlo_analysis.targets import Target, load_target, target_from_config

_WANTED = ("thunk_sequence", "priority_fusion_dump", "before_priority_fusion", "after_rename", "target_config")
"""What a GPU's dump should have beside its HLO, by artefact key."""


def infer_manifest(folder: Path, wanted_module: str | None) -> Manifest:
    """The manifest of a folder that somebody else's `xla_dump_to` wrote.

    Raises:
      DumpError: nothing that XLA wrote, or so little that nothing can be said of the program.
    """
    module, names = artefacts.main_module(folder, wanted_module)
    files = artefacts.index(module, names)
    if (folder / LOG_NAME).is_file():
        files["worker_log"] = LOG_NAME
    hlo_keys = {"final_hlo", "after_priority_fusion", "after_rename", "before_optimizations"}
    if not hlo_keys & set(files):
        raise DumpError(
            f"{folder} holds no HLO text of {module}: dump with xla_dump_hlo_as_text=true; it has "
            f"{', '.join(sorted(files)) or 'nothing usable'}"
        )
    is_cpu = "final_hlo" in files and "cpu_after_optimizations" in files["final_hlo"]
    if not is_cpu and "final_hlo" not in files:
        raise DumpError(
            f"{folder} was cut off: {module} has {', '.join(sorted(files))}, but not the module after optimisation "
            "(*_after_optimizations.txt), which XLA writes last; dump again, or let the compilation finish"
        )
    absent = [] if is_cpu else [key for key in _WANTED if key not in files]
    notes = _notes_of_dump(folder, module, absent, wanted_module)
    target = _target_of(folder, files, is_cpu, notes)
    tuned = "module_autotune" in files and "{" in (folder / files["module_autotune"]).read_text(encoding="utf-8")
    if not is_cpu and not tuned:
        notes.append("Whether a GPU chose the kernels of the matrix products is not known.")
    return Manifest(
        label=module.partition(".")[2],
        target=target.name,
        kind=target.kind,
        device=target.device,
        compute_capability=target.compute_capability,
        module=module,
        complete=not absent,
        memory=Memory(),
        provenance=Provenance(
            function=module.partition(".")[2].removeprefix("jit_"),
            mode="unknown",
            arguments=(),
            target=target.name,
            gemm_choice="attached" if tuned else "none",
            notes=tuple(notes),
        ),
        files=files,
    )


def _notes_of_dump(folder: Path, module: str, absent: Sequence[str], wanted_module: str | None) -> list[str]:
    """Caveats: what is unknown of a dump, and which of its modules is read."""
    notes = ["Read from a folder that xla_dump_to wrote: how it was made is not known."]
    if absent:
        notes.append(
            f"The folder lacks {', '.join(absent)}; dump with xla_dump_hlo_pass_re matching 'priority-fusion' and "
            "'rename_fusions' to have them all."
        )
    others = [other for other in artefacts.modules(path.name for path in folder.iterdir()) if other != module]
    if others:
        named = f"{', '.join(others[:4])}{', …' if len(others) > 4 else ''}"
        how = "asked for" if wanted_module else "the largest"
        notes.append(f"This is {module}, {how}; the folder holds {len(others)} more, which were not read: {named}.")
    return notes


def _target_of(folder: Path, files: dict[str, str], is_cpu: bool, notes: list[str]) -> Target:
    if is_cpu:
        return load_target("cpu")
    if "target_config" in files:
        try:
            return target_from_config(None, (folder / files["target_config"]).read_text(encoding="utf-8"))
        except (DumpError, UnknownTargetError, UnicodeDecodeError) as error:
            raise DumpError(f"{folder / files['target_config']}: {error}") from error
    notes.append("The folder has no *.gpu_target_config.pbtxt, so the roofline assumes an H200.")
    return load_target("h200")
