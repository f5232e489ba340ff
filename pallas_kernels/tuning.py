"""The tuned table: the fastest measured implementation and configuration of a call, looked up at trace time.

`xlafuse tune` measures and writes tables; this module reads them. Each kind of device may have a file in the user's
cache folder. If it has no entry for a call, the operation's own rule decides.

An operation takes part by three things: `OpSpec.tuned_key` names what decides, `implementations` gives
`dispatch.choose` its preference, and `configuration` gives the kernel its configuration.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.primitives.context import assigned
from pallas_kernels.primitives.platform import target_device

SCHEMA_VERSION = 1
CACHE_VARIABLE = "XLAFUSE_CACHE"
"""The environment variable that names a folder to use instead of the user's cache."""

Key = Mapping[str, int | str]
"""The properties of a call that decide which configuration is fastest, by name: sizes, dtype, fused operations."""


_is_ignored: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_ignored", default=False)


class TuningWarning(UserWarning):
    """Warns that a table cannot be read, which one and why. Operations then follow their own rules."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A table entry: the fastest implementation and configuration of a call.

    implementation: a name as `implementation=` takes it.
    variant: the name of the configuration among the operation's candidates, or None for the untuned one.
    microseconds: the measured medians of one run, by name.
    """

    implementation: str
    variant: str | None
    microseconds: Mapping[str, float]


_FEW_ROWS = 64


def near(size: int) -> int:
    """Rounds a number of rows to the power of two that stands for it in a key.

    Up to 64 rows it rounds up; above, it takes the nearest by ratio, but at least 128. Separate kernels handle up to 16
    rows, up to 64 and more, so a measurement of one must not stand for another.
    """
    if size <= _FEW_ROWS:
        return 2 ** math.ceil(math.log2(size)) if size > 0 else 0
    return max(2 * _FEW_ROWS, 2 ** round(math.log2(size)))


def key_of(operation: str, phase: str, key: Key) -> str:
    """Returns the key of an entry, such as 'linear forward rows=8192 features=4096 ...'."""
    return " ".join((operation, phase, *(f"{name}={value}" for name, value in key.items())))


def choice(operation: str, phase: str, key: Key) -> Choice | None:
    """Returns the entry of a key for the device of the current trace, or None if there is none."""
    if _is_ignored.get():
        return None
    return _entries(target_device().kind, str(cache_folder())).get(key_of(operation, phase, key))


def implementations(operation: str, key: Key, *, untuned: Sequence[str]) -> Sequence[str]:
    """Returns the table's implementation as `preferred` for `dispatch.choose`, or `untuned` if there is no entry."""
    found = choice(operation, "forward", key)
    return untuned if found is None else (found.implementation,)


def configuration[T](
    operation: str, phase: str, key: Key, candidates: Callable[[], Mapping[str, T]], *, untuned: T
) -> T:
    """Returns the configuration that the table names among `candidates()`, or `untuned` if it names none."""
    found = choice(operation, phase, key)
    return untuned if found is None or found.variant is None else candidates().get(found.variant, untuned)


def file_name(device_kind: str) -> str:
    """Returns the file name of a device's table: 'NVIDIA H200' → 'h200.json'."""
    return "_".join(device_kind.lower().removeprefix("nvidia").replace("/", " ").split()) + ".json"


def cache_folder() -> Path:
    """Returns the folder of the user's tables."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named) / "tuned"
    from platformdirs import user_cache_path

    return user_cache_path("xlafuse") / "tuned"


def read(path: Path, device_kind: str) -> dict[str, Choice]:
    """Reads the entries of a file; none if there is no file.

    A file that cannot be read, or is no table of this schema version and device, gives no entries and a TuningWarning.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version, kind = document["schema_version"], document["device_kind"]
        if version != SCHEMA_VERSION:
            raise ValueError(f"it has schema version {version!r}, expected {SCHEMA_VERSION}")
        if kind != device_kind:
            raise ValueError(f"it is of {kind!r}, expected {device_kind!r}")
        return {key: _checked(entry) for key, entry in document["entries"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"The tuned table {path} is left out: {type(error).__name__}: {error}. Remove it, make it anew with "
            f"`xlafuse tune`, or name another folder in {CACHE_VARIABLE}.",
            TuningWarning,
            stacklevel=2,
        )
        return {}


def add(path: Path, device_kind: str, entries: Mapping[str, Choice]) -> None:
    """Adds entries to a table, creates it if needed, and keeps its other entries.

    The file is replaced as a whole, so a reader sees the old or the new one. What another process adds at the same
    moment may be lost; `xlafuse tune` measures it again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {**read(path, device_kind), **entries}
    document = {
        "schema_version": SCHEMA_VERSION,
        "device_kind": device_kind,
        "entries": {key: asdict(kept[key]) for key in sorted(kept)},
    }
    _replace(path, document)
    forget()


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    written.replace(path)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignores the tables inside the context: operations traced there follow their own rules."""
    with assigned(_is_ignored, True):
        yield


def forget() -> None:
    """Drops the tables from memory, so that the next look-up reads the files again."""
    _entries.cache_clear()


@functools.cache
def _entries(device_kind: str, cache: str) -> Mapping[str, Choice]:
    return read(Path(cache) / file_name(device_kind), device_kind)


def _checked(entry: Any) -> Choice:
    found = Choice(**entry)
    if not isinstance(found.implementation, str) or not isinstance(found.variant, str | None):
        raise ValueError(f"expected names in an entry, got {entry!r}")
    return found
