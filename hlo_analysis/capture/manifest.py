"""The manifest of a capture: `capture.json` in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from hlo_analysis.errors import DumpError
from hlo_analysis.records import Device, Memory, Provenance

MANIFEST = "capture.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a capture; stored as `capture.json` in its folder."""

    format: int = FORMAT
    label: str
    target: str
    kind: str
    """'cuda', 'cpu' or 'attached'."""
    device: Device
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


def manifest_json(manifest: Manifest) -> bytes:
    """The text of `capture.json`."""
    return _MANIFEST.dump_json(manifest, indent=2)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `capture.json`, whole or not at all."""
    partial = folder / f"{MANIFEST}.partial"
    partial.write_bytes(manifest_json(manifest))
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Reads `capture.json`. Raises `DumpError` when it is not one, or files that it names are gone."""
    try:
        manifest = _MANIFEST.validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DumpError(f"{folder / MANIFEST} is not a capture's manifest: {reason}") from error
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
