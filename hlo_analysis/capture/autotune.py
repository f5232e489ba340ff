"""Recorded autotuning: which kernels a real GPU chose for its matrix products, replayed where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hlo_analysis.errors import CaptureError, DumpError
from hlo_analysis.records import GemmChoice
from hlo_analysis.targets import Target
from hlo_analysis.targets.textproto import Message, parse_textproto

RESULTS_NAME = "autotune_results.pbtxt"

# config_assigner_pass at verbosity 3: "Config assigner cache stats: hits=0, misses=3 (strict_hits=0, ...".
_STATS = re.compile(r"Config assigner cache stats: hits=(\d+), misses=(\d+)")

# What XLA chooses a kernel for: a dot, a Triton GEMM fusion, or a library call.
_GEMM_MARKS = (" dot(", "__triton_gemm", "__triton_nested_gemm_fusion", "__cublas$", "__cudnn$conv", " scaled-dot(")


@dataclass(frozen=True, kw_only=True)
class GemmReplay:
    """How the program's matrix products got their kernels."""

    choice: GemmChoice = "none"
    hits: int = 0
    lookups: int = 0
    notes: tuple[str, ...] = ()


def resolve(autotune: str | Path | None, target: Target) -> Path | None:
    """The recording to replay: the target's own for "default", the file itself for a path.

    Raises:
      CaptureError: no such file, or not a recording.
    """
    if autotune is None or target.kind == "cpu":
        return None
    if autotune == "default":
        return target.autotune
    path = Path(autotune).absolute()
    if not path.is_file():
        raise CaptureError(f"autotune={str(autotune)!r}: no such file; expected 'default', None, or a recording's path")
    try:
        entries(path.read_text(encoding="utf-8"))
    except (DumpError, UnicodeDecodeError) as error:
        raise CaptureError(f"autotune={str(autotune)!r} is not a recorded autotuning in text form: {error}") from error
    return path


def describe(log: str, module_before: str, target: Target, recording: Path | None) -> GemmReplay:
    """What the worker's log says of the replay.

    Args:
      log: the worker's log, with config_assigner_pass at verbosity 3.
      module_before: HLO text before kernels were chosen.
      target: what was compiled for.
      recording: the recording that was loaded, if any.
    """
    counts = [(int(match[1]), int(match[2])) for match in _STATS.finditer(log)]
    hits = sum(hit for hit, _ in counts)
    lookups = hits + sum(miss for _, miss in counts)
    if not any(mark in module_before for mark in _GEMM_MARKS):
        return GemmReplay(choice="none", hits=hits, lookups=lookups)
    if target.kind == "attached":
        return GemmReplay(choice="attached", hits=hits, lookups=lookups)
    if recording is None:
        note = "GEMM kernels are XLA's defaults: no recorded autotuning was replayed, and a GPU would choose others."
        return GemmReplay(choice="default", lookups=lookups, notes=(note,))
    if hits == 0:
        note = (
            f"GEMM kernels are XLA's defaults: the recorded autotuning knows none of this program's {lookups} choices, "
            "and a GPU would choose others."
        )
        return GemmReplay(choice="default", lookups=lookups, notes=(note,))
    missed = lookups - hits
    note = (
        f"The recorded autotuning knows {hits} of this program's {lookups} choices; the other {missed} are XLA's "
        "defaults."
    )
    return GemmReplay(choice="replayed", hits=hits, lookups=lookups, notes=(note,) if missed else ())


def entries(text: str) -> dict[str, Message]:
    """A recording's entries by key. Raises `DumpError` when it is not a recording."""
    root = parse_textproto(text)
    if any(name not in ("version", "entries", "results") for name, _ in root.fields):
        raise DumpError("expected the fields 'version' and 'entries' of XLA's autotune results, found others")
    return {_render(entry.message("key")): entry for entry in root.messages("entries")}


def merge_autotune(texts: Iterable[str]) -> str:
    """One recording made of several, each choice once; for equal keys the later text wins.

    Args:
      texts: recordings in text form, as `xla_gpu_dump_autotune_results_to` writes them.

    Raises:
      DumpError: one of them is not a recording, or their versions differ.
    """
    merged: dict[str, Message] = {}
    versions: set[str] = set()
    for text in texts:
        found = entries(text)
        merged |= found
        if version := parse_textproto(text).scalar("version"):
            versions.add(version)
    if len(versions) > 1:
        raise DumpError(f"recordings of different versions cannot be merged: {', '.join(sorted(versions))}")
    head = [f"version: {version}" for version in versions]
    return "\n".join([*head, *(f"entries {{\n{_render(merged[key], 1)}\n}}" for key in sorted(merged))]) + "\n"


def _render(message: Message, depth: int = 0) -> str:
    raise NotImplementedError
