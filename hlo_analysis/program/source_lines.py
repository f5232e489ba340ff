"""Reads the text of the source lines that launches come from, where the files are at hand."""

from __future__ import annotations

import linecache
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from hlo_analysis.hlo import Module


def source_lines(module: Module, wanted: Collection[str], created: str) -> tuple[tuple[str, str], ...]:
    """Returns ('file.py:line', text) of the wanted lines, in order; none of a file that is gone or has changed.

    Args:
        module: its frames have the files' paths.
        wanted: lines as `Launch.source` names them.
        created: when the program was captured (ISO 8601); a file written later may have other lines. '' if unknown.
    """
    paths: dict[str, str] = {}
    metadata = [instruction.metadata for instruction in module.instructions.values() if instruction.metadata]
    for frames in {id(each.frames): each.frames for each in metadata}.values():  # instructions share stacks
        for frame in frames:
            paths.setdefault(f"{frame.file.rpartition('/')[2]}:{frame.line}", frame.file)
    texts = {
        line: linecache.getline(paths[line], int(line.rpartition(":")[2])).strip()
        for line in sorted(wanted)
        if line in paths and _is_as_captured(Path(paths[line]), created)
    }
    return tuple((line, text) for line, text in texts.items() if text)


def _is_as_captured(path: Path, created: str) -> bool:
    try:
        changed = path.stat().st_mtime
        return not created or changed <= datetime.fromisoformat(created).timestamp() + 1
    except (OSError, ValueError):
        return False
