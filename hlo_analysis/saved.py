"""Saves and loads analyses and comparisons as JSON, or as compressed JSON if the name ends in .gz."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path

from hlo_analysis.errors import DumpError
from hlo_analysis.records import Analysis, Comparison
from hlo_analysis.schema import from_json, to_json

SUFFIXES = (".json", ".json.gz")


def is_json(path: str | Path) -> bool:
    """Whether the name is that of a file that `save` writes."""
    return Path(path).name.endswith(SUFFIXES)


def save(record: Analysis | Comparison, path: str | Path) -> Path:
    """Writes the record completely or not at all, and returns its path.

    Raises:
        DumpError: the name ends in neither .json nor .json.gz, or the file cannot be written.
    """
    target = Path(path)
    if not is_json(target):
        raise DumpError(f"expected a file name that ends in {' or '.join(SUFFIXES)}, got {target.name!r}")
    data = to_json(record).encode()
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        raise DumpError(f"cannot save to {target}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def load(path: str | Path) -> Analysis | Comparison:
    """Reads a record of either class that `save` wrote, or a report.json of `xlafuse report`.

    Raises:
        DumpError: the file does not exist, is not JSON, has another schema version, or holds another record.
    """
    text = read_text(path)
    try:
        is_comparison = "strategies" in json.loads(text)
    except (ValueError, TypeError) as error:
        raise DumpError(f"{path} is not JSON: {error}") from error
    try:
        return from_json(Comparison, text) if is_comparison else from_json(Analysis, text)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def read_text(path: str | Path) -> str:
    """Returns the text of a file, decompressed if the name ends in .gz.

    Raises:
        DumpError: the file cannot be read.
    """
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if Path(path).suffix == ".gz" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DumpError(f"cannot read {path}: {error}") from error
