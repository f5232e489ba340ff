"""Registers, spills, shared memory and launch dimensions of kernels, from the output of ptxas and of Mosaic.

Both artefacts are JSON: a list of objects, one a kernel, with `kernel` (the entry's name), `registers`,
`spill_store_bytes`, `spill_load_bytes`, `stack_bytes` and `static_shared_bytes` (ptxas); for Mosaic kernels also
`grid`, `block` and `dynamic_shared_bytes`, null where Mosaic does not report them, and the kernel's `ptx`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCH = re.compile(
    r"gpu\.launch_func\b.*?@(?P<kernel>[\w.$-]+)\s+blocks in \((?P<grid>[^)]*)\) threads in \((?P<block>[^)]*)\)"
    r"(?:[^%]*dynamic_shared_memory_size (?P<shared>%[\w.$-]+))?"
)
_CONSTANT = re.compile(r"(?P<name>%[\w.$-]+) = arith\.constant (?P<value>-?\d+) :")
_PTXAS_SECONDS = 120.0


def parse_ptxas(text: str) -> list[dict[str, Any]]:
    """What `ptxas -v` said of each entry function."""
    kernels: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            kernels.append({"kernel": match[1], "static_shared_bytes": 0})
        elif kernels and (match := _SPILLS.search(line)):
            # The first such line after an entry is the entry's own; later ones are of functions that it calls.
            sizes = dict(
                zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), map(int, match.groups()), strict=True)
            )
            kernels[-1] = sizes | kernels[-1]
        elif kernels and (match := _USED.search(line)):
            kernels[-1]["registers"] = int(match[1])
            if shared := _SHARED.search(line):
                kernels[-1]["static_shared_bytes"] = int(shared[1])
    return kernels


def mosaic_resources(folder: Path) -> str | None:
    """JSON of every kernel that Mosaic dumped into `folder` (MOSAIC_GPU_DUMP_TO), or None when there is none."""
    kernels: list[dict[str, Any]] = []
    for report in sorted(folder.glob("*.ptxas"), key=lambda path: _numbered(path.stem)):
        launch = _launch(report.with_name(f"{report.stem}.mlir-passes.log")) | {"ptx": _ptx(report)}
        kernels += [launch | kernel for kernel in parse_ptxas(report.read_text(encoding="utf-8", errors="replace"))]
    return json.dumps(kernels, indent=1) if kernels else None


def ptx_resources(files: list[Path], compute_capability: tuple[int, int]) -> tuple[str | None, str]:
    """JSON of every kernel in the PTX files, as `ptxas -v` reports, and a note where that failed."""
    ptxas = find_ptxas()
    if ptxas is None:
        return None, "Registers and spills are not known: no ptxas was found."
    major, minor = compute_capability
    command = [ptxas, "-v", f"-arch=sm_{major}{minor}{'a' if major >= 9 else ''}", "-o", "/dev/null"]

    def assemble(part: list[Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, part)], capture_output=True, text=True, timeout=_PTXAS_SECONDS, check=False
        )

    # XLA writes a file a kernel. One process a core reads its part of them: 1.5 s of CPU for 49 kernels, where a
    # process a kernel takes 2.0 s.
    workers = min(os.cpu_count() or 1, len(files))
    kernels: list[dict[str, Any]] = []
    try:
        with ThreadPoolExecutor(workers) as pool:
            for done in pool.map(assemble, [files[first::workers] for first in range(workers)]):
                if done.returncode != 0:
                    return None, f"Registers and spills are not known: ptxas said {done.stderr.strip()[:200]!r}"
                kernels += parse_ptxas(done.stderr)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"Registers and spills are not known: {error}"
    return (json.dumps(kernels, indent=1) if kernels else None), ""


def find_ptxas() -> str | None:
    """Returns the ptxas of the nvidia-cuda-nvcc wheel, else of PATH, which may be too old for XLA's PTX."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    for pattern in ("cu*/bin/ptxas", "cuda_nvcc/bin/ptxas"):
        for root in roots:
            if wheels := sorted(root.glob(pattern)):
                return str(wheels[-1])
    return shutil.which("ptxas")


def _launch(log: Path) -> dict[str, Any]:
    """Grid, block and dynamic shared memory: the first launch with constant operands in the log of Mosaic's passes."""
    unknown: dict[str, Any] = {"grid": None, "block": None, "dynamic_shared_bytes": None}
    if not log.is_file():
        return unknown
    constants: dict[str, int] = {}
    for line in _lines(log):
        if "arith.constant" in line and (match := _CONSTANT.search(line)):
            constants[match["name"]] = int(match["value"])
        elif "gpu.launch_func" in line and (match := _LAUNCH.search(line)):
            grid, block = (_values(match[part], constants) for part in ("grid", "block"))
            shared = constants.get(match["shared"] or "")
            return {"grid": grid, "block": block, "dynamic_shared_bytes": shared}
    return unknown


def _ptx(report: Path) -> str | None:
    ptx = report.with_suffix(".ptx")
    return ptx.read_text(encoding="utf-8", errors="replace") if ptx.is_file() else None


def _lines(log: Path) -> Iterator[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _values(names: str, constants: dict[str, int]) -> list[int] | None:
    values = [constants.get(name.strip()) for name in names.split(",")]
    return [value for value in values if value is not None] if None not in values else None


def _numbered(stem: str) -> tuple[str, int]:
    name, _, number = stem.rpartition("_")
    return (name, int(number)) if number.isdigit() else (stem, 0)
