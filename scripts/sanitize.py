#!/usr/bin/env python3
"""Memory errors of the kernels, found by NVIDIA's compute-sanitizer (memcheck) on an attached Hopper GPU.

    scripts/sanitize.py [-o FILE] [--match SPEC] [--every] [--jobs N] [--seconds S] [OPERATION ...]

One line an operation, and FILE as JSON, written after each. Of each operation one small call of every kind (dtype,
ragged or long rows, arguments given) is run forward and backward with "mosaic"; with --every each call of the GPU
tests, as after changes to which kernel a shape takes. First a kernel with a planted fault: a tool that does not see
that one sees nothing. Only Mosaic GPU's kernels are watched. Where the tool itself dies or stands still, another
process goes on. What FILE has of the same commit is kept. Exits with 1 where one of ours is at fault, where a case was
not finished, and where the planted fault was not seen.

Racecheck (2025.3, on an H200) saw none of the races planted for it, between warpgroups or lanes, so it is not run. For
races between warpgroups there is the interpreter's detector, in tests/kernels; for lanes that disagree, the check of
every kernel's PTX in tests/kernels/test_deviceless.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
PLANTED = "planted fault"
_OURS = "mosaic_gpu"
"""Part of the name of every Mosaic GPU kernel."""
_MOST_VALUES = 1 << 26
"""Of the largest array. Rows are taken away, never columns."""
# API calls that fail are no faults of kernels: XLA asks the driver about pointers that it does not know.
_COMMAND = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20")
_CASE = "CASE "
_WATCHED = ("--kernel-name", f"kns={_OURS}")
_PROCESSES = 8
"""Of one operation, before its other cases are given up."""
_STILL_SECONDS = 70.0
"""A process that prints nothing for so long is stopped; no case takes that."""
_REPORT = re.compile(r"^=+ (Invalid |Misaligned |.*leaked)")
_PLACE = re.compile(r"(?: at |access at )(?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)(?:\(.*?\))?\+0x")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One report: its kernel, the case that ran when it was printed, and the tool's words."""

    kernel: str
    case: str
    message: str

    @property
    def is_ours(self) -> bool:
        """Whether it is of one of our kernels; a report without a kernel's name counts as ours."""
        return _OURS in self.kernel or not self.kernel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tool said of an operation's kernels. summary: the tool's last line."""

    operation: str
    status: Literal["clean", "faults", "failed"]
    cases: tuple[str, ...]
    findings: tuple[Finding, ...]
    summary: str
    seconds: float
    processes: int = 1
    died: tuple[str, ...] = ()
    """Cases that the tool did not live through in two processes; of one process, whether it was cut short."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--match", default="", metavar="SPEC", help="only calls whose name holds this")
    parser.add_argument("--every", action="store_true", help="every call that the GPU tests have, not one of each kind")
    parser.add_argument("--jobs", type=int, default=6, help="processes that share the GPU")
    parser.add_argument("--seconds", type=float, default=240.0, help="for one process")
    parser.add_argument("--run", action="store_true", help="run the operation (what compute-sanitizer calls)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="with --run: leave out the first N cases")
    options = parser.parse_args(argv)
    if options.run:
        run(options.operations[0], options.match, options.skip, is_every=options.every)
        return 0
    from pallas_kernels import REGISTRY
    from xlafuse.bench.environment import commit, gpu_state
    from xlafuse.files import write_files

    tasks = (PLANTED, *(options.operations or REGISTRY))
    document = {"schema_version": SCHEMA, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}", "commit": commit()}
    document |= {"device": gpu_state().get("gpu", "")}
    kept = earlier(options.output, document["commit"])
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(sanitize, task, options) for task in tasks]
        for done in as_completed(running):
            outcomes.append(done.result())
            print(line(outcomes[-1]), flush=True)
            kept[outcomes[-1].operation] = asdict(outcomes[-1])
            if options.output:
                text = json.dumps({**document, "outcomes": list(kept.values())}, indent=1) + "\n"
                write_files(options.output.parent, {options.output.name: text})
    return int(any(not is_as_wanted(found) for found in outcomes))


def earlier(path: Path | None, commit: str) -> dict[str, dict]:
    """What a file has of this commit, by operation."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = document["outcomes"] if document["commit"] == commit else []
    return {row["operation"]: row for row in rows}


def sanitize(operation: str, options: argparse.Namespace) -> Outcome:
    """Runs one operation under the tool, in a process of its own.

    The tool dies or stands still now and then, in other cases each time. Another process then goes on with the case
    that was not finished; one that does not finish twice is left out and named in `Outcome.died`.
    """
    end = time.monotonic() + options.seconds
    parts: list[Outcome] = []
    skip, died, stopped_at = 0, [], -1
    while not parts or (parts[-1].died and len(parts) < _PROCESSES and time.monotonic() < end):
        parts.append(_sanitize(operation, options, skip, end - time.monotonic()))
        if parts[-1].died:
            place = skip + max(0, len(parts[-1].cases) - 1)
            if place == stopped_at:
                died += parts[-1].cases[:1] or parts[-1].died
            skip, stopped_at = place + (place == stopped_at), place
    return joined(parts, died)


def joined(parts: Sequence[Outcome], died: Sequence[str]) -> Outcome:
    """The processes of one operation as one outcome: faults before all; with cases that died it has failed."""
    last = parts[-1]
    status = "faults" if any(each.status == "faults" for each in parts) else "failed" if died else last.status
    summary = f"not finished: {', '.join(died)}; {last.summary}" if died else last.summary
    cases = dict.fromkeys(case for each in parts for case in each.cases)
    found = tuple(finding for each in parts for finding in each.findings)
    seconds = sum(each.seconds for each in parts)
    return replace(last, status=status, cases=tuple(cases), findings=found, summary=summary, seconds=seconds,
                   processes=len(parts), died=tuple(died))  # fmt: skip


def _sanitize(operation: str, options: argparse.Namespace, skip: int, seconds: float) -> Outcome:
    command = [*_COMMAND, *_WATCHED, sys.executable, __file__, "--run", operation, "--match", options.match]
    command += ["--skip", str(skip), *(["--every"] if options.every else [])]
    # With an allocation for each array, the first byte past its end is past an allocation, too.
    allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Neither trial runs of XLA's own products nor CUDA graphs, whose kernels the tool has to take apart.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    environment = {**os.environ, **allocator, "XLA_FLAGS": flags.strip(), "PYTHONPATH": _path()}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
            code = _ended(process, log.fileno(), start + seconds)
        log.seek(0)
        text = log.read()
    return outcome(operation, text, code, time.monotonic() - start)


def _ended(process: subprocess.Popen, log: int, end: float) -> int | None:
    """The exit status; None where time ran out or nothing was printed for long, and the process was killed."""
    size, changed = -1, time.monotonic()
    while process.poll() is None:
        now, written = time.monotonic(), os.fstat(log).st_size
        if written != size:
            size, changed = written, now
        if now > end or now - changed > _STILL_SECONDS:
            process.kill()
            process.wait()
            return None
        time.sleep(0.2)
    return process.returncode


def outcome(operation: str, text: str, code: int | None, seconds: float = 0.0) -> Outcome:
    """What a process printed, read. code: its exit status, None where it was stopped."""
    lines = text.splitlines()
    found = tuple(findings(lines))
    summary = next((line.strip("= ") for line in reversed(lines) if " SUMMARY: " in line), "")
    is_finished = code == 0 and bool(summary) and any(line == f"{_CASE}end" for line in lines)
    status = "faults" if any(each.is_ours for each in found) else "clean" if is_finished else "failed"
    if status == "failed":
        last = next((line for line in reversed(lines) if line and not line.startswith("=")), "nothing")
        reason = "ran out of time" if code is None else f"ended with exit code {code}"
        summary = f"{reason}; {summary or 'no summary'}; its last words: {last[:300]}"
    cases = tuple(line.removeprefix(_CASE) for line in lines if line.startswith(_CASE) and line != f"{_CASE}end")
    died = (cases[-1] if cases else "start",) if not is_finished and status == "failed" else ()
    return Outcome(operation=operation, status=status, cases=cases, findings=found, summary=summary, seconds=seconds,
                   died=died)  # fmt: skip


def findings(lines: Iterable[str]) -> list[Finding]:
    """The reports among a tool's lines: of each the first two lines, and the kernel of the first place it names."""
    found: list[Finding] = []
    case, report = "", []
    for text in (*lines, ""):
        is_next = bool(_REPORT.match(text))
        if report and (is_next or not text.startswith("=") or not text.strip("= ")):
            place = next((place for each in report if (place := _PLACE.search(each))), None)
            words = " ".join(each.strip("= ") for each in report[:2])
            found.append(Finding(kernel=place[1] if place else "", case=case, message=words))
            report = []
        if is_next or report:
            report.append(text)
        if text.startswith(_CASE):
            case = text.removeprefix(_CASE)
    return found


def is_as_wanted(found: Outcome) -> bool:
    """Clean, or for the planted fault: seen."""
    return found.status == ("faults" if found.operation == PLANTED else "clean")


def line(found: Outcome) -> str:
    """One line, and one for each finding of ours and, counted, of others."""
    ours = [each for each in found.findings if each.is_ours]
    others = len(found.findings) - len(ours)
    text = f"{found.operation:<22} {found.status:<7} {len(found.cases)} cases, {found.seconds:.0f} s"
    text += f"; {others} reports of kernels that are not ours" if others else ""
    if found.status == "failed":
        text += f": {found.summary}"
    if found.operation == PLANTED:
        return text + (" (seen, as it must be)" if is_as_wanted(found) else " (NOT SEEN)")
    return "\n".join([text, *(f"    {each.case}: {each.kernel}: {each.message}" for each in ours)])


def run(operation: str, match: str = "", skip: int = 0, *, is_every: bool = False) -> None:
    """Runs an operation's calls after the first `skip`, printing each before it; what compute-sanitizer watches.

    is_every: all of its GPU tests' calls, and not one of each kind.
    """
    import jax

    from pallas_kernels import get_op, testing
    from xlafuse.bench.candidates import callable_of

    if operation == PLANTED:
        print(f"{_CASE}{operation}", flush=True)
        planted_fault()
        print(f"{_CASE}end", flush=True)
        return
    op = get_op(operation)
    calls = gpu_calls(op) if is_every else one_of_each_kind(op)
    specs = [spec for spec in calls if match in spec.name]
    for number, spec in enumerate(specs):
        if 2 * (number + 1) <= skip:
            continue
        with jax.default_device(jax.devices("cpu")[0]):  # fewer kernels to watch
            case = testing.make_case(op, shortened(op, spec, _MOST_VALUES), 0)
        inputs = jax.device_put((case.arguments, case.cotangents), jax.devices()[0])
        for place, (phase, given) in enumerate((("forward", inputs[:1]), ("backward", inputs))):
            if 2 * number + place < skip:
                continue
            print(f"{_CASE}{phase} {spec.name}", flush=True)
            jax.block_until_ready(jax.jit(callable_of(op, phase, "mosaic"))(*given))
    # At least one call of the driver's: without any the tool does not end well.
    jax.block_until_ready(jax.device_put(0.0, jax.devices()[0]))
    print(f"{_CASE}end", flush=True)


def one_of_each_kind(op) -> list:
    """The first GPU test's spec of each dtype, shape of row, and set of arguments."""
    kinds = {}
    for spec in gpu_calls(op):
        main = spec.arguments[op.batched[0]]
        kinds.setdefault((main.dtype, spec.tags, frozenset(spec.arguments)), spec)
    return list(kinds.values())


def gpu_calls(op) -> list:
    """Every GPU test's spec: shapes, too, decide which kernel runs."""
    return [spec for spec in op.tagged("gpu") if "bench" not in spec.tags]


def shortened(op, spec, most: int):
    """The spec with fewer rows, its first array with at most so many values; with more than two axes as it is."""
    main = spec.arguments[op.batched[0]]
    if len(main.shape) != 2 or math.prod(main.shape) <= most:
        return spec
    rows = max(1, most // main.shape[1])
    cut = {name: replace(spec.arguments[name], shape=(rows, *spec.arguments[name].shape[1:])) for name in op.batched
           if spec.arguments.get(name) is not None}  # fmt: skip
    return replace(spec, arguments={**spec.arguments, **cut})


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


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main())
