"""Records how the attached GPU autotunes the block under every strategy, to be replayed where there is no GPU.

    python scripts/record_autotune.py RECORDING.txtpb LAUNCHES.json [--seconds 230] [--only llama3-8b/xla/ ...]

Compiles each case on the attached GPU and writes two files, again after every case, so that a run cut short keeps what
it has. RECORDING is XLA's autotuning of all cases in one text proto, for `hlo_analysis/targets/autotune/`. LAUNCHES
says which kinds of kernels the GPU was given in each case, for the test that a replay gives the same ones.

Cases share one autotuning: each starts from what the ones before it chose, so that a product which several of them hold
is tuned once and the recording never contradicts LAUNCHES. What is to be recorded first comes first. With --only, the
two files that are there are added to: rows of LAUNCHES are replaced case by case, and products known to RECORDING keep
their choice. Without it both are begun anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the machine with the GPU need not have the package installed

Case = tuple[str, str, str, tuple[int, int]]
"""Preset, strategy, mode and shape."""

LLAMA_SHAPES = ((2, 4096), (1, 512), (1, 1))
GPT2_SHAPES = ((1, 512), (2, 1024))
MODES = ("forward", "grad")
STRATEGY_ORDER = (
    "xla",
    "best",
    "pallas_cudnn",
    "pallas",
    "xla_cudnn",
    "xla_cublas",
    "xla_dot_merger",
    "xla_gemm_v2",
    "unfused",
)


# cuDNN has no gradient of attention for one token.
IMPOSSIBLE = tuple(("llama3-8b", name, "grad", (1, 1)) for name in ("xla_cudnn", "pallas_cudnn"))


def cases() -> list[Case]:
    """Preset, strategy, mode and shape of every case, the most wanted first."""
    wanted = [
        *(("llama3-8b", "xla", mode, shape) for mode in MODES for shape in LLAMA_SHAPES),
        *(("llama3-8b", name, "forward", shape) for name in STRATEGY_ORDER[1:] for shape in LLAMA_SHAPES),
        *(("llama3-8b", name, "grad", LLAMA_SHAPES[0]) for name in STRATEGY_ORDER[1:]),
        *(("gpt2-medium", "xla", mode, shape) for mode in MODES for shape in GPT2_SHAPES),
        *(("gpt2-medium", "pallas", mode, GPT2_SHAPES[-1]) for mode in MODES),
        *(("llama3-8b", name, "grad", shape) for name in STRATEGY_ORDER[1:] for shape in LLAMA_SHAPES[1:]),
    ]
    return [case for case in wanted if case not in IMPOSSIBLE]


def record(case: Case, recording: Path, timeout: float, target: str = "attached") -> dict[str, Any]:
    """Compiles one case on the GPU, adds its choices to `recording` and returns its row of LAUNCHES."""
    from hlo_analysis.capture import capture, merge_autotune
    from hlo_analysis.hlo import parse_module
    from hlo_analysis.program.launch_kinds import kind_of
    from hlo_analysis.program.launch_sites import find_launches
    from xlafuse.files import write_files
    from xlafuse.models import block_function
    from xlafuse.strategies import get_strategy

    preset, name, mode, shape = case
    strategy = get_strategy(name)
    function, arguments = block_function(preset, shape, plan=strategy.plan)
    began = time.perf_counter()
    captured = capture(
        function,
        *arguments,
        target=target,
        mode=mode,
        compiler_options=strategy.compiler_options,
        autotune=recording if recording.exists() else None,
        timeout=timeout,
    )
    chosen = captured.text("autotune_results")
    if chosen:
        known = [recording.read_text()] if recording.exists() else []
        write_files(recording.parent, {recording.name: merge_autotune([*known, chosen])})
    module = parse_module(captured.text("final_hlo") or "")
    table = find_launches(module, captured.text("thunk_sequence"), captured.text("thunk_metadata"))
    kinds: Counter[str] = Counter()
    for site in table.sites:
        kinds[kind_of(module, site.instruction, site.thunk.kind)] += site.repeat
    provenance = captured.manifest.provenance
    return {
        "preset": preset,
        "strategy": name,
        "mode": mode,
        "shape": list(shape),
        "sites": strategy.plan.fused_sites,
        "kinds": dict(sorted(kinds.items())),
        "launches": kinds.total(),
        "thunks": dict(sorted(Counter(site.thunk.kind for site in table.sites).items())),
        "gemm_choice": provenance.gemm_choice,
        "reused": provenance.autotune_hits,
        "lookups": provenance.autotune_lookups,
        "seconds": round(time.perf_counter() - began, 1),
        "versions": dict(provenance.versions),
    }


def known_rows(launches: Path) -> dict[Case, dict[str, Any]]:
    """The rows of LAUNCHES by case, none where there is no such file."""
    found = json.loads(launches.read_text())["cases"] if launches.exists() else []
    return {(row["preset"], row["strategy"], row["mode"], tuple(row["shape"])): row for row in found}


def keep(
    launches: Path,
    found_device: dict[str, str],
    rows: dict[Case, dict[str, Any]],
    failed: list[dict[str, str]],
    left: list[str],
) -> None:
    """Writes LAUNCHES, its rows in the order of `cases`."""
    from xlafuse.files import write_files

    order = {case: i for i, case in enumerate(cases())}
    ordered = [rows[case] for case in sorted(rows, key=lambda case: order.get(case, len(order)))]
    document = {"device": found_device, "cases": ordered, "failed": failed, "left_out": left}
    write_files(launches.parent, {launches.name: json.dumps(document, indent=1) + "\n"})


def main() -> int:
    """Records all cases that fit into the time; 1 when one failed or none was recorded."""
    parser = argparse.ArgumentParser(description="Record the attached GPU's autotuning of the block.")
    parser.add_argument("recording", type=Path)
    parser.add_argument("launches", type=Path)
    parser.add_argument("--seconds", type=float, default=230.0, help="start no case after this long")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PREFIX",
        help="add to the files, cases whose 'preset/strategy/mode/shape' starts so",
    )
    parser.add_argument("--target", default="attached", help="another target records nothing, and rehearses")
    options = parser.parse_args()
    for path in (options.recording, options.launches):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not options.only:
            path.unlink(missing_ok=True)

    # Tracing needs no GPU, and would take the memory that the compiling processes tune in.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from xlafuse.bench.environment import gpu_state

    began = time.perf_counter()
    rows = known_rows(options.launches)
    recorded = 0
    failed: list[dict[str, str]] = []
    left: list[str] = []
    state = gpu_state()
    found_device = {name: state[key] for name, key in (("name", "gpu"), ("driver", "driver")) if key in state}
    for case in cases():
        label = f"{case[0]}/{case[1]}/{case[2]}/{'x'.join(map(str, case[3]))}"
        if options.only and not label.startswith(tuple(options.only)):
            continue
        elapsed = time.perf_counter() - began
        if elapsed > options.seconds:
            left.append(label)
            continue
        try:
            timeout = max(60.0, options.seconds - elapsed + 60.0)
            row = record(case, options.recording, timeout, options.target)
        except Exception as error:  # the other cases are worth having
            failed.append({"case": label, "error": f"{type(error).__name__}: {error}"[:2000]})
            print(f"{elapsed:6.1f} s  {label:40} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        else:
            rows[case] = row
            recorded += 1
            tuned = f"{row['reused']} of {row['lookups']} reused"
            print(f"{elapsed:6.1f} s  {label:40} {row['seconds']:6.1f} s  {tuned:20} {row['kinds']}", flush=True)
        keep(options.launches, found_device, rows, failed, left)
    if left:
        keep(options.launches, found_device, rows, failed, left)
        print(f"left out for want of time: {', '.join(left)}", flush=True)
    print(f"{recorded} recorded, {len(failed)} failed, {time.perf_counter() - began:.0f} s", flush=True)
    return 0 if recorded and not failed else 1


if __name__ == "__main__":
    raise SystemExit(main())
