"""Files: several written at once or none of them, and records as JSON, read with a check of their version."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlo_analysis.errors import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def to_json(record: Any) -> str:
    """Returns a dataclass as the text of a file; equal records give equal text."""
    return json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_record[T](path: Path, kind: TypeAdapter[T], version: int, what: str, error: type[Exception]) -> T:
    """Reads a record from JSON. what: the record in words, for messages.

    Raises `error` if the file is missing, was cut off, or is of another version or kind.
    """
    from pydantic import ValidationError

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data.get("schema_version") if isinstance(data, dict) else None
        if found != version:
            raise error(f"{path} has schema version {found!r}, expected {version}; make {what} again with this package")
        return kind.validate_python(data, strict=False)
    except (OSError, ValidationError, json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise error(f"expected {what} at {path}: {str(problem)[:500]}") from None


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Writes files atomically: to a temporary folder first, then moved, so that a reader never sees half a file.

    Raises:
        InputError: a file cannot be written, for example because the disk is full or a folder has its name. No file has
            changed then, unless the moving failed.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as passing:
            for name, text in texts.items():
                Path(passing, name).write_text(text, encoding="utf-8")
            return [Path(passing, name).replace(folder / name) for name in texts]
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error.strerror or error}") from None
