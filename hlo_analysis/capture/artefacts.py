"""Identifies the files of a folder that XLA's `xla_dump_to` wrote, by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hlo_analysis.errors import DumpError

# module_0001.jit_f.0004.fusion.after_sort-iota-fusion.before_priority-fusion.txt; the module's own name may hold dots.
_FILE = re.compile(r"(?P<module>module_\d+\.(?P<name>.+?))\.(?P<rest>(?:\d{4}\.[^/]+\.after_[^/]+|[^/.]+\.txt|[^/]+))$")
_STAGE = re.compile(r"(?P<order>\d{4})\.(?P<pipeline>.+?)\.after_(?P<after>.+?)\.before_(?P<before>.+?)\.txt$")

# Key of an artefact, by the end of its file name.
_ENDINGS: tuple[tuple[str, str], ...] = (
    ("before_optimizations", ".before_optimizations.txt"),
    ("final_hlo", "_after_optimizations.txt"),
    ("thunk_sequence", ".thunk_sequence.txt"),
    ("thunk_sequence_after_passes", ".thunk_sequence_after_thunk_passes.txt"),
    ("thunk_metadata", ".thunk_metadata.txt"),
    ("priority_fusion_dump", ".priority_fusion_dump.txt"),
    ("buffer_assignment", "_after_optimizations-buffer-assignment.txt"),
    ("memory_usage", "_after_optimizations-memory-usage-report.txt"),
    ("live_range", "_after_optimizations-live-range.txt"),
    ("before_config_assignment", ".before_config_assignment.txt"),
    ("target_config", ".gpu_target_config.pbtxt"),
    ("module_autotune", ".autotune_results.pbtxt"),
    ("debug_options", ".debug_options"),
    ("module_config", ".config.pbtxt"),
    ("ptx", ".ptx"),
)

# Key of an artefact, by the pass whose dump it is: the module before it, and after.
_PASSES: tuple[tuple[str, str], ...] = (
    ("priority-fusion", "priority_fusion"),
    ("multi_output_fusion", "multi_output_fusion"),
    ("rename_fusions", "rename"),
    ("triton-gemm-rewriter", "gemm_rewriter"),
    ("triton-softmax-rewriter", "softmax_rewriter"),
    ("config-assigner", "config_assigner"),
    ("fusion", "cpu_fusion"),
)


def modules(names: Iterable[str]) -> dict[str, list[str]]:
    """File names by the module they belong to ('module_0001.jit_f')."""
    known = sorted(names)
    # XLA writes before_optimizations first of every module; its file name shows where the module's name ends.
    starts = [name.removesuffix(".before_optimizations.txt") for name in known if name.endswith(_ENDINGS[0][1])]
    if not starts:
        starts = sorted({match["module"] for name in known if (match := _FILE.match(name))})
    heads: dict[str, list[str]] = {start: [] for start in sorted(starts, key=len, reverse=True)}
    for name in known:
        start = name
        while start and start not in heads:  # the longest that fits: a module's name may begin with another's
            start = start.rpartition(".")[0]
        if start and start != name:
            heads[start].append(name)
    return heads


def main_module(folder: Path, preferred: str | None = None) -> tuple[str, list[str]]:
    """The module of a dump folder that matters (the largest one), and its files.

    Args:
      folder: where `xla_dump_to` wrote.
      preferred: the module's name ("jit_f", or "module_0001.jit_f"), where the largest is not the one.

    Raises:
      DumpError: no folder, nothing in it, nothing that XLA wrote, or no module of that name.
    """
    if not folder.is_dir():
        raise DumpError(f"{folder} is not a folder; expected a capture or what xla_dump_to wrote")
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if not names:
        raise DumpError(f"{folder} is empty; expected a capture or what xla_dump_to wrote (with xla_dump_hlo_as_text)")
    found = modules(names)
    if not found:
        raise DumpError(
            f"{folder} holds no XLA dump: expected files such as module_0001.jit_f.before_optimizations.txt, found "
            f"{', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}"
        )

    def weight(module: str) -> tuple[bool, int]:
        files = found[module]
        compiled = any(file.endswith("_after_optimizations.txt") for file in files)
        return compiled, sum((folder / file).stat().st_size for file in files)

    candidates = [module for module in found if preferred in (None, module, module.partition(".")[2])]
    if not candidates:
        raise DumpError(f"{folder} holds no module {preferred!r}; it has {', '.join(_distinct_names(found))}")
    chosen = max(candidates, key=weight)
    return chosen, found[chosen]


def _distinct_names(modules: Iterable[str]) -> list[str]:
    """The names that JAX gave, with XLA's number where two have one, as two lambdas do."""
    names = {module: module.partition(".")[2] for module in modules}
    alone = Counter(names.values())
    return [name if alone[name] == 1 else module for module, name in names.items()]


def index(module: str, names: Iterable[str]) -> dict[str, str]:
    """File names of one module by artefact key."""
    own = sorted(names)
    files: dict[str, str] = {}
    for key, ending in _ENDINGS:
        # The module's name may itself end like an artefact, so only what follows it counts.
        matches = [name for name in own if ("." + name[len(module) + 1 :]).endswith(ending)]
        if matches:
            files[key] = matches[-1]
    for name, after, before in stages(module, own):
        for dumped, key in _PASSES:
            if before == dumped:
                files.setdefault(f"before_{key}", name)
            if after == dumped:
                files[f"after_{key}"] = name
    return files


def stages(module: str, names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Lists a module's dumps between passes, in XLA's order: the file, the pass before it, the pass after it."""
    found = [(match, name) for name in names if (match := _STAGE.match(name[len(module) + 1 :]))]
    found.sort(key=lambda each: int(each[0]["order"]))
    return [(name, match["after"], match["before"]) for match, name in found]
