"""A Capture: the folder that holds what XLA wrote, and the one-file archive of it."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tempfile
import weakref
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hlo_analysis.capture.foreign import infer_manifest
from hlo_analysis.capture.limits import Limits
from hlo_analysis.capture.manifest import MANIFEST, Manifest, manifest_json, read_manifest
from hlo_analysis.errors import DumpError
from hlo_analysis.records import Memory, Provenance


class Capture:
    """What XLA wrote while it compiled one program.

    Made by `capture()`, or opened with `Capture.load`. Files in a temporary folder go when the capture does.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, temporary: bool = False, limits: Limits | None = None
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._limits = limits or Limits.of_environment()
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
        """An artefact's text, or None when the capture has none of that key.

        Raises `DumpError` for a file that is larger than the limits of `load` allow.
        """
        path = self.file(key)
        if path is None:
            return None
        self._limits.check_file(path, path.stat().st_size)
        return path.read_text(encoding="utf-8", errors="replace")

    def require(self, key: str) -> str:
        """An artefact's text. Raises `DumpError` when the capture has none of that key."""
        text = self.text(key)
        if text is None:
            notes = " ".join(self.manifest.provenance.notes)
            raise DumpError(f"{self!r} has no {key!r}; it has {', '.join(self.keys) or 'nothing'}. {notes}".rstrip())
        return text

    def ptx(self) -> tuple[str, ...]:
        """The PTX of the kernels that XLA compiled, a text a file of the dump; those of Mosaic are in its resources."""
        files = sorted((self.path / self.manifest.dump).glob(f"{glob.escape(self.manifest.module)}.*ptx"))
        for file in files:
            self._limits.check_file(file, file.stat().st_size)
        return tuple(file.read_text(encoding="utf-8", errors="replace") for file in files)

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
                archive.writestr(MANIFEST, manifest_json(self.manifest))
            partial.replace(target)
        except OSError as error:
            raise DumpError(f"cannot save to {target}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return target

    @classmethod
    def load(cls, path: str | Path, *, module: str | None = None, limits: Limits | None = None) -> Capture:
        """Opens a capture: its folder, its archive, or any folder (or zip of one) that `xla_dump_to` wrote.

        Args:
          path: the folder or archive.
          module: which module of a dump with several, e.g. "jit_train_step"; the largest by default.
          limits: how large it may be; by default those of `Limits`, and of the environment.

        Raises:
          DumpError: nothing there, not a capture, one that was cut off, or one above a limit; says what and why.
        """
        source, limits = Path(path), limits or Limits.of_environment()
        if source.is_dir():
            limits.check_count(source, sum(1 for _ in source.iterdir()))
            manifest = read_manifest(source) if (source / MANIFEST).is_file() else infer_manifest(source, module)
            return cls(source.absolute(), manifest, limits=limits)
        if not source.exists():
            raise DumpError(f"{source} does not exist; expected a capture or a folder that xla_dump_to wrote")
        if not zipfile.is_zipfile(source):
            raise DumpError(f"{source} is neither a folder nor a capture's zip archive (or it was cut off)")
        folder = Path(tempfile.mkdtemp(prefix="hlo_capture_"))
        try:
            _extract(source, folder, limits)
            inner = folder if (folder / MANIFEST).is_file() else _only_folder(folder)
            manifest = read_manifest(inner) if (inner / MANIFEST).is_file() else infer_manifest(inner, module)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if inner != folder:
            manifest = _moved_into(manifest, inner.relative_to(folder).as_posix())
        return cls(folder, manifest, temporary=True, limits=limits)


def _extract(source: Path, folder: Path, limits: Limits) -> None:
    """Unpacks an archive, refusing too much, names that lead out of the folder, and anything but plain files.

    A file gives no more bytes than the archive's directory says, so that the limits hold whatever is inside.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            limits.check_archive(source, [entry.file_size for entry in archive.infolist()])
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
