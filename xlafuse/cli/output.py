"""Writes a report's files: checks the folder first, and writes all files or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from xlafuse.cli.errors import InputError


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Creates the folder if it is missing and checks that it is writable, before any costly work.

    If the context raises, folders that were created here are removed.

    Raises:
        InputError: the folder cannot be created or written.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        _remove(missing)
        raise InputError(f"cannot write to the output folder {path}: {error.strerror or error}") from None
    try:
        yield path
    except BaseException:
        _remove(missing)
        raise


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Writes each file under a temporary name and renames it, so that a reader never sees a partial file.

    Raises:
        InputError: a file cannot be written, for example because the disk is full or a folder has its name. No file has
            changed then, unless the final renaming failed.
    """
    waiting: list[tuple[Path, Path]] = []
    try:
        for name, text in texts.items():
            handle, passing = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            waiting.append((Path(passing), folder / name))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(passing).chmod(0o666 & ~_umask())
        for passing, final in waiting:
            passing.replace(final)
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error.strerror or error}") from None
    finally:
        for passing, _ in waiting:
            passing.unlink(missing_ok=True)
    return [final for _, final in waiting]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
