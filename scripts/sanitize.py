#!/usr/bin/env python3
"""Memory errors of the kernels, found by NVIDIA's compute-sanitizer (memcheck) on an attached Hopper GPU.

    scripts/sanitize.py [-o FILE] [--jobs N] [--seconds S] [OPERATION ...]

Prints a line an operation, and writes FILE as JSON after each. Of each operation one small call of every kind (dtype,
ragged or long rows, arguments given) is run forward and backward with "mosaic". First comes a kernel with a planted
fault: a tool that does not see that one sees nothing. Only Mosaic GPU's kernels are watched. Exits with 1 where one of
ours is at fault, where a case was not finished, and where the planted fault was not seen.

Racecheck (2025.3, on an H200) saw none of the races planted for it, between warpgroups or lanes, so it is not run. For
races between warpgroups there is the interpreter's detector, in tests/kernels; for lanes that disagree, the check of
every kernel's PTX in tests/kernels/test_deviceless.py.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLANTED = "planted fault"
_OURS = "mosaic_gpu"
"""Part of the name of every Mosaic GPU kernel."""
# API calls that fail are no faults of kernels: XLA asks the driver about pointers that it does not know.
_COMMAND = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20",
            "--kernel-name", f"kns={_OURS}", sys.executable, __file__, "--run")  # fmt: skip
_CASE = "CASE "
_END = f"{_CASE}end"
_PROCESSES = 8
"""Of one operation, before its other cases are given up."""
_STILL_SECONDS = 70.0
"""A process whose case takes longer ends itself; no case takes that."""
_REPORT = re.compile(r"^=+ (Invalid |Misaligned |.*leaked)")
_PLACE = re.compile(r"(?: at |access at )(?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)(?:\(.*?\))?\+0x")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=6, help="processes that share the GPU")
    parser.add_argument("--seconds", type=float, default=240.0, help="for one operation")
    parser.add_argument("--run", action="store_true", help="run the operation (what compute-sanitizer calls)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="with --run: leave out the first N cases")
    options = parser.parse_args(argv)
    if options.run:
        run(options.operations[0], options.skip)
        return 0
    from pallas_kernels import REGISTRY
    from xlafuse.bench.environment import commit, gpu_state
    from xlafuse.files import write_files

    document: dict[str, Any] = {"schema_version": 1, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"}
    document |= {"commit": commit(), "device": gpu_state().get("gpu", ""), "outcomes": []}
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = (PLANTED, *(options.operations or REGISTRY))
        for done in as_completed([pool.submit(sanitize, task, options) for task in tasks]):
            document["outcomes"].append(done.result())
            print(line(done.result()), flush=True)
            if options.output:
                write_files(options.output.parent, {options.output.name: json.dumps(document, indent=1) + "\n"})
    return int(not all(map(is_as_wanted, document["outcomes"])))


def sanitize(operation: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one operation's cases under compute-sanitizer.

    The tool dies or stands still now and then, in other cases each time. Another process then goes on with the case
    that was not finished; one that does not finish twice is left out and named in "died".
    """
    start, stopped_at, skip = time.monotonic(), -1, 0
    cases: list[str] = []
    found: list[dict[str, str]] = []
    died: list[str] = []
    for _ in range(_PROCESSES):
        lines = printed(operation, skip, start + options.seconds - time.monotonic()).splitlines()
        own = [text.removeprefix(_CASE) for text in lines if text.startswith(_CASE) and text != _END]
        cases, found = [*cases, *own], [*found, *findings(lines)]
        if _END in lines or any(map(is_ours, found)):
            break
        place = skip + max(0, len(own) - 1)
        died += own[-1:] or ["start"] if place == stopped_at else []
        skip, stopped_at = place + (place == stopped_at), place
    else:
        died.append("the cases after it")
    return {
        "operation": operation,
        "status": "faults" if any(map(is_ours, found)) else "failed" if died else "clean",
        "cases": list(dict.fromkeys(cases)),
        "findings": found,
        "seconds": time.monotonic() - start,
        "died": died,
    }


def printed(operation: str, skip: int, seconds: float) -> str:
    """Returns what a process under the tool prints until it ends or the time is up."""
    # With an allocation for each array, the first byte past its end is past an allocation, too.
    allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Neither trial runs of XLA's own products nor CUDA graphs, whose kernels the tool has to take apart.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        return subprocess.run(
            [*_COMMAND, operation, "--skip", str(skip)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **allocator, "XLA_FLAGS": flags.strip(), "PYTHONPATH": path},
            timeout=max(1.0, seconds),
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace")


def findings(lines: Iterable[str]) -> list[dict[str, str]]:
    """The reports among a tool's lines: each one's first two lines, the kernel that it names first, and the case."""
    found: list[dict[str, str]] = []
    case, report = "", []
    for text in (*lines, ""):
        is_next = bool(_REPORT.match(text))
        if report and (is_next or not text.startswith("=") or not text.strip("= ")):
            place = next((place for each in report if (place := _PLACE.search(each))), None)
            words = " ".join(each.strip("= ") for each in report[:2])
            found.append({"kernel": place[1] if place else "", "case": case, "message": words})
            report = []
        if is_next or report:
            report.append(text)
        if text.startswith(_CASE):
            case = text.removeprefix(_CASE)
    return found


def is_ours(finding: dict[str, str]) -> bool:
    """Whether a finding is in one of our kernels; one without a kernel's name counts as ours."""
    return _OURS in finding["kernel"] or not finding["kernel"]


def is_as_wanted(outcome: dict[str, Any]) -> bool:
    """Clean, or for the planted fault: seen."""
    return outcome["status"] == ("faults" if outcome["operation"] == PLANTED else "clean")


def line(outcome: dict[str, Any]) -> str:
    """Formats an operation's outcome: one line, and one for each finding in our kernels."""
    operation, status, cases = (outcome[name] for name in ("operation", "status", "cases"))
    text = f"{operation:<22} {status:<7} {len(cases)} cases, {outcome['seconds']:.0f} s"
    text += f"; not finished: {', '.join(outcome['died'])}" if outcome["died"] else ""
    if operation == PLANTED:
        return text + (" (seen, as it must be)" if is_as_wanted(outcome) else " (NOT SEEN)")
    ours = filter(is_ours, outcome["findings"])
    return "\n".join([text, *(f"    {each['case']}: {each['kernel']}: {each['message']}" for each in ours)])


def run(operation: str, skip: int = 0) -> None:
    """Runs an operation's calls after the first `skip`, printing each before it; what compute-sanitizer watches."""
    import jax

    from pallas_kernels import get_op, testing
    from xlafuse.bench.candidates import callable_of, inputs_of

    if operation == PLANTED:
        print(f"{_CASE}{operation}", flush=True)
        planted_fault()
    else:
        op = get_op(operation)
        calls = [(spec, phase) for spec in one_of_each_kind(op) for phase in ("forward", "backward")]
        for spec, phase in calls[skip:]:
            faulthandler.dump_traceback_later(_STILL_SECONDS, exit=True)
            print(f"{_CASE}{phase} {spec.name}", flush=True)
            with jax.default_device(jax.devices("cpu")[0]):  # fewer kernels to watch
                case = testing.make_case(op, spec, 0)
            given = jax.device_put(inputs_of(case, phase), jax.devices()[0])
            jax.block_until_ready(jax.jit(callable_of(op, phase, "mosaic"))(*given))
        # At least one call of the driver's: without any the tool does not end well.
        jax.block_until_ready(jax.device_put(0.0, jax.devices()[0]))
    print(_END, flush=True)


def one_of_each_kind(op) -> list:
    """The first GPU test's spec of each dtype, shape of row, and set of arguments."""
    kinds = {}
    for spec in op.tagged("gpu"):
        if "bench" not in spec.tags:
            main = spec.arguments[op.batched[0]]
            kinds.setdefault((main.dtype, spec.tags, frozenset(spec.arguments)), spec)
    return list(kinds.values())


def planted_fault() -> None:
    """Runs a kernel that reads far past its input."""
    import jax
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import jax.numpy as jnp

    words = 128

    def reads_past_the_end(start, x, y):
        y[...] = plgpu.load(x.at[pl.ds(start[0], words)])

    kernel = plgpu.kernel(reads_past_the_end, out_type=jax.ShapeDtypeStruct((words,), jnp.float32))
    try:
        jax.block_until_ready(jax.jit(kernel)(jnp.full(1, 1 << 28, jnp.int32), jnp.ones(words)))
    except jax.errors.JaxRuntimeError as error:  # the GPU stops at the access
        print(f"{type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
