"""Recorded autotuning: which kernels a real GPU chose, replayed where there is no GPU to choose them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hlo_analysis.errors import CaptureError, DumpError
from hlo_analysis.records import GemmChoice
from hlo_analysis.targets import Target
from hlo_analysis.targets.textproto import Message, format_textproto, parse_textproto

RESULTS_NAME = "autotune_results.pbtxt"

# config_assigner_pass at verbosity 3: "Config assigner cache stats: hits=0, misses=3 (strict_hits=0, ...".
_STATS = re.compile(r"Config assigner cache stats: hits=(\d+), misses=(\d+)")
_OTHER_VERSION = re.compile(r"version_mismatch=[1-9]")
# config_assigner at verbosity 1: one line for each instruction looked up, and one more for each that was found.
_LOOKUP = "Getting config for HLO: "
_FOUND = "Found cached config for HLO: "
# What makes an instruction a matrix product to choose a kernel for.
_GEMM_MARKS = (
    '"kind":"__triton_gemm"',
    '"kind":"__triton_nested_gemm_fusion"',
    'custom_call_target="__cublas$',
    " dot(",
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How the program's kernels were chosen.

    `hits` of `lookups` are XLA's own counts: every distinct fusion and matrix product that has more than one kernel to
    choose from. `gemm_hits` of `gemms` are the matrix products among them.
    """

    choice: GemmChoice = "none"
    hits: int = 0
    lookups: int = 0
    gemm_hits: int = 0
    gemms: int = 0
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


def describe(log: str, target: Target, recording: Path | None) -> Replay:
    """Reads from the worker's log how kernels were chosen.

    Args:
      log: the worker's log, with config_assigner_pass at verbosity 3 and config_assigner at 1.
      target: what was compiled for.
      recording: the recording that was loaded, if any.
    """
    counts = [(int(match[1]), int(match[2])) for match in _STATS.finditer(log)]
    hits = sum(hit for hit, _ in counts)
    lookups = hits + sum(miss for _, miss in counts)
    gemms = _instructions(log, _LOOKUP)
    found = gemms & _instructions(log, _FOUND)
    replay = Replay(hits=hits, lookups=lookups, gemm_hits=len(found), gemms=len(gemms))
    judged = _judged(replay, target, recording)
    if recording is not None and _OTHER_VERSION.search(log):
        return replace(judged, notes=(*judged.notes, "Some of the recorded choices are of another version of XLA."))
    return judged


def _judged(replay: Replay, target: Target, recording: Path | None) -> Replay:
    def result(choice: GemmChoice, *notes: str) -> Replay:
        return replace(replay, choice=choice, notes=notes)

    estimated = "Estimates are of a library's products, which a GPU would choose for most."
    products = f"{replay.gemms} distinct matrix product{'s' if replay.gemms != 1 else ''}"
    if replay.gemms == 0:
        return result("none")
    if target.kind == "attached":
        return result("attached")
    if recording is None:
        return result(
            "default",
            f"No recorded autotuning was replayed: {products} got XLA's default kernels. {estimated}",
        )
    if replay.gemm_hits == 0:
        return result(
            "default",
            f"The recorded autotuning does not fit: {products} got XLA's default kernels. {estimated}",
        )
    if replay.hits < replay.lookups:
        missed = replay.lookups - replay.hits
        return result(
            "replayed",
            f"The recorded autotuning knows {replay.gemm_hits} of {products} and {replay.hits} of {replay.lookups} "
            f"choices in all; the other {missed} {'are' if missed != 1 else 'is'} XLA's default. {estimated}",
        )
    return result("replayed")


def _instructions(log: str, message: str) -> set[str]:
    """The matrix products in the log lines with that message, as HLO text."""
    texts = (line.partition(message)[2] for line in log.splitlines() if message in line)
    return {text for text in texts if any(mark in text for mark in _GEMM_MARKS)}


def entries(text: str) -> dict[str, Message]:
    """A recording's entries by key. Raises `DumpError` when it is not a recording."""
    root = parse_textproto(text)
    strange = [name for name, _ in root.fields if name not in ("version", "entries")]
    if strange:
        raise DumpError(f"expected the fields 'version' and 'entries' of XLA's autotune cache, found {strange[0]!r}")
    return {format_textproto(entry.message("key")): entry for entry in root.messages("entries")}


def merge_autotune(texts: Iterable[str]) -> str:
    """One recording made of several, each choice once; for equal keys the later text wins.

    Args:
      texts: recordings in text form, as `xla_gpu_dump_autotune_results_to` writes them and `record_autotune` gives.

    Raises:
      DumpError: one of them is not a recording, or their versions differ.
    """
    merged: dict[str, Message] = {}
    versions: set[str] = set()
    for text in texts:
        merged |= entries(text)
        if version := parse_textproto(text).scalar("version"):
            versions.add(version)
    if len(versions) > 1:
        raise DumpError(f"recordings of different versions cannot be merged: {', '.join(sorted(versions))}")
    fields = [("version", version) for version in versions]
    fields += [("entries", merged[key]) for key in sorted(merged)]
    return format_textproto(Message(tuple(fields))) + "\n"
