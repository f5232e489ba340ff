"""A Capture: the folder that holds what XLA wrote, its manifest, and the one-file archive of both."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from hlo_analysis.capture import artefacts
from hlo_analysis.capture.process import LOG_NAME
from hlo_analysis.errors import DumpError, UnknownTargetError
from hlo_analysis.records import Device, Memory, Provenance
from hlo_analysis.targets import Target, load_target, target_from_config

MANIFEST = "capture.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a capture says of itself; `capture.json` in its folder."""

    format: int = FORMAT
    label: str
    target: str
    kind: str
    """'cuda', 'cpu' or 'attached'."""
    device: Device
    device_kind: str = ""
    core_count: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    module: str = ""
    """How XLA names the module's files: 'module_0001.jit_f'."""
    complete: bool = True
    """False when XLA stopped before the end (no ptxas, or a dump cut off): see `provenance.notes`."""
    memory: Memory = field(default_factory=Memory)
    provenance: Provenance
    files: dict[str, str] = field(default_factory=dict)
    """Artefact key → path in the folder, with '/'."""
    dump: str = "."
    """Where in the folder XLA's own files are."""


_MANIFEST = TypeAdapter(Manifest)


class Capture:
    """What XLA wrote while it compiled one program.

    Made by `capture()`, or opened with `Capture.load`. Files in a temporary folder go when the capture does.
    """

    def __init__(self, path: Path, manifest: Manifest, *, temporary: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self._finalizer = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True) if temporary else None

    def __repr__(self) -> str:
        provenance = self.manifest.provenance
        return f"Capture({provenance.function!r}, target={self.manifest.target!r}, mode={provenance.mode!r})"

    @property
    def provenance(self) -> Provenance:
        """How the capture was made."""
        return self.manifest.provenance

    @property
    def memory(self) -> Memory:
        """Memory of the program, counted from XLA's buffer assignment."""
        return self.manifest.memory

    @property
    def keys(self) -> tuple[str, ...]:
        """The artefacts that this capture has."""
        return tuple(key for key, name in self.manifest.files.items() if (self.path / name).is_file())

    def file(self, key: str) -> Path | None:
        """Where an artefact is, or None when the capture has none of that key."""
        name = self.manifest.files.get(key)
        path = self.path / name if name else None
        return path if path is not None and path.is_file() else None

    def text(self, key: str) -> str | None:
        """An artefact's text, or None when the capture has none of that key."""
        path = self.file(key)
        return None if path is None else path.read_text(encoding="utf-8", errors="replace")

    def require(self, key: str) -> str:
        """An artefact's text. Raises `DumpError` when the capture has none of that key."""
        text = self.text(key)
        if text is None:
            notes = " ".join(self.manifest.provenance.notes)
            raise DumpError(f"{self!r} has no {key!r}; it has {', '.join(self.keys) or 'nothing'}. {notes}".rstrip())
        return text

    def stages(self) -> list[tuple[int, str, Path]]:
        """Dumps between passes in XLA's order: (number, 'after X, before Y', path)."""
        folder = self.path / self.manifest.dump
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        own = [name for name in names if name.startswith(self.manifest.module + ".")]
        return [
            (stage.order, f"after {stage.after}, before {stage.before}", stage.path)
            for stage in artefacts.stages(self.manifest.module, own, folder)
        ]

    def save(self, path: str | Path) -> Path:
        """Writes the capture into one zip archive, whole or not at all, and gives its path."""
        target = Path(path)
        if not target.parent.is_dir():
            raise DumpError(f"cannot save to {target}: {target.parent} is not a folder")
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(self.path.rglob("*")):
                    if file.is_file() and file.name != MANIFEST:
                        archive.write(file, file.relative_to(self.path).as_posix())
                archive.writestr(MANIFEST, _MANIFEST.dump_json(self.manifest, indent=2))
            partial.replace(target)
        except OSError as error:
            raise DumpError(f"cannot save to {target}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    @classmethod
    def load(cls, path: str | Path, *, module: str | None = None) -> Capture:
        """Opens a capture: its folder, its archive, or any folder (or zip of one) that `xla_dump_to` wrote.

        Args:
          path: the folder or archive.
          module: which module of a dump with several, e.g. "jit_train_step"; the largest by default.

        Raises:
          DumpError: nothing there, not a capture, or one that was cut off; says what is missing.
        """
        source = Path(path)
        if source.is_dir():
            if (source / MANIFEST).is_file():
                return cls(source.absolute(), read_manifest(source))
            return cls(source.absolute(), infer_manifest(source, module))
        if not source.exists():
            raise DumpError(f"{source} does not exist; expected a capture or a folder that xla_dump_to wrote")
        if not zipfile.is_zipfile(source):
            raise DumpError(f"{source} is neither a folder nor a capture's zip archive (or it was cut off)")
        folder = Path(tempfile.mkdtemp(prefix="hlo_capture_"))
        try:
            _extract(source, folder)
            inner = folder if (folder / MANIFEST).is_file() else _only_folder(folder)
            manifest = read_manifest(inner) if (inner / MANIFEST).is_file() else infer_manifest(inner, module)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if inner != folder:
            manifest = _moved_into(manifest, inner.relative_to(folder).as_posix())
        return cls(folder, manifest, temporary=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `capture.json`, whole or not at all."""
    partial = folder / f"{MANIFEST}.partial"
    partial.write_bytes(_MANIFEST.dump_json(manifest, indent=2))
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Reads `capture.json`. Raises `DumpError` when it is not one, or files that it names are gone."""
    try:
        manifest = _MANIFEST.validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DumpError(f"{folder / MANIFEST} is not a capture's manifest: {told}") from error
    if manifest.format != FORMAT:
        raise DumpError(f"{folder} is a capture of format {manifest.format}; this version reads format {FORMAT}")
    names = [*manifest.files.values(), manifest.dump]
    unsafe = [name for name in names if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if unsafe:
        raise DumpError(f"{folder / MANIFEST} names a path outside its folder: {unsafe[0]}")
    missing = sorted(key for key, name in manifest.files.items() if not (folder / name).is_file())
    if missing:
        raise DumpError(f"{folder} is a capture with files missing: {', '.join(missing)}; it was cut off or edited")
    return manifest


_WANTED = ("thunk_sequence", "priority_fusion_dump", "before_priority_fusion", "after_rename", "target_config")
"""What a GPU's dump should have beside its HLO, by artefact key."""


def infer_manifest(folder: Path, wanted_module: str | None = None) -> Manifest:
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
        device_kind=target.device_kind,
        core_count=target.core_count,
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
    """What a folder does not tell, and which of its modules is read."""
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


def _extract(source: Path, folder: Path) -> None:
    """Unpacks an archive, refusing names that lead out of the folder and anything but plain files."""
    try:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                name = PurePosixPath(entry.filename.replace("\\", "/"))
                mode = entry.external_attr >> 16
                if name.is_absolute() or ".." in name.parts or (name.parts and ":" in name.parts[0]):
                    raise DumpError(f"{source} holds a path that leads out of it: {entry.filename!r}")
                if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                    raise DumpError(f"{source} holds something other than plain files: {entry.filename!r}")
                if entry.is_dir():
                    continue
                destination = folder.joinpath(*name.parts)
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as packed, destination.open("wb") as plain:
                    shutil.copyfileobj(packed, plain)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise DumpError(f"{source} is not a readable archive: {error}") from error


def _only_folder(folder: Path) -> Path:
    """The one folder inside, where an archive was made with its folder; else the folder itself."""
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 and inside[0].is_dir() else folder


def _moved_into(manifest: Manifest, prefix: str) -> Manifest:
    files = {key: f"{prefix}/{name}" for key, name in manifest.files.items()}
    return replace(manifest, files=files, dump=f"{prefix}/{manifest.dump}")
