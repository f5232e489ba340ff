#!/usr/bin/env python3
"""What limits a kernel: hardware counters of its launches, read with Nsight Compute on an attached GPU.

    scripts/read_counters.py -o FILE rms_norm:backward:8192x8192-bfloat16 softmax:forward:16384x4096-float32 ...
    scripts/read_counters.py -o FILE --study softmax [--match CASE]  # adds a part to the study's result

Each case is OPERATION:PHASE:SPEC[:IMPLEMENTATION], SPEC a benchmark spec by its whole name, IMPLEMENTATION "mosaic"
unless said, or a peer ("fa4"). One line a launch is printed, and FILE gets all counters as JSON. Clocks are left as
they are.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_SEPARATOR = "wrapped_tan"
"""The kernel XLA makes of `jnp.tan`: stands between two cases in Nsight Compute's list."""

_STALLS = (
    *("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle", "lg_throttle"),
    *("wait", "dispatch_stall", "no_instruction", "not_selected", "membar", "gmma"),
)
_PIPES = ("alu", "fma", "xu", "lsu")
METRICS = {
    "us": "gpu__time_duration.sum",
    "sm_cycles": "sm__cycles_elapsed.avg",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "instructions": "smsp__inst_executed.sum",
    "shared_accesses": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm_active_percent": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "grid": "launch__grid_size",
    "block": "launch__block_size",
    "blocks_by_registers": "launch__occupancy_limit_registers",
    "blocks_by_shared_memory": "launch__occupancy_limit_shared_mem",
    "shared_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "pipe_tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    **{f"pipe_{pipe}_percent": f"sm__inst_executed_pipe_{pipe}.avg.pct_of_peak_sustained_active" for pipe in _PIPES},
    **{f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in _STALLS},
}


def main() -> None:
    """Reads the counters, or with --run launches what they are read of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="OPERATION:PHASE:SPEC[:IMPLEMENTATION]")
    parser.add_argument("--study", metavar="NAME", help="the JAX variants of a study's cases")
    parser.add_argument("--match", default="", metavar="CASE", help="only the study's cases whose name holds this")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--run", action="store_true", help="launch the cases' kernels (what Nsight Compute calls)")
    arguments = parser.parse_args()
    if arguments.run:
        launch(arguments.cases)
        return
    rows = read(arguments.cases or of_study(arguments.study, arguments.match))
    if arguments.output and arguments.study:
        arguments.output.write_text(study_part(arguments.study, rows), encoding="utf-8")
    elif arguments.output:
        from xlafuse.bench.environment import commit, gpu_state

        document = {"schema_version": 1, "read_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}", "commit": commit()}
        document |= {"device": gpu_state().get("gpu", ""), "launches": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(line(row))


def of_study(name: str, match: str) -> list[str]:
    """The JAX variants of a study's cases, "study:NAME:CASE:VARIANT" each."""
    from xlafuse.studies import get_study

    return [
        f"study:{name}:{case.name}:{variant}"
        for case in get_study(name).cases()
        for variant, how in case.variants.items()
        if match in case.name and how.framework == "jax"
    ]


def study_part(name: str, rows: list[dict[str, Any]]) -> str:
    """A study's result as JSON: of each variant sums over its launches, and the L2 hit rate of the longest one."""
    from xlafuse.bench.environment import environment
    from xlafuse.files import to_json
    from xlafuse.studies.records import Part, Row, StudyResult

    made = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        sums = {"counted_us": "us", "dram_read_bytes": "read_bytes", "dram_write_bytes": "written_bytes"}
        values = {quantity: sum(row[key] or 0.0 for row in own) for quantity, key in sums.items()}
        values["l2_hits"] = max(own, key=lambda row: row["us"])["l2_hit_percent"]
        made.append(Row(case=case.split(":", 3)[2], variant=case.split(":", 3)[3], values=values))
    here, started = environment(), datetime.now(UTC).isoformat(timespec="seconds")
    part = Part(basis="measured", target=here.device_kind, started=started, environment=here, rows=tuple(made))
    return to_json(StudyResult(study=name, parts=(part,)))


def read(cases: list[str]) -> list[dict[str, Any]]:
    """One row a launch, in the cases' order. Raises RuntimeError with Nsight Compute's words when it fails."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--run", *cases]
    done = subprocess.run(command, capture_output=True, text=True)
    table = done.stdout[done.stdout.find('"ID"') :]
    if done.returncode or not table.startswith('"ID"'):
        raise RuntimeError(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    sys.stderr.write(done.stderr)
    rows, left = [], iter(cases)
    case = next(left)
    units, *launches = csv.DictReader(io.StringIO(table))  # the first row holds units
    for launched in launches:
        if launched["Kernel Name"].startswith(_SEPARATOR):
            case = next(left, "")
            continue
        values = {name: _number(launched[metric], units[metric]) for name, metric in METRICS.items()}
        rows.append({"case": case, "kernel": launched["Kernel Name"], **values})
    return rows


def launch(cases: list[str]) -> None:
    """Runs every case once to compile it, then once between the profiler's marks, a separator after each."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to peers
    import jax
    import jax.numpy as jnp

    driver = ctypes.CDLL("libcuda.so.1")
    separator = jax.jit(jnp.tan)
    one = jax.block_until_ready(separator(jnp.ones(1)))
    for text in cases:
        try:
            call = compiled(text)
        except Exception as error:  # the other cases are read all the same
            print(f"{text}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            call = None
        driver.cuProfilerStart()
        if call:
            call()
        jax.block_until_ready(separator(one))
        driver.cuProfilerStop()


def compiled(text: str) -> Callable[[], Any]:
    """A case's call, which has run once and waits for its result."""
    import jax

    from pallas_kernels import get_op, testing
    from xlafuse.bench import peers
    from xlafuse.bench.candidates import callable_of, inputs_of

    if text.startswith("study:"):
        return _compiled_variant(*text.split(":", 3)[1:])
    name, phase, wanted, *implementation = text.split(":", 3)
    op = get_op(name)
    spec = next(s for s in op.tagged("bench") if s.name == wanted)
    case = testing.make_case(op, spec, 0)
    chosen = implementation[0] if implementation else "mosaic"
    inputs = inputs_of(case, phase)
    wait = jax.block_until_ready
    if chosen in peers.PEERS and chosen not in peers.OF_THE_OPERATION:
        candidate, _ = peers.load(chosen).candidate(name, phase, [case])
        call, inputs, wait = candidate.call, candidate.inputs[0], candidate.wait
    else:
        call = jax.jit(callable_of(op, phase, chosen))
    wait(call(*inputs))
    return lambda: wait(call(*inputs))


def _compiled_variant(study: str, name: str, variant: str) -> Callable[[], Any]:
    import jax

    from xlafuse.studies import get_study
    from xlafuse.studies.variants import drawn

    case = next(case for case in get_study(study).cases() if case.name == name)
    arguments = jax.tree.map(lambda leaf: drawn(leaf, 0), case.arguments)
    how = case.variants[variant]
    run = jax.jit(how.function).lower(*arguments).compile(compiler_options=dict(how.options))
    jax.block_until_ready(run(*arguments))
    return lambda: jax.block_until_ready(run(*arguments))


def line(row: dict[str, Any]) -> str:
    """The row's most telling counters."""
    shown = {name: row[name] or 0 for name in ("us", "dram_percent", "issue_percent", "warps_percent", "registers")}
    shown |= {f"stall {name}": row[f"stall_{name}"] or 0 for name in _STALLS if (row[f"stall_{name}"] or 0) > 0.5}
    return f"{row['case']}  {str(row['kernel'])[:40]}: {', '.join(f'{n} {value:.1f}' for n, value in shown.items())}"


_SCALE = {"nsecond": 1e-3, "ns": 1e-3, "msecond": 1e3, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
"""Factors to microseconds and bytes, by unit."""


def _number(text: str, unit: str) -> float | None:
    try:
        return float(text.replace(",", "")) * _SCALE.get(unit, 1.0)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
