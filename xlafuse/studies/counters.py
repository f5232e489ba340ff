"""Reads DRAM and L2 counters of a study's variants with Nsight Compute on the attached GPU.

python -m xlafuse.studies.counters NAME -o FILE [--match CASE]    adds a part to the study's result
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp

from xlafuse.studies import get_study
from xlafuse.studies.records import Part, Row, StudyResult, to_json
from xlafuse.studies.variants import Case, drawn

_METRICS = {
    "counted_us": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}
_L2_HITS = "lts__t_sector_hit_rate.pct"
_SEPARATOR = "wrapped_tan"
_SCALES = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_SCALES |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def chosen(name: str, match: str) -> list[tuple[Case, str]]:
    """Returns the JAX variants of the cases whose names contain `match`."""
    return [
        (case, variant)
        for case in get_study(name).cases()
        if match in case.name
        for variant, how in case.variants.items()
        if how.framework == "jax"
    ]


def launch(name: str, match: str) -> None:
    """Compiles every variant, then runs each once between the profiler's marks, with a separator kernel after each."""
    driver = ctypes.CDLL("libcuda.so.1")
    separator = jax.jit(jnp.tan)
    one = jax.block_until_ready(separator(jnp.ones(1)))
    for case, variant in chosen(name, match):
        how = case.variants[variant]
        arguments = jax.tree.map(lambda leaf: drawn(leaf, 0), case.arguments)
        try:
            run = jax.jit(how.function).lower(*arguments).compile(compiler_options=dict(how.options))
            jax.block_until_ready(run(*arguments))
        except Exception as error:  # the other variants are still read
            print(f"{variant}: {str(error)[:200]}", file=sys.stderr)
            run = None
        driver.cuProfilerStart()
        if run:
            jax.block_until_ready(run(*arguments))
        jax.block_until_ready(separator(one))
        driver.cuProfilerStop()


def read(name: str, match: str) -> list[Row]:
    """Returns a row for each variant: sums over its launches, and the L2 hit rate of the longest launch."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join((*_METRICS.values(), _L2_HITS)), sys.executable, "-m", __spec__.name]
    # Nsight Compute saves and restores the process's GPU memory, which JAX would take nearly all of.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([*command, name, "--match", match, "--run"], capture_output=True, text=True, env=environment)
    table = done.stdout[done.stdout.find('"ID"') :]
    if done.returncode or not table.startswith('"ID"'):
        raise RuntimeError(f"ncu ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    units, *launches = csv.DictReader(io.StringIO(table))
    groups: list[list[dict[str, str]]] = [[]]
    for row in launches:
        if row["Kernel Name"].startswith(_SEPARATOR):
            groups.append([])
        else:
            groups[-1].append(row)
    rows = []
    for (case, variant), group in zip(chosen(name, match), groups, strict=False):
        if not group:
            continue
        values = {
            quantity: sum(_number(row[metric]) for row in group) * _SCALES.get(units[metric], 1.0)
            for quantity, metric in _METRICS.items()
        }
        longest = max(group, key=lambda row: _number(row[_METRICS["counted_us"]]))
        rows.append(Row(case=case.name, variant=variant, values={**values, "l2_hits": _number(longest[_L2_HITS])}))
    return rows


def _number(text: str) -> float:
    return float(text.replace(",", "") or 0)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--match", default="")
    parser.add_argument("--run", action="store_true", help="what Nsight Compute calls")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        launch(arguments.name, arguments.match)
        return
    from xlafuse.bench.environment import environment

    started = datetime.now(UTC).isoformat(timespec="seconds")
    rows = tuple(read(arguments.name, arguments.match))
    here = environment()
    part = Part(basis="measured", target=here.device_kind, started=started, environment=here, rows=rows)
    for row in rows:
        print(row.case, row.variant, {name: round(value, 1) for name, value in row.values.items()})
    if arguments.output:
        arguments.output.write_text(to_json(StudyResult(study=arguments.name, parts=(part,))), encoding="utf-8")


if __name__ == "__main__":
    main()
