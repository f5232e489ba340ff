"""How large a dump or an archive may be: more is refused with the limit's name, before it fills memory or disk."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from hlo_analysis.errors import DumpError

_PREFIX = "HLO_ANALYSIS_MAX_"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of `Capture.load`. Each is also an environment variable: HLO_ANALYSIS_MAX_FILES, ..._FILE_BYTES, ..."""

    files: int = 20_000
    """In the folder or archive."""
    file_bytes: int = 512 << 20
    """Of one file that is read; of 64 layers' gradient XLA writes some 20 MB."""
    total_bytes: int = 4 << 30
    """Of all files that an archive unpacks to."""

    @classmethod
    def of_environment(cls) -> Limits:
        """The limits with those that the environment sets.

        Raises:
            DumpError: a variable is not a whole number.
        """
        given: dict[str, int] = {}
        for field in fields(cls):
            text = os.environ.get(_PREFIX + field.name.upper(), "")
            if text and not text.isdecimal():
                raise DumpError(f"expected a whole number in {_PREFIX}{field.name.upper()}, got {text!r}")
            if text:
                given[field.name] = int(text)
        return cls(**given)

    def check_count(self, source: Path, count: int) -> None:
        """Raises `DumpError` for more files than `files`."""
        if count > self.files:
            raise DumpError(f"{source} holds {count:,} files, more than {self._named('files', count)}")

    def check_file(self, name: str | Path, size: int) -> None:
        """Raises `DumpError` for a file above `file_bytes`."""
        if size > self.file_bytes:
            raise DumpError(f"{name} has {size:,} bytes, more than {self._named('file_bytes', size)}")

    def check_archive(self, source: Path, sizes: Collection[int]) -> None:
        """Raises `DumpError` for more files, or more bytes in all, than an archive may unpack to."""
        self.check_count(source, len(sizes))
        if (total := sum(sizes)) > self.total_bytes:
            raise DumpError(f"{source} unpacks to {total:,} bytes, more than {self._named('total_bytes', total)}")

    def _named(self, name: str, needed: int) -> str:
        return (
            f"the limit of {getattr(self, name):,} ({name}). If you trust it, set {_PREFIX}{name.upper()}={needed}, or "
            f"in Python Capture.load(path, limits=Limits({name}={needed}))"
        )
