"""The tuned table: what was measured to be the fastest on a kind of device, for dispatch to look up while it traces.

Nothing is measured here: `xlafuse tune` does that, and writes a table. A file for each kind of device: the shipped one
beside this module, `tuned/h200.json`, and the user's own in the cache folder, whose entries come first. A problem that
neither has is left to the operation's own rule.

An operation is tuned by three lines: `OpSpec.problem` names what decides; `implementations` says what is preferred
where `dispatch.choose` picks one, and `configuration` what is launched.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.primitives.platform import target_device

try:
    import fcntl
except ImportError:  # Windows, where nobody tunes
    fcntl = None

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "tuned"
CACHE_VARIABLE = "XLAFUSE_CACHE"
"""The environment variable that names another folder than the user's cache."""

Problem = Mapping[str, int | str]
"""What decides which configuration is the fastest, by name: sizes, dtype, what is fused."""


_is_ignored: contextvars.ContextVar[bool] = contextvars.ContextVar("_is_ignored", default=False)


class TuningWarning(UserWarning):
    """A table cannot be read; the message says which and why. Operations then go by their own rules."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to take for a problem.

    implementation: as `implementation=` has it. variant: the name of its configuration among the operation's
        candidates, None for the untuned one. microseconds: the evidence: medians of one run, by name.
    """

    implementation: str
    variant: str | None
    microseconds: Mapping[str, float]


_FEW_ROWS = 64


def near(size: int) -> int:
    """The power of two that stands for a number of rows in a problem: the nearest by ratio.

    Up to 64 rows it is the next one, and above never 64: kernels of their own take up to 16 or 64 rows, and what was
    measured of one says nothing of the other.
    """
    if size <= _FEW_ROWS:
        return 2 ** math.ceil(math.log2(size)) if size > 0 else 0
    return max(2 * _FEW_ROWS, 2 ** round(math.log2(size)))


def key_of(operation: str, phase: str, problem: Problem) -> str:
    """The name of an entry: 'linear forward rows=8192 features=4096 ...'."""
    return " ".join((operation, phase, *(f"{name}={value}" for name, value in problem.items())))


def choice(operation: str, phase: str, problem: Problem) -> Choice | None:
    """The entry for a problem on the device of the current trace, None where there is none."""
    if _is_ignored.get():
        return None
    return _entries(target_device().kind, str(cache_folder())).get(key_of(operation, phase, problem))


def implementations(operation: str, problem: Problem, *, untuned: Sequence[str]) -> Sequence[str]:
    """What `dispatch.choose` takes as `preferred`: what the table says, else `untuned`."""
    found = choice(operation, "forward", problem)
    return untuned if found is None else (found.implementation,)


def configuration[T](
    operation: str, phase: str, problem: Problem, candidates: Callable[[], Mapping[str, T]], *, untuned: T
) -> T:
    """The configuration that the table names among `candidates()`, else `untuned`."""
    found = choice(operation, phase, problem)
    return untuned if found is None or found.variant is None else candidates().get(found.variant, untuned)


def file_name(device_kind: str) -> str:
    """'NVIDIA H200' → 'h200.json'."""
    return "_".join(device_kind.lower().removeprefix("nvidia").replace("/", " ").split()) + ".json"


def cache_folder() -> Path:
    """Where the user's tables are."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named) / "tuned"
    from platformdirs import user_cache_path

    return user_cache_path("xlafuse") / "tuned"


def read(path: Path, device_kind: str) -> dict[str, Choice]:
    """The entries of a file; none where there is no file, and with a TuningWarning where it cannot be read or is not a
    table of this version and device."""
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
    """Writes entries into a table, new or not, whose other entries stay. A reader finds the old file or the new one,
    and of several writers each waits for the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(path.parent):
        kept = {**read(path, device_kind), **entries}
        document = {
            "schema_version": SCHEMA_VERSION,
            "device_kind": device_kind,
            "entries": {key: asdict(kept[key]) for key in sorted(kept)},
        }
        _replace(path, document)
    forget()


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds a folder's lock, which leaves no file behind and ends with the process."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network drives have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """What is traced meanwhile goes by the operations' own rules."""
    token = _is_ignored.set(True)
    try:
        yield
    finally:
        _is_ignored.reset(token)


def forget() -> None:
    """Has the tables read anew at the next look-up."""
    _entries.cache_clear()


@functools.cache
def _entries(device_kind: str, cache: str) -> Mapping[str, Choice]:
    """Both tables of a kind of device, the user's entries before the shipped ones."""
    name = file_name(device_kind)
    return {**read(SHIPPED / name, device_kind), **read(Path(cache) / name, device_kind)}


def _checked(entry: Any) -> Choice:
    found = Choice(**entry)
    if not isinstance(found.implementation, str) or not isinstance(found.variant, str | None):
        raise ValueError(f"expected names in an entry, got {entry!r}")
    return found
